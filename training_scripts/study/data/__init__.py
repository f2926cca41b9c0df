"""Texts and what becomes of them: a tokenizer, passages in buckets, rows to train on, questions to ask."""
