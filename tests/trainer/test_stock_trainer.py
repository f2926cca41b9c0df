"""The stock Trainer on a grid does what it does on one process: every option that a user may know from it.

Each case is one run. The truth is the same run on one process, made before the ranks are started.
"""

from __future__ import annotations

import contextlib
import fnmatch
import shutil
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.optimization import Adafactor, AdafactorSchedule
from transformers.trainer_utils import HubStrategy

from hf_axonn import Grid
from hf_axonn.trainer import hub
from hf_axonn.trainer.hooks import OPTIMIZERS
from tests.helpers.equality import full
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, token_data, training_options


BOUND = 1e-10
LAST = Grid(z=2, x=2)


class Metrics:
    """Numbers that tell a row twice, a row missing and rows in another order. The first evaluation is the best."""

    def __init__(self):
        self.calls = 0

    def __call__(self, prediction) -> dict[str, float]:
        self.calls += 1
        logits, labels = prediction.predictions, prediction.label_ids
        real = labels[:, 1:] != -100
        right = (logits[:, :-1].argmax(-1) == labels[:, 1:])[real]
        # The logits of padding are -100 where another batch was longer, so they depend on how batches are cut.
        of_rows = (np.abs(logits[:, :-1]).sum(-1) * real).sum(-1)
        return {
            "rows": len(logits),
            "accuracy": float(right.mean()),
            "in_order": float((of_rows * np.arange(1, len(logits) + 1)).sum()),
            "inputs": float((prediction.inputs[:, 1:] * real).sum()),
            "earlier": -float(self.calls),
        }


class Events(TrainerCallback):
    """What a callback is told, and when; every step begins with the same random state."""

    def __init__(self):
        self.seen = []

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(state.global_step)

    def on_event(name):
        def method(self, args, state, control, **kwargs):
            self.seen.append((name, state.global_step, round(state.epoch or 0, 6)))

        return method

    for _name in ("on_train_begin", "on_epoch_begin", "on_step_end", "on_evaluate", "on_save", "on_train_end"):
        locals()[_name] = on_event(_name)
    del _name, on_event


def stock_trainer(output: Path, grid: Grid | None, *, even: bool = False, **changes) -> Trainer:
    """8 rows a step in two micro-batches. The 8 rows of evaluation are as long, so that `eval_loss` is one number."""
    own = dict(max_steps=2, save_strategy="no", include_for_metrics=["inputs"])
    own.update(per_device_eval_batch_size=4 // (grid.dp_size if grid else 1))
    rows = token_data(64, seed=0)
    if even:
        rows = Dataset.from_list([{name: row[name][:15] for name in row} for row in rows])
    return Trainer(
        model=tiny_model("qwen3"),
        args=TrainingArguments(**training_options(output, grid, **own | changes)),
        train_dataset=rows,
        eval_dataset=Dataset.from_list(list(token_data(16, seed=1))[::2]),
        data_collator=collate,
        compute_metrics=Metrics(),
        callbacks=[Events()],
    )


def outcome(trainer: Trainer, resume: Path | None = None) -> dict:
    """Train, and return all that must not depend on the grid."""
    with Float64():
        trainer.train(resume_from_checkpoint=resume and str(resume))
    events = next(its for its in trainer.callback_handler.callbacks if isinstance(its, Events))
    timed = ("runtime", "per_second", "total_flos")
    history = [
        {key: its for key, its in entry.items() if not key.endswith(timed)} for entry in trainer.state.log_history
    ]
    return {
        "history": history,
        "events": events.seen,
        "parameters": {name: full(parameter) for name, parameter in trainer.model.named_parameters()},
        # With rows of two lengths there is less padding where each position pads its own.
        "flos": trainer.state.total_flos if len({len(row["labels"]) for row in trainer.train_dataset}) == 1 else None,
        "best": trainer.state.best_global_step,
    }


EVERYTHING = dict(
    max_steps=6,
    eval_strategy="steps",
    eval_steps=3,
    save_strategy="steps",
    save_steps=3,
    save_total_limit=1,
    load_best_model_at_end=True,
    metric_for_best_model="earlier",
    greater_is_better=True,
    train_sampling_strategy="group_by_length",
    include_num_input_tokens_seen="non_padding",
)


def everything(folder: Path, grid: Grid | None) -> dict:
    """Training, evaluation, the best model, prediction of 7 rows of two lengths in batches of 2, and resuming."""
    trainer = stock_trainer(folder / "everything", grid, **EVERYTHING)
    found = outcome(trainer)
    if dist.is_initialized():
        dist.barrier()  # Trainer removes older checkpoints on rank 0, and goes on
    found["kept"] = sorted(path.name for path in (folder / "everything").glob("checkpoint-*"))
    trainer.args.per_device_eval_batch_size = 2
    with Float64():
        predicted = trainer.predict(token_data(7, seed=2))
    found["labels"] = predicted.label_ids.tolist()
    metrics = {key: value for key, value in predicted.metrics.items() if "loss" not in key and "second" not in key}
    found["history"].append({key: value for key, value in metrics.items() if not key.endswith("runtime")})
    again = stock_trainer(folder / "again", grid, **EVERYTHING)
    resumed = outcome(again, folder / "everything" / "checkpoint-3")
    return found | {f"resumed {key}": value for key, value in resumed.items()}


def smoothed(folder: Path, grid: Grid | None) -> dict:
    """Label smoothing, in training without full logits."""
    options = dict(label_smoothing_factor=0.1, eval_strategy="epoch", include_num_input_tokens_seen="all")
    return outcome(stock_trainer(folder / "smoothed", grid, even=True, max_steps=-1, num_train_epochs=0.4, **options))


def adafactor(folder: Path, grid: Grid | None) -> dict:
    """Factored statistics over shards; resumed from what one process saved, which is in the folder by then."""
    options = dict(optim="adafactor", max_steps=4, save_strategy="steps", save_steps=2)
    found = outcome(stock_trainer(folder / "adafactor", grid, **options))
    source = folder.parent / "one" / "adafactor" / "checkpoint-2"
    resumed = outcome(stock_trainer(folder / "adafactor again", grid, **options), source)
    return found | {f"resumed {key}": value for key, value in resumed.items()}


def adafactor_relative(folder: Path, grid: Grid | None) -> dict:
    """Adafactor's own learning rates, and a first moment."""
    trainer = stock_trainer(folder / "relative", grid)
    trainer.optimizer = Adafactor(trainer.model.parameters(), lr=None, beta1=0.9, weight_decay=0.1)
    trainer.lr_scheduler = AdafactorSchedule(trainer.optimizer)
    return outcome(trainer)


def elementwise(name: str):
    def run(folder: Path, grid: Grid | None) -> dict:
        return outcome(stock_trainer(folder / name, grid, optim=name))

    return run


def noisy(folder: Path, grid: Grid | None) -> dict:
    """NEFTune: every position draws the same noise for its own rows, as processes of stock Trainer do."""
    if grid is not None:
        return outcome(stock_trainer(folder / "noisy", grid, even=True, neftune_noise_alpha=5.0))
    trainer = stock_trainer(folder / "noisy", grid, even=True)

    def add_noise(module, _, output):
        if not module.training:
            return output
        most = 5.0 / torch.sqrt(torch.tensor(output.size(1) * output.size(2)))
        noise = torch.zeros_like(output[: len(output) // LAST.dp_size]).uniform_(-most, most)
        return output + noise.repeat(LAST.dp_size, 1, 1)

    trainer.model.get_input_embeddings().register_forward_hook(add_noise)
    return outcome(trainer)


def rebalanced(folder: Path, grid: Grid | None) -> dict:
    """A sampler of Trainer's that divides samples by itself, where accelerate divides nothing."""
    return outcome(stock_trainer(folder / "rebalanced", grid, train_sampling_strategy="batch_rebalance"))


class Hub:
    """Takes uploads into a folder instead of the hub."""

    def __init__(self, folder: Path):
        self.folder = folder

    def create_repo(self, name, **kwargs):
        return SimpleNamespace(repo_id=f"someone/{name}")

    def upload_folder(self, *, folder_path, path_in_repo="", ignore_patterns=(), commit_message="", **kwargs):
        target = self.folder / commit_message.replace(" ", "-") / path_in_repo
        for path in Path(folder_path).rglob("*"):
            name = str(path.relative_to(folder_path))
            ignored = any(
                fnmatch.fnmatch(name, pattern) or name.startswith(pattern.strip("*")) for pattern in ignore_patterns
            )
            if path.is_file() and not ignored:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target / name)
        done = Future()
        done.set_result(None)
        return done


class Offline:
    """A hub that cannot be reached."""

    def create_repo(self, *args, **kwargs):
        raise OSError("no connection")

    upload_folder = create_repo


def pushed(folder: Path, grid: Grid | None) -> dict:
    """Each save and the end of a run are uploaded; what fails does not leave other ranks behind."""
    import transformers.trainer as module

    original, module.hf_api = module.hf_api, Offline
    try:
        options = dict(push_to_hub=True, hub_strategy="checkpoint", save_strategy="steps", save_steps=1)
        with pytest.raises((OSError, ValueError), match="no connection"):
            stock_trainer(folder / "refused", grid, **options)
        module.hf_api = lambda: Hub(folder / "hub")
        trainer = stock_trainer(folder / "pushed", grid, **options)
        found = outcome(trainer)
        module.hf_api = Offline
        with contextlib.suppress(OSError):  # of rank 0
            trainer.push_to_hub()
        module.hf_api = lambda: Hub(folder / "hub")
        trainer.push_to_hub(commit_message="the end")
    finally:
        module.hf_api = original
    if grid:
        assert (folder / "pushed" / "model.safetensors").is_file()
        trainer.args.push_to_hub = False
        trainer.save_model()  # shards again, and nothing of what was there
        assert not list((folder / "pushed").glob("model*.safetensors*"))
        assert (folder / "pushed" / "axonn_checkpoint.json").is_file()
    return found


def model_only(folder: Path, grid: Grid | None) -> dict:
    """A checkpoint without optimizer state is not resumed from."""
    options = dict(save_only_model=True, save_strategy="steps", save_steps=2, debug="underflow_overflow")
    found = outcome(stock_trainer(folder / "model only", grid, **options))
    if grid:
        checkpoint = folder / "model only" / "checkpoint-2"
        with pytest.raises(ValueError, match="no optimizer state"):
            stock_trainer(folder / "refused", grid, **options, max_steps=4).train(
                resume_from_checkpoint=str(checkpoint)
            )
    return found


COMMON = {"everything": everything, "smoothed": smoothed, "adafactor": adafactor}
OTHERS = {name: elementwise(name) for name in OPTIMIZERS if name != "adafactor"} | {
    "adafactor with relative steps": adafactor_relative,
    "noisy": noisy,
    "rebalanced": rebalanced,
    "pushed": pushed,
    "model only": model_only,
}


RARE = ("adagrad", "rmsprop")  # elementwise, like sgd and the two of AdamW
IN_8_BITS = [name for name in OTHERS if "8bit" in name]  # blocks of shards have other scales than those of parameters


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stock")


class Truths(dict):
    """Each case on one process, when it is first looked at."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> dict:
        self[name] = (COMMON | OTHERS)[name](self.folder / "one", None)
        return self[name]


@pytest.fixture(scope="module")
def truth(folder) -> Truths:
    return Truths(folder)


def on_grid(folder: Path, names: list[str], grid: Grid) -> dict[str, dict]:
    return {name: (COMMON | OTHERS)[name](folder / str(grid), grid) for name in names}


def on_grids(folder: Path, cases: dict[Grid, list[str]]) -> dict[Grid, dict[str, dict]]:
    return {grid: on_grid(folder, names, grid) for grid, names in cases.items()}


def differences(ours: dict, true: dict) -> list[str]:
    """What of a run is not as on one process."""
    wrong = [] if ours.keys() == true.keys() else ["other keys"]
    for key in ours.keys() & true.keys():
        if "parameters" in key:
            errors = relative_errors(ours[key], true[key])
            wrong += [f"{key}: {name} {error:.1e}" for name, error in errors.items() if not error < BOUND]
        elif "history" in key:
            if [set(its) for its in ours[key]] != [set(its) for its in true[key]]:
                wrong.append(f"{key}: {ours[key]} and not {true[key]}")
                continue
            for mine, its in zip(ours[key], true[key], strict=True):
                for name, value in its.items():
                    # Trainer adds up the losses of training in float32.
                    bound = 3e-7 if name in ("loss", "train_loss") or "eval" in name and "loss" in name else BOUND
                    if not abs(mine[name] - value) <= bound * max(abs(value), 1e-12):
                        wrong.append(f"{key}: {name} {mine[name]} and not {value} at {its.get('step')}")
        elif ours[key] != true[key]:
            wrong.append(f"{key}: {ours[key]} and not {true[key]}")
    return wrong


def assert_as_one_process(folder: Path, truth: dict, cases: dict[Grid, list[str]]) -> None:
    assert all(truth[name] for name in COMMON)  # made before the grids, which go on from what one process saved
    for rank in run_ranks(on_grids, 2, folder, cases):
        wrong = [
            (str(grid), name, line)
            for grid, cases in rank.items()
            for name, ours in cases.items()
            for line in differences(ours, truth[name])
        ]
        assert not wrong, (len(wrong), wrong[:3], {line.split(":")[0] for *_, line in wrong})


@pytest.mark.slow
def test_what_every_run_does_on_the_other_grids_of_two_ranks(folder, truth):
    others = {Grid(data=2): ["smoothed", "adafactor"], Grid(y=2): ["everything"]}
    each = dict.fromkeys((Grid(x=2), Grid(z=2), Grid(z=2, context=2)), list(COMMON))
    assert_as_one_process(folder, truth, others | each)


def test_what_every_run_does_on_grids_of_two_ranks(folder, truth):
    cases = {Grid(data=2): ["everything"], Grid(y=2): ["smoothed", "adafactor"], Grid(z=2, context=2): ["smoothed"]}
    assert_as_one_process(folder, truth, cases)
    history = truth["everything"]["history"]
    assert truth["everything"]["best"] == 3 and truth["everything"]["kept"] == ["checkpoint-3"]
    assert [entry["num_input_tokens_seen"] for entry in history if "loss" in entry][0] > 100
    # Statistics of a grid are read on one process, too.
    options = dict(optim="adafactor", max_steps=4)
    source = folder / str(Grid(y=2)) / "adafactor" / "checkpoint-2"
    resumed = outcome(stock_trainer(folder / "back", None, **options), source)
    wanted = {key: value for key, value in truth["adafactor"].items() if key in resumed}
    resumed |= {"events": wanted["events"]}  # nothing is saved this time
    # Trainer's mean over a run that was resumed is over the steps since.
    losses = [entry["loss"] for entry in resumed["history"] if "loss" in entry][2:]
    assert abs(resumed["history"][-1]["train_loss"] - sum(losses) / 2) < 1e-5
    for found in (resumed, wanted):
        *steps, end = found["history"]
        found["history"] = [*steps, {name: value for name, value in end.items() if name != "train_loss"}]
    assert not differences(resumed, wanted)


def assert_on_four_ranks(folder: Path, truth: dict, names: list[str]) -> None:
    for rank in run_ranks(on_grid, 4, folder, names, LAST):
        wrong = [(name, line) for name, ours in rank.items() for line in differences(ours, truth[name])]
        assert not wrong, (len(wrong), wrong[:3], {line.split(":")[0] for *_, line in wrong})


@pytest.mark.slow
def test_what_every_run_does_and_rare_optimizers_on_four_ranks(folder, truth):
    assert_on_four_ranks(folder, truth, [*COMMON, *RARE])


@pytest.mark.slow
def test_every_option_on_four_ranks(folder, truth):
    assert_on_four_ranks(folder, truth, [name for name in OTHERS if name not in (*RARE, *IN_8_BITS)])
    assert any(entry.get("grad_norm") for entry in truth["noisy"]["history"])
    plain = truth["adamw_torch"]["parameters"]
    assert max(relative_errors(truth["noisy"]["parameters"], plain).values()) > 1e-3

    saved = folder / str(LAST) / "model only" / "checkpoint-2"
    assert not list(saved.glob("**/optimizer*"))
    read = AutoModelForCausalLM.from_pretrained(saved).named_parameters()
    assert max(relative_errors(dict(read), truth["model only"]["parameters"]).values()) < BOUND
    assert_ordinary(folder / str(LAST) / "hub", truth["pushed"]["parameters"])


@pytest.mark.slow
def test_moments_in_8_bits_are_as_near_to_one_process_as_it_is_to_adamw(folder, truth):
    def distance(parameters: dict, others: dict) -> float:
        return float(sum((parameters[name] - other).square().sum() for name, other in others.items()))

    for rank in run_ranks(on_grid, 4, folder, IN_8_BITS, LAST):
        for name in IN_8_BITS:
            alone = truth[name]["parameters"]
            assert distance(rank[name]["parameters"], alone) < distance(alone, truth["adamw_torch"]["parameters"])


def assert_ordinary(hub: Path, parameters: dict) -> None:
    """What was uploaded is what one process would have uploaded."""
    assert {path.name for path in hub.iterdir()} == {
        "the-end",
        *(f"Training-in-progress,-step-{step}{what}" for step in (1, 2) for what in ("", ",-checkpoint")),
    }
    for name in ("the-end", "Training-in-progress,-step-2"):
        files = {path.name for path in (hub / name).iterdir()}
        assert {"model.safetensors", "config.json", "training_args.bin"} <= files
        assert files <= {
            "model.safetensors",
            "config.json",
            "generation_config.json",
            "training_args.bin",
            "README.md",
        }
        read = AutoModelForCausalLM.from_pretrained(hub / name).named_parameters()
        assert max(relative_errors(dict(read), parameters).values()) < BOUND, name
    card = ModelCard.load(hub / "the-end" / "README.md")
    assert "total_train_batch_size: 8\n" in card.text and card.data.to_dict()["hf_axonn"]["grid"] == LAST.as_dict()
    assert (hub / "Training-in-progress,-step-2,-checkpoint" / "last-checkpoint" / "axonn_checkpoint.json").is_file()


def refused(folder: Path) -> str:
    # A rank would save when the signal comes to it, in the middle of what the others do.
    with pytest.raises(ValueError, match="optim=galore_adamw is not supported over a grid") as problem:
        stock_trainer(folder / "refused", Grid(x=2), optim="galore_adamw", optim_target_modules=["q_proj"])
    with pytest.raises(ValueError, match="neftune_noise_alpha with context is not supported over a grid"):
        stock_trainer(folder / "refused", Grid(z=2, context=2), neftune_noise_alpha=5.0)
    with pytest.raises(ValueError, match="save_on_each_node is not supported over a grid"):
        stock_trainer(folder / "refused", Grid(x=2), save_on_each_node=True)
    with pytest.raises(ValueError, match="eval_use_gather_object is not supported over a grid"):
        stock_trainer(folder / "refused", Grid(x=2), eval_use_gather_object=True)
    return str(problem.value)


def test_what_a_grid_cannot_do_is_refused(folder):
    for message in run_ranks(refused, 2, folder):
        assert "adamw_torch, adamw_torch_fused, adafactor, sgd" in message


def test_all_pushes_but_those_at_the_end_alone_have_the_model_of_their_checkpoint(monkeypatch, tmp_path):
    placed = []
    monkeypatch.setattr(hub, "is_sharded_checkpoint", lambda folder: True)
    monkeypatch.setattr(hub, "read_manifest", lambda folder: SimpleNamespace(model=True))
    monkeypatch.setattr(hub, "place_exported", lambda folder, output: placed.append(strategy))
    monkeypatch.setattr(hub, "_wait_for_rank_0", lambda trainer: None)
    for strategy in HubStrategy:
        args = SimpleNamespace(hub_strategy=strategy, hub_always_push=False, output_dir=str(tmp_path))
        trainer = SimpleNamespace(args=args, push_in_progress=None, is_world_process_zero=lambda: True)
        hub._push_from_checkpoint(trainer, lambda folder: None, "checkpoint-1")
    assert placed == [strategy for strategy in HubStrategy if strategy != HubStrategy.END]
