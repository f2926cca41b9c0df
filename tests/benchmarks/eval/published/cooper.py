"""pasta41/book-extraction-science on a small model: the windows of a book and their probabilities.

    python -m tests.benchmarks.eval.published.cooper CHECKOUT

The authors' own `runner.run` does everything, from the text file to the files of probabilities: with a tokenizer that
adds a BOS, with the BOS by hand that a model called pythia gets, and without a BOS. Needs seaborn and accelerate.
"""

import json
import pickle
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.benchmarks.eval.published.common import about, arguments, digest, saved_model, write
from tests.eval.published import inputs


FILES = tuple(
    f"script/memorization/{name}.py"
    for name in (
        "config",
        "execute",
        "inference",
        "loaders/data_loader",
        "loaders/model_loader",
        "pz",
        "runner",
        "utils/paths",
        "utils/tokenize",
    )
)
# name of the model -> whether its tokenizer adds a BOS
MODELS = {"ours": True, "ours-pythia": False, "ours-no-bos": False}


def main() -> None:
    """Run the book once for each model and write windows and probabilities."""
    options = arguments(__doc__)
    sys.path.insert(0, str(options.checkout))
    from script.memorization import constants

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        (folder / "data" / "book.txt").write_text(inputs.book(), encoding="utf-8")
        for model, bos in MODELS.items():
            path = saved_model(folder / model, bos=bos)
            constants.MODEL_INFO[model] = constants.ModelInfo(path=str(path), family="", size="", plot_name="")
        outputs = {model: ran(folder, model) for model in MODELS}
    head = about(
        options.checkout,
        "pasta41/book-extraction-science",
        FILES,
        stands_in=(
            "entries of MODEL_INFO, for the model and its tokenizer; precision=32, which the authors' code offers "
            "(its default of 16 bits takes float16, or bfloat16 for Qwen, Gemma and Llama-3)",
            "the third configuration: k of all tokens, the full softmax",
        ),
        packages=("accelerate",),
    )
    write(options.output, "cooper100", head, {"stride": 10, "characters": len(inputs.book()), "runs": outputs})


def ran(folder: Path, model: str) -> dict[str, Any]:
    """Where windows begin, their tokens, and log-probabilities under each configuration (null: impossible)."""
    from script.memorization.config import ConfigItem, ConfigListInput
    from script.memorization.runner import run
    from script.memorization.utils.paths import Paths

    paths = Paths(str(folder), "data", "outputs", model, "book.txt")
    configs = [*ConfigListInput("top40-basic,greedy-basic"), ConfigItem("all", 1.0, len(inputs.tokenizer()), 50)]
    settings = {"model": model, "precision": 32, "ex_len": 100, "batch_size": 1000, "stride": 10, "force": True}
    run(SimpleNamespace(**settings, book="book.txt", parsed_configs=configs), paths)
    [batch] = json.loads(Path(paths.manifest_path()).read_text())
    known = pickle.loads(Path(batch["metadata_path"]).read_bytes())["metadata"]
    found: dict[str, Any] = {"starts": [known[key]["example_loc"]["start_idx"] for key in batch["hashes"]]}
    for config in configs:
        results = json.loads(Path(paths.probs_path_from_config(config, 0)).read_text())["results"]
        rows = [results[key] for key in batch["hashes"]]
        found.setdefault("windows", [digest([*row["prefix_ids"], *row["suffix_ids"]]) for row in rows])
        found[f"k_{config.k}"] = [row["logprob"] for row in rows]
        assert {len(row["prefix_ids"]) for row in rows} == {50}
    numbers = [known[key]["example"] for key in batch["hashes"]]
    found["duplicates"] = numbers[-1] + 1 - len(numbers)
    return found


if __name__ == "__main__":
    main()
