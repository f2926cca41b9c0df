"""What a step costs, by arithmetic. Only tracing and measure import torch: a plan for 32,768 GPUs needs no GPU."""
