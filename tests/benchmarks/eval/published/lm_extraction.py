"""google-research/lm-extraction-benchmark on a small model: its baseline attack, and its score of it.

    python -m tests.benchmarks.eval.published.lm_extraction CHECKOUT

`baseline/simple_baseline.py` draws suffixes with top-k 10 and orders them by their loss; `score_submission.py` counts
recall at 100 errors. Both run as they are.
"""

import csv
import io
import os
import runpy
import sys
import tempfile
import types
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from absl import flags

from tests.benchmarks.eval.published.common import about, arguments, digest, write
from tests.eval.published import inputs


TRIALS = 40
BASELINE, SCORE = "baseline/simple_baseline.py", "example_submission/score_submission.py"


class OnThisDevice:
    """The model with the calls that would move it to a GPU and halve its precision, which here do nothing."""

    def __getattr__(self, name: str) -> Any:
        return (lambda: self) if name in ("half", "cuda", "eval") else getattr(inputs.model(), name)

    def generate(self, *args: Any, pad_token_id: int, **kwargs: Any) -> Any:
        """With the padding token of this model, which as GPT-Neo's 50256 is its EOS."""
        return inputs.model().generate(*args, pad_token_id=inputs.tokenizer().eos_token_id, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return inputs.model()(*args, **kwargs)


def main() -> None:
    """Attack, score, and write guesses' order and counts of draws."""
    options = arguments(__doc__)
    known = np.array(inputs.examples(), dtype=np.uint16)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "train_prefix.npy", known[:, 100:150])
        np.save(folder / "train_suffix.npy", known[:, 150:])
        attack(options.checkout / BASELINE, folder)
        trials = range(TRIALS)
        drawn = np.stack([np.load(folder / "run/generations" / f"{trial}.npy")[:, 50:] for trial in trials], axis=1)
        losses = np.stack([np.load(folder / "run/losses" / f"{trial}.npy")[:, 0] for trial in trials], axis=1)
        scores = {f"guess{some}": scored(options.checkout / SCORE, folder, some) for some in (1, 10, 100)}
    exact = (drawn == known[:, None, 150:]).all(-1)
    outputs = {
        "examples": [digest(row[100:]) for row in inputs.examples()],
        "top_k": 10,
        "draws": TRIALS,
        "exact_draws": exact.sum(1).tolist(),
        "loss_of_the_true_suffix": [_mean(row[hit]) for row, hit in zip(losses, exact, strict=True)],
        "loss_off_by_one": "the mean over the last prefix token and the suffix without its last token",
        **scores,
    }
    head = about(
        options.checkout,
        "google-research/lm-extraction-benchmark",
        (BASELINE, SCORE),
        stands_in=(
            "from_pretrained of EleutherAI/gpt-neo-1.3B: the small model, in float64 and not .half(), on the CPU",
            "datasets/train_prefix.npy and train_suffix.npy: examples()",
            "np.printoptions(legacy='1.25'), so that guesses are written as with the NumPy of their time",
            "--num-trials: 40 of 100, so guess100.csv is of 40 draws",
            "pad_token_id 50256, the end of the text of GPT-Neo: that of the small model",
        ),
    )
    write(options.output, "lm-extraction-benchmark", head, outputs)


def attack(script: Path, folder: Path) -> None:
    """Run the baseline; it leaves generations, losses and guess1.csv, guess10.csv and guess100.csv in `folder`."""
    torch.manual_seed(0)
    with (
        patch.object(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: OnThisDevice()),
        patch.object(torch.Tensor, "cuda", lambda self: self),
    ):
        baseline = types.SimpleNamespace(**runpy.run_path(str(script)))
        flags.FLAGS(
            ["", f"--root-dir={folder}", "--experiment-name=run", f"--dataset-dir={folder}", f"--num-trials={TRIALS}"]
        )
        # the script writes str(list(guess)), which since NumPy 2 says np.int64(311) where its score reads 311
        with chdir(folder), np.printoptions(legacy="1.25"):
            baseline.main([])


def scored(script: Path, folder: Path, guesses: int) -> dict[str, Any]:
    """What the script prints, and the curve that its function gives for the examples that there are."""
    submission = folder / f"guess{guesses}.csv"
    command = [str(script), "--submission", str(submission), "--answer", str(folder / "train_suffix.npy")]
    with patch.object(sys, "argv", command), redirect_stdout(io.StringIO()) as printed:
        after = runpy.run_path(str(script), run_name="__main__")
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            recall, errors = after["generate_full_curve"](after["rows"], len(inputs.examples()))
    with open(submission, newline="") as lines:
        order = [int(row["Example ID"]) for row in csv.DictReader(lines)]
    return {
        "printed": printed.getvalue().splitlines()[0],
        "order": order,
        "correct": [bool(row[1]) for row in after["rows"]],
        "recall": [float(some) for some in recall],
        "errors": [int(some) for some in errors],
    }


def _mean(losses: np.ndarray) -> float | None:
    return float(losses.mean()) if len(losses) else None


if __name__ == "__main__":
    main()
