"""What a step costs, by arithmetic alone: no file here imports torch, so a plan for 32,768 GPUs needs no GPU."""
