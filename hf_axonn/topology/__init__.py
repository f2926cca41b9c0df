"""The arithmetic of a grid. Imports no torch."""
