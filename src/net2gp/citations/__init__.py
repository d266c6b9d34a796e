"""From a posterior, or any part of net2gp, to the papers behind it."""

from net2gp.citations.cite import Citations, cite
from net2gp.citations.reference import Reference

__all__ = ["Citations", "Reference", "cite"]
