"""Predicts what a training step costs, by arithmetic: a plan for 32,768 GPUs needs no GPU."""
