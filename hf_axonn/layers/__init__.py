"""The sharded layers: blocks, vocabulary, norms, experts, dropout."""
