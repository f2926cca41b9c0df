"""A stock `Accelerator` on a grid: prepare, data loaders, training, files."""
