"""Documents, samples cut from them, published protocols, and files of results."""
