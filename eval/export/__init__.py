"""Samples as tasks of other tools: texts in the place of token ids, and only samples for which that is the same."""
