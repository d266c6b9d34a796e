"""The front doors of bayes: one convention for all methods, and named errors for what does not fit."""

import numpy as np
import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp import bayes
from net2gp.bayes.chains.starts import starts
from net2gp.calling import lacks_vmap
from net2gp.errors import InputError, Net2GPError, NetworkError
from net2gp.linear import linearize

X = torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None]
DATA = X, X.sin()
NOISE = n2g.Gaussian(0.1)
SHORT = bayes.Training(num_steps=4, batch_size=3)


def mlp(seed=0, width=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double().eval()


def dropping():
    return nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.2), nn.Linear(3, 1)).double().eval()


FEW = {"num_draws": 2, "warmup": 0}
CHAINS = {
    "hmc": (bayes.hmc, {**FEW, "step_size": 0.1}),
    "nuts": (bayes.nuts, {**FEW, "step_size": 0.05}),
    "sgld": (bayes.sgld, {**FEW, "step_size": 1e-12}),
    "sghmc": (bayes.sghmc, {**FEW, "step_size": 1e-6}),
    "microcanonical": (bayes.microcanonical, {**FEW, "step_size": 1e-6, "length": 1.0}),
}
METHODS = {
    **CHAINS,
    "map_estimate": (bayes.map_estimate, {"training": SHORT}),
    "ensemble": (bayes.ensemble, {"training": SHORT, "num_members": 2}),
    "multi_swag": (bayes.multi_swag, {"training": SHORT, "num_members": 2, "num_collected": 2}),
    "mean_field": (bayes.mean_field, {"num_steps": 2, "num_draws": 3}),
    "mc_dropout": (bayes.mc_dropout, {"num_samples": 3}),
}


def found(name, network=None, data=DATA, likelihood=NOISE, **options):
    method, usual = METHODS[name]
    own = dropping() if name == "mc_dropout" else mlp()
    return method(own if network is None else network, data, likelihood, **{**usual, **options})


class Started(Exception):
    """Raised where chains would start, with their parameters."""


def first_weights(name, monkeypatch, **options):
    """The hidden weights where each chain starts."""

    def stop(*arguments):
        raise Started(starts(*arguments)[0])

    room = "runs" if name in ("hmc", "nuts") else "langevin.walks"
    monkeypatch.setattr(f"net2gp.bayes.chains.{room}.starts", stop)
    with pytest.raises(Started) as caught:
        found(name, **options)
    monkeypatch.undo()
    return caught.value.args[0][:, :3, None]


@pytest.mark.parametrize("name", CHAINS)
def test_all_chains_start_from_the_same_things(name, monkeypatch):
    other = mlp(5)
    members = bayes.ensemble(mlp(), DATA, NOISE, num_members=3, training=SHORT)
    stacked = {n: torch.stack([v, v + 1]) for n, v in linearize(other).params.items()}
    earlier = bayes.sghmc(mlp(), DATA, NOISE, num_chains=3, num_draws=5, warmup=5, step_size=0.01)
    ends = earlier.process.members.values["0.weight"][4::5]
    single = bayes.map_estimate(mlp(), DATA, NOISE, training=SHORT)
    one = other[0].weight.expand(4, -1, -1)
    cases = {
        "network": ("network", mlp()[0].weight.expand(4, -1, -1)),
        "other network": (other, one),
        "linearization": (linearize(other), one),
        "ensemble": (members, members.process.members.values["0.weight"]),
        "one optimum": (single, single.process.members.values["0.weight"].expand(4, -1, -1)),
        "draws": (stacked, stacked["0.weight"]),
        "earlier chains": (earlier, ends),
    }
    for start, wanted in cases.values():
        weights = first_weights(name, monkeypatch, start=start)
        assert torch.equal(weights, wanted.detach())


@pytest.mark.filterwarnings("ignore::net2gp.errors.NotStationary")
@pytest.mark.parametrize("name", CHAINS)
def test_a_gaussian_posterior_starts_chains_at_its_draws(name, monkeypatch):
    around = n2g.laplace(mlp(), DATA, NOISE, prior_var=1.0)
    weights = first_weights(name, monkeypatch, start=around)
    draws = around.sample_weights(4, generator=torch.Generator().manual_seed(0))["0.weight"]
    assert torch.equal(weights, draws)


@pytest.mark.parametrize("name", CHAINS)
def test_the_number_of_chains_follows_one_rule(name):
    members = bayes.ensemble(mlp(), DATA, NOISE, num_members=3, training=SHORT)
    assert found(name).recipe.num_chains == 4
    assert found(name, start=members).recipe.num_chains == 3
    assert found(name, start=members, num_chains=2).recipe.num_chains == 2
    with pytest.raises(InputError, match="start has 3 networks for 5 chains"):
        found(name, start=members, num_chains=5)
    with pytest.raises(InputError, match="num_chains must be a positive whole number"):
        found(name, num_chains=0)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("mode", r"start must be a posterior, .*but is 'mode'"),
        (np.ones(2), r"start must be a posterior, .*an object of type ndarray"),
        ({}, r"start must be a posterior"),
        ({"0.weight": 1.0}, "start must be a posterior"),
        (mlp(width=4), r"'0.weight' has shape \(3, 1\) in the network and \(4, 1\) in start"),
        ({"0.weight": torch.ones(2, 3, 1)}, r"'0.bias' has shape .* and None in start"),
    ],
)
def test_a_start_that_does_not_fit_is_named(name, start, message):
    with pytest.raises(InputError, match=message):
        found(name, start=start)


def test_chains_of_fixed_statistics_refuse_a_start_with_others():
    def normed():
        layers = nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)
        return nn.Sequential(*layers).double().eval()

    other = normed()
    other[1].running_mean.fill_(2.0)
    with pytest.raises(InputError, match=r"other values of '1.running_mean', which nuts keeps"):
        found("nuts", normed(), start=other)
    kept = found("sghmc", normed(), start=other).process.members.values["1.running_mean"]
    assert bool((kept == 2).all())


def test_a_checkpoint_of_chains_that_start_at_a_posterior_is_continued(tmp_path):
    members = bayes.ensemble(mlp(), DATA, NOISE, num_members=2, training=SHORT)
    options = {"start": members, "checkpoint": tmp_path / "chain.safetensors", "num_draws": 4}
    one, other = (found("nuts", step_size=0.1, **options) for _ in range(2))
    assert torch.equal(one.mean(X), other.mean(X))
    again = bayes.ensemble(mlp(), DATA, NOISE, num_members=2, training=bayes.Training(num_steps=9))
    with pytest.raises(InputError, match="belongs to another"):
        found("nuts", step_size=0.1, **{**options, "start": again})


@pytest.mark.parametrize("name", [n for n in METHODS if n not in ("map_estimate", "mc_dropout")])
def test_an_unknown_option_is_a_type_error_as_in_python(name):
    with pytest.raises(TypeError, match="there is no option 'burn_in'"):
        found(name, burn_in=3)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "mc_dropout"])
def test_only_decides_what_is_random_and_requires_grad_does_not(name):
    network = mlp()
    for value in network[0].parameters():
        value.requires_grad_(False)
    usual = found(name, mlp())
    frozen = found(name, network)
    assert torch.equal(frozen.mean(X), usual.mean(X))
    assert not network[0].weight.requires_grad
    part = found(name, network, only="2.*")
    for index in range(2 if name != "map_estimate" else 1):
        assert torch.equal(bayes.module_of(part, index)[0].weight, network[0].weight)


SEEDED = {
    **{name: (lambda seed, name=name: found(name, seed=seed)) for name in (*CHAINS, "mean_field")},
    "mc_dropout": lambda seed: found("mc_dropout", seed=seed),
    "Training": lambda seed: bayes.Training(seed=seed),
    "CurveTraining": lambda seed: bayes.CurveTraining(seed=seed),
    "match_weights": lambda seed: bayes.match_weights(mlp(), mlp(), seed=seed),
    "loss_slice": lambda seed: bayes.loss_slice(mlp(), DATA, NOISE, seed=seed),
    "double_descent": lambda seed: bayes.double_descent(DATA, DATA, [2], seed=seed),
    "network_like": lambda seed: bayes.network_like(n2g.RBF(), X, seed=seed),
    "draw_masks": lambda seed: bayes.draw_masks(linearize(dropping()), X, 2, seed=seed),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_of_the_wrong_kind_is_named(name):
    for seed in ("a", None, 1.5, True, np.int64(3), torch.tensor(2)):
        with pytest.raises(InputError, match="seed must be a whole number of Python, but is"):
            SEEDED[name](seed)
    with pytest.raises(InputError, match="seed must lie between"):
        SEEDED[name](2**70)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("network", 3, "network must be"),
        ("network", "resnet", "network must be"),
        ("data", torch.tensor(2.0), r"data must be a pair \(x, y\)"),
        ("data", (X[:0], X[:0]), "x is empty"),
        ("data", (X.float(), X), r"x is torch\.float32, but the network is"),
        ("data", (X, X[:3]), "they must have equally many"),
        ("data", (X.repeat(1, 2), X), "the network cannot take x"),
        ("data", (X, torch.full((6,), 9)), "y"),
        ("data", (X / 0, X), "x must be finite"),
        ("likelihood", None, "likelihood must be e.g. Categorical"),
        ("likelihood", n2g.Gaussian, r"is the class Gaussian. Pass Gaussian\(\)"),
        ("output", "logits", "output must be a function of what the network returns"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(name, argument, value, message):
    with pytest.raises(Net2GPError, match=message):
        found(name, **{argument: value})


@pytest.mark.parametrize("name", METHODS)
def test_labels_out_of_range_are_named(name):
    network = nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.2), nn.Linear(3, 2)).double().eval()
    for wrong in (2, -1):
        labels = torch.tensor([0, 1, 1, 0, 1, wrong])
        with pytest.raises(InputError, match=r"labels must be in 0\.\.1"):
            found(name, network, (X, labels), n2g.Categorical())


@pytest.mark.parametrize("name", [name for name in METHODS if name != "multi_swag"])
def test_one_point_is_enough(name):
    posterior = found(name, data=(X[:1], X[:1]))
    assert posterior.predict(X).mean.shape == (6, 1)


@pytest.mark.parametrize("only", [3, 1.5, [mlp()], {"0.weight": 1.0}, b"0.*"])
def test_patterns_of_the_wrong_kind_are_named(only):
    with pytest.raises(InputError, match="only must be a name pattern or a list of them"):
        bayes.nuts(mlp(), DATA, NOISE, only=only)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (-1.0, r"^prior must be zero or positive and finite, but -1 was given"),
        (float("nan"), r"^prior must be zero or positive and finite, but nan"),
        ("wide", r"^prior must be a prior of parameters, a variance or None"),
        (bayes.NormalPrior(-1.0), r"^variance must be finite and not negative, but is -1\.0"),
        (bayes.NormalPrior({"*": -1.0}), r"^variance\['\*'\] must be finite and not negative"),
        (bayes.StudentTPrior(-1.0), r"^scale_var must be finite and not negative"),
    ],
)
def test_messages_about_a_prior_name_what_was_typed(prior, message):
    for use in (
        lambda: bayes.nuts(mlp(), DATA, NOISE, prior=prior),
        lambda: bayes.map_estimate(mlp(), DATA, NOISE, prior=prior),
        lambda: bayes.prior_functions(mlp(), prior),
    ):
        with pytest.raises(InputError, match=message):
            use()
    with pytest.raises(InputError, match=r"^priors\['\*'\] must be"):
        bayes.PriorByName({"*": -1.0})


@pytest.mark.parametrize("value", [None, mlp(), "posterior", 3])
@pytest.mark.parametrize(
    "use",
    [
        bayes.module_of,
        bayes.linearized_mean_field,
        lambda value: bayes.diagnose(value, X),
    ],
)
def test_what_is_no_posterior_is_named(use, value):
    with pytest.raises(InputError, match=r"posterior must be what a method such as ensemble"):
        use(value)


def test_other_arguments_of_the_wrong_kind_are_named():
    members = bayes.ensemble(mlp(), DATA, NOISE, num_members=2, training=SHORT)
    for index in (1.5, None, "0", True):
        with pytest.raises(InputError, match="index must be the number of a network, from 0 to 1"):
            bayes.module_of(members, index)
    model = bayes.Model.of(mlp(), NOISE)
    weights = bayes.GaussianWeights(model.params, {n: v**2 + 1 for n, v in model.params.items()})
    cases = {
        "mixture is of one or more posteriors": lambda: bayes.mixture(3),
        "weights must be one number per posterior": lambda: bayes.mixture([members], 2.0),
        "networks must be a posterior or a list": lambda: bayes.diversity(3, X),
        "losses must be two or more numbers": lambda: bayes.barrier(None),
        "orders must be a dict by the names": lambda: bayes.permute_units(mlp(), None),
        "factors must be a dict by the names": lambda: bayes.scale_units(mlp(), 2.0),
        "directions must be 1, 2, or a list": lambda: bayes.loss_slice(
            mlp(), DATA, NOISE, directions=None
        ),
        "widths must be one or more whole": lambda: bayes.double_descent(DATA, DATA, 3),
        "training must be CurveTraining": lambda: bayes.curve_between(
            mlp(), mlp(1), DATA, NOISE, training=SHORT
        ),
        "t must be zero or positive": lambda: bayes.straight_line(mlp(), mlp(1)).params("a"),
        "elbo takes a GaussianWeights": lambda: bayes.elbo(None, model, DATA),
        "generator must be a torch.Generator": lambda: bayes.elbo(
            weights, model, DATA, generator=3
        ),
        "mean must be tensors by name": lambda: bayes.GaussianWeights(None, None),
        "drop must be at least 0 and less": lambda: bayes.DropoutMixture(X, 0.1, None),
        "architecture must be linearize": lambda: bayes.draw_masks(dropping(), X, 2),
        "layer must be an nn.Linear": lambda: bayes.drop_units(None),
        "kernel_size must be the pixels": lambda: bayes.CorrelatedPrior.spatial(3),
        "network must be a torch.nn.Module": lambda: bayes.decay_groups(None, 1.0),
        "family must be Family": lambda: bayes.network_like(n2g.RBF(), X, family="relu"),
        "num_data must be a positive whole": lambda: bayes.Model.of(mlp(), NOISE, num_data=0),
        "bootstrap must be True or False": lambda: found("ensemble", bootstrap="yes"),
        "collect_every must be a positive": lambda: found("multi_swag", collect_every=0),
        "checkpoint must be the path of a file": lambda: found("nuts", checkpoint=3),
        "vectorized must be True or False": lambda: found("sgld", vectorized="no"),
        "optimizer must be a function": lambda: found("mean_field", optimizer="adam"),
        "function without arguments": lambda: found("ensemble", network=nn.Linear),
    }
    for message, use in cases.items():
        text = message if message != "t must be zero or positive" else "t must be a number"
        with pytest.raises((InputError, NetworkError), match=text):
            use()


class Faulty(nn.Module):
    """A network whose code fails after some calls, which all copies count together."""

    def __init__(self, left):
        super().__init__()
        self.layer, self.left = nn.Linear(1, 1).double(), left

    def forward(self, x):
        self.left.count -= 1
        if self.left.count < 0:
            raise KeyError("head")
        return self.layer(x)


class Left:
    """A number of calls that copies of a network share."""

    def __init__(self, count):
        self.count = count

    def __deepcopy__(self, memo):
        return self


@pytest.mark.parametrize("name", [n for n in METHODS if n != "mc_dropout"])
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_a_fault_in_the_code_of_a_network_is_not_blamed_on_x(name, share):
    left = Left(10**6)
    torch.manual_seed(0)
    found(name, Faulty(left))
    left.count = int(share * (10**6 - left.count))
    torch.manual_seed(0)
    with pytest.raises((KeyError, NetworkError), match="head") as caught:
        found(name, Faulty(left))
    assert "cannot take x" not in str(caught.value)
    assert isinstance(caught.value, KeyError) or isinstance(caught.value.__cause__, KeyError)


class BrokenPrior:
    """A prior that cannot be evaluated."""

    def check(self, params):
        pass

    def log_prob(self, params):
        raise ZeroDivisionError("of the prior")

    def sample(self, params, num_samples, generator=None):
        return {n: v.expand(num_samples, *v.shape) for n, v in params.items()}


@pytest.mark.parametrize("name", ["hmc", "nuts", "sgld", "sghmc", "microcanonical", "mean_field"])
def test_a_fault_in_a_prior_is_not_blamed_on_the_network(name):
    with pytest.raises(ZeroDivisionError, match="of the prior"):
        found(name, prior=BrokenPrior())


class Refusing(nn.Module):
    """A network that fails in a way of its own under vmap alone."""

    def __init__(self, error):
        super().__init__()
        self.layer, self.error = nn.Linear(1, 1).double(), error

    def forward(self, x):
        out = self.layer(x)
        if torch._C._functorch.is_batchedtensor(out):
            raise self.error
        return out


@pytest.mark.parametrize("name", ["nuts", "sghmc", "ensemble"])
def test_running_out_of_memory_is_not_taken_for_a_network_without_vmap(name):
    for error in (torch.OutOfMemoryError("CUDA out of memory"), ValueError("mine")):
        factory = lambda error=error: Refusing(error)
        network = factory if name == "ensemble" else factory()
        with pytest.raises(type(error), match=str(error)):
            found(name, network)
    loops = Refusing(RuntimeError("vmap: It looks like you're calling .item() on a Tensor"))
    network = (lambda: Refusing(loops.error)) if name == "ensemble" else loops
    assert found(name, network).mean(X).shape == (6, 1)


def test_predictions_of_a_posterior_let_memory_errors_through():
    posterior = found("sghmc", nn.Sequential(nn.Linear(1, 1)).double().eval())
    members = posterior.process.members
    broken = Refusing(torch.OutOfMemoryError("CUDA out of memory"))
    values = {n.replace("0.", "layer."): v for n, v in members.values.items()}
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        type(members)(linearize(broken), values)(X)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda v: v.item(), RuntimeError),
        (lambda v: v if v > 0 else -v, RuntimeError),
        (lambda v: v.numpy(), RuntimeError),
        (lambda v: torch.zeros(()).add_(v), RuntimeError),
        (lambda v: torch.zeros(2).nonzero() if v.unique().numel() else v, RuntimeError),
        (lambda v: torch.add(v, v, out=torch.zeros(())), RuntimeError),
    ],
)
def test_what_torch_cannot_vectorize_is_recognized(function, kind):
    with pytest.raises(kind) as caught:
        torch.func.vmap(function)(torch.ones(2))
    assert lacks_vmap(caught.value)


def test_other_failures_are_not_taken_for_a_lack_of_vmap():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    wrong = [
        caught.value,
        torch.OutOfMemoryError("vmap"),
        NetworkError("vmap"),
        ValueError("vmap"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
    ]
    assert not any(lacks_vmap(error) for error in wrong)
