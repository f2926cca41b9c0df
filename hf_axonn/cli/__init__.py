"""The commands of `hf-axonn`: plan, doctor, env, convert, verify, bench-links."""
