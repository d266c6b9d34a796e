"""All members of an ensemble in training: stacked where that fits, otherwise one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from net2gp.bayes.model.stacked import stacked_mlp
from net2gp.bayes.optimum.descent import Optimum, descend, seeded
from net2gp.bayes.optimum.objective import Objective
from net2gp.bayes.optimum.settings import Training
from net2gp.bayes.optimum.starts import member_seeds
from net2gp.bayes.optimum.task import Task
from net2gp.bayes.optimum.teams import Perceptrons, Single, Stacked, Team, can_stack
from net2gp.calling import lacks_vmap
from net2gp.errors import InputError
from net2gp.inputs import rows
from net2gp.progress import progress

STACKED_NUMBERS = 2**24
"""How many parameters members may have together to be stacked without being asked to."""

SeeMember = Callable[[int, int, Callable[[], nn.Module]], None]
"""What is called with the number of a member, the number of steps, and a function that gives the module."""


class Crew:
    """The members of an ensemble, which can be trained several times, going on where they stand.

    Args:
        task: The checked problem.
        networks: The members at their starts.
        training: The first settings; they decide whether members can be stacked.
        vectorize: Whether to stack members; None does so if it fits and networks are small.

    Raises:
        InputError: If members are to be stacked that cannot be.
    """

    def __init__(
        self, task: Task, networks: Sequence[nn.Module], training: Training, vectorize: bool | None
    ) -> None:
        self.task, self.teams = task, list[Team]()
        reason = "" if vectorize is False else why_not_stacked(task, networks, training)
        if vectorize and reason:
            raise InputError(
                f"the members cannot be trained in vectorized passes: {reason}. Leave out vectorize=True."
            )
        if vectorize is None and _better_apart(task, networks):
            vectorize = False
        if reason or vectorize is False or len(networks) == 1:
            own = (copy.deepcopy(network) for network in networks)
            self.teams = [Single(network, task.names, task.output) for network in own]
        else:
            stacked = perceptrons(task, networks, training)
            self.teams = [stacked or Stacked(networks, task.names, task.output)]

    def train(
        self,
        objective: Objective,
        training: Training,
        *,
        held: Objective | None = None,
        see: SeeMember | None = None,
    ) -> list[Optimum]:
        """Train all members.

        Args:
            objective: What they minimize; what differs between members has an axis of members in front.
            training: How.
            held: The rows for early stopping.
            see: Is called for each member after each step.

        Returns:
            What was found, one entry per team.
        """
        seeds = member_seeds(training.seed, sum(map(len, self.teams)))
        found, start = [], 0
        several = len(self.teams) > 1
        # only the outermost bar is shown: of the members, or of the steps if all train at once
        with progress("members", len(self.teams)) if several else nullcontext(_silent) as advance:
            for team in self.teams:
                part = slice(start, start + len(team))
                visit = None if see is None else partial(_visit, see, start)
                own = _of_members(objective, part)
                found.append(descend(team, own, training, seeds[part], held=held, visit=visit))
                start = part.stop
                advance()
        return found


def perceptrons(
    task: Task, networks: Sequence[nn.Module], training: Training
) -> Perceptrons | None:
    """Make one team of perceptrons, which needs no graph, if the networks are such.

    Args:
        task: The checked problem.
        networks: Members that differ in the parameters in training alone.
        training: How they will be trained.

    Returns:
        The team, or None for other networks, and for optimizers that read shapes of parameters.
    """
    architecture = task.model.architecture
    layers = stacked_mlp(architecture, rows(task.objective.x, slice(0, 1)))
    shapes = [value.shape for value in task.model.params.values()]
    if layers is None or not training.takes_flat(shapes):
        return None
    return Perceptrons(networks, architecture, layers)


def why_not_stacked(task: Task, networks: Sequence[nn.Module], training: Training) -> str:
    """Say why members cannot share vectorized passes.

    Args:
        task: The checked problem.
        networks: The members, in the modes in which they train.
        training: How.

    Returns:
        The reason, or nothing if they can.
    """
    if not training.keeps_members_apart([value.shape for value in task.model.params.values()]):
        return "the optimizer or its schedule would mix the members"
    few = rows(task.objective.x, slice(0, 4))
    try:
        with seeded(0, task.model.architecture.example.device), torch.enable_grad():
            if not can_stack(networks, task.names, few):
                return "a pass changes buffers, as batch norm does, or members differ in what is not trained"
            team = Stacked(networks, task.names, task.output)
            out = team.outputs(few, own=False)
            torch.autograd.grad(out.sum(), team.leaves, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        if not lacks_vmap(error):
            raise
        return f"torch cannot vectorize a pass ({error})"
    return ""


def _better_apart(task: Task, networks: Sequence[nn.Module]) -> bool:
    """Whether stacked networks would be no faster, or take too much memory.

    A vectorized convolution is a grouped one, which took 1.5 times as long as a loop on a CPU.
    """
    convolution = nn.modules.conv._ConvNd
    heavy = len(networks) * task.model.architecture.num_params > STACKED_NUMBERS
    return heavy or any(isinstance(module, convolution) for module in networks[0].modules())


def _silent(steps: int = 1, note: str = "") -> None:
    """Show nothing."""


def _visit(see: SeeMember, start: int, team: Team, step: int) -> None:
    for index in range(len(team)):
        see(start + index, step, partial(_module, team, index))


def _module(team: Team, index: int) -> nn.Module:
    """A member of a team as a module; for one network, the module that is in training."""
    if isinstance(team, Single):
        return team.network
    module = copy.deepcopy(team.network)
    known = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in team.params.items():
            known[name].copy_(value[index])
    return module


def _of_members(objective: Objective, part: slice) -> Objective:
    """The objective of some of the members."""
    some: Callable[[Tensor | None], Tensor | None] = lambda v: None if v is None else v[part]
    anchors = objective.anchors
    return replace(
        objective,
        anchors=None if anchors is None else {name: value[part] for name, value in anchors.items()},
        resampled=some(objective.resampled),
        targets=some(objective.targets),
    )
