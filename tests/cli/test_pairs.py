"""Every pair of values of any two options of a command ends with an answer, or with one sentence and exit code 2."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import yaml

from hf_axonn.cli.main import main
from hf_axonn_eval import build_samples, write_samples
from hf_axonn_eval.__main__ import main as eval_main
from tests.helpers.eval_support import documents, tiny_llama, topics_tokenizer
from tests.helpers.pairs import pairwise, words


GRIDS = {
    "z": (2, {"grid": {"z": 2}, "keep_gathered": 1, "reduce_dtype": "bfloat16"}),
    "xy": (4, {"grid": {"x": 2, "y": 2}}),
    "one": (1, {"grid": {}}),
    "pipe": (2, {"grid": {"pipe": 2}}),
    "auto": (4, {"grid": "auto", "plan": {"model": "llama", "machine": "dgx-h100", "batch_tokens": "64k", "seq": 99}}),
}
PLAN = {
    "--model": ["llama", "gpt-5b"],
    "--machine": ["dgx-h100", "frontier"],
    "--gpus": ["8", "1", "3", "64"],
    "--batch-sequences": ["8", "1", "96"],
    "--seq": [None, "1", "1M"],
    "--weights": [None, "bf16"],
    "--fix": [None, "keep_gathered=3", "micro_batches=4", "stages_per_rank=2", "pipeline=interleaved"],
    "--tokens": [None, "2T"],
    "--price": [None, "2.5"],
    "--json": [False, True],
}
# By a name, and words of the command with options and their values. Those of one command that exclude each other are
# in several.
COMMANDS = {
    "init": (
        ["init", "--yes", "--output", "out.yaml"],
        {
            "--force": [True, False],
            "--model": [None, "llama", "gpt-5b"],
            "--machine": [None, "dgx-h100", "frontier", "hgx-h200-4"],
            "--nodes": [None, "1", "3"],
            "--processes": [None, "1", "6", "24"],
            "--mixed-precision": [None, "bf16", "fp16", "no"],
            "--seq": [None, "1", "100k"],
            "--batch-tokens": [None, "1", "1M"],
        },
    ),
    "plan": (["plan"], {**PLAN, "--pipe": [None, "3", "1,2", "any"], "--free": [None, "reduce_dtype"]}),
    "plan --lora": (["plan", "--lora", "16"], {**PLAN, "--base": [None, "4bit"], "--no-checkpointing": [False, True]}),
    "plan --sweep": (
        ["plan", "--sweep"],
        {"": ["1..8", "3..24"], **PLAN, "--gpus": [None], "--pipe": [None, "2", "3"], "--weak": [False, True]},
    ),
    "doctor": (
        ["doctor", "--config"],
        {
            "": [f"{name}.yaml" for name in GRIDS],
            "--model": ["llama", None],
            "--batch": [None, "1", "64"],
            "--seq": [None, "1", "100000"],
            "--accumulation": [None, "3"],
            "--gpu-memory": [None, "0.001"],
            "--machine": [None, "dgx-h100"],
            "--checkpointing": [False, True],
        },
    ),
    "convert": (["convert"], {"from": ["llama", "absent"], "to": ["made", "llama"], "--max-shard-gb": [None, "-1"]}),
    "verify": (["verify"], {"folder": ["llama", "absent", "documents.jsonl"]}),
    "certify": (
        ["certify", "--config", "absent.yaml", "--output", "certificate"],
        {
            "--model": [None, "llama"],
            "--script": [None, "train.py --lr 1"],
            "--trainer-args": [None, "absent.yaml"],
            "--dtype": [None, "bf16", "fp8"],
            "--steps": [None, "0", "2"],
        },
    ),
    "bench-links": (
        ["bench-links", "--output", "links.json"],
        {"--seconds": [None, "0"], "--peak-tflops": [None, "1"]},
    ),
}
SAMPLES = ["samples", "--documents", "documents.jsonl", "--tokenizer", "llama", "--output", "out.jsonl"]
CUT = {
    "--bucket": [None, "3"],
    "--number_documents": [False, True],
    "--min_document_tokens": [None, "0", "100"],
    "--add_special_tokens": [False, True],
    "--bos": [None, "prefix", "window"],
    "--deduplicate": [False, True],
}
LENGTHS = {"--prefix_length": [None, "4", ["4", "8"]], "--suffix_length": [None, "1"]}
EVAL_COMMANDS = {
    "samples": (
        SAMPLES,
        {
            **CUT,
            **LENGTHS,
            "--offset": [None, ["0", "3"], "-1"],
            "--combine": [None, "axes"],
            "--shared_suffix": [None, True],
        },
    ),
    "samples --sampling sliding": (
        [*SAMPLES, "--sampling", "sliding", "--max_documents", "1"],
        {
            **CUT,
            **LENGTHS,
            "--stride": [None, "7"],
            "--stride_unit": [None, "characters"],
            "--slice_characters": [None, "50"],
        },
    ),
    "samples --sampling": (
        SAMPLES,
        {**CUT, "--sampling": ["first", "last", "rest"], "--max_tokens": [None, "9"], "--append_eos": [False, True]},
    ),
    "samples --protocol": (
        SAMPLES,
        {**CUT, "--protocol": ["sc24", "carlini50", "goldfish", "hubble", "apertus"]},
    ),
    "overlaps": (
        ["overlaps", "--documents", "documents.jsonl", "--output", "overlaps.json"],
        {
            "--held_out": [None, "documents.jsonl"],
            "--tokenizer": [None, "llama"],
            "--drop": [None, "drop.txt"],
            "--ngram": [None, "1", "200"],
            "--least": [None, "0.99"],
            "--one_in": [None, "7"],
            "--number_documents": [False, True],
        },
    ),
    "extract": (
        ["extract", "--model", "llama", "--samples", "samples.jsonl", "--output", "out"],
        {
            "--generation": [False, True],
            "--stop_early": [True, False],
            "--sampler": [None, "none", "top_p=0.5"],
            "--guesses": [True, False],
            "--near_copies": [None, "edits=100,beams=1"],
            "--membership": [True, False],
            "--grid": [None, "x=2"],
        },
    ),
    "report": (
        ["report", "--runs", "a=run", "--output", "out"],
        {
            "--samples": [None, "samples.jsonl"],
            "--base": ["z", "a"],
            "--goldfish": [None, "strategy=static,k=4", "k=4,context_width=100"],
            "--budget_queries": [None, "1"],
            "--documents": ["documents.jsonl", None],
        },
    ),
    "compare": (
        ["compare", "--runs"],
        {
            "": [["a=run", "b=run"], ["a=run"]],
            "--base": [None, "b", "z"],
            "--lengths": [None, "1", "100"],
            "--output": [None, "c.md", "c.json"],
            "--confidence": [None, "0.999"],
        },
    ),
    "tokens": (
        ["tokens"],
        {"--run": ["run", "llama"], "--output": ["t.npz", "t.csv"], "--samples": [None, "samples.jsonl", "run.json"]},
    ),
    "export": (
        ["export", "--tokenizer", "llama", "--output", "out", "--samples", "samples.jsonl"],
        {"--format": ["lm-eval", "open-unlearning"], "--name": [None, "..", "x y"]},
    ),
    "canaries make": (
        ["canaries", "make", "--output", "out"],
        {
            "--format": [None, "{digits:1}", "{hex:2} {letters:3}", "{digits:0}", "{"],
            "--insertions": [None, "0", ["1", "2"], ["3", "3"]],
            "--each": [None, "1"],
            "--candidates": [None, "1", "9"],
            "--documents": [None, "documents.jsonl"],
        },
    ),
    "bundle": (
        ["bundle"],
        {
            "runs": [["run"], ["a=run", "b=run"]],
            "--samples": ["samples.jsonl"],
            "--output": ["out.tar"],
            "--key": ["key"],
            "--base": [None, "b"],
            "--lengths": [None, "1"],
            "--document_ids": [False, True],
        },
    ),
    "verify": (
        ["verify"],
        {"bundle": ["documents.jsonl", "absent"], "--samples": [None, "samples.jsonl"], "--model": [None, "llama"]},
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with launch files, a model, documents, samples and a run."""
    place = tmp_path_factory.mktemp("place")
    for name, (processes, section) in GRIDS.items():
        launch = {"num_processes": processes, "mixed_precision": "bf16", "axonn_config": section}
        (place / f"{name}.yaml").write_text(yaml.safe_dump(launch))
    tokenizer = topics_tokenizer()
    for made in (tokenizer, tiny_llama()):
        made.save_pretrained(place / "llama")
    (place / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents()))
    (place / "run.json").write_text("{}")
    asked = build_samples(documents(), tokenizer=tokenizer, prefix_length=8, suffix_length=8)
    write_samples(asked, place / "samples.jsonl")
    run = ["extract", "--model", "llama", "--samples", "samples.jsonl", "--output", "run", "--no_generation"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert eval_main(run) == 0
    return place


# Other options of a command that is quick without them.
SLOW = {"plan --lora", "plan --sweep"} | {name for name in EVAL_COMMANDS if name.startswith("samples --")}


@pytest.mark.parametrize(
    ("program", "command"),
    [
        pytest.param(program, command, marks=[pytest.mark.slow] if command in SLOW else [])
        for program, commands in ((main, COMMANDS), (eval_main, EVAL_COMMANDS))
        for command in commands
    ],
    ids=[f"hf-axonn {name}" for name in COMMANDS] + [f"hf-axonn-eval {name}" for name in EVAL_COMMANDS],
)
def test_every_pair_of_options_is_answered(place, tmp_path, monkeypatch, capsys, program, command):
    monkeypatch.chdir(tmp_path)
    for path in place.iterdir():
        os.symlink(path, tmp_path / path.name)
    first, options = (COMMANDS if program is main else EVAL_COMMANDS)[command]
    here, answered = set(os.listdir()), 0
    for choice in pairwise(options):
        line = [*first, *words(choice)]
        for name in set(os.listdir()) - here:
            shutil.rmtree(name) if os.path.isdir(name) else os.unlink(name)
        try:
            code = program(line) or 0
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        assert "Traceback" not in said.err, line
        assert code in (0, 1, 2), line
        if code == 2:
            what = [text for text in said.err.splitlines() if text.startswith(("error: ", "hf-axonn"))]
            if len(what) == 2 and what[1].endswith(" --help shows the options."):
                what.pop()
            assert len(what) == 1 and "Error(" not in what[0] and len(what[0].split()) > 4, (line, said.err)
        else:
            answered += 1
            assert said.out.strip(), line
    assert answered or command in ("certify", "convert", "bench-links", "verify")
