"""A page to play with: networks of any width as Gaussian processes, in a browser, offline."""

from net2gp.explorer.page import write_explorer

__all__ = ["write_explorer"]
