"""The commands of `python -m hf_axonn_eval`."""
