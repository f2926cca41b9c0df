"""A recipe and its checks, the steps that follow from it, and their cost."""
