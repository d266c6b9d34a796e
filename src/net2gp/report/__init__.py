"""Reports: a page with figures, tables and the code that made them."""

from net2gp.report.demo import demo
from net2gp.report.page import Figure, Section, Table, page

__all__ = ["Figure", "Section", "Table", "demo", "page"]
