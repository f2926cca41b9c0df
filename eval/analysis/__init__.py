"""Statistics of results: intervals, summaries, comparisons of models, membership attacks."""
