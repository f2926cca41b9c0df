"""Measure how much of its training data a causal language model reproduces verbatim.

Installed as `hf_axonn_eval` (a top-level package called `eval` would shadow users' own). In Python:

    from hf_axonn_eval import build_samples, extract, load_model, summarize

    loaded = load_model("runs/my-model")
    samples = build_samples(documents, tokenizer=loaded.tokenizer, prefix_length=32, suffix_length=32)
    results = extract(loaded.model, loaded.tokenizer, samples)
    summary = summarize(results)

and from a shell `hf-axonn-eval samples | overlaps | extract | report | compare | canaries | bundle | verify`;
docs/evaluation.md defines every metric. A public name (`__init__.pyi`) is imported when it is first used, so that
--help does not wait for torch.
"""

from hf_axonn.compat.facade import lazy_names


__getattr__, __dir__ = lazy_names(globals())
