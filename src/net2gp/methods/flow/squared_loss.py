"""Train a network by gradient flow on the squared loss, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, check_positive
from net2gp.inputs import gather, num_rows, tensors
from net2gp.likelihoods import Gaussian
from net2gp.limits.prior import Parameterization, Variances
from net2gp.linear import Linearized
from net2gp.memory import check_memory
from net2gp.methods.flow.flow import Flow, assemble
from net2gp.methods.flow.kernels import (
    KernelPair,
    Part,
    Single,
    check_matrix,
    count_outputs,
    own,
    result_dtype,
    source_of,
)
from net2gp.methods.flow.modes import Modes, Relative, Ridge, make_descent
from net2gp.types import Data


@torch.no_grad()
def gradient_flow(
    network: nn.Module | Linearized | KernelPair,
    data: Data,
    *,
    weight_var: Variances | None = None,
    bias_var: Variances | None = None,
    parameterization: Parameterization | None = None,
    learning_rate: float = 1.0,
    momentum: float | None = None,
    ridge: Ridge = 0.0,
) -> Flow:
    """Train a network by gradient flow on the squared loss, in closed form and in function space.

    The loss is ‖f(X) − y‖² / (2NC), a mean over points and outputs. See `Flow` for the law and its parts, and
    `loss_flow` for other losses. Cost: one eigendecomposition, O(N³), or O((NC)³) for linearized networks.

    Args:
        network: A module, whose infinitely wide ensemble under the given prior is trained; or its kernels,
            `infinite_width(network)` or any function of (x, y) that returns (K, Θ); or `linearize(network)`,
            for the one network that starts at its present parameters. With fewer parameters than outputs the
            latter ends as least squares.
        data: (x, y) with real targets, or a DataLoader.
        weight_var: The prior variance of the weights, as in `infinite_width`. Only for modules.
        bias_var: The prior variance of the biases, as in `infinite_width`. Only for modules.
        parameterization: "ntk" or "standard", as in `infinite_width`. Only for modules.
        learning_rate: The learning rate of gradient descent, whose steps are the unit of time.
        momentum: The momentum of steps v ← momentum·v − learning_rate·∇L, or None. With momentum
            f'' = −(1 − momentum)/√learning_rate · f' − Θ∇L in the time √learning_rate·t.
        ridge: What is added to the diagonal of Θ(X, X): a number, or `Relative(1e-6)` times its mean
            diagonal.

    Returns:
        The flow: the law of the ensemble at every time.

    Raises:
        InputError: If the targets are not real numbers (N, C), if a number is out of range, or if prior
            variances are given without a module.
        TooLarge: If the kernels do not fit into memory.

    >>> network = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 1))
    >>> x = torch.linspace(-1, 1, 5)[:, None]
    >>> flow = gradient_flow(network, (x, x.sin()), weight_var=2.0, bias_var=0.1)
    >>> law = flow.at([0.0, 10.0, 1000.0], torch.tensor([[0.25]]))
    >>> law.mean.flatten(), law.variance.flatten()
    (tensor([0.0000, 0.2352, 0.2540]), tensor([0.3250, 0.0276, 0.0038]))

    References: Jacot et al., Neural tangent kernel, NeurIPS 2018; Lee et al., Wide neural networks of any
    depth evolve as linear models under gradient descent, NeurIPS 2019; Yang and Littwin, Tensor
    programs IIb, ICML 2021, for the architectures.
    """
    descent = make_descent(learning_rate, momentum)
    if not isinstance(ridge, Relative):
        check_positive(ridge, "ridge", zero=True)
    prior = {"weight_var": weight_var, "bias_var": bias_var, "parameterization": parameterization}
    source = source_of(network, prior)
    x, y = own(*gather(data))
    source.check(x)
    source = source.at(x)
    N, C = num_rows(x), count_outputs(source, x) or (y.shape[1] if y.dim() > 1 else 1)
    like = torch.zeros(N, C, dtype=result_dtype(x, y), device=tensors(x)[0].device)
    Gaussian().check(like, y)
    y = y.reshape(N, C)
    R = N * C if source.joint else N
    check_memory(
        5 * 8 * R**2,
        y.device,
        f"an eigendecomposition of size {R} and its kernels",
        "train on fewer points",
    )
    blank = Flow(source, None, Part.NTK, x, y, descent, ridge, Modes.empty(y), None)
    initial = None if isinstance(source, Single) else Part.NNGP
    return assemble(blank, initial, Part.NTK, source.both(x))


def max_learning_rate(
    flow: Flow | Tensor, *, num_outputs: int = 1, momentum: float | None = None
) -> float:
    """Return the learning rate above which gradient descent on the squared loss diverges.

    It is 2(1 + momentum)·NC / λ_max(Θ) for the loss ‖f − y‖² / (2NC), since without momentum a step
    multiplies each direction by 1 − learning_rate·λ/(NC). Cost: O(1) for a flow, O(N³) for a matrix.

    Args:
        flow: A flow, or a Gram matrix Θ(X, X).
        num_outputs: The number of independent outputs that share a Gram matrix.
        momentum: The momentum of gradient descent. None takes the momentum of the flow, if there is one.

    Returns:
        The largest stable learning rate.

    Raises:
        InputError: If the matrix is not square, or the momentum is out of range.

    >>> max_learning_rate(torch.diag(torch.tensor([1.0, 4.0])))
    1.0

    Reference: Goh, Why momentum really works, Distill 2017.
    """
    if isinstance(flow, Flow):
        largest, size = float(flow.modes.values.max()), flow.y.numel()
        momentum = flow.descent.momentum if momentum is None else momentum
    else:
        if flow.dim() != 2 or flow.shape[0] != flow.shape[1] or not len(flow):
            raise InputError(
                f"a Gram matrix must be square, (N, N), but has shape {tuple(flow.shape)}. "
                "Pass Θ(X, X), or a flow."
            )
        size = len(flow) * num_outputs
        largest = float(torch.linalg.eigvalsh(check_matrix(flow, "the Gram matrix", len(flow)))[-1])
    make_descent(1.0, momentum)
    return 2.0 * (1.0 + (momentum or 0.0)) * size / largest
