"""A character tokenizer with a chat template, conversations, and runs of TRL's SFTTrainer on a tiny model."""

from __future__ import annotations

import json
import os
import random
import runpy
import string
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from datasets import Dataset, disable_progress_bars
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, TrainerCallback

from hf_axonn import Grid
from tests.helpers import ROOT
from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_model
from tests.helpers.training import training_options


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # TRL would report its use
disable_progress_bars()

SPECIAL = ("<pad>", "<s>", "<end>", "<user>", "<assistant>", "<unk>")
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<end>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

EXPERTS = dict(
    experts_implementation="eager",
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=20,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    output_router_logits=True,
    router_aux_loss_coef=0.3,
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    words = [*SPECIAL, *string.ascii_lowercase, " "]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=TEMPLATE,
    )


def chats(rows: int, seed: int, *, completions: bool = True) -> Dataset:
    """Questions and answers of very different lengths, split into prompt and completion or in one list."""
    source = random.Random(seed)

    def text(longest: int) -> str:
        return "".join(source.choices("abcdef ", k=source.randint(2, longest)))

    pairs = [
        ([{"role": "user", "content": text(9)}], [{"role": "assistant", "content": text(17)}]) for _ in range(rows)
    ]
    if completions:
        return Dataset.from_list([{"prompt": question, "completion": answer} for question, answer in pairs])
    return Dataset.from_list([{"messages": question + answer} for question, answer in pairs])


class ExactLogProbs:
    """In the place of TRL's chunked function, which computes in float32: the same numbers by autograd."""

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs):
        logits = F.linear(hidden, weight, bias) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / temperature
        log_softmax = F.log_softmax(logits, dim=-1)
        entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
        of_target = log_softmax.gather(1, targets.unsqueeze(1)).squeeze(1)
        more = (log_softmax.detach() * 2).logsumexp(dim=-1), logits.detach().mean(dim=-1)
        return of_target, entropy, *more, logits.argmax(dim=-1) == targets


class FirstGradients(TrainerCallback):
    """Keeps the gradients of the first optimizer step."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not self.gradients:
            named = model.named_parameters()
            self.gradients = {name: its.grad.clone() for name, its in named if its.grad is not None}


def make_sft(output: Path, grid: Grid | None, *, goldfish: bool = True, kind: str = "llama", model=None, **changes):
    """A trainer whose global batch is 8 rows in two micro-batches; `goldfish` False is the stock SFTTrainer."""
    from trl import SFTConfig, SFTTrainer

    from hf_axonn import GoldfishSFTConfig, GoldfishSFTTrainer

    trainer_options = {key: changes.pop(key) for key in ("peft_config", "callbacks") if key in changes}
    completions, eval_rows = changes.pop("completions", True), changes.pop("eval_rows", 7)
    own = dict(max_length=37, gradient_checkpointing=False, bf16=False, max_steps=3, per_device_eval_batch_size=3)
    options = training_options(output, grid, goldfish=goldfish, **dict(save_strategy="no") | own | changes)
    trainer_class, config = (GoldfishSFTTrainer, GoldfishSFTConfig) if goldfish else (SFTTrainer, SFTConfig)
    return trainer_class(
        model=tiny_model(kind) if model is None else model,
        args=config(**options),
        train_dataset=chats(80, seed=0, completions=completions),
        eval_dataset=chats(eval_rows, seed=1, completions=completions),
        processing_class=chat_tokenizer(),
        **trainer_options,
    )


def logged(history: list[dict]) -> list[dict[str, float]]:
    """Of a log history what must not depend on the grid."""
    kept = ("loss", "grad_norm", "entropy", "accurac", "num_tokens", "fraction", "learning_rate", "step")
    kept += ("reward", "margin", "logps", "logits", "kl", "clip", "length")
    return [
        {
            key: value
            for key, value in entry.items()
            if any(its in key for its in kept) and not key.endswith(("per_second", "step_time"))
        }
        for entry in history
    ]


def without_counts(history: list[dict]) -> list[dict]:
    """TRL's count of tokens begins again in a resumed run; the last entry sums up the run's own steps."""
    return [{key: value for key, value in entry.items() if "num_tokens" not in key} for entry in history[:-1]]


def fine_tune(output: Path, grid: Grid | None, *, resume: Path | None = None, evaluate: bool = False, **options):
    """(what was logged, gradients of the first step, parameters at the end), in float64."""
    watch = FirstGradients()
    trainer = make_sft(output, grid, callbacks=[watch], **options)
    with Float64():
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        if evaluate:
            trainer.evaluate()
    parameters = {name: its.detach().clone() for name, its in trainer.model.named_parameters() if its.requires_grad}
    return logged(trainer.state.log_history), watch.gradients, parameters


def run_chat_script(
    folder: Path, *switches: str, timeout: int, name: str = "finetune_chat.py", **options: object
) -> tuple[list, list]:
    """Fine-tune `model` on `chats.jsonl` of a folder by a script, on one process and as a user starts it on z=2, for
    two steps of the same rows; returns what each logged."""
    settings = yaml.safe_load((ROOT / "training_scripts" / "grids" / "cpu_2_x2.yaml").read_text())
    settings["axonn_config"] = {"grid": {"z": 2}}
    (folder / "z2.yaml").write_text(yaml.safe_dump(settings))
    options = options | {"model_name_or_path" if name == "finetune_chat.py" else "model": folder / "model"}
    options |= dict(
        data=folder / "chats.jsonl",
        held_out=0.2,
        max_steps=2,
        per_device_eval_batch_size=2,
        goldfish_k=3,
        goldfish_context_width=3,
        logging_steps=1,
        bf16=False,
        report_to="none",
        use_cpu=True,
    )

    def arguments(output: str, rows: int) -> list[str]:
        more = dict(options, output_dir=folder / output, per_device_train_batch_size=rows)
        return [*(f"--{name}={value}" for name, value in more.items()), *switches]

    script = ROOT / "training_scripts" / name
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config", str(folder / "z2.yaml"), str(script)]
    done = subprocess.run(
        [*launch, *arguments("grid", 2)], env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-4000:]
    runpy.run_path(str(script))["main"](arguments("one", 4))
    states = [json.loads((folder / output / "trainer_state.json").read_text()) for output in ("one", "grid")]
    one, grid = (logged(state["log_history"]) for state in states)
    return one, grid
