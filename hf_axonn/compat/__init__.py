"""The private names of torch, Transformers, Accelerate and PEFT that this package relies on, a file each.

Checked with torch 2.11 and 2.13, transformers 5.23.0, accelerate 1.15.0, peft 0.21.2. setup.cfg pins what is not
proven on other versions.
"""
