"""What Transformers' Trainer needs on a grid: saving, resuming, the Hub, samplers, TRL."""
