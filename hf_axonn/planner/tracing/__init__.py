"""Reads a model's layers off the model itself, built on the meta device."""
