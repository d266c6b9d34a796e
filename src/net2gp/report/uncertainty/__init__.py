"""The uncertainty report: a posterior and held-out data go in, a page and its numbers come out."""

from net2gp.report.uncertainty.report import UncertaintyReport, uncertainty_report

__all__ = ["UncertaintyReport", "uncertainty_report"]
