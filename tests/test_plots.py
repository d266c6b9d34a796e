from __future__ import annotations

import sys

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from net2gp import metrics, plots
from net2gp.errors import InputError


@pytest.fixture
def ax():
    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close(figure)


def rendered(figure: Figure) -> np.ndarray:
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())


def test_the_band_is_two_standard_deviations_around_the_mean(ax) -> None:
    x = torch.tensor([[2.0], [0.0], [1.0]])
    mean, var = torch.tensor([[4.0], [0.0], [1.0]]), torch.tensor([[1.0], [0.25], [4.0]])
    assert plots.plot_regression(ax, x, mean, var, label="gp") is ax
    (line,) = ax.get_lines()
    assert line.get_xydata().tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 4.0]]
    corners = {tuple(p) for p in ax.collections[0].get_paths()[0].vertices.tolist()}
    assert {(0.0, -1.0), (0.0, 1.0), (1.0, -3.0), (1.0, 5.0), (2.0, 2.0), (2.0, 6.0)} <= corners
    assert ax.get_legend_handles_labels()[1] == ["gp"]


def test_truth_follows_the_order_of_x(ax) -> None:
    x = torch.tensor([2.0, 0.0, 1.0])
    plots.plot_regression(ax, x, x, torch.ones(3), truth=10 * x, data=(x, -x))
    _, truth, points = ax.get_lines()
    assert truth.get_ydata().tolist() == [0.0, 10.0, 20.0]
    assert points.get_ydata().tolist() == [-2.0, 0.0, -1.0]
    assert ax.get_legend_handles_labels()[1] == ["truth", "data"]


def test_a_second_posterior_gets_the_next_color(ax) -> None:
    x = torch.linspace(0, 1, 4)
    for _ in range(2):
        plots.plot_regression(ax, x, x, torch.ones(4), data=(x, x))
    colors = [line.get_color() for line in ax.get_lines() if line.get_linestyle() == "-"]
    assert colors == list(plots.COLORS[:2])
    assert to_hex(ax.collections[1].get_facecolor()[0]).upper() == plots.COLORS[1]


def test_a_label_is_not_repeated_in_the_legend(ax) -> None:
    x = torch.linspace(0, 1, 4)
    for label in ("one", "two"):
        plots.plot_regression(ax, x, x, torch.ones(4), data=(x, x), label=label)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["one", "data", "two"]


def test_reliability_lines_are_the_bins(ax) -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(300, 3, generator=generator).softmax(-1)
    y = probs.multinomial(1, generator=generator)[:, 0]
    milder = probs.sqrt() / probs.sqrt().sum(-1, keepdim=True)
    assert plots.plot_reliability(ax, {"map": probs, "gp": milder}, y, num_bins=5) is ax
    bins = metrics.reliability(probs, y, 5)
    filled = bins.count > 0
    line = ax.get_lines()[1]
    assert np.array_equal(line.get_xdata(), bins.confidence[filled].numpy())
    assert np.array_equal(line.get_ydata(), bins.accuracy[filled].numpy())
    errors = [metrics.expected_calibration_error(p, y, 5) for p in (probs, milder)]
    words = [f"map (ECE {errors[0]:.3f})", f"gp (ECE {errors[1]:.3f})"]
    assert ax.get_legend_handles_labels()[1] == words
    assert ax.get_lines()[2].get_color() == plots.COLORS[1]
    heights = [bar.get_height() for bar in ax.patches[:5]]
    assert heights == pytest.approx((bins.count / 300).tolist())
    assert not ax.texts


def test_a_single_reliability_line_has_its_counts_written(ax) -> None:
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]])
    plots.plot_reliability(ax, {"map": probs}, torch.tensor([0, 1, 0]), num_bins=4)
    assert [text.get_text() for text in ax.texts] == ["1", "2"]


def test_the_right_variance_lies_on_the_diagonal(ax) -> None:
    y = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    right, narrow = (torch.zeros_like(y), torch.ones_like(y)), (torch.zeros_like(y), 0.2 + 0 * y)
    assert plots.plot_coverage(ax, {"right": right, "too sure": narrow}, y) is ax
    _, calibrated, sure = ax.get_lines()
    nominal = calibrated.get_xdata()
    assert np.abs(calibrated.get_ydata() - nominal).max() < 0.02
    assert (sure.get_ydata() < nominal)[1:-1].all()


def test_samples_and_moments_of_one_law_have_the_same_coverage(ax) -> None:
    generator = torch.Generator().manual_seed(0)
    y = 1.5 * torch.randn(2000, generator=generator)
    samples = torch.randn(4000, 2000, generator=generator)
    moments = torch.zeros_like(y), torch.ones_like(y)
    plots.plot_coverage(ax, {"samples": samples, "moments": moments}, y, num_levels=9)
    _, drawn, exact = ax.get_lines()
    assert np.abs(drawn.get_ydata() - exact.get_ydata())[1:-1].max() < 0.02
    error = metrics.coverage_error(*moments, y, num_levels=9)
    assert ax.get_legend_handles_labels()[1][1] == f"moments (off by {error:.3f})"


def test_the_risk_curve_is_the_metric_and_names_its_area(ax) -> None:
    uncertainty, loss = torch.tensor([0.3, 0.1, 0.2, 0.2]), torch.tensor([1.0, 0.0, 0.5, 0.1])
    assert plots.plot_risk_coverage(ax, {"gp": (uncertainty, loss)}, risk="error") is ax
    curve = metrics.risk_coverage(uncertainty, loss)
    (line,) = ax.get_lines()
    assert np.array_equal(line.get_xdata(), curve.coverage.numpy())
    assert np.array_equal(line.get_ydata(), curve.risk.numpy())
    area = metrics.aurc(uncertainty, loss)
    assert ax.get_legend_handles_labels()[1] == [f"gp (AURC {area:.3g})"]
    assert ax.get_ylabel() == "error"


def test_both_histograms_of_a_detection_have_area_one_and_the_same_bins(ax) -> None:
    generator = torch.Generator().manual_seed(0)
    known = torch.rand(500, generator=generator)
    foreign = torch.rand(200, generator=generator) + 0.5
    assert plots.plot_detection(ax, known, foreign, label="entropy", num_bins=10) is ax
    bars = [patch for patch in ax.patches if hasattr(patch, "get_height")]
    for half in (bars[:10], bars[10:]):
        assert sum(bar.get_height() * bar.get_width() for bar in half) == pytest.approx(1.0)
    assert [b.get_x() for b in bars[:10]] == pytest.approx([b.get_x() for b in bars[10:]])
    title = ax.get_legend().get_title().get_text()
    assert title == f"AUROC {metrics.auroc(known, foreign):.3f}"
    assert ax.get_legend_handles_labels()[1] == ["in distribution", "out of distribution"]
    assert ax.get_xlabel() == "entropy"


def test_scores_that_are_all_equal_are_drawn(ax) -> None:
    plots.plot_detection(ax, torch.ones(5), torch.ones(3))
    assert ax.get_legend().get_title().get_text() == "AUROC 0.500"
    heights = [patch.get_height() for patch in ax.patches if hasattr(patch, "get_height")]
    assert np.isfinite(heights).all()


def test_similarities_are_named_and_numbered(ax) -> None:
    values = torch.tensor([[1.0, 0.25], [0.25, 1.0]])
    assert plots.plot_similarities(ax, values, ["a", "b"], label="cosine") is ax
    assert np.array_equal(ax.get_images()[0].get_array(), values.numpy())
    assert [text.get_text() for text in ax.get_xticklabels()] == ["a", "b"]
    assert [text.get_text() for text in ax.texts] == ["1.00", "0.25", "0.25", "1.00"]
    assert ax.figure.axes[1].get_ylabel() == "cosine"


def test_a_kernel_is_drawn_as_it_is_indexed(ax) -> None:
    K = torch.arange(6.0).reshape(2, 3)
    assert plots.plot_kernel(ax, K, label="k(x, x')") is ax
    (image,) = ax.get_images()
    assert np.array_equal(image.get_array(), K.numpy())
    assert image.origin == "upper"
    assert ax.figure.axes[1].get_ylabel() == "k(x, x')"


def test_zero_is_the_middle_of_a_kernel_with_both_signs(ax) -> None:
    plots.plot_kernel(ax, torch.tensor([[3.0, -1.0], [-1.0, 2.0]]))
    assert ax.get_images()[0].get_clim() == (-3.0, 3.0)


def test_every_figure_leaves_ink() -> None:
    x = torch.linspace(0, 1, 30)
    probs = torch.stack([x, 1 - x], 1)
    y = (x < 0.5).long()
    draw = [
        lambda: plots.plot_regression(None, x, x, x, data=(x, x), truth=x, label="gp"),
        lambda: plots.plot_reliability(None, {"net": probs}, y),
        lambda: plots.plot_coverage(None, {"gp": (x, x + 0.1)}, x),
        lambda: plots.plot_kernel(None, x[:, None] * x),
        lambda: plots.plot_risk_coverage(None, {"gp": (x, x)}),
        lambda: plots.plot_detection(None, x, x + 0.5),
        lambda: plots.plot_similarities(None, torch.eye(3), ["a", "b", "c"]),
    ]
    for function in draw:
        axes = function()
        pixels = rendered(axes.figure)
        assert (pixels[..., :3].min(-1) < 200).mean() > 0.003
        pyplot.close(axes.figure)


def test_tensors_that_require_gradients_are_drawn(ax) -> None:
    x = torch.linspace(0, 1, 4, requires_grad=True)
    plots.plot_regression(ax, x, x, x + 1)
    plots.plot_kernel(ax, x[:, None] * x)


def test_mistakes_say_what_to_pass(ax) -> None:
    x = torch.linspace(0, 1, 4)
    with pytest.raises(InputError, match=r"mean must hold one number per point.*mean\[:, 0\]"):
        plots.plot_regression(ax, x, torch.zeros(4, 2), x)
    with pytest.raises(InputError, match="there are x: 4, mean: 3, var: 4"):
        plots.plot_regression(ax, x, x[:3], x)
    with pytest.raises(InputError, match=r"K must be a matrix, but has shape \(4,\)"):
        plots.plot_kernel(ax, x)
    with pytest.raises(InputError, match=r"must be \(3, 3\) for 3 names, but has shape \(2, 2\)"):
        plots.plot_similarities(ax, torch.eye(2), ["a", "b", "c"])
    with pytest.raises(InputError, match="num_levels must be at least 1, but is 0"):
        plots.plot_coverage(ax, {"gp": (x, x)}, x, num_levels=0)
    with pytest.raises(InputError, match="num_bins must be at least 1, but is 0"):
        plots.plot_detection(ax, x, x, num_bins=0)


def test_plots_without_matplotlib_say_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install net2gp\[plots\]"):
        plots.plot_kernel(None, torch.eye(2))
