"""Numbers that people watch while a model trains, names for profilers, and snapshots of memory."""
