"""Bytes and calls of every collective of a step."""
