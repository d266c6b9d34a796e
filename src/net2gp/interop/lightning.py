"""Lightning: a posterior around the network at the end of its training, with one callback.

trainer = Trainer(callbacks=[FitLaplace(Categorical(), path="posterior.safetensors", network="model")])
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from net2gp.errors import InputError
from net2gp.interop.shards import laplace_of_shards
from net2gp.linear.linearized import PriorVar
from net2gp.methods.laplace_approximation.laplace import laplace
from net2gp.methods.laplace_approximation.tuning import Evidence, Tuning
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.weights import Structure
from net2gp.types import Likelihood, Stream

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("the callback needs lightning: pip install 'net2gp[lightning]'.") from error

__all__ = ["FitLaplace"]


class FitLaplace(Callback):
    """Fit a Laplace posterior when training ends, log its evidence, and save it.

    The posterior is in `callback.posterior` afterwards. Its evidence goes to all loggers of the trainer as
    `log_evidence`. The data are those of the training loader, each point once and in order, whatever sampler
    it has; transforms are applied as in training, so pass `data` without random ones. Parameters vary if they
    have `requires_grad`.

    With several processes (DDP) each takes its part of the data set and the sums of the curvature are added
    up (`laplace_of_shards`). Prior and noise are then chosen by the evidence, so `tuning=Evidence()` has to
    be passed; the posterior is the same as with one process and this tuning. Sharded parameters (FSDP) are
    not supported.

    Args:
        likelihood: How targets follow the outputs, such as `Categorical()` or `Gaussian()`.
        path: The file for the posterior. None saves nothing.
        network: The network: the name of the module's attribute, such as "model", or a function of the
            module. None takes the module itself, whose `forward` maps inputs to outputs.
        data: A data set or loader of pairs (x, y). None takes the training loader. With several processes it
            is a data set, or a loader of one.
        structure: What of the covariance is kept, as for `laplace`.
        prior_var: The prior variance of the parameters. None leaves it open.
        tuning: How what is open is chosen, as for `laplace`.

    >>> from net2gp.likelihoods import Categorical
    >>> FitLaplace(Categorical(), network="model").posterior is None
    True

    Reference: Daxberger et al., Laplace redux, NeurIPS 2021.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        path: str | os.PathLike | None = None,
        *,
        network: str | Callable[[Any], nn.Module] | None = None,
        data: Any = None,
        structure: Structure | None = None,
        prior_var: PriorVar | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        self.likelihood = likelihood
        self.path = None if path is None else Path(path).expanduser()
        self.network = network
        self.data = data
        self.tuning = tuning
        self.options: dict[str, Any] = {"structure": structure, "prior_var": prior_var}
        self.posterior: Posterior | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse before training what cannot work after it."""
        if stage != "fit":
            return
        _network(pl_module, self.network)
        if self.path is not None and not self.path.parent.is_dir():
            raise InputError(
                f"the folder {self.path.parent} for the posterior does not exist. Make it first."
            )
        if trainer.world_size > 1 and not isinstance(self.tuning, Evidence):
            raise InputError(
                f"with {trainer.world_size} processes prior and noise are chosen by the evidence. Pass "
                "FitLaplace(..., tuning=net2gp.tuning.Evidence())."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit, log and save."""
        network = _network(pl_module, self.network)
        modes = {module: module.training for module in network.modules()}
        network.eval()
        try:
            self.posterior = self._fit(trainer, network)
        finally:
            for module, training in modes.items():
                module.training = training
        if self.posterior.evidence is not None:
            value = {"log_evidence": float(self.posterior.evidence)}
            for logger in trainer.loggers:
                logger.log_metrics(value, step=trainer.global_step)
        if self.path is not None and trainer.is_global_zero:
            self.posterior.save(self.path)
        trainer.strategy.barrier("net2gp.FitLaplace")

    def _fit(self, trainer: Trainer, network: nn.Module) -> Posterior:
        data = trainer.train_dataloader if self.data is None else self.data
        if not isinstance(self.tuning, Evidence):
            own = _in_order(data, 0, 1)
            return laplace(network, own, self.likelihood, tuning=self.tuning, **self.options)
        own = _in_order(data, trainer.global_rank, trainer.world_size)
        per_layer = self.tuning.per_layer
        return laplace_of_shards(
            network, Stream(own), self.likelihood, per_layer=per_layer, **self.options
        )


def _network(module: Any, chosen: str | Callable[[Any], nn.Module] | None) -> nn.Module:
    """The network of a module."""
    found = module
    if isinstance(chosen, str):
        found = getattr(module, chosen, None)
    elif chosen is not None:
        found = chosen(module)
    if not isinstance(found, nn.Module):
        names = ", ".join(repr(name) for name, _ in module.named_children())
        raise InputError(
            f"{type(module).__name__} has no network {chosen!r}. Pass network= the name of one of its "
            f"modules, which are {names}, or a function of the module that returns it."
        )
    return found


def _in_order(data: Any, rank: int, size: int) -> Any:
    """Each point of a process's part once: every `size`-th of the data set, from the number `rank` on."""
    dataset: Any = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Dataset):
        if size == 1:
            return data
        raise InputError(
            "with several processes the callback takes its part of a data set by the numbers of the points, "
            f"but got {type(dataset).__name__}. Pass data= a Dataset with a length, or a DataLoader of one."
        )
    count = len(dataset)  # type: ignore[arg-type]
    if count < size:
        raise InputError(f"{count} points are too few for {size} processes: each needs one.")
    part = Subset(dataset, range(rank, count, size))
    if not isinstance(data, DataLoader):
        return DataLoader(part, batch_size=256)
    return DataLoader(
        part,
        batch_size=data.batch_size or 256,
        collate_fn=data.collate_fn,
        num_workers=data.num_workers,
        pin_memory=data.pin_memory,
    )
