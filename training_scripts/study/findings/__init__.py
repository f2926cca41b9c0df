"""Findings in the files of a study: outcomes, estimates over articles, slopes, and the cost of a loss."""
