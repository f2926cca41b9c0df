"""Pipelines: the layers of a model divided into stages over the axis pipe."""
