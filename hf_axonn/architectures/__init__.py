"""Analysis of a model: its blocks, which of its Linears are column and which row, what its norms do."""
