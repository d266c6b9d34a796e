"""What is refused, and what the refusal says to type instead."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import net2gp as n2g
from net2gp import memory
from net2gp.errors import InputError, TooLarge
from posteriors.methods import found
from posteriors.ways import class_targets, network, points, real_targets, seeded

X = points(6)
Y = real_targets(X, 2)
LABELS = class_targets(X, 3)


def kernel(outputs: int = 2):
    return n2g.linearize(network(outputs)).kernel()


def bad_targets(value: float):
    y = Y.clone()
    y[3, 1] = value
    return y


DATA = {
    "NaN in y": ((X, bad_targets(torch.nan)), r"y must be finite, but 1 of 12 values is .*row 3"),
    "infinity in y": ((X, bad_targets(torch.inf)), r"y must be finite.*keep = y.isfinite\(\)"),
    "NaN in x": ((X * torch.nan, Y), "x must be finite, but 12 of 12"),
    "no points": ((X[:0], Y[:0]), "x is empty: at least one point"),
    "other rows": ((X, Y[:4]), "x has 6 rows and y has 4"),
    "single y": ((X, Y.float()), r"y is torch.float32.*y = y.to\(torch.float64\)"),
    "single x": ((X.float(), Y), r"x is torch.float32.*x = x.to\(torch.float64\)"),
    "integer y": (
        (X, LABELS[:, None].expand(6, 2)),
        r"y must be a floating tensor.*Categorical\(\)",
    ),
    "other outputs": ((X, Y[:, :1]), r"y must have shape \(6, 2\)"),
    "an array of texts": (
        (np.array(["a"] * len(Y)), Y),
        r"x is an array of <U1, .* Encode it first",
    ),
    "a list of numbers": ((X, Y.tolist()), r"y must be a tensor.*torch.as_tensor\(y\)"),
    "three things": ((X, Y, Y), r"data must be a pair \(x, y\)"),
    "no data at all": (None, r"data must be a pair \(x, y\), a Dataset or a DataLoader"),
    "an empty loader": (DataLoader([]), "data is empty"),
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("call", ["condition", "adapt", "spectrum", "adapt_tasks"])
def test_bad_data_is_refused(name, call):
    data, text = DATA[name]
    calls = {
        "condition": lambda: n2g.condition(kernel(), data, n2g.Gaussian(0.1)),
        "adapt": lambda: n2g.adapt(network(2), data, n2g.Gaussian()),
        "spectrum": lambda: n2g.tuning.spectrum(kernel(), data),
        "adapt_tasks": lambda: n2g.adapt_tasks(network(2), {"task": data}),
    }
    with pytest.raises(InputError, match=text):
        calls[call]()


def test_a_shuffling_loader_is_refused():
    loader = DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True, generator=seeded(0))
    with pytest.raises(InputError, match="DataLoader with shuffle=False"):
        n2g.condition(kernel(), loader, n2g.Gaussian(0.1))


LABELINGS = {
    "beyond the outputs": (LABELS + 3, r"labels must be in 0\.\.2.*Widen the last layer"),
    "negative": (LABELS - 5, r"labels must be in 0\.\.2"),
    "floating": (LABELS.double(), r"integer class indices.*y = y.long\(\)"),
    "one hot": (torch.eye(3)[LABELS].long(), r"shape \(6,\).*y = y.argmax\(-1\)"),
    "a column": (LABELS[:, None], r"y = y.reshape\(-1\)"),
}


@pytest.mark.parametrize("name", LABELINGS)
def test_bad_labels_are_refused(name):
    y, text = LABELINGS[name]
    for call in (
        lambda: n2g.condition(kernel(3), (X, y), n2g.Categorical()),
        lambda: n2g.adapt(network(3), (X, y), n2g.Categorical()),
    ):
        with pytest.raises(InputError, match=text):
            call()


def test_binary_labels_are_zero_or_one():
    with pytest.raises(InputError, match=r"labels must be 0 or 1, but y holds -1.*y = y > 0"):
        n2g.condition(
            kernel(1), (X, torch.where(Y[:, :1] > 0, 1.0, -1.0).double()), n2g.Bernoulli()
        )


GAUSSIAN = {
    "no noise yet": (lambda: (kernel(), n2g.Gaussian(), {}), r"Gaussian\(noise_var=0.1\)"),
    "inference with Gaussian noise": (
        lambda: (kernel(), n2g.Gaussian(0.1), {"inference": n2g.solvers.Laplace()}),
        "exact: leave inference out",
    ),
    "a solver by name": (
        lambda: (kernel(), n2g.Gaussian(0.1), {"solver": "cg"}),
        r"solver must be Cholesky\(\), WeightCholesky\(\), CG\(\), ADASAP\(\), Centers\(\) or None, "
        "but is an object of type str",
    ),
    "a solver class": (
        lambda: (kernel(), n2g.Gaussian(0.1), {"solver": n2g.solvers.CG}),
        r"solver must be Cholesky\(\)",
    ),
    "weight space without features": (
        lambda: (n2g.RBF(), n2g.Gaussian(0.1), {"solver": n2g.solvers.WeightCholesky()}),
        r"RBF has none. Pass solver=Cholesky\(\) or CG\(\)",
    ),
    "weight space of a trace kernel": (
        lambda: (
            n2g.linearize(network(2)).trace_kernel(),
            n2g.Gaussian(0.1),
            {"solver": n2g.solvers.WeightCholesky()},
        ),
        "TraceKernel has none",
    ),
    "zero noise in weight space": (
        lambda: (kernel(), n2g.Gaussian(0.0), {"solver": n2g.solvers.WeightCholesky()}),
        r"WeightCholesky\(\) needs noise_var > 0",
    ),
    "zero noise by iteration": (
        lambda: (kernel(), n2g.Gaussian(0.0), {"solver": n2g.solvers.CG()}),
        r"CG\(\) needs noise_var > 0",
    ),
    "a mean with too few outputs": (
        lambda: (kernel(), n2g.Gaussian(0.1), {"mean": lambda x: x[:, :1]}),
        r"the mean gives a tensor of shape \(6, 1\).*\(6, 2\) is needed",
    ),
    "a flat mean": (
        lambda: (kernel(), n2g.Gaussian(0.1), {"mean": lambda x: x[:, 0]}),
        r"the mean gives a tensor of shape \(6,\)",
    ),
    "a mean that gives nothing": (
        lambda: (n2g.RBF(), n2g.Gaussian(0.1), {"mean": lambda x: None}),
        "the mean gives None",
    ),
    "a mean that is a number": (
        lambda: (n2g.RBF(), n2g.Gaussian(0.1), {"mean": 0.0}),
        "mean must be a function of x, or None, but is an object of type float",
    ),
    "a network for a kernel": (
        lambda: (network(2), n2g.Gaussian(0.1), {}),
        r"Sequential. Pass linearize\(network\).kernel\(\), or use adapt",
    ),
    "a linearization for a kernel": (
        lambda: (n2g.linearize(network(2)), n2g.Gaussian(0.1), {}),
        r"kernel must be a Kernel, but is an object of type Linearized",
    ),
    "a class for a kernel": (
        lambda: (n2g.RBF, n2g.Gaussian(0.1), {}),
        "kernel must be a Kernel, but is an object of type",
    ),
    "a number for a likelihood": (lambda: (kernel(), 0.1, {}), r"likelihood must be e.g. Gaussian"),
    "a class for a likelihood": (
        lambda: (kernel(), n2g.Gaussian, {}),
        r"likelihood is the class Gaussian\. Write Gaussian\(\)",
    ),
    "noise of other points": (
        lambda: (kernel(), n2g.Gaussian(torch.ones(4, 1)), {}),
        "noise of 4 points, but there are 6",
    ),
    "noise of other outputs": (
        lambda: (kernel(), n2g.Gaussian(torch.ones(3)), {}),
        "there are 2 outputs",
    ),
}


@pytest.mark.parametrize("name", GAUSSIAN)
def test_bad_arguments_are_refused(name):
    build, text = GAUSSIAN[name]
    given, likelihood, options = build()
    with pytest.raises(InputError, match=text):
        n2g.condition(given, (X, Y), likelihood, **options)


def test_duplicates_without_noise_are_refused():
    data = (torch.cat([X, X[:2]]), torch.cat([Y, Y[:2]]))
    with pytest.raises(InputError, match="2 of 8 points with noise_var=0 are duplicates"):
        n2g.condition(n2g.RBF(), data, n2g.Gaussian(0.0))
    noise = torch.zeros(8, 1)
    noise[-2:] = 0.1
    n2g.condition(n2g.RBF(), data, n2g.Gaussian(noise))


@pytest.mark.parametrize("inference", ["laplace", n2g.solvers.Laplace, n2g.solvers.CG()], ids=str)
def test_inference_is_one_of_two_values(inference):
    with pytest.raises(InputError, match=r"inference must be Laplace\(\), Variational\(\) or None"):
        n2g.condition(kernel(3), (X, LABELS), n2g.Categorical(), inference=inference)


def test_variational_inference_by_iteration_is_refused_before_it_runs(monkeypatch):
    monkeypatch.setattr(import_module("net2gp.posteriors.conditioning.solve"), "infer", None)
    with pytest.raises(InputError, match=r"Variational\(\) needs .* Pass solver=Cholesky\(\)"):
        n2g.condition(
            kernel(3),
            (X, LABELS),
            n2g.Categorical(),
            inference=n2g.solvers.Variational(),
            solver=n2g.solvers.CG(),
        )


@pytest.mark.parametrize(
    "build",
    [
        lambda: n2g.solvers.Laplace(max_iterations=0),
        lambda: n2g.solvers.Variational(max_iterations=-1),
        lambda: n2g.solvers.Laplace(tol=0.0),
        lambda: n2g.solvers.CG(tol=-1e-6),
        lambda: n2g.solvers.CG(max_iterations=0),
        lambda: n2g.solvers.Lanczos(0),
        lambda: n2g.solvers.Nystrom(0),
        lambda: n2g.solvers.PivotedCholesky(-3),
    ],
)
def test_settings_are_positive(build):
    with pytest.raises(InputError, match="must be positive, but is"):
        build()


@pytest.mark.parametrize("count", [-1, 1])
def test_probes_are_none_or_several(count):
    with pytest.raises(InputError, match=f"num_probes must be 2 or more, or 0.*but is {count}"):
        n2g.solvers.CG(num_probes=count)


def test_without_probes_there_is_no_evidence():
    data, kernel = (X, X[:, :1].sin()), n2g.RBF()
    without, whole = (
        n2g.condition(kernel, data, n2g.Gaussian(0.1), solver=n2g.solvers.CG(num_probes=probes))
        for probes in (0, 8)
    )
    torch.testing.assert_close(without.marginal(X).mean, whole.marginal(X).mean)
    with pytest.raises(InputError, match=r"CG\(num_probes=0\), .* leave the evidence out"):
        without.log_marginal_likelihood()


NOT_POINTS = {
    "NaN": (X * torch.nan, "x must be finite"),
    "nothing": (X[:0], "x is empty"),
    "a number": (1.0, "x must be a tensor"),
    "another dtype": (X.float(), "x is torch.float32"),
}


@pytest.mark.parametrize("name", NOT_POINTS)
@pytest.mark.parametrize(
    "solver", [n2g.solvers.Cholesky(), n2g.solvers.WeightCholesky(), n2g.solvers.CG()], ids=str
)
def test_test_points_are_checked(name, solver):
    posterior = n2g.condition(kernel(), (X, Y), n2g.Gaussian(0.1), solver=solver)
    x, text = NOT_POINTS[name]
    for call in (posterior.marginal, posterior.joint, posterior.predict):
        with pytest.raises(InputError, match=text):
            call(x)
    with pytest.raises(InputError, match=text):
        posterior.sample(x, 2)


def test_test_points_of_an_rbf_need_the_columns_of_the_data():
    posterior = n2g.condition(n2g.RBF(), (X, Y), n2g.Gaussian(0.1))
    with pytest.raises(InputError, match="equally many columns"):
        posterior.marginal(points(3, inputs=1))
    with pytest.raises(InputError, match=r"shape \(N, D\), but x is a tensor of shape \(6,\)"):
        posterior.kernel(X[:, 0])
    with pytest.raises(InputError, match=r"shape \(N, D\), but x is a tensor of shape \(6,\)"):
        posterior.marginal(X[:, 0])


def test_an_rbf_has_one_length_scale_or_one_a_column():
    with pytest.raises(InputError, match="one for each of the 2 columns of x"):
        n2g.RBF(torch.ones(3))(X)
    with pytest.raises(InputError, match="lengthscale must be positive"):
        n2g.RBF(-1.0)
    with pytest.raises(InputError, match="output_var must be positive"):
        n2g.RBF(1.0, 0.0)


def test_noise_of_training_points_is_not_that_of_new_points():
    posterior = n2g.condition(kernel(), (X, Y), n2g.Gaussian(torch.full((6, 1), 0.1)))
    with pytest.raises(InputError, match=r"likelihood=Gaussian\(noise_var=...\)"):
        posterior.predict(X[:2])


TOO_LARGE = {
    "a Gram matrix": (
        n2g.solvers.Cholesky(),
        n2g.Gaussian(0.1),
        Y,
        r"12 × 12 .* pass solver=CG\(\)",
    ),
    "inference": (
        n2g.solvers.Cholesky(),
        n2g.Bernoulli(),
        (Y > 0).double(),
        r"12 × 12 .*solver=CG\(\)",
    ),
    "a weight space": (n2g.solvers.WeightCholesky(), n2g.Gaussian(0.1), Y, "27 parameters.*only="),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_cannot_fit_is_refused_before_it_is_tried(name, monkeypatch):
    solver, likelihood, y, text = TOO_LARGE[name]
    given = kernel()
    monkeypatch.setattr(memory, "available_memory", lambda device: 1000)
    with pytest.raises(TooLarge, match=text):
        n2g.condition(given, (X, y), likelihood, solver=solver)


def test_a_decomposition_that_cannot_fit_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: 1000)
    with pytest.raises(TooLarge, match="tune on a subset of the points, or pass prior_var"):
        n2g.tuning.spectrum(n2g.RBF(), (X, Y))


def test_the_solver_is_chosen_by_size(monkeypatch):
    many = points(40)
    few_rows = n2g.condition(kernel(), (X, Y), n2g.Gaussian(0.1))
    assert isinstance(few_rows.solver, n2g.solvers.Cholesky)
    few_parameters = n2g.condition(kernel(), (many, real_targets(many, 2)), n2g.Gaussian(0.1))
    assert isinstance(few_parameters.solver, n2g.solvers.WeightCholesky)
    silent = n2g.condition(n2g.RBF(), (X, Y), n2g.Gaussian(0.0))
    assert isinstance(silent.solver, n2g.solvers.Cholesky)
    monkeypatch.setattr(
        "net2gp.posteriors.conditioning.problem.available_memory", lambda device: 1000
    )
    neither = n2g.condition(kernel(), (X, Y), n2g.Gaussian(0.1))
    assert isinstance(neither.solver, n2g.solvers.CG)


def test_tasks_are_a_mapping_that_is_not_empty():
    with pytest.raises(InputError, match=r"tasks is empty: pass \{name: \(x, y\)\}"):
        n2g.adapt_tasks(network(2), {})
    with pytest.raises(InputError, match=r"tasks must map names to data.*but is a list"):
        n2g.adapt_tasks(network(2), [(X, Y)])
    with pytest.raises(InputError, match="adapt_tasks is for Gaussian noise"):
        n2g.adapt_tasks(network(3), {"task": (X, LABELS)}, n2g.Categorical())


def test_adapt_refuses_what_it_cannot_tune():
    noise = torch.full((6, 1), 0.1)
    with pytest.raises(InputError, match="pass prior_var too, or tune it"):
        n2g.adapt(network(2), (X, Y), n2g.Gaussian(noise))
    with pytest.raises(InputError, match=r"with noise_var=0 .* pass prior_var too"):
        n2g.adapt(network(2), (X, Y), n2g.Gaussian(0.0))
    with pytest.raises(InputError, match="exact: leave inference out"):
        n2g.adapt(network(2), (X, Y), n2g.Gaussian(), inference=n2g.solvers.Laplace())
    n2g.adapt(network(2), (X, Y), n2g.Gaussian(noise), prior_var=1.0)


ONE_OF_EACH = [
    "gaussian by cholesky",
    "gaussian in weight space",
    "gaussian, rbf",
    "laplace, kron last layer",
    "laplace, function space",
    "codes of classes",
]


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("call", ["marginal", "joint", "predict", "sample"])
def test_one_point_without_its_first_axis_is_told_how_to_get_one(name, call):
    posterior, x = found(name), points(4, seed=3)
    more = (3,) if call == "sample" else ()
    with pytest.raises(InputError, match=r"x is one point, .* Pass x\[:1\] in place of x\[0\]"):
        getattr(posterior, call)(x[0], *more)
    getattr(posterior, call)(x[:1], *more)


def test_one_image_without_its_first_axis_is_told_how_to_get_one():
    """A convolution takes one, as an image without channels."""
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 1)).double().eval()
    x = torch.randn(5, 1, 4, 4, dtype=torch.float64)
    posterior = n2g.condition(
        n2g.linearize(network).kernel(), (x, x[:, 0, 0, :1]), n2g.Gaussian(0.1)
    )
    with pytest.raises(InputError, match=r"x is one point, .* \(1, 4, 4\).* Pass x\[:1\]"):
        posterior.predict(x[0])
