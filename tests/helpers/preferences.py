"""Runs of TRL's trainers of preferences and rewards on a tiny model, the same on one process and on any grid."""

from __future__ import annotations

import contextlib
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from datasets import Dataset, load_from_disk
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_axonn import Grid
from tests.helpers.chats import EXPERTS, FirstGradients, chat_tokenizer, logged
from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_config, tiny_model
from tests.helpers.training import training_options
from tests.helpers.vllm_client import vllm_is_there


def preferences(rows: int, seed: int) -> Dataset:
    """Questions, each with a better and a worse answer of very different lengths."""
    source = random.Random(seed)

    def said(role: str, letters: str, longest: int) -> list[dict[str, str]]:
        return [{"role": role, "content": "".join(source.choices(letters, k=source.randint(2, longest)))}]

    return Dataset.from_list(
        [
            {
                "prompt": said("user", "abcdef ", 9),
                "chosen": said("assistant", "abcd ", 17),
                "rejected": said("assistant", "defg ", 12),
            }
            for _ in range(rows)
        ]
    )


def write_preferences(folder: Path) -> None:
    """A model and data on disk, where TRL looks for reference models and for what it has computed before."""
    tiny_model("llama").save_pretrained(folder / "model")
    tiny_model("llama", vocab_size=33).save_pretrained(folder / "speaker")  # of which some completions end
    preferences(41, seed=0).save_to_disk(folder / "train")  # the last batch of which is short
    preferences(8, seed=1).save_to_disk(folder / "eval")
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen" if index % 3 else "rejected"], "label": bool(index % 3)}
        for index, row in enumerate(preferences(41, seed=2))
    ]
    Dataset.from_list(rows).save_to_disk(folder / "marked")


def lora(**changes) -> LoraConfig:
    options = dict(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return LoraConfig(**(options | changes))


def arguments(config: type, output: Path, grid: Grid | None, **changes):
    """Arguments of a run whose global batch is 8 samples in two micro-batches, also in evaluation one of these."""
    own = dict(gradient_checkpointing=False, bf16=False, max_steps=3, save_strategy="no")
    options = training_options(output, grid, **own | changes)
    return config(**dict(per_device_eval_batch_size=options["per_device_train_batch_size"]) | options)


def policy(folder: Path, *, adapted: bool = False) -> nn.Module:
    """The model of `write_preferences`, `adapted` with an adapter."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    if not adapted:
        return model
    torch.manual_seed(3)
    return get_peft_model(model, lora())


def _trainer_options(changes: dict[str, Any]) -> dict[str, Any]:
    """What is not for the arguments of a run; a `reference` is another model."""
    if changes.pop("reference", False):
        changes["ref_model"] = tiny_model("llama", seed=5)
    return {key: changes.pop(key) for key in ("peft_config", "callbacks", "ref_model") if key in changes}


def make_dpo(folder: Path, output: Path, grid: Grid | None, *, model=None, adapted=False, experts=False, **changes):
    """A DPOTrainer with the model and the data of `write_preferences`; or with a mixture of `experts`."""
    from trl import DPOConfig, DPOTrainer

    given = _trainer_options(changes)
    if experts:
        model = tiny_model("qwen3_moe", **EXPERTS)
    return DPOTrainer(
        model=policy(folder, adapted=adapted) if model is None else model,
        args=arguments(DPOConfig, output, grid, **dict(max_length=29, beta=0.5) | changes),
        train_dataset=load_from_disk(folder / "train"),
        eval_dataset=load_from_disk(folder / "eval"),
        processing_class=chat_tokenizer(),
        **given,
    )


def make_kto(folder: Path, output: Path, grid: Grid | None, *, pairs_of: int | None = None, **changes):
    """A KTOTrainer with the model and the data of `write_preferences`.

    Args:
        pairs_of: rows within which TRL pairs prompts and answers for the KL term: those of the batch of a process,
            where None.
    """
    from trl import KTOConfig, KTOTrainer

    given = _trainer_options(changes)
    args = arguments(KTOConfig, output, grid, **dict(max_length=29, beta=0.5) | changes)
    rows = args.per_device_train_batch_size
    args.per_device_train_batch_size = pairs_of or rows
    trainer = KTOTrainer(
        model=policy(folder),
        args=args,
        train_dataset=load_from_disk(folder / "marked"),
        eval_dataset=load_from_disk(folder / "marked").select(range(8)),
        processing_class=chat_tokenizer(),
        **given,
    )
    trainer.args.per_device_train_batch_size = trainer._train_batch_size = rows
    return trainer


def make_reward(folder: Path, output: Path, grid: Grid | None, **changes):
    """A RewardTrainer with the data of `write_preferences`."""
    from trl import RewardConfig, RewardTrainer

    given = _trainer_options(changes)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(tiny_config("llama", num_labels=1)).double()
    return RewardTrainer(
        model=model,
        args=arguments(RewardConfig, output, grid, **changes),
        train_dataset=load_from_disk(folder / "train"),
        eval_dataset=load_from_disk(folder / "eval"),
        processing_class=chat_tokenizer(),
        **given,
    )


class Quantiles:
    """In the place of torch.multinomial: each row takes a quantile of its own, which depends on its place among the
    completions of all data-parallel ranks, on the token's place and on the step. So the grid does not count."""

    def __init__(self, dp_rank: int) -> None:
        self.dp_rank, self.step, self.place = dp_rank, 0, 0

    def begin(self, step: int) -> None:
        """Completions are generated from here on, in this step of the run."""
        self.step, self.place = step, 0

    def __call__(self, probabilities, num_samples: int = 1):
        self.place += 1
        rows = len(probabilities) * self.dp_rank + torch.arange(len(probabilities))
        wanted = (0.137 + 0.618 * (rows + 1) + 0.4142 * self.place * (rows + 3) + 0.2773 * self.step) % 1
        below = probabilities.cumsum(dim=-1) < wanted.unsqueeze(1)
        return below.sum(dim=-1, keepdim=True).clamp(max=probabilities.shape[1] - 1)


def make_groups(
    folder: Path,
    output: Path,
    grid: Grid | None,
    *,
    kind: str = "GRPO",
    by_quantiles: bool = True,
    judge: bool = False,
    server: bool = False,
    experts: bool = False,
    **changes,
):
    """A GRPOTrainer or RLOOTrainer with the prompts of `write_preferences`, which samples by `Quantiles`; with `judge`
    a model gives one of its rewards; or of a mixture of `experts`. A `server` is `VLLMClientStub`."""
    import trl

    def some_letters(completion_ids, **_) -> list[float]:
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    def length(completion_ids, **_) -> list[float]:
        return [len(ids) / 4 for ids in completion_ids]

    given = _trainer_options(changes)
    rewards: list = [some_letters, length]
    if judge:
        torch.manual_seed(0)
        config = tiny_config("llama", num_labels=1, vocab_size=33)
        rewards[1] = AutoModelForSequenceClassification.from_config(config).double().eval()
        given["reward_processing_classes"] = [None, chat_tokenizer()]
    own = dict(max_completion_length=5, num_generations=4, beta=0.3, temperature=0.8, learning_rate=1e-3)
    # Of two micro-batches each data-parallel rank takes its own completions, so that not the same ones meet.
    # Transformers' rotary angles are float32, so that how far a prompt is padded would count.
    own |= dict(pad_to_multiple_of=16, gradient_accumulation_steps=1)
    own |= dict(per_device_train_batch_size=8 // (grid.dp_size if grid else 1))
    own |= dict(use_vllm=True, vllm_mode="server") if server else {}
    own |= dict(model_init_kwargs={"dtype": "auto"})  # of the reference model, which trl 1.15 loads in float32
    args = arguments(getattr(trl, f"{kind}Config"), output, grid, **own | changes)
    with vllm_is_there() if server else contextlib.nullcontext():
        trainer = getattr(trl, f"{kind}Trainer")(
            # In generate Transformers 5.23 compares the routers of one token with the mask of the row, and fails.
            model=tiny_model("qwen3_moe", vocab_size=33, **EXPERTS | {"output_router_logits": False})
            if experts
            else AutoModelForCausalLM.from_pretrained(folder / "speaker", dtype=torch.float64),
            args=args,
            reward_funcs=rewards,
            train_dataset=load_from_disk(folder / "train").select_columns(["prompt"]),
            processing_class=chat_tokenizer(),
            **given,
        )
    if server or not by_quantiles:
        return trainer
    dp_rank = dist.get_rank() if dist.is_initialized() else 0
    if grid is not None:
        here = grid.coordinates(dist.get_rank())
        dp_rank = here["data"] * grid.z + here["z"]
    sampling, generate, prepare = Quantiles(dp_rank), trainer._generate_single_turn, trainer._prepare_inputs

    def sampled(*args):
        sampling.begin(trainer.state.global_step + 1)
        with mock.patch.object(torch, "multinomial", sampling):
            return generate(*args)

    def in_order(*args):
        with mock.patch.object(sys.modules[type(trainer).__module__], "shuffle_sequence_dict", lambda rows: rows):
            return prepare(*args)

    trainer._generate_single_turn, trainer._prepare_inputs = sampled, in_order
    return trainer


def fit(make, *args, evaluate: bool = False, resume: Path | None = None, **options):
    """(what was logged, gradients of the first step, parameters at the end) of a trainer, in float64."""
    watch = FirstGradients()
    torch.set_default_dtype(torch.float64)  # of a batch without rejected answers TRL makes `torch.Tensor([])`
    try:
        with Float64():
            trainer = make(*args, callbacks=[watch], **options)
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)
            if evaluate:
                trainer.evaluate()
    finally:
        torch.set_default_dtype(torch.float32)
    parameters = {name: its.detach().clone() for name, its in trainer.model.named_parameters() if its.requires_grad}
    return logged(trainer.state.log_history), watch.gradients, parameters
