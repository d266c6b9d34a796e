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
    assert plots.plot_reliability(ax, {"map": probs, "gp": probs.sqrt()}, y, num_bins=5) is ax
    bins = metrics.reliability(probs, y, 5)
    filled = bins.count > 0
    line = ax.get_lines()[1]
    assert np.array_equal(line.get_xdata(), bins.confidence[filled].numpy())
    assert np.array_equal(line.get_ydata(), bins.accuracy[filled].numpy())
    assert ax.get_legend_handles_labels()[1] == ["map", "gp"]
    assert ax.get_lines()[2].get_color() == plots.COLORS[1]


def test_the_right_variance_lies_on_the_diagonal(ax) -> None:
    y = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    right, narrow = (torch.zeros_like(y), torch.ones_like(y)), (torch.zeros_like(y), 0.2 + 0 * y)
    assert plots.plot_coverage(ax, {"right": right, "too sure": narrow}, y) is ax
    _, calibrated, sure = ax.get_lines()
    nominal = calibrated.get_xdata()
    assert np.abs(calibrated.get_ydata() - nominal).max() < 0.02
    assert (sure.get_ydata() < nominal)[1:-1].all()


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
    with pytest.raises(InputError, match=r"mean must hold one number a point.*mean\[:, 0\]"):
        plots.plot_regression(ax, x, torch.zeros(4, 2), x)
    with pytest.raises(InputError, match="there are x: 4, mean: 3, var: 4"):
        plots.plot_regression(ax, x, x[:3], x)
    with pytest.raises(InputError, match=r"K must be a matrix, but has shape \(4,\)"):
        plots.plot_kernel(ax, x)


def test_plots_without_matplotlib_say_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install net2gp\[plots\]"):
        plots.plot_kernel(None, torch.eye(2))
