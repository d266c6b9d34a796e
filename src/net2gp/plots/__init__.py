"""Figures of predictions, calibration and kernels, in one plain style.

Each function draws into the given Axes and returns it. If the Axes is None, it makes a new one.
"""

from net2gp.plots.calibration import (
    plot_coverage,
    plot_detection,
    plot_reliability,
    plot_risk_coverage,
)
from net2gp.plots.convergence import plot_convergence
from net2gp.plots.kernels import (
    Picture,
    plot_class_kernel,
    plot_class_means,
    plot_gallery,
    plot_kernel,
    plot_similarities,
)
from net2gp.plots.predictions import plot_regression
from net2gp.plots.selection import plot_selection
from net2gp.plots.stability import plot_stability
from net2gp.plots.style import COLORS, FAINT, INK

__all__ = [
    "COLORS",
    "FAINT",
    "INK",
    "Picture",
    "plot_class_kernel",
    "plot_class_means",
    "plot_convergence",
    "plot_coverage",
    "plot_detection",
    "plot_gallery",
    "plot_kernel",
    "plot_regression",
    "plot_reliability",
    "plot_risk_coverage",
    "plot_selection",
    "plot_similarities",
    "plot_stability",
]
