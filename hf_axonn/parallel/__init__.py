"""A model becomes a parallel one: `parallelize`, `from_pretrained`, and what they install."""
