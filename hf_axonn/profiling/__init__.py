"""Profiles what a plan needs to know: the layers of a model, built without weights, and the speed of a machine."""
