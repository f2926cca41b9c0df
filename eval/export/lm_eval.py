"""Samples as tasks of EleutherAI's lm-evaluation-harness, one for each bucket.

    NAME_bucket_12.yaml, NAME_bucket_12.jsonl    the task and its documents; all tasks have the tag NAME
    export.json                                  what was left out, and which samples and tokenizer these are

The tasks are of its type `loglikelihood`: `acc` is the share of suffixes that are greedy (`exact_match` here), and
`perplexity` exp(-mean log-probability of a suffix) per sample, not per token. Intervals, near ties and everything else
stay here.

Source: lm_eval/api/model.py (`_encode_pair`), lm_eval/models/huggingface.py (`tok_encode`) and lm_eval/api/task.py at
commit 4e7e0d47f33b: context and continuation are tokenized together and cut where the context alone ends, after
spaces at the end of the context were moved to the continuation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_axonn_eval.data.jsonl import replacing
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.export.texts import Tally, Texts, as_texts, write_documents


MODEL_ARGUMENTS = "add_bos_token=False"  # the texts begin with BOS where the samples do


def export_lm_eval(
    samples: Iterable[Sample], tokenizer: Any, directory: Path, *, name: str, tally: Tally
) -> list[str]:
    """Write the tasks.

    Args:
        samples: read once.
        tokenizer: that made them.
        directory: to write into; made if it is not there.
        name: of the tag, and the beginning of the names of tasks and files.
        tally: is counted up.
    Returns:
        the names of the tasks.
    Raises:
        ValueError: no sample can be exported.
    """

    def tokenize(prefix: str, suffix: str) -> tuple[Sequence[int], Sequence[int]]:
        # without the spaces at its end, which become part of the continuation
        shown = tokenizer.encode(prefix.rstrip(), add_special_tokens=False)
        return shown, tokenizer.encode(prefix + suffix, add_special_tokens=False)[len(shown) :]

    texts = as_texts(samples, tokenizer, begin=(), tokenize=tokenize, tally=tally)
    tasks = write_documents(texts, directory, name=name, fields=_fields)
    for task in tasks:
        with replacing(directory / f"{task}.yaml") as file:
            file.write(yaml.safe_dump(_task(name, task), sort_keys=False, allow_unicode=True).encode())
    return sorted(tasks)


def _fields(texts: Texts) -> dict[str, Any]:
    sample = {name: getattr(texts.sample, name) for name in ("sample_id", "document_id", "bucket")}
    return {**sample, "prefix": texts.prefix, "suffix": texts.suffix}


def _task(name: str, task: str) -> dict[str, Any]:
    return {
        "tag": name,
        "task": task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{task}.jsonl"}},  # looked up in the current directory
        "test_split": "test",
        "output_type": "loglikelihood",
        "num_fewshot": 0,
        "doc_to_text": "prefix",  # columns: their texts are used as they are, not as templates
        "doc_to_target": "suffix",
        "target_delimiter": "",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        ],
        "metadata": {"version": 1.0},
    }
