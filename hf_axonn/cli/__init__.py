"""The commands of `hf-axonn`: init, plan, doctor, env, convert, verify, bench-links, kit, survey."""
