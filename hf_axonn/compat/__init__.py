"""The private names of torch, Transformers, Accelerate and PEFT that this package relies on."""
