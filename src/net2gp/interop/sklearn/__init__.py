"""Estimators of scikit-learn: arrays and tables go in, arrays come out, and `posterior_` is the posterior.

`NNGPRegressor`, `NNGPClassifier` and `NTKRegressor` are networks of infinite width, `LinearizedRegressor` and
`LinearizedClassifier` condition a trained network on new data, `LaplaceRegressor` and `LaplaceClassifier`
give a network uncertainty on the data that it was trained on.
"""

try:
    import sklearn as _sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        "net2gp.interop.sklearn needs scikit-learn: pip install 'net2gp[sklearn]'"
    ) from error

from net2gp.interop.sklearn.laplaces import LaplaceClassifier, LaplaceRegressor
from net2gp.interop.sklearn.linearizations import LinearizedClassifier, LinearizedRegressor
from net2gp.interop.sklearn.widths import NNGPClassifier, NNGPRegressor, NTKRegressor

__all__ = [
    "LaplaceClassifier",
    "LaplaceRegressor",
    "LinearizedClassifier",
    "LinearizedRegressor",
    "NNGPClassifier",
    "NNGPRegressor",
    "NTKRegressor",
]
