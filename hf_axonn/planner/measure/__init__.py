"""Measures a machine and counts the collectives of a step."""
