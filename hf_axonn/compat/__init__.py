"""The private names of torch, Transformers, Accelerate and PEFT that this package relies on, a file each.

Checked with torch 2.11 and 2.13 to 2.15, transformers 5.23.0, accelerate 1.15.0, peft 0.21.2. setup.cfg has the proven
ranges, and versions.py refuses others.
"""
