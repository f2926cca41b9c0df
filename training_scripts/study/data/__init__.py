"""Texts, and the files that are made of them: a tokenizer, passages in buckets, rows to train on, questions."""
