"""One self-contained page that shows every head."""

from polyhead.inspection.report.html_page import Page
from polyhead.inspection.report.report import report

__all__ = ["Page", "report"]
