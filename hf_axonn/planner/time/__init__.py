"""Seconds: of products, of collectives, and of what they do not hide."""
