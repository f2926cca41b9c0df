"""The loss of logits that are divided over the vocabulary."""
