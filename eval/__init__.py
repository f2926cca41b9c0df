"""Measure how much of its training data a causal language model reproduces verbatim.

Installed as `hf_axonn_eval` (a top-level package called `eval` would shadow users' own). In Python:

    from hf_axonn_eval import build_samples, extract, load_model, summarize

    loaded = load_model("runs/my-model")
    samples = build_samples(documents, tokenizer=loaded.tokenizer, prefix_length=32, suffix_length=32)
    results = extract(loaded.model, loaded.tokenizer, samples)
    summary = summarize(results)

and from a shell `hf-axonn-eval samples | overlaps | extract | report | compare | canaries |
bundle | verify`;
docs/evaluation.md defines every metric.
"""

from importlib import import_module
from typing import TYPE_CHECKING


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
    "find_overlaps": "data.overlaps",
    "PROTOCOLS": "data.protocols",
    "write_bundle": "bundle.pack",
    "verify_bundle": "bundle.verify",
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
    "attack_cost": "analysis.attack_cost",
    "books": "analysis.coverage",
    "book_coverage": "analysis.coverage",
    "token_masks": "analysis.goldfish_tokens",
    "goldfish_tokens": "analysis.goldfish_tokens",
    "write_tokens": "data.token_file",
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
    "clopper_pearson": "analysis.intervals",
    "mcnemar": "analysis.intervals",
}
__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from hf_axonn_eval.analysis.attack_cost import attack_cost as attack_cost
    from hf_axonn_eval.analysis.coverage import book_coverage as book_coverage
    from hf_axonn_eval.analysis.coverage import books as books
    from hf_axonn_eval.analysis.goldfish_tokens import goldfish_tokens as goldfish_tokens
    from hf_axonn_eval.analysis.goldfish_tokens import token_masks as token_masks
    from hf_axonn_eval.analysis.intervals import clopper_pearson as clopper_pearson
    from hf_axonn_eval.analysis.intervals import mcnemar as mcnemar
    from hf_axonn_eval.analysis.membership_attack import auc as auc
    from hf_axonn_eval.analysis.membership_attack import tpr_at_fpr as tpr_at_fpr
    from hf_axonn_eval.analysis.summary import compare as compare
    from hf_axonn_eval.analysis.summary import summarize as summarize
    from hf_axonn_eval.bundle.pack import write_bundle as write_bundle
    from hf_axonn_eval.bundle.verify import verify_bundle as verify_bundle
    from hf_axonn_eval.canaries.generate import insert_canaries as insert_canaries
    from hf_axonn_eval.canaries.generate import make_canaries as make_canaries
    from hf_axonn_eval.canaries.rank import rank_canaries as rank_canaries
    from hf_axonn_eval.data.documents import iter_documents as iter_documents
    from hf_axonn_eval.data.documents import read_documents as read_documents
    from hf_axonn_eval.data.overlaps import find_overlaps as find_overlaps
    from hf_axonn_eval.data.protocols import PROTOCOLS as PROTOCOLS
    from hf_axonn_eval.data.protocols import protocol as protocol
    from hf_axonn_eval.data.results import SampleResult as SampleResult
    from hf_axonn_eval.data.results import read_run as read_run
    from hf_axonn_eval.data.samples import Sample as Sample
    from hf_axonn_eval.data.samples import SampleFile as SampleFile
    from hf_axonn_eval.data.samples import read_about as read_about
    from hf_axonn_eval.data.samples import read_samples as read_samples
    from hf_axonn_eval.data.samples import samples_digest as samples_digest
    from hf_axonn_eval.data.samples import write_samples as write_samples
    from hf_axonn_eval.data.sampling import build_samples as build_samples
    from hf_axonn_eval.data.sampling import iter_samples as iter_samples
    from hf_axonn_eval.data.token_file import write_tokens as write_tokens
    from hf_axonn_eval.data.windows import Sampling as Sampling
    from hf_axonn_eval.extraction.callback import ExtractionCallback as ExtractionCallback
    from hf_axonn_eval.extraction.extract import extract as extract
    from hf_axonn_eval.extraction.load_model import LoadedModel as LoadedModel
    from hf_axonn_eval.extraction.load_model import load_model as load_model
    from hf_axonn_eval.extraction.scoring import document_nll as document_nll
    from hf_axonn_eval.metrics.discoverability import Sampler as Sampler
    from hf_axonn_eval.metrics.discoverability import is_discoverable as is_discoverable
    from hf_axonn_eval.metrics.discoverability import n_needed as n_needed
    from hf_axonn_eval.metrics.exposure import exposure as exposure
    from hf_axonn_eval.metrics.registry import register_metric as register_metric
    from hf_axonn_eval.report.html import html_page as html_page
    from hf_axonn_eval.report.maps import document_maps as document_maps
    from hf_axonn_eval.report.write import plot as plot
    from hf_axonn_eval.report.write import terminal_table as terminal_table
    from hf_axonn_eval.report.write import write_report as write_report
else:  # hidden from type checkers, to which it would make every name exist

    def __getattr__(name):
        if name not in _EXPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
