"""Measure how much of its training data a causal language model gives back verbatim.

Installed as `hf_axonn_eval` (a top-level package called `eval` would shadow users' own). In Python:

    from hf_axonn_eval import build_samples, extract, load_model, summarize

    loaded = load_model("runs/my-model")
    samples = build_samples(documents, tokenizer=loaded.tokenizer, prefix_length=32, suffix_length=32)
    results = extract(loaded.model, loaded.tokenizer, samples)
    summary = summarize(results)

and from a shell `python -m hf_axonn_eval samples | extract | report | compare | canaries`; docs/evaluation.md defines
every metric.
"""

from importlib import import_module


_EXPORTS = {  # public name -> module; resolved on first use, so that --help does not wait for torch
    "Sample": "data.samples",
    "SampleFile": "data.samples",
    "read_samples": "data.samples",
    "write_samples": "data.samples",
    "read_about": "data.samples",
    "samples_digest": "data.samples",
    "iter_documents": "data.documents",
    "read_documents": "data.documents",
    "Sampling": "data.windows",
    "build_samples": "data.sampling",
    "iter_samples": "data.sampling",
    "PROTOCOLS": "data.protocols",
    "make_canaries": "canaries.generate",
    "insert_canaries": "canaries.generate",
    "rank_canaries": "canaries.rank",
    "protocol": "data.protocols",
    "load_model": "extraction.load_model",
    "LoadedModel": "extraction.load_model",
    "extract": "extraction.extract",
    "SampleResult": "data.results",
    "read_run": "data.results",
    "document_nll": "extraction.scoring",
    "summarize": "analysis.summary",
    "compare": "analysis.summary",
    "write_report": "report.write",
    "html_page": "report.html",
    "document_maps": "report.maps",
    "ExtractionCallback": "extraction.callback",
    "Sampler": "metrics.discoverability",
    "n_needed": "metrics.discoverability",
    "register_metric": "metrics.registry",
    "is_discoverable": "metrics.discoverability",
    "plot": "report.write",
    "terminal_table": "report.write",
    "auc": "analysis.membership_attack",
    "tpr_at_fpr": "analysis.membership_attack",
    "exposure": "metrics.exposure",
    "wilson": "analysis.intervals",
    "bootstrap": "analysis.intervals",
    "mcnemar": "analysis.intervals",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_EXPORTS[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
