"""Sharded checkpoints: saved whole or not at all, read on any grid, converted to ordinary ones."""
