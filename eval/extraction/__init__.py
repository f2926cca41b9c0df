"""Asks a model for the rest of its samples: one pass, decoding, a record of the run."""
