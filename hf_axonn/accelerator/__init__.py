"""What a stock `Accelerator` does on a grid: prepare, data loaders, training, files."""
