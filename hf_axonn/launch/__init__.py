"""How a run starts: the launch file, `axonn-launch`, stock `accelerate launch`, notebooks."""
