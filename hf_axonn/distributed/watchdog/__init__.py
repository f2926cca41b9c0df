"""A rank fails, hangs or dies: all end, with one message that says why."""
