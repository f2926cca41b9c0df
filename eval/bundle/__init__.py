"""Signed bundles: the numbers of runs without their texts, for an auditor who recomputes them."""
