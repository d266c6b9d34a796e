"""What optimizers that draw weights share: draws that go on where a saved state was taken."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from net2gp.errors import InputError


class DrawingOptimizer(Optimizer):
    """An optimizer whose random draws belong to its state.

    The mean of the weights is in the network's own parameters, and therefore in `network.state_dict()`.
    """

    generator: torch.Generator

    def state_dict(self) -> dict[str, Any]:
        """Return curvatures, averages and the state of the draws; the mean is in `network.state_dict()`."""
        return {**super().state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where a state was taken; load the network's own state as well.

        Args:
            state_dict: What `state_dict()` returned.

        Raises:
            InputError: If the state is not of such an optimizer.
        """
        if "generator" not in state_dict:
            raise InputError(
                f"the state has no 'generator': it is not the state of {self._named()}. "
                "Pass what its state_dict() returned."
            )
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "generator"})
        self.generator.set_state(state_dict["generator"].cpu())

    def _named(self) -> str:
        name = type(self).__name__
        return f"an {name}" if name[0] in "AEIO" else f"a {name}"
