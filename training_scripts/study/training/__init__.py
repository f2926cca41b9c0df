"""Work on a grid of processes: base training, the pilot, continuations, and asking models."""
