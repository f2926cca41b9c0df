"""Sharded checkpoints: saved completely or not at all, read on any grid, converted to ordinary ones."""
