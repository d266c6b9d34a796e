"""Reports: a page with figures, tables and the code that made them."""

from net2gp.report.demo import demo
from net2gp.report.page import Figure, Section, Table, page
from net2gp.report.uncertainty import UncertaintyReport, uncertainty_report

__all__ = [
    "Figure",
    "Section",
    "Table",
    "UncertaintyReport",
    "demo",
    "page",
    "uncertainty_report",
]
