"""Reports: a page with figures, tables and the code that made them."""

from net2gp.report.atlas import atlas
from net2gp.report.demo import demo
from net2gp.report.page import Figure, Section, Table, page
from net2gp.report.papers import Paper, PaperResult, PaperRow, list_papers, run_paper
from net2gp.report.uncertainty import UncertaintyReport, uncertainty_report

__all__ = [
    "Figure",
    "Paper",
    "PaperResult",
    "PaperRow",
    "Section",
    "Table",
    "UncertaintyReport",
    "atlas",
    "demo",
    "list_papers",
    "page",
    "run_paper",
    "uncertainty_report",
]
