"""Prompts a model with prefixes and scores its continuations: one pass, decoding, a record of the run."""
