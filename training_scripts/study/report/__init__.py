"""The report: sentences, figures and tables of the findings, on one page."""
