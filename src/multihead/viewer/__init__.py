"""Show a record or a census: each as one offline page, and a record in the viewer that `multihead view` serves."""

from multihead.viewer.census_page import write_census_page
from multihead.viewer.report import ReportSummary, write_report

__all__ = ["ReportSummary", "write_census_page", "write_report"]
