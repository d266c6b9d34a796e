"""Reports: a page with figures, tables and the code that made them."""

from net2gp.report.atlas import atlas, recorded_atlas
from net2gp.report.demo import demo
from net2gp.report.page import Figure, Section, Table, page
from net2gp.report.papers import list_papers, run_paper
from net2gp.report.records import keep_record, read_records
from net2gp.report.reproductions import Paper, PaperResult, PaperRow
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
    "keep_record",
    "list_papers",
    "page",
    "read_records",
    "recorded_atlas",
    "run_paper",
    "uncertainty_report",
]
