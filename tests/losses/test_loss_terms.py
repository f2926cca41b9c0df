"""Terms of a loss that are no share over tokens are those of one process, with and without gradients, whoever asks."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_axonn import GoldfishConfig, GoldfishTrainer, Grid
from hf_axonn.config import AxonnConfig
from hf_axonn.engine.state import ParallelState
from hf_axonn.losses import router_aux
from hf_axonn.losses.router_aux import RouterLogits, install_router_loss
from hf_axonn.losses.shares import install_shares
from hf_axonn.losses.vocab_parallel import ShardedCausalLMLoss
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_config, tiny_model
from tests.helpers.ranks import fake_mesh, run_ranks
from tests.helpers.training import collate, token_data, training_options
from tests.layers.test_moe import moe


BOUND = 1e-10
ROWS = 8
TWO = [Grid(z=2), Grid(pipe=2)]
OTHERS = [Grid(data=2), Grid(x=2), Grid(y=2)]
FOUR = [Grid(z=2, x=2), Grid(data=2, z=2), Grid(data=2, y=2), Grid(pipe=2, z=2), Grid(pipe=2, data=2)]


def classifier() -> nn.Module:
    """Its whole loss is a mean over rows, which knows no num_items_in_batch."""
    torch.manual_seed(0)
    config = tiny_config("llama", num_labels=3)
    return AutoModelForSequenceClassification.from_config(config).double()


def bamba() -> nn.Module:
    """Its loss has a mean over all logits, which are squared."""
    sizes = dict(mamba_d_head=24, mamba_n_heads=4, mamba_n_groups=1, attn_layer_indices=[1], z_loss_coefficient=0.1)
    return tiny_model("bamba", **sizes)


class Squares(Qwen3MoeForCausalLM):
    """Adds the mean over this rank's tokens, which says nothing of those of others."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids, attention_mask, position_ids, labels=labels, **kwargs)
        output["loss"] = output["loss"] + torch.cat(output.router_logits).logsumexp(dim=-1).square().mean()
        return output


def squares() -> nn.Module:
    model = moe("qwen3_moe", num_hidden_layers=2)
    model.__class__ = Squares
    return model


MODELS = {"routers": functools.partial(moe, "qwen3_moe", num_hidden_layers=4), "squares": bamba, "rows": classifier}
OWN = {"own squares": squares}


def make(folder: Path, kind: str, grid: Grid | None, *, goldfish: bool = False, **changes) -> Trainer:
    """A trainer of 8 rows of two lengths, which are one batch in training and in evaluation."""
    size = ROWS // (grid.dp_size if grid else 1)
    own = dict(per_device_train_batch_size=size, per_device_eval_batch_size=size, gradient_accumulation_steps=1)
    options = training_options(folder, grid, goldfish=goldfish, **own | changes)
    trainer_class, config = (GoldfishTrainer, GoldfishConfig) if goldfish else (Trainer, TrainingArguments)
    rows = token_data(ROWS, seed=1)
    return trainer_class(
        model=(MODELS | OWN)[kind](),
        args=config(**options),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=collate if kind != "rows" else collate_with_classes,
    )


def collate_with_classes(samples: list[dict]) -> dict[str, Tensor]:
    batch = collate(samples)
    return batch | {"labels": batch["input_ids"][:, 0] % 3}


def of_loops(trainer: Trainer, kind: str, batch: dict[str, Tensor], samples: int) -> dict[str, Tensor]:
    """Losses of passes without gradients that scripts make themselves, as means over ranks."""
    model, items = trainer.model, trainer._get_num_items_in_batch([batch], trainer.args.device)
    found = {"prediction_step": trainer.prediction_step(model, dict(batch), True)[0]}
    with torch.no_grad():
        found["compute_loss"] = trainer.compute_loss(model, dict(batch), num_items_in_batch=items)
    if kind == "squares":  # a mean of unequal rows on each rank, as of every loss of such a loop
        alike = {}
    elif kind == "rows":
        alike = batch
    else:
        alike = batch | {"labels": torch.where(torch.arange(batch["labels"].shape[1]) < 15, batch["labels"], -100)}
    with torch.inference_mode():
        if trainer.args.average_tokens_across_devices:
            output = model(**batch, num_items_in_batch=items)
            found["share"] = output.loss * samples
        if alike:
            output = model(**alike)
            found["loop"] = output.loss
        if output.get("aux_loss") is not None:
            found["aux_loss"] = output.aux_loss
    return {name: trainer.accelerator.gather(value.detach().reshape(1)).mean() for name, value in found.items()}


def outcome(folder: Path, kind: str, grid: Grid | None, **changes) -> dict:
    """Losses of evaluations of every kind, and the gradients of a training step; over pipe no gradients, which
    tests/parallel/pipeline/test_pipeline_routers.py compares."""
    trainer = make(folder, kind, grid, **changes)
    with Float64():
        found = {
            "evaluate": trainer.evaluate()["eval_loss"],
            "predict": trainer.predict(trainer.eval_dataset).metrics["test_loss"],
        }
        for batch in trainer.get_eval_dataloader():
            found |= of_loops(trainer, kind, batch, grid.dp_size if grid else 1)
        if grid and grid.pipe > 1:
            return found
        trainer.accelerator.prepare(trainer.model)
        for batch in trainer.get_train_dataloader():
            items = trainer._get_num_items_in_batch([batch], trainer.args.device)
            trainer.current_gradient_accumulation_steps = 1
            trainer.training_step(trainer.model, dict(batch), items)
    named = trainer.model.named_parameters()
    return found | {"gradients": {name: its.grad.clone() for name, its in named if its.grad is not None}}


def _equal(folder: Path, cases: list, truths: dict) -> None:
    for grid, kind, changes in cases:
        ours, truth = outcome(folder, kind, grid, **dict(changes)), dict(truths[kind, changes])
        errors = {}
        if "gradients" in ours:
            errors = relative_errors(ours.pop("gradients"), truth.pop("gradients"))
        errors |= {name: abs(float(its) / float(truth[name]) - 1) for name, its in ours.items()}
        worst = {name: error for name, error in errors.items() if not error < BOUND}
        assert not worst, (str(grid), kind, changes, worst)


def check(folder: Path, cases: list) -> None:
    truths = {(kind, changes): outcome(folder, kind, None, **dict(changes)) for _, kind, changes in cases}
    run_ranks(_equal, cases[0][0].size, folder, cases, truths)


OWN_ITEMS = (("average_tokens_across_devices", False),)


def test_two_ranks_equal_one_process(tmp_path) -> None:
    cases = [(grid, "routers", ()) for grid in TWO]
    cases += [(Grid(z=2), kind, ()) for kind in MODELS if kind != "routers"]
    cases += [(Grid(z=2), "routers", (("goldfish", True),)), (Grid(data=2), "rows", OWN_ITEMS)]
    check(tmp_path, cases)


class Multiplies(Trainer):
    """Multiplies by the number of processes itself, as Trainer did in earlier releases."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = output.loss * self.accelerator.num_processes
        return (loss, output) if return_outputs else loss


def _losses_multiplied(folder: Path, grid: Grid) -> None:
    trainer = make(folder, "rows", grid)
    trainer.accelerator.prepare(trainer.model)
    trainer.current_gradient_accumulation_steps = 1
    (batch,) = trainer.get_train_dataloader()
    items = trainer._get_num_items_in_batch([batch], trainer.args.device)

    def losses() -> list[float]:
        evaluated, *_ = trainer.prediction_step(trainer.model, dict(batch), True)
        return [float(evaluated), float(trainer.training_step(trainer.model, dict(batch), items))]

    own = losses()
    trainer.__class__ = Multiplies
    assert losses() == own
    assert trainer.accelerator.num_processes == 2  # outside, for Trainer, which divides itself


def test_num_processes_is_what_trainer_multiplies_a_loss_by(tmp_path) -> None:
    run_ranks(_losses_multiplied, 2, tmp_path, Grid(x=2))


@pytest.mark.slow
def test_other_grids_of_two_ranks_equal_one_process(tmp_path) -> None:
    cases = [(grid, "routers", ()) for grid in OTHERS]
    check(tmp_path, cases + [(Grid(data=2), kind, ()) for kind in MODELS if kind != "routers"])


@pytest.mark.slow
def test_four_ranks_equal_one_process(tmp_path) -> None:
    cases = [(grid, "routers", ()) for grid in FOUR]
    cases += [(grid, kind, ()) for grid in FOUR[:3] for kind in MODELS if kind != "routers"]
    cases += [(Grid(data=2, z=2), "rows", OWN_ITEMS), (Grid(data=2, z=2), "routers", (("goldfish", True),))]
    check(tmp_path, cases)


class Own(nn.Module):
    """A model whose forward reads the number itself."""

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs) -> dict[str, Tensor]:
        return {"loss": (input_ids - labels).sum() / kwargs["num_items_in_batch"]}


def test_a_forward_that_reads_the_number_itself_is_left_alone() -> None:
    mesh = fake_mesh(Grid(z=2), 0)
    state = ParallelState(mesh, AxonnConfig(grid=mesh.grid))
    model = Own()
    install_shares(state, model)
    assert model(input_ids=torch.tensor(9), labels=torch.tensor(1), num_items_in_batch=4)["loss"] == 2
    model = classifier()
    plain = model(**tiny_rows()).loss
    install_shares(state, model)
    assert model(**tiny_rows()).loss == plain
    for form in (True, False):
        assert model(**tiny_rows(), num_items_in_batch=4, return_dict=form)[0] == plain / 2
        ids, mask, labels = (tiny_rows().get(name) for name in ("input_ids", "attention_mask", "labels"))
        by_place = model(ids, mask, None, None, None, labels, num_items_in_batch=4, return_dict=form)
        assert by_place[0] == plain / 2
    model.loss_function = lambda logits, labels, num_items_in_batch=None, **_: labels.sum() / 4
    assert model(**tiny_rows(), num_items_in_batch=4).loss == tiny_rows()["labels"].sum() / 8


class OwnLlama(LlamaForCausalLM):
    """A class of another library, with Transformers' loss."""

    def forward(self, **kwargs):
        return super().forward(**kwargs)


def test_the_share_of_smoothed_labels_is_divided_whoever_wrote_the_model() -> None:
    mesh = fake_mesh(Grid(z=2), 0)
    state = ParallelState(mesh, AxonnConfig(grid=mesh.grid))
    model = OwnLlama(tiny_config("llama", num_hidden_layers=1)).double()
    model.loss_function = loss = ShardedCausalLMLoss(state, model.config.vocab_size)
    batch = collate(list(token_data(4, seed=2))) | {"num_items_in_batch": 4}
    with torch.no_grad(), loss.smooth_labels(0.1):
        share = model(**batch).loss
        install_shares(state, model)
        assert model(**batch).loss == share


def tiny_rows() -> dict[str, Tensor]:
    return collate_with_classes(list(token_data(4, seed=2)))


def test_outputs_that_are_made_anew_are_tuples_like_any_other() -> None:
    """As Accelerate makes them under mixed precision, and Trainer in `predict`."""
    logits = RouterLogits([torch.ones(2, dtype=torch.bfloat16)], router_loss=None)
    assert convert_to_fp32({"router_logits": logits})["router_logits"][0].dtype == torch.float32


def evaluate(folder: Path, grid: Grid | None) -> float:
    trainer = make(folder, "own squares", grid)
    with Float64():
        return trainer.evaluate()["eval_loss"]


def test_an_evaluation_where_context_divides_rows_has_own_terms_of_all_positions(tmp_path) -> None:
    truth = evaluate(tmp_path, None)
    for found in run_ranks(evaluate, 2, tmp_path, Grid(z=2, context=2)):
        assert abs(found / truth - 1) < BOUND


@pytest.mark.parametrize("own", [Squares, Qwen3MoeForCausalLM])
def test_a_class_that_takes_its_own_mean_of_router_logits_is_warned_once(own, caplog) -> None:
    router_aux._warn_of_own_means.cache_clear()
    model = squares()
    model.__class__ = own
    mesh = fake_mesh(Grid(z=2), 0)
    install_router_loss(ParallelState(mesh, AxonnConfig(grid=mesh.grid)), model)
    ids = tiny_rows()["input_ids"]
    with torch.no_grad():
        model.model(ids, output_router_logits=True)
    assert not caplog.messages
    for _ in range(2):
        assert isinstance(model.model(ids, output_router_logits=True).router_logits, RouterLogits)
    warned = [
        message for message in caplog.messages if "Squares.forward gets the router logits of one of 2" in message
    ]
    assert len(warned) == len(caplog.messages) == (own is Squares)
