"""BoTorch: a posterior, or data and a network, go in; a model that acquisition functions take comes out."""

try:
    import botorch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "net2gp.interop.botorch needs BoTorch: pip install 'net2gp[botorch]'"
    ) from error

from net2gp.interop.botorch.draws import DrawnFunction
from net2gp.interop.botorch.model import PosteriorModel
from net2gp.interop.botorch.network_gp import NetworkGP

__all__ = ["DrawnFunction", "NetworkGP", "PosteriorModel"]
