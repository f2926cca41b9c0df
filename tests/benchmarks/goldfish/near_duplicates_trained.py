"""Measure what a model gives back of passages whose copies are not exact, after the goldfish loss with several h.

    python -m tests.benchmarks.goldfish.near_duplicates_trained --study runs/study/rivals --model 3M

Reads the base model and the passages of a study (training_scripts/study) that has made them. The passages are dealt
evenly to edit rates and to a group that is not trained on; of each passage the model sees COPIES copies, in each of
which every token is replaced with the chance of its group, by one that is drawn evenly. It is trained once with the
ordinary loss and once for each h, with k = 4, on the same rows, and then asked for the second half of each passage as
it is. Printed, by loss and edit rate: the share given back verbatim (the first SHOWN tokens), and of the tokens that
the mask of the passage itself drops and keeps, the share that is the model's first choice given the true ones before;
after the ordinary loss those of the mask with the first h. In brackets 95% intervals over articles.

On one process and, for 3M, about two minutes a training on one core of an AMD EPYC.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_axonn import GoldfishConfig, GoldfishTrainer
from hf_axonn_eval import Sample, SampleResult, extract, token_masks
from hf_axonn_eval.analysis.intervals import mean_intervals, share_intervals
from hf_axonn_scripts.study.training.training import collate
from tests.benchmarks.goldfish.near_duplicates import KINDS, edit


RATES, WIDTHS, K = (0.0, 0.02, 0.05, 0.1, 0.2), (2, 4, 13, 25), 4
COPIES, ROWS, SHOWN = 24, 16, 8
TRAINING: dict[str, Any] = {  # of rivals.yaml
    "per_device_train_batch_size": ROWS,
    "num_train_epochs": 1,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 4,
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch_fused",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "remove_unused_columns": False,
    "seed": 0,
}
UNSEEN = len(RATES)  # group that is not trained on


def deal(passages: Sequence[dict[str, Any]]) -> list[int]:
    """Return the group of each passage: place of its rate in RATES, or UNSEEN; articles are spread over the groups."""
    order = np.random.default_rng(0).permutation(len(passages))
    groups = np.empty(len(passages), dtype=int)
    groups[order] = np.arange(len(passages)) % (UNSEEN + 1)
    return groups.tolist()


def make_rows(passages: Sequence[dict[str, Any]], groups: Sequence[int], vocabulary: int) -> list[dict[str, Any]]:
    """Return the edited copies of all passages, shuffled; a step has as many of each as chance gives it."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for passage, group in zip(passages, groups, strict=True):
        for _ in range(COPIES if group != UNSEEN else 0):
            copy, _ = edit(torch.tensor(passage["input_ids"]), RATES[group], KINDS[0], draw, vocabulary)
            rows.append({"input_ids": copy.tolist(), "labels": copy.tolist()})
    return [rows[place] for place in torch.randperm(len(rows), generator=draw).tolist()]


def make_samples(passages: Sequence[dict[str, Any]], groups: Sequence[int]) -> list[Sample]:
    """Return a question for the second half of each passage; its bucket is the group."""
    made = []
    for passage, group in zip(passages, groups, strict=True):
        tokens, half = tuple(passage["input_ids"]), len(passage["input_ids"]) // 2
        about = {"sample_id": passage["id"], "document_id": passage["article"], "bucket": group, "offset": 0}
        made.append(Sample(**about, prefix=tokens[:half], suffix=tokens[half:]))
    return made


def describe(results: Sequence[SampleResult], samples: Sequence[Sample], width: int) -> list[str]:
    """Return the cells of a group: verbatim, and hits among dropped and among kept tokens of the mask with this h."""
    masks = token_masks(samples, k=K, context_width=width)
    articles = [result.document_id for result in results]
    verbatim = np.array([[float(result.divergence_point >= SHOWN)] for result in results])
    (found,) = share_intervals(verbatim, articles)
    cells = [_cell(float(verbatim.mean()), found.interval)]
    for kind in (1, 0):
        hits, names = [], []
        for result in results:
            chosen = np.array(result.hits)[masks.select(result) == kind]
            hits += chosen.astype(float).tolist()
            names += [result.document_id] * len(chosen)
        (found,) = mean_intervals(np.array(hits)[:, None], names)
        cells.append(_cell(float(np.mean(hits)), found.interval))
    return cells


def _cell(mean: float, interval: Any) -> str:
    return f"{mean:.2f}" + (f" [{max(0, interval.low):.2f}, {min(1, interval.high):.2f}]" if interval else "")


def train(study: Path, model: str, rows: list[dict[str, Any]], **loss: Any) -> Any:
    """Return the base model of a study after one pass over the rows with a loss."""
    made = AutoModelForCausalLM.from_pretrained(study / "base" / model, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GoldfishTrainer(
            model=made,
            args=GoldfishConfig(folder, **TRAINING, **loss),
            train_dataset=rows,
            data_collator=collate,
        )
        trainer.train()
    return made.eval()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train with each loss, and print a line for each loss and edit rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, required=True, help="directory of a study")
    parser.add_argument("--model", default="3M", help="name of a model with a base in it")
    options = parser.parse_args(arguments)
    text = (options.study / "data" / "study" / "passages.jsonl").read_text(encoding="utf-8")
    passages = [json.loads(line) for line in text.splitlines()]
    vocabulary = AutoConfig.from_pretrained(options.study / "base" / options.model).vocab_size
    groups = deal(passages)
    rows, samples = make_rows(passages, groups, vocabulary), make_samples(passages, groups)
    print(f"{len(passages)} passages of {len(passages[0]['input_ids'])} tokens, {len(rows)} rows")
    print("| loss | edits | verbatim | dropped tokens right | kept tokens right |", flush=True)
    losses: list[tuple[str, int, dict[str, Any]]] = [("ordinary", WIDTHS[0], {"goldfish": False})]
    losses += [(f"h = {h}", h, {"goldfish_k": K, "goldfish_context_width": h}) for h in WIDTHS]
    for name, width, loss in losses:
        model = train(options.study, options.model, rows, **loss)
        results = extract(model, None, samples, batch_size=32, generate=False, progress=False)
        for group in range(UNSEEN + 1):
            cells = describe([one for one in results if one.bucket == group], samples, width)
            rate = "not seen" if group == UNSEEN else f"{RATES[group]:.0%}"
            print(f"| {name} | {rate} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
