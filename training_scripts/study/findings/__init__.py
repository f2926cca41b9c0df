"""What the files of a study say: outcomes, estimates over articles, slopes, and what a loss costs."""
