"""The study: memorization over the size of models, the repetition of documents and goldfish k, from one recipe."""
