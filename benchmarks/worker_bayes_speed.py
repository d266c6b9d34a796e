"""CPU seconds of a step of one library at one task, in the environment of the library.

    python worker_bayes_speed.py LIBRARY TASK

prints a JSON object. A step is the difference between a long and a short run over the difference of their
numbers of steps, the best of three, on one thread: what a call does once is left out.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from worker_bayes_peers import without_unused

Runner = Callable[[int], object]
NUM_MEMBERS, NUM_CHAINS = 10, 4
STEP_SIZE, MOMENTUM = 1e-3, 0.9


def table() -> tuple[Tensor, Tensor]:
    """1000 points with 8 inputs and a target."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 8, generator=generator)
    return x, x[:, :1].sin() + 0.1 * torch.randn(1000, 1, generator=generator)


def labeled() -> tuple[Tensor, Tensor]:
    """128 points with 64 inputs and ten classes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(128, 64, generator=generator), torch.randint(10, (128,), generator=generator)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 1))


def large() -> nn.Sequential:
    parts = (nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return nn.Sequential(*parts)


def our_ensemble(batch: int | None) -> Runner:
    import net2gp as n2g
    from net2gp import bayes

    x, y = table()
    return lambda steps: bayes.ensemble(
        small(),
        (x, y),
        n2g.Gaussian(0.01),
        num_members=NUM_MEMBERS,
        training=bayes.Training(num_steps=steps, batch_size=batch),
    )


def their_ensemble(batch: int | None) -> Runner:
    without_unused()
    from torch_uncertainty.methods.deep_ensembles import deep_ensembles

    make = lambda: deep_ensembles(
        small(), num_estimators=NUM_MEMBERS, task="regression", probabilistic=False
    )
    return descent(make, batch)


def plain_ensemble(batch: int | None) -> Runner:
    """Ten modules in a loop of torch."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList(small() for _ in range(NUM_MEMBERS))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([member(x) for member in self.members])

    return descent(Loop, batch)


def descent(make: Callable[[], nn.Module], batch: int | None) -> Runner:
    """Adam on the log joint of all members, which share their batches."""
    all_x, all_y = table()

    def run(steps: int) -> None:
        module = make()
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            rows = torch.randint(len(all_x), (batch,)) if batch else slice(None)
            x, y = all_x[rows], all_y[rows]
            optimizer.zero_grad()
            error = (module(x).reshape(NUM_MEMBERS, *y.shape) - y).square().mean((1, 2)).sum()
            decay = sum(p.square().sum() for p in module.parameters())
            (error / 0.02 + decay / (2 * len(all_x))).backward()
            optimizer.step()
            schedule.step()

    return run


def our_mean_field(estimator: str) -> Callable[[], Runner]:
    def make() -> Runner:
        import net2gp as n2g
        from net2gp import bayes

        pair = labeled()
        return lambda steps: bayes.mean_field(
            large().eval(),
            pair,
            n2g.Categorical(),
            estimator=estimator,  # type: ignore[arg-type]
            num_steps=steps,
            batch_size=None,
            num_draws=2,
        )

    return make


def their_mean_field(kind: str) -> Callable[[], Runner]:
    def make() -> Runner:
        from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

        x, y = labeled()

        def run(steps: int) -> None:
            module = large()
            prior = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0}
            prior |= {"posterior_rho_init": -4.0, "moped_enable": False, "moped_delta": 0.5}
            dnn_to_bnn(module, prior | {"type": kind})
            optimizer = torch.optim.Adam(module.parameters(), lr=0.01, fused=True)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            for _ in range(steps):
                optimizer.zero_grad()
                (F.cross_entropy(module(x), y) + get_kl_loss(module) / len(x)).backward()
                optimizer.step()
                schedule.step()

        return run

    return make


def our_sghmc() -> Runner:
    import net2gp as n2g
    from net2gp import bayes

    x, y = table()
    return lambda steps: bayes.sghmc(
        small().eval(),
        (x, y),
        n2g.Gaussian(0.01),
        step_size=STEP_SIZE,
        momentum=MOMENTUM,
        batch_size=100,
        num_chains=NUM_CHAINS,
        num_draws=2,
        warmup=steps - 2,
        thin=1,
    )


def their_sghmc(vectorized: bool) -> Callable[[], Runner]:
    def make() -> Runner:
        import posteriors

        (x, y), module = table(), small()

        def log_posterior(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]):
            found = functional_call(module, params, batch[0])
            fit = -(found - batch[1]).square().sum() / 0.02 * (len(x) / len(batch[0]))
            return fit - 0.5 * sum(p.square().sum() for p in params.values()), found

        chain = posteriors.sgmcmc.sghmc.build(
            log_posterior, lr=STEP_SIZE, alpha=(1 - MOMENTUM) / STEP_SIZE
        )

        def run(steps: int) -> None:
            start = {name: value.detach() for name, value in module.named_parameters()}
            if not vectorized:
                for _ in range(NUM_CHAINS):
                    state = chain.init(start)
                    for _ in range(steps):
                        rows = torch.randint(len(x), (100,))
                        state, _ = chain.update(state, (x[rows], y[rows]), inplace=False)
                return
            many = {n: v.expand(NUM_CHAINS, *v.shape).clone() for n, v in start.items()}
            state = torch.func.vmap(chain.init, randomness="different")(many)
            update = torch.func.vmap(chain.update, randomness="different")
            for _ in range(steps):
                rows = torch.randint(len(x), (NUM_CHAINS, 100))
                state, _ = update(state, (x[rows], y[rows]))

        return run

    return make


TASKS: dict[tuple[str, str], Callable[[], Runner]] = {
    ("net2gp", "ensemble of 10, full batches"): lambda: our_ensemble(None),
    ("TorchUncertainty", "ensemble of 10, full batches"): lambda: their_ensemble(None),
    ("plain torch", "ensemble of 10, full batches"): lambda: plain_ensemble(None),
    ("net2gp", "ensemble of 10, batches of 100"): lambda: our_ensemble(100),
    ("TorchUncertainty", "ensemble of 10, batches of 100"): lambda: their_ensemble(100),
    ("plain torch", "ensemble of 10, batches of 100"): lambda: plain_ensemble(100),
    ("net2gp", "mean field, weights drawn once"): our_mean_field("weights"),
    ("bayesian-torch", "mean field, weights drawn once"): their_mean_field("Reparameterization"),
    ("net2gp", "mean field, flipout"): our_mean_field("flipout"),
    ("bayesian-torch", "mean field, flipout"): their_mean_field("Flipout"),
    ("net2gp", "SGHMC, 4 chains"): our_sghmc,
    ("posteriors", "SGHMC, 4 chains"): their_sghmc(vectorized=False),
    ("posteriors under vmap", "SGHMC, 4 chains"): their_sghmc(vectorized=True),
}


def seconds(run: Runner, steps: int) -> float:
    torch.manual_seed(0)
    start = time.process_time()
    run(steps)
    return time.process_time() - start


def main() -> None:
    library, task, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    run = TASKS[library, task]()
    short = max(4, steps // 5)
    seconds(run, short)
    found = [(seconds(run, steps + short) - seconds(run, short)) / steps for _ in range(3)]
    print(json.dumps({"step_s": min(found), "all": found}))


if __name__ == "__main__":
    main()
