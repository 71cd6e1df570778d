"""Show a record: `write_report` writes one offline page, `multihead view` serves the interactive viewer."""

from multihead.viewer.report import ReportSummary, write_report

__all__ = ["ReportSummary", "write_report"]
