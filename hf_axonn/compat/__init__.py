"""The private names of torch, Transformers, Accelerate and PEFT that this package relies on, a file each.

Checked with torch 2.11 and 2.13 to 2.15, transformers 5.20 to 5.24, accelerate 1.12 to 1.15, peft 0.20 and 0.21
(docs/versions.md). setup.cfg has the proven ranges, and versions.py refuses others.
"""
