"""Processes with the kernel of an infinitely wide network: a program holds their training inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from net2gp.errors import NotAvailable
from net2gp.inputs import num_rows, tensors
from net2gp.limits.limit_kernels import LimitKernel
from net2gp.limits.moments.evaluation import Evaluation
from net2gp.limits.moments.expression_moments import run
from net2gp.limits.tiles.batch import Tiles, pairs
from net2gp.posteriors.conditioning.conditioned import Conditioned
from net2gp.serving.programs.moments import Law, Moments, left_open
from net2gp.serving.programs.tangents import inverse_root
from net2gp.types import Inputs

ADVICE = (
    "Of activations, those with closed forms have programs, such as nn.ReLU, nn.GELU and nn.LeakyReLU; "
    "others are integrated by rules that depend on the points. Use one of these, or laplace on a trained "
    "network."
)


def limit_process(process: Conditioned) -> Law:
    """Return the law of a process with the NNGP or the tangent kernel at infinite width.

    The kernel between a point and the training inputs is that of the limit, operation by operation; solves
    with the Gram matrix become a product with its inverse root. A point costs N entries of the kernel and N²
    operations.

    Raises:
        NotAvailable: If outputs are coupled, if there is a prior mean, or if there is no factorization.
    """
    kernel = process.kernel.precise()
    assert isinstance(kernel, LimitKernel)
    if kernel.outputs(process.x) is not None or process.prior_mean is not None:
        raise NotAvailable(
            "export takes limit kernels whose outputs are independent copies, without a prior mean. End the "
            "network with a flatten and a linear layer, and condition without mean=."
        )
    limit, C = kernel.limit, process.num_outputs
    with torch.no_grad():
        known = limit.tiles(process.x, kernel.tangent)
        alpha = process.alpha.detach().double()
        root = process.cache.mT.double() if process.cache is not None else inverse_root(process)
        scale = torch.as_tensor(kernel.variance, dtype=torch.float64).detach()

    def moments(x: Inputs) -> Moments:
        data = known.plan.data(tuple(tensors(x)), torch.float64)
        evaluation = Evaluation(known.plan.program, known.prior, known.tangent, data)
        own = run(evaluation)
        near = Tiles(known.plan, known.prior, data, known.tangent, evaluation.profile, own)
        cross = _chosen(pairs(known, near), kernel.tangent) * scale  # (N, B)
        prior = _chosen(own, kernel.tangent) * scale
        variance = (prior - (root @ cross).square().sum(0)).clamp(min=0)
        mean = cross.mT @ alpha
        blocks = variance[:, None, None] * torch.eye(C, dtype=torch.float64)
        return Moments(mean, blocks, novelty=left_open(blocks, prior[:, None].expand(-1, C)))

    name = "NTK" if kernel.tangent else "NNGP"
    carries = f"the {num_rows(process.x)} training inputs, and a root"
    return Law(moments, C, name, carries, ADVICE)


def _chosen(pair: tuple[Tensor, Tensor | None], tangent: bool) -> Tensor:
    if not tangent:
        return pair[0]
    assert pair[1] is not None
    return pair[1]
