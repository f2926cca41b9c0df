"""Tests of hf_axonn, one folder a package; helpers, and benchmarks, beside them."""
