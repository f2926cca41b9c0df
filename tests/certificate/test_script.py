"""`--script`: what is replaced in a user's script, a sentence for what cannot be compared, and scripts for real."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from hf_axonn.certificate.certify import _elsewhere, prepare_script
from hf_axonn.certificate.compare import BOUND
from hf_axonn.certificate.float64 import ExactLogProbs
from hf_axonn.certificate.recording import Recorder
from hf_axonn.certificate.rows import collate, fingerprints, make_rows, pack, seen_in, spans, tokens_of
from hf_axonn.certificate.script import run_script
from hf_axonn.certificate.script_run import ScriptRun, WatchedWrites
from hf_axonn.cli.main import main
from hf_axonn.compat.accelerate import forget_state
from tests.certificate.runs import launch_file, many_processes, plan_of, script_on_one_process
from tests.certificate.test_certify import FSDP
from tests.helpers.chats import chat_tokenizer, chats
from tests.helpers.eval_support import documents, topics_tokenizer
from tests.helpers.ranks import run_ranks


SCRIPTS = Path(__file__).parent / "scripts"
OURS = Path(__file__).parents[2] / "training_scripts"
ROWS = make_rows(6, 100, 0)
LOOP = """
import sys
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig

accelerator = Accelerator()
model = {model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range({steps}):
    accelerator.backward({loss})
    optimizer.step()
"""
LINEAR = {"model": "torch.nn.Linear(2, 2)", "loss": "model(torch.ones(1, 2)).sum()"}
LLAMA = {
    "model": "AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1))",
    "loss": "model(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss",
}
REFUSED = {
    "builds no Trainer and no Accelerator": "print('nothing')",
    "ended with 3 after 0 step": "raise SystemExit(3)",
    "loads no model of Transformers": LOOP.format(steps=9, **LINEAR),
    "ended after 1 of 2 step(s): give fewer --steps": LOOP.format(steps=1, **LLAMA),
    "prepares no model with Accelerator.prepare": LOOP.format(steps=1, **LLAMA)
    .replace("model, optimizer = acc", "_ = acc")
    .replace(".prepare(model, optimizer)", ""),
    "quantized weights": LOOP.format(steps=1, **LLAMA).replace(
        "from_config(LlamaConfig(num_hidden_layers=1))",
        "from_pretrained('.', config=LlamaConfig(), load_in_8bit=True)",
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories with the config.json of models that are too large for a test."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "bert"):
        AutoConfig.for_model(kind).save_pretrained(folder / kind)
    return folder


def test_packed_rows_are_those_of_a_batch():
    batch = pack(ROWS)
    assert len(batch["input_ids"]) == 1 and "attention_mask" not in batch
    assert [len(places) for _, places in spans(batch)] == [len(row["input_ids"]) for row in ROWS]
    assert seen_in(batch, ROWS) == list(range(6))
    assert tokens_of(batch) == tokens_of(collate(ROWS))


def test_fingerprints_are_of_rows_and_not_of_batches():
    whole = fingerprints(collate(ROWS))
    assert len(set(whole)) == 6
    assert whole == [fingerprints(collate([row]))[0] for row in ROWS]  # whatever the padding
    changed = {**ROWS[0], "labels": [*ROWS[0]["labels"][:-1], 7]}
    assert fingerprints(collate([changed])) != whole[:1]
    assert fingerprints({"pixel_values": torch.zeros(2, 3)}) == []


def test_batches_are_of_the_small_vocabulary(tmp_path):
    job = prepare_script(tmp_path, plan_of(tmp_path, 2), [__file__], steps=2)
    run = ScriptRun(job, Recorder(tmp_path / "records", 0, None), parallel=True)
    given = {
        "input_ids": torch.tensor([[5, 163]]),
        "labels": torch.tensor([[-100, 163]]),
        "weight": torch.ones(1).half(),
    }
    assert run.fit_vocabulary(given)["input_ids"].tolist() == [[5, 163]]  # no model yet
    run.vocabulary = 160
    found = run.fit_vocabulary(given)
    assert found["input_ids"].tolist() == [[5, 3]] and found["labels"].tolist() == [[-100, 3]]
    assert found["weight"].dtype == torch.float64 and given["input_ids"].tolist() == [[5, 163]]
    of_rows = {"input_ids": torch.zeros(1, 2), "labels": torch.tensor([400])}
    assert run.fit_vocabulary(of_rows)["labels"].tolist() == [400]
    assert run.fit_vocabulary([1, 2]) == [1, 2]


def test_a_folder_stands_for_the_files_in_it_and_what_was_removed_is_not_listed(tmp_path):
    job = prepare_script(tmp_path, plan_of(tmp_path, 2), [__file__], steps=2)
    assert _elsewhere(job) == []
    new, newer, other = (tmp_path / name for name in ("new", "newer", "other"))
    new.mkdir()
    for path in (new / "file", newer, other):
        path.touch()
    removed = tmp_path / "hf_axonn-watch-1"  # the watchdog's folder, which is gone when a run has ended
    for rank, paths in enumerate([[new, new / "file", newer], [new / "file", other, removed]]):
        file = tmp_path / "many" / "script-train.py" / f"elsewhere-rank{rank}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(list(map(str, paths))))
    assert _elsewhere(job) == [f"the script wrote elsewhere: {new}, {newer}, {other}."]


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    """In one fork: scripts change what is replaced, and the state of accelerate."""
    run_ranks(_refused, 1, tmp_path)
    file = str(launch_file(tmp_path, 2))
    assert main(["certify", "--config", file, "--script", f"{tmp_path}/none.py --rows 3"]) == 2
    assert main(["certify", "--config", file, "--script", __file__, "--model", "llama"]) == 2
    said = capsys.readouterr().err
    assert "none.py is no file" in said and "give --model, or --script" in said


def _refused(folder: Path) -> None:
    for number, (said, text) in enumerate(REFUSED.items()):
        here = folder / str(number)
        here.mkdir()
        (here / "script.py").write_text(text)
        plan = plan_of(here, 2)
        job = prepare_script(here, plan, [str(here / "script.py")], steps=2)
        with pytest.raises(ValueError) as error:
            run_script(job, Recorder(here / "records", 0, None), parallel=False)
        assert said in str(error.value), (said, str(error.value))
        forget_state()
    inside, outside = folder / "inside", folder / "inside-not"
    inside.mkdir()
    written = WatchedWrites(inside)
    outside.mkdir()
    (inside / "file").write_text("of the certificate")
    (outside / "file").write_text("elsewhere")
    (outside / "file").read_text()
    os.close(os.open(outside / "other", os.O_WRONLY | os.O_CREAT))
    written.over = True
    (outside / "later").touch()
    assert written.paths == {str(outside), str(outside / "file"), str(outside / "other")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("x", {"axonn_config": {"grid": {"x": 2}}}),
        ("z", {"axonn_config": {"grid": {"z": 2}}}),
        ("ddp", {}),
        ("fsdp2", {"distributed_type": "FSDP", "fsdp_config": FSDP}),
    ],
)
@pytest.mark.parametrize("script", ["trainer", "lora", "loop"])
def test_a_script_is_equal(tmp_path, capsys, models, script, name, settings):
    elsewhere = tmp_path / "elsewhere.txt"
    if name == "fsdp2" and script == "loop":  # by default Accelerate shards BERT's embeddings twice, and fails
        settings = {**settings, "fsdp_config": {**FSDP, "fsdp_transformer_layer_cls_to_wrap": "BertLayer"}}
    words = {
        "trainer": ["trainer_script.py", models / "llama"],
        "lora": ["trainer_script.py", models / "llama", "--lora"],
        "loop": ["loop_script.py", models / "bert", elsewhere],
    }[script]
    asked = " ".join(map(str, [SCRIPTS / words[0], *words[1:]]))
    command = ["certify", "--config", str(launch_file(tmp_path, 2, **settings)), "--script", asked]
    code = main([*command, "--steps", "2", "--output", str(tmp_path / "certificate")])
    screen = capsys.readouterr()
    assert code == 0, screen.out + screen.err
    written = json.loads((tmp_path / "certificate" / "certificate.json").read_text())
    (case,) = written["cases"]
    assert case["equal"] and written["verdict"].startswith("equal to one process, within")
    assert {"samples", "start", "loss", "gradient", "norm", "parameter", "logged"} <= set(case["worst"])
    assert all(error["error"] <= BOUND for error in case["worst"].values())
    assert "script" in written["sha256"]
    assert elsewhere.exists() == (script == "loop")
    assert (f"the script wrote elsewhere: {elsewhere}" in screen.out) == (script == "loop")


@pytest.mark.slow
def test_log_probabilities_are_those_of_trl():
    """They are put in place of its kernel, which adds up in float32."""
    kernels = pytest.importorskip("trl.kernels")
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in ((5, 8), (13, 8), (13,)))
    targets = torch.randint(0, 13, (5,), generator=generator)
    for way in ((0.7, 4, None, 1.0), (1.3, 4, 3.0, 0.5)):
        theirs = kernels.ChunkedLogProbFunction.apply(hidden, weight, bias, targets, *way)
        for found, wanted in zip(ExactLogProbs.apply(hidden, weight, bias, targets, *way), theirs, strict=True):
            assert torch.allclose(found.double(), wanted.double(), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "name"),
    [("finetune", "x"), ("finetune_no_trainer", "z"), ("finetune_chat", "ddp"), ("finetune_chat", "x")],
)
def test_our_training_scripts_are_equal(tmp_path, capsys, script, name):
    """Which load models by hf_axonn.from_pretrained over a grid, and have the goldfish loss; one with TRL and LoRA."""
    folder, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    AutoConfig.for_model("llama").save_pretrained(folder)
    if script == "finetune_chat":
        chat_tokenizer().save_pretrained(folder)
        chats(40, 1).to_json(rows)
        options = f"--model_name_or_path {folder} --per_device_train_batch_size 2 --max_steps 5 --use_peft --lora_r 4"
    else:
        topics_tokenizer().save_pretrained(folder)
        rows.write_text("\n".join(json.dumps({"text": row["text"]}) for row in documents()))
        batch = (
            "--batch_size 2" if script == "finetune_no_trainer" else "--per_device_train_batch_size 2 --max_steps 5"
        )
        options = f"--model {folder} --sequence_length 32 {batch}"
    settings = {} if name == "ddp" else {"axonn_config": {"grid": {name: 2}}}
    asked = f"{OURS / script}.py {options} --data {rows} --output_dir {tmp_path / 'out'}"
    command = ["certify", "--config", str(launch_file(tmp_path, 2, **settings)), "--script", asked]
    code = main([*command, "--steps", "2", "--output", str(tmp_path / "certificate")])
    screen = capsys.readouterr()
    assert code == 0, screen.out + screen.err
    (case,) = json.loads((tmp_path / "certificate" / "certificate.json").read_text())["cases"]
    assert case["equal"] and all(error["error"] <= BOUND for error in case["worst"].values()), case


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "error", "kind", "said"),
    [
        ("trainer", "scaled_loss", "loss", "gradients are those of one process times 2 (the number of ranks = "),
        (
            "trainer",
            "forgotten_average",
            "gradient",
            "own samples alone: nothing is averaged over the ranks (times 2 (",
        ),
        ("loop", "forgotten_average", "gradient", "own samples alone: nothing is averaged over the ranks (times 2 ("),
        ("loop", "unclipped_rank", "parameter", "what the optimizer makes of them is not"),
    ],
)
def test_planted_errors_of_a_script_are_found_and_named(tmp_path, models, script, error, kind, said):
    plan = plan_of(tmp_path, 2)
    words = [models / "llama"] if script == "trainer" else [models / "bert", tmp_path / "elsewhere.txt"]
    job = script_on_one_process(tmp_path / "alone", plan, SCRIPTS / f"{script}_script.py", *words)
    assert many_processes(job, tmp_path / "equal", plan).equal
    result = many_processes(job, tmp_path / "certificate", plan, error)
    assert result.first is not None and result.first[0] == kind and not result.documented, result.first
    assert said in result.cause, result.cause
