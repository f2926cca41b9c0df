"""PEFT adapters on a sharded model: LoRA, DoRA, merging, and PEFT's files."""
