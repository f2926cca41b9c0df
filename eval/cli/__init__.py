"""The commands of `hf-axonn-eval`."""
