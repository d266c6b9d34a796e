"""Programs say what the posterior says, for any number of points, without net2gp."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp import serving
from net2gp.errors import InputError, Net2GPWarning, NetworkError, NotAvailable
from net2gp.links import WeightSamples
from serving.programs import Convolutions, check, classifier, fitted, run_alone, table, wanted

QUICK = ["numbers LastLayer()", "classes Kron()", "numbers Diagonal()", "nngp"]
SLOW = [
    *["classes LastLayer()", "numbers Kron()", "classes Diagonal()", "numbers Full()", "ntk"],
    *[
        "classes FunctionSpace()",
        "numbers LastLayer(n2g.Kron())",
        "classes LastLayer(n2g.Diagonal())",
    ],
    *["classes structures.LowRank(10)", "adapt"],
]


@pytest.fixture(scope="module")
def points():
    return torch.randn(256, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)]
)
def test_a_program_for_torch_says_what_the_posterior_says(kind, points, tmp_path):
    posterior = fitted(kind)
    facts = serving.export(posterior, tmp_path / "a.pt2", table()[0])
    program = serving.load(tmp_path / "a.pt2")
    assert program.facts == facts
    expected = wanted(posterior, points)
    for count in (1, 2, 256):
        check(program(points[:count]), expected)


@pytest.mark.parametrize(
    "kind",
    [
        "classes Kron()",
        *(pytest.param(k, marks=pytest.mark.slow) for k in [*QUICK[:1], *QUICK[2:], *SLOW]),
    ],
)
def test_a_program_for_onnxruntime_says_what_the_posterior_says(kind, points, tmp_path):
    pytest.importorskip("onnxruntime")
    posterior = fitted(kind)
    facts = serving.export(posterior, tmp_path / "a.onnx", table()[0])
    program = serving.load(tmp_path / "a.onnx")
    assert program.facts == facts
    expected = wanted(posterior, points)
    for count in (1, 2, 256):
        check(program(points[:count]), expected)
    check(run_alone(tmp_path / "a.onnx", points, tmp_path), expected)


def test_values_inside_of_an_onnx_program_may_be_called_like_its_outputs(tmp_path):
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    ).eval()
    x = torch.randn(30, 1, 6, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        posterior = n2g.laplace(
            network,
            (x, (x.mean((1, 2, 3)) > 0).long()),
            n2g.Categorical(),
            structure=n2g.LastLayer(),
        )
    serving.export(posterior, tmp_path / "a.onnx", x, novelty=False)  # the pooling is a mean
    answers = serving.load(tmp_path / "a.onnx")(x[:3])
    marginal = posterior.marginal(x[:3])
    check(answers, {"mean": marginal.mean, "variance": marginal.variance})


def test_a_program_needs_torch_alone(points, tmp_path):
    posterior = fitted("classes LastLayer()")
    serving.export(
        posterior, tmp_path / "a.pt2", table()[0], novelty=False, classes=["a", "b", "c"]
    )
    assert serving.load(tmp_path / "a.pt2").facts["classes"] == ["a", "b", "c"]
    marginal = posterior.marginal(points)
    answers = run_alone(tmp_path / "a.pt2", points, tmp_path)
    check(answers, {"mean": marginal.mean, "variance": marginal.variance})
    assert "novelty" not in answers


@pytest.mark.parametrize("task", ["numbers", pytest.param("classes", marks=pytest.mark.slow)])
def test_draws_are_those_of_weight_samples(task, points, tmp_path):
    posterior = fitted(f"{task} Kron()")
    serving.export(
        posterior, tmp_path / "a.pt2", table()[0], draws=WeightSamples(5, 3), levels=(0.1, 0.9)
    )
    answers = serving.load(tmp_path / "a.pt2")(points)
    law = posterior.predict(points, samples=WeightSamples(5, 3))
    if task == "classes":
        check(answers, {"probabilities": law.probs})
        return
    check(answers, {"mean": law.mean, "variance": law.variance})
    for number, level in enumerate((0.1, 0.9)):
        parts = law.base_dist.component_distribution
        cdf = parts.cdf(answers["quantiles"][..., number, None]).mean(-1)
        assert (cdf - level).abs().max() < 1e-5


@pytest.mark.parametrize("structure", ["Kron()", "Diagonal()", "LastLayer()"])
@pytest.mark.slow
def test_convolutions_norms_pools_and_sums_have_programs(structure, tmp_path):
    torch.manual_seed(0)
    network, x = Convolutions(), torch.randn(40, 1, 11, 11)
    network(x), network.eval()
    labels = network(x).argmax(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        chosen = eval(f"n2g.{structure}")
        posterior = n2g.laplace(network, (x, labels), n2g.Categorical(), structure=chosen)
    new = torch.randn(9, 1, 11, 11)
    for name in ("a.pt2", "a.onnx"):
        serving.export(posterior, tmp_path / name, x)
        check(serving.load(tmp_path / name)(new), wanted(posterior, new))


def test_quantiles_are_those_of_the_law(points, tmp_path):
    posterior = fitted("numbers Diagonal()")
    serving.export(posterior, tmp_path / "a.pt2", table()[0], levels=(0.05, 0.5))
    answers = serving.load(tmp_path / "a.pt2")(points)
    law = posterior.predict(points)
    normal = torch.distributions.Normal(law.mean, law.variance.sqrt())
    assert torch.allclose(answers["quantiles"][..., 0], normal.icdf(torch.tensor(0.05)), atol=1e-4)
    assert torch.equal(answers["quantiles"][..., 1], answers["mean"])


def test_facts_say_what_a_program_holds_of_the_training_data(tmp_path):
    x = table()[0]
    posterior = fitted("nngp")
    assert serving.export(posterior, tmp_path / "a.pt2", x)["carries"].startswith(
        "the 60 training inputs"
    )
    posterior = fitted("numbers Diagonal()")
    assert serving.export(posterior, tmp_path / "b.pt2", x, novelty=False)["carries"] == "nothing"


class Doubled(nn.Module):
    """Its parameter is no weight of a layer with a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(4, 3))

    def forward(self, x):
        return x @ self.own.exp()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: fitted("classes Kron()", tuning=n2g.tuning.Evidence()),
            r"Categorical\(net2gp.links.Contrast",
        ),
        (lambda: n2g.condition(n2g.RBF(), table()[:2], n2g.Gaussian(0.1)), "with the kernel RBF"),
        (
            lambda: n2g.condition(
                n2g.nngp(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), weight_var=1.5),
                table()[:2],
                n2g.Gaussian(0.1),
            ),
            "nn.ReLU, nn.GELU",
        ),
        (
            lambda: n2g.laplace(
                Doubled().eval(), (table()[0], table()[2]), n2g.Categorical(),
                structure=n2g.Diagonal(), prior_var=1.0,
            ),
            "'own' cannot be exported.*draws=32",
        ),
        (
            lambda: n2g.condition(
                n2g.linearize(classifier()).kernel(), (table()[0], table()[0][:, :3]), n2g.Gaussian(0.1),
                solver=n2g.solvers.CG(),
            ),
            "conjugate gradients",
        ),
    ],
    ids=["link", "kernel", "activation", "parameter", "solver"],
)  # fmt: skip
def test_what_has_no_program_is_refused_with_what_has_one(make, message, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        posterior = make()
        with pytest.raises(NotAvailable, match=message):
            serving.export(posterior, tmp_path / "a.pt2", table()[0])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("a.pth", {}, r"ends in '.pth'.*a.pt2"),
        ("a.pt2", {"format": "jit"}, "format is 'jit'"),
        ("no/a.pt2", {}, "there is no folder"),
        ("a.pt2", {"levels": (0.0, 0.5)}, "levels lie between 0 and 1"),
        ("a.pt2", {"levels": ()}, "levels lie between 0 and 1"),
        ("a.pt2", {"levels": 0.5}, "levels lie between 0 and 1"),
        ("a.pt2", {"levels": "ab"}, "levels lie between 0 and 1"),
        ("a.pt2", {"classes": "a"}, "classes must name 1 classes"),
        ("a.pt2", {"draws": 0}, "num_samples"),
        ("a.pt2", {"novelty": 1}, "novelty"),
    ],
)
def test_bad_arguments_are_named(name, settings, message, tmp_path):
    with pytest.raises(InputError, match=message):
        serving.export(fitted("numbers Diagonal()"), tmp_path / name, table()[0], **settings)
    with pytest.raises(InputError, match="takes a posterior"):
        serving.export(classifier(), tmp_path / "a.pt2", table()[0])
    for wrong, error in ((table()[0][:, :2], NetworkError), (table()[0].double(), InputError)):
        with pytest.raises(error, match="network"):
            serving.export(fitted("numbers Diagonal()"), tmp_path / "a.pt2", wrong)
