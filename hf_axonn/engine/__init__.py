"""The 4D algorithm: products, layouts, gathers of weights, averages of gradients."""
