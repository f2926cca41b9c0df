"""What the planner knows of a model: layers, sizes, numbers of parameters."""
