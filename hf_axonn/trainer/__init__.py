"""Transformers' Trainer on a grid: saving, resuming, the Hub, samplers, TRL, callbacks."""
