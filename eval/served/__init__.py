"""Models that a server holds: asked over HTTP, in token ids, for log-probabilities and greedy continuations."""
