"""Networks of estimators: the user's own, a skorch net's, or a small perceptron."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from sklearn.utils import check_random_state
from torch import Tensor, nn

from net2gp.errors import InputError
from net2gp.inputs import describe
from net2gp.interop.sklearn.estimator import Estimator
from net2gp.linear import Linearized, linearize
from net2gp.linear.linearized import example_of


class Log(nn.Module):
    """Logits log p of a network that returns probabilities p: softmax(log p) = p.

    Args:
        network: A network that ends in a softmax.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Compute log p, of probabilities that are at least the smallest number."""
        probs = self.network(*inputs, **named)
        return probs.clamp(min=torch.finfo(probs.dtype).tiny).log()


class OfNetwork(Estimator):
    """An estimator that is made of a network.

    `fit` sets `linearized_`: the network at its parameters, which are copies, so that training the network
    further does not change the estimator.
    """

    network: Any
    random_state: Any
    linearized_: Linearized

    @classmethod
    def from_skorch(cls, net: Any, **settings: Any) -> Self:
        """Make an estimator around the module of a fitted skorch net, to be fitted to data itself.

        Labels of a `NeuralNetClassifier` are taken over. Its default criterion, `NLLLoss`, is for modules
        that return probabilities; their logarithms are the logits then.

        Args:
            net: A fitted `skorch.NeuralNet`.
            **settings: Parameters of the estimator.

        Returns:
            The estimator, not fitted.

        Raises:
            InputError: If the net is not fitted, or is no skorch net.
        """
        module = getattr(net, "module_", None)
        if not isinstance(module, nn.Module):
            raise InputError(
                f"from_skorch needs a fitted skorch net, but got {describe(net)}. Call net.fit(X, y) before."
            )
        if isinstance(getattr(net, "criterion_", None), nn.NLLLoss):
            module = Log(module)
        known = getattr(net, "classes_", None)
        if known is not None and "classes" in cls._get_param_names():
            settings = {"classes": known, **settings}
        return cls(module, **settings)

    def _example(self) -> Tensor:
        example = example_of(self.linearized_)
        return super()._example() if example is None else example

    def _linearization(self) -> Linearized:
        """The linearization of the network that was given."""
        if isinstance(self.network, Linearized):
            return self.network
        if not isinstance(self.network, nn.Module):
            raise InputError(
                "network must be a torch module, net2gp.linearize(module, only=...) or None, but is "
                f"{describe(self.network)}."
            )
        # the caller's module may be in training mode, and should stay in it
        return linearize(copy.deepcopy(self.network).eval())

    def _seed(self) -> int:
        """The seed of the default network's initial weights."""
        return int(check_random_state(self.random_state).randint(2**31 - 1))
