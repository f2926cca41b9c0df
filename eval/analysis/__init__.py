"""What results say: intervals, summaries, comparisons of models, membership attacks."""
