"""Synthetic secrets: put into training data, and ranked afterwards."""
