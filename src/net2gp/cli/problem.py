"""A network and data put together: what is learned, in which units, and with which names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from net2gp.cli.options import DataOptions, one_of
from net2gp.cli.reading.data import Loaded, Wanted
from net2gp.cli.running import say
from net2gp.data.scaling import Scaling
from net2gp.errors import InputError, Net2GPWarning, NetworkError, check_device, warn
from net2gp.likelihoods import Bernoulli, Categorical, Gaussian

TASKS = ("regression", "classification")
STANDARDIZED = ("none", "features", "target", "both")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Reading:
    """How files become what a network takes, and its outputs what they mean.

    Args:
        task: "regression" or "classification".
        features: The columns of a table.
        targets: The columns of targets.
        classes: The names of the classes, in the order of the outputs.
        image_size: Height and width to which pictures are resized.
        scaling: Means and standard deviations.
        integers: Whether the network takes integers.
        pixels: Whether inputs were pictures with values in [0, 1] before they were scaled; None if unknown.
    """

    task: str
    features: Sequence[str] = ()
    targets: Sequence[str] = ()
    classes: Sequence[str] = ()
    image_size: int | None = None
    scaling: Scaling = field(default_factory=Scaling)
    integers: bool = False
    pixels: bool | None = None

    def wanted(self, needs_target: bool) -> Wanted:
        """What to read of a file of the same kind."""
        return Wanted(self.targets, self.features, self.image_size, needs_target)

    def inputs(self, loaded: Loaded, like: Tensor) -> Tensor:
        """The inputs as the network takes them, with a warning if pictures are in other units than at fit."""
        if self.pixels is not None and loaded.x.ndim > 2 and loaded.pixels != self.pixels:
            kinds = ("other values", "values from 0 to 1, as bytes become")
            warn(
                f"{loaded.path} has pictures with {kinds[loaded.pixels]}, but the posterior was fitted on "
                f"pictures with {kinds[self.pixels]}. Predictions are of little worth unless both are in the "
                "same units: scale these as those were, or fit again with --image-mean and --image-std.",
                Net2GPWarning,
            )
        if self.integers:
            return torch.from_numpy(loaded.x.astype(np.int64)).to(like.device)
        x = np.ascontiguousarray(self.scaling.inputs(loaded.x))
        return torch.from_numpy(x).to(like)

    def labels(self, y: np.ndarray) -> Tensor:
        """Labels as numbers of outputs."""
        names = np.array([_name(one) for one in y.reshape(-1)])
        known = {name: index for index, name in enumerate(self.classes)}
        strange = sorted(set(names) - set(known))
        if strange:
            raise InputError(
                f"the label '{strange[0]}' is none of the {len(known)} classes {_some(self.classes)}. Check "
                "the target column, or the order of the outputs."
            )
        return torch.tensor([known[name] for name in names])

    def values(self, loaded: Loaded, like: Tensor) -> Tensor:
        """The targets as the likelihood takes them: labels (N,), or standardized numbers (N, C)."""
        assert loaded.y is not None
        if self.task == "classification":
            return self.labels(loaded.y).to(like.device)
        if loaded.y.dtype.kind not in "fiu":
            raise InputError(
                f"the targets of {loaded.path} are text, such as '{loaded.y.reshape(-1)[0]}'. Pass --task "
                "classification, or another --target."
            )
        y = loaded.y.reshape(len(loaded.y), -1)
        targets = torch.from_numpy(self.scaling.targets(y.astype(np.float64)))
        return targets.to(like.device, torch.promote_types(like.dtype, torch.float32))

    def as_dict(self) -> dict[str, Any]:
        """All of it, for a file."""
        return {**vars(self), "scaling": self.scaling.as_dict()}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Reading:
        """Read back what `as_dict` gave."""
        return cls(**{**found, "scaling": Scaling(**found["scaling"])})


@dataclass(frozen=True, eq=False)
class Problem:
    """A network with the data that it is to learn from.

    Args:
        network: The module, on its device and in its dtype.
        reading: How files are read for it.
        x: Inputs.
        y: Targets.
    """

    network: nn.Module
    reading: Reading
    x: Tensor
    y: Tensor

    def likelihood(self, noise_var: float | None) -> Gaussian | Categorical | Bernoulli:
        """How targets follow the outputs."""
        if self.reading.task == "regression":
            return Gaussian() if noise_var is None else Gaussian(noise_var)
        if noise_var is not None:
            raise InputError(
                "--noise-var is of a regression, but the task is classification. Leave it out."
            )
        return Bernoulli() if self.outputs == 1 else Categorical()

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return num_outputs(self.network, self.x)

    def also(self, loaded: Loaded) -> tuple[Tensor, Tensor]:
        """Inputs and targets of other data, such as held-out ones."""
        like = example(self.network)
        return self.reading.inputs(loaded, like), self.reading.values(loaded, like)


def make_problem(
    network: nn.Module,
    loaded: Loaded,
    options: DataOptions,
    task: str,
    *,
    new_classes: bool = False,
) -> Problem:
    """Put a network and data together, and guess what is not said.

    Args:
        network: The module, placed by `placed`.
        loaded: The data, with targets.
        options: How they are read.
        task: "regression", "classification", or nothing.
        new_classes: Whether the classes may be others than the outputs of the network.
    """
    if task:
        one_of(task, TASKS, "--task")
    one_of(options.standardize, STANDARDIZED, "--standardize")
    _check_kind(loaded, options)
    like = example(network)
    plain = Reading("regression", loaded.features, loaded.targets, (), options.image_size)
    plain = replace(plain, pixels=loaded.pixels)
    channels = options.channels()
    if channels is not None:
        plain = replace(plain, scaling=Scaling(*channels))
    elif options.standardize in ("features", "both"):
        plain = replace(plain, scaling=standardized_columns(loaded, options.standardize))
    plain = replace(plain, integers=_takes_integers(network, plain, loaded, like))
    x = plain.inputs(loaded, like)
    outputs = num_outputs(network, x)
    assert loaded.y is not None
    chosen = task or _guessed(loaded.y, outputs)
    reading = replace(plain, task=chosen)
    if chosen == "classification":
        reading = replace(reading, classes=_classes(loaded.y, outputs, new_classes))
    elif options.standardize in ("target", "both"):
        if loaded.y.dtype.kind not in "fiu":
            return Problem(network, reading, x, reading.values(loaded, like))
        own = Scaling.of(None, loaded.y.reshape(len(loaded.y), -1))
        reading = replace(
            reading, scaling=replace(reading.scaling, y_mean=own.y_mean, y_std=own.y_std)
        )
    y = reading.values(loaded, like)
    if chosen == "regression" and y.shape[1] != outputs:
        raise InputError(
            f"the network has {outputs} outputs, but the data have {y.shape[1]} targets. Pass --target once "
            "per output, or --task classification."
        )
    return Problem(network, reading, x, y)


def _check_kind(loaded: Loaded, options: DataOptions) -> None:
    """Refuse options about pictures for data that are none, which would not do what they say."""
    if options.image_size is not None and not loaded.path.is_dir():
        raise InputError(
            f"--image-size resizes pictures of a folder, but {loaded.path} is a file. Resize them before."
        )
    if loaded.x.ndim == 2 and options.channels() is not None:
        raise InputError(
            f"--image-mean and --image-std are for channels of pictures, but {loaded.path} has rows of "
            f"{loaded.x.shape[1]} numbers. Pass --standardize features."
        )


def standardized_columns(loaded: Loaded, kind: str) -> Scaling:
    """Means and deviations of the columns of a table.

    Raises:
        InputError: If the inputs have no columns.
    """
    if loaded.x.ndim != 2:
        raise InputError(
            f"--standardize {kind} is for tables, but the inputs have shape {loaded.x.shape}. Pass "
            "--image-mean and --image-std with a number per channel."
        )
    return Scaling.of(loaded.x)


def placed(network: nn.Module, device: str, dtype: str) -> nn.Module:
    """Return a network on a device and in a dtype.

    Args:
        network: The module.
        device: Such as "cpu" or "cuda".
        dtype: "float32", "float64", or nothing for the network's own.
    """
    check_device(device)
    if dtype:
        network = network.to(DTYPES[one_of(dtype, list(DTYPES), "--dtype")])
    return network.to(device)


def example(network: nn.Module) -> Tensor:
    """One of the parameters, to read dtype and device from."""
    for value in network.parameters():
        if value.is_floating_point():
            return value.detach()
    raise NetworkError("the network has no parameters, so there is nothing to be uncertain about.")


def num_outputs(network: nn.Module, x: Tensor) -> int:
    """The number of numbers that the network returns for a point."""
    with torch.no_grad():
        out = _run(network, x[:1])
    if not isinstance(out, Tensor):
        raise NetworkError(
            f"the network returns {type(out).__name__}, where one tensor is needed. Wrap it in a module that "
            "returns the outputs, such as the logits, alone."
        )
    if not out.dim():
        raise NetworkError(
            "the network returns a single number for all points, such as a sum or a mean over them. Return a "
            "row for each point."
        )
    return int(out[:1].numel())


def _takes_integers(network: nn.Module, plain: Reading, loaded: Loaded, like: Tensor) -> bool:
    """Whether integers, such as the numbers of tokens, are what the network takes."""
    if loaded.x.dtype.kind not in "iu":
        return False
    few = loaded.rows(np.arange(1))
    try:
        with torch.no_grad():
            _forward(network)(plain.inputs(few, like))
    except Exception:  # whatever a network raises for numbers of another kind
        return True
    return False


def _run(network: nn.Module, x: Tensor) -> Any:
    try:
        return _forward(network)(x)
    except Exception as error:  # whatever the network's own code raises
        reason = str(error).strip().split("\n")[0]
        raise InputError(
            f"the network cannot take inputs of shape {('N', *x.shape[1:])} ({reason}). Check --features, "
            "--image-size, or the array x.".replace("'N'", "N")
        ) from None


def _forward(network: nn.Module) -> Callable[[Tensor], Any]:
    """The network as a function that prints nothing where it fails, as calls of traced modules do."""
    return network.forward if isinstance(network, torch.fx.GraphModule) else network


def _guessed(y: np.ndarray, outputs: int) -> str:
    """Guess the task by the targets, and say so."""
    flat = y.reshape(-1)
    one = y.ndim == 1 or y.shape[1] == 1
    if y.dtype.kind not in "fiu":
        found, reason = "classification", "the targets are text"
    elif not one or not np.array_equal(flat, np.round(flat)):
        found, reason = "regression", "the targets are not integers"
    elif outputs == 1 and set(np.unique(flat)) <= {0, 1}:
        found, reason = "classification", "the targets are 0 and 1"
    elif outputs > 1:
        found, reason = (
            "classification",
            f"the targets are integers, and the network has {outputs} outputs",
        )
    else:
        found, reason = "regression", "the network has one output"
    say(f"task: {found}, since {reason}. Pass --task to choose.")
    return found


def _classes(y: np.ndarray, outputs: int, new: bool) -> list[str]:
    """The names of the classes in the order of the outputs."""
    names = sorted({_name(one) for one in y.reshape(-1)}, key=_order)
    count = max(outputs, 2)
    numbers = all(name.isdecimal() for name in names)
    if numbers and (new or int(names[-1]) < count):
        return [str(index) for index in range(int(names[-1]) + 1 if new else count)]
    if len(names) == count or new:
        if numbers:
            say(f"labels {_some(names)} are the outputs 0 to {len(names) - 1}, in this order.")
        return names
    raise InputError(
        f"the data have {len(names)} classes ({_some(names)}), but the network tells {count} apart. Pass "
        "another --target, or labels from 0 to the number of outputs minus one."
    )


def _order(name: str) -> tuple[int, float, str]:
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name


def _name(label: Any) -> str:
    if isinstance(label, str):
        return str(label)
    return str(int(label)) if float(label) == int(label) else str(float(label))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f", … ({len(names)} in all)" if len(names) > 6 else "")
