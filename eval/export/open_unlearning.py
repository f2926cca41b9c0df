"""Samples as a data set and an evaluation of OpenUnlearning: verbatim memorization, by its own metrics.

    data/NAME_bucket_12.jsonl                 documents: prompt, gt
    configs/data/datasets/NAME_bucket_12.yaml a CompletionDataset over them
    configs/eval/NAME_bucket_12.yaml          the evaluation, and in NAME_bucket_12_metrics/ its metrics:
                                              exact_memorization, extraction_strength, verbmem_ROUGE
    export.json                               what was left out, and which samples and tokenizer these are

`exact_memorization` is `token_accuracy` here. `extraction_strength` is that of here, but 1 / |suffix| where the last
token is missed, which is 0 here. Both leave the last token of a text out, as it is mostly the end-of-text token: so
each `gt` ends with that token, and the full suffix is scored. `verbmem_ROUGE` is of at most as many new tokens as the
longest suffix has, stops at the end of a text, and stems words. Knowledge memorization (KnowMem) asks questions, which
samples do not have.

Source: src/data/pretraining.py, src/data/utils.py (`preprocess_pretraining_instance`), src/evals/metrics at commit
d3d7cf9e6b3c.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_axonn_eval.data.jsonl import replacing
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.export.texts import Tally, Texts, as_texts, write_documents


_TEACHER_FORCED = ("exact_memorization", "extraction_strength")


def export_open_unlearning(
    samples: Iterable[Sample], tokenizer: Any, directory: Path, *, name: str, tally: Tally
) -> list[str]:
    """Write data and configuration.

    Args:
        samples: read once.
        tokenizer: that made them; it has an end-of-text token.
        directory: to write into; made if it is not there. Its `configs` go into those of a clone of OpenUnlearning,
            its `data` into the directory that it is started in.
        name: the beginning of the names of evaluations and files.
        tally: is counted up.
    Returns:
        the names of the evaluations.
    Raises:
        ValueError: no sample can be exported, or the tokenizer has no end-of-text token.
    """
    if tokenizer.eos_token is None:
        raise ValueError(
            "the tokenizer has no end-of-text token (eos_token), which OpenUnlearning leaves out at the end of every "
            "text: without one it would leave out the last token of the suffix."
        )
    end, begin = tokenizer.eos_token, tokenizer("", add_special_tokens=True)["input_ids"]

    def tokenize(prefix: str, suffix: str) -> tuple[Sequence[int], Sequence[int]]:
        shown = tokenizer(prefix, add_special_tokens=True)["input_ids"]
        full = tokenizer(prefix + suffix + end, add_special_tokens=True)["input_ids"]
        if full[: len(shown)] != shown or full[-1] != tokenizer.eos_token_id:
            return (), ()
        return shown, full[len(shown) : -1]

    def fields(texts: Texts) -> dict[str, Any]:
        return {"sample_id": texts.sample.sample_id, "prompt": texts.prefix, "gt": texts.suffix + end}

    texts = as_texts(samples, tokenizer, begin=begin, tokenize=tokenize, tally=tally)
    longest = write_documents(texts, directory / "data", name=name, fields=fields)
    for task, tokens in longest.items():
        _write_configs(directory / "configs", task, tokens)
    return sorted(longest)


def _write_configs(configs: Path, task: str, longest: int) -> None:
    dataset = {
        "handler": "CompletionDataset",
        "args": {
            "hf_args": {"path": "json", "data_files": f"data/{task}.jsonl", "split": "train"},
            "prefix_key": "prompt",
            "text_key": "gt",
            "max_length": longest + 1,
            "insert_space": False,
        },
    }
    _write(configs / "data" / "datasets" / f"{task}.yaml", {task: dataset})
    metrics = f"{task}_metrics"
    for metric in _TEACHER_FORCED:
        content = {"defaults": _defaults(task), "handler": metric, "batch_size": 8}
        _write(configs / "eval" / metrics / f"{metric}.yaml", content, package=f"eval.{task}.metrics.{metric}")
    rouge = {
        "defaults": [*_defaults(task), {"../../generation@generation_args": "default"}],
        "handler": "rouge",
        "rouge_type": "rougeL_f1",
        "batch_size": 8,
        "datasets": {task: {"args": {"predict_with_generate": True}}},
        "collators": {"DataCollatorForSupervisedDataset": {"args": {"padding_side": "left"}}},
        "generation_args": {"max_new_tokens": longest},
    }
    _write(configs / "eval" / metrics / "verbmem_ROUGE.yaml", rouge, package=f"eval.{task}.metrics.verbmem_ROUGE")
    evaluation = {
        "defaults": [{metrics: [*_TEACHER_FORCED, "verbmem_ROUGE"]}],
        "handler": "MUSEEvaluator",  # the one without a retained model to compare with
        "output_dir": "${paths.output_dir}",
        "metrics": {},
        "overwrite": False,
    }
    _write(configs / "eval" / f"{task}.yaml", evaluation, package=f"eval.{task}")


def _defaults(task: str) -> list[dict[str, str]]:
    collator = {"../../collator@collators": "DataCollatorForSupervisedDatasetwithIndex"}
    return [{"../../data/datasets@datasets": task}, collator]


def _write(path: Path, content: dict[str, Any], *, package: str | None = None) -> None:
    """Write a file of Hydra; `package`, in a comment in the first line, is the place of its content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first = f"# @package {package}\n" if package is not None else ""
    with replacing(path) as file:
        file.write((first + yaml.safe_dump(content, sort_keys=False)).encode())
