"""Steps are done: here one after the other, or on a cluster in arrays; and how far they are."""
