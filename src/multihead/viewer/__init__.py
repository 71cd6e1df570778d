"""Turn a record into a page: every head of a model, to look at offline."""

from multihead.viewer.report import ReportSummary, write_report

__all__ = ["ReportSummary", "write_report"]
