"""Starts a run: the launch file, `axonn-launch`, stock `accelerate launch`, notebooks."""
