"""Runners of steps, here one after the other or on a cluster in arrays, and the progress of a study."""
