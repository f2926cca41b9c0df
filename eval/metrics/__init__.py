"""The metrics: of texts, of probabilities, of membership, of exposure."""
