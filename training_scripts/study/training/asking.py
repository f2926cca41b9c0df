"""Ask a model in memory for what it was trained on: every sample, and every canary."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_axonn.goldfish.record import read_or_none
from hf_axonn_eval import SampleFile, Sampler, extract, rank_canaries, read_about
from hf_axonn_eval.canaries.generate import read_canaries
from hf_axonn_eval.canaries.rank import ranking_record
from hf_axonn_eval.data.jsonl import write_json
from hf_axonn_eval.data.samples import counts
from hf_axonn_eval.extraction.near_copies import NearCopySearch
from hf_axonn_eval.extraction.weights_on_disk import fingerprint
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_scripts.study.recipe.definition import Evaluation
from hf_axonn_scripts.study.recipe.marked_yaml import named_numbers


def record_of(model, directory: Path) -> dict[str, Any]:
    """Return the record of `load_model` for the model in memory, as if it were read from where it was saved.

    Collectives: those of `fingerprint`.
    """
    return {
        "path": str(directory),
        "fingerprint": fingerprint(directory, WorkSplit.for_model(None)),
        "architecture": type(model).__name__,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "attn_implementation": getattr(model.config, "_attn_implementation", None),
        "tokenizer": str(directory),
        "training": read_or_none(directory),
    }


def ask(model, tokenizer, samples: Path, *, output: Path, record: Mapping[str, Any], evaluation: Evaluation) -> None:
    """Ask for every sample; continue where an earlier call was stopped.

    Args:
        model, tokenizer: plain or on a grid, and its tokenizer.
        samples: file of `write_samples`.
        output: run directory of `extract`.
        record: identifies the model.
        evaluation: of the recipe.
    Raises:
        ValueError: as `extract`.
    Collectives: those of `extract`.
    """
    about = read_about(samples) or {}
    sampler: Any = (about.get("extract") or {}).get("sampler")  # a protocol may ask for one
    if evaluation.sampler is not None:
        sampler = named_numbers(evaluation.sampler)
    search: Any = named_numbers(evaluation.near_copies) if evaluation.near_copies is not None else None
    extract(
        model,
        tokenizer,
        SampleFile(samples),
        output=output,
        model_record=dict(record),
        batch_size="auto",
        sampler=Sampler(**sampler) if sampler is not None else None,
        membership=True,
        near_copies=NearCopySearch(**search) if search is not None else None,
        protocol=about.get("protocol"),
        left_out=counts(about),
        progress=False,
    )


def ask_canaries(model, tokenizer, canaries: Path, *, output: Path, record: Mapping[str, Any]) -> None:
    """Write the ranks of all canaries, unless they are there.

    Args:
        model, tokenizer: plain or on a grid, and its tokenizer.
        canaries: directory of `write_canaries`.
        output: JSON file.
        record: identifies the model.
    Raises:
        ValueError: as `rank_canaries`.
    Collectives: those of `extract`.
    """
    work_split = WorkSplit.for_model(None)
    if work_split.on_rank_zero(output.is_file):
        return
    found = read_canaries(canaries)
    ranked = rank_canaries(model, tokenizer, found, batch_size=64, progress=False)
    if work_split.rank == 0:
        write_json(output, ranking_record(ranked, found, dict(record)))
