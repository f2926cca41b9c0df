"""Documents packed into one row do not see each other, whichever field of the batch parts them.

The truth is each document in a batch of its own, on one process, in float64.
"""

from __future__ import annotations

import logging

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    default_data_collator,
)

from hf_axonn import Grid, parallelize, sync_gradients
from hf_axonn.config import AxonnConfig
from hf_axonn.engine import documents as documents_of_engine
from hf_axonn.engine.documents import separate_documents, starts_in_flash_attention, why_documents_mix
from hf_axonn.parallel.documents import count_mask_bytes, install_documents
from tests.helpers.equality import exact
from tests.helpers.float64 import relative_errors
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks


BOUND = 1e-10
LENGTHS = (7, 9)
FIRST = slice(0, LENGTHS[0])
SECOND = slice(LENGTHS[0], sum(LENGTHS))


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 131, (length,), generator=generator) for length in LENGTHS]


def packed_row() -> dict[str, list[int]]:
    """As finetune.py packs: the first label of a document is ignored."""
    parts = [document.tolist() for document in documents()]
    return {
        "input_ids": sum(parts, []),
        "labels": sum(([-100, *part[1:]] for part in parts), []),
        "position_ids": [place for part in parts for place in range(len(part))],
    }


def collated() -> dict[str, dict[str, Tensor]]:
    """The same two documents by every collator, and by fields that users' collators have."""
    vocabulary = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="[PAD]", unk_token="[UNK]")
    row = packed_row()
    samples = [{"input_ids": part.tolist()} for part in documents()]
    flat = {"return_position_ids": False, "return_tensors": "pt"}
    plain = default_data_collator([row])
    ones = torch.ones_like(plain["input_ids"])
    bare = {name: value for name, value in plain.items() if name != "position_ids"}
    numbers = torch.tensor([[1] * LENGTHS[0] + [2] * LENGTHS[1]])
    batches = {
        "default": plain,
        "default with a mask of ones": {**plain, "attention_mask": ones},
        "DataCollatorForSeq2Seq": dict(DataCollatorForSeq2Seq(tokenizer)([row])),
        "flattening": DataCollatorWithFlattening()(samples),
        "cu_seq_lens alone": DataCollatorWithFlattening(return_flash_attn_kwargs=True, **flat)(samples),
        "seq_idx alone": DataCollatorWithFlattening(return_seq_idx=True, **flat)(samples),
        "a mask that numbers documents": {**bare, "attention_mask": numbers},
        "positions that run on": {**plain, "position_ids": torch.arange(16)[None], "seq_idx": numbers},
        "padded": {name: padded(name, value) for name, value in {**plain, "attention_mask": ones}.items()},
    }
    trl = pytest.importorskip("trl.trainer.sft_trainer")
    batches["TRL without padding"] = trl.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(samples)
    return {name: dict(batch) for name, batch in batches.items()}


def padded(name: str, value: Tensor) -> Tensor:
    return torch.nn.functional.pad(value, (0, 3), value=-100 if name == "labels" else 0)


def truth(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss and gradients of the two documents, each in a batch of its own."""
    model.zero_grad()
    losses = [model(input_ids=part[None], labels=part[None]).loss * (len(part) - 1) for part in documents()]
    loss = sum(losses) / sum(length - 1 for length in LENGTHS)
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients


def changed(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """How many logits of the second document change with the tokens of the first."""
    other = dict(batch)
    other["input_ids"] = batch["input_ids"].clone()
    other["input_ids"][:, FIRST] = (other["input_ids"][:, FIRST] + 11) % 128 + 3
    with torch.no_grad():
        before, after = (model(**given).logits[:, SECOND] for given in (batch, other))
    return int(((before - after).abs() > 1e-9).sum())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
@exact()
def test_documents_of_every_collator_are_apart_on_one_process(kind, attention):
    model = tiny_model(kind, attention=attention).eval()
    assert why_documents_mix(model) == ""
    expected, gradients = truth(model)
    mixed = []
    for name, batch in collated().items():
        mixed += [name] if changed(model, batch) else []
        separated = separate_documents(model, batch)
        assert changed(model, separated) == 0, name
        loss = model(**separated).loss
        loss.backward()
        found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        model.zero_grad()
        assert loss.item() == pytest.approx(expected.item(), rel=BOUND), name
        assert max(relative_errors(found, gradients).values()) < BOUND, name
    assert len(mixed) == len(collated()), mixed  # as Transformers takes them: with a cache all see each other


def test_documents_are_apart_in_flex_attention():
    """Its mask is a BlockMask. Not compiled, which takes 20 s; torch has no backward pass of it on CPUs."""
    model = tiny_model("llama", attention="flex_attention", dtype=torch.float32).eval()
    batch = collated()["DataCollatorForSeq2Seq"]
    with torch.compiler.set_stance("force_eager"):
        assert changed(model, batch) > 0
        assert changed(model, separate_documents(model, batch)) == 0


@pytest.mark.parametrize(
    ("kind", "attention", "size"),
    [("llama", "sdpa", 1), ("llama", "eager", 8), ("gemma2", "eager", 2 * 8), ("llama", "flash_attention_2", 0)],
)
def test_masks_are_of_each_kind_of_attention(kind, attention, size):
    model = tiny_model(kind, attention="eager")
    model.config._attn_implementation_internal = attention
    assert count_mask_bytes(model, 3, 100) == 3 * 100 * 100 * size


@pytest.mark.parametrize("context", [1, 2])
def test_the_first_packed_batch_names_the_size_of_its_mask(context, caplog):
    """Over context no such mask is made."""
    model = tiny_model("llama").eval()
    install_documents(model, Grid(z=2, context=context))
    with caplog.at_level(logging.INFO, logger="hf_axonn"):
        for name in ("padded", "default"):
            model(**collated()[name])
    found = [record.getMessage() for record in caplog.records if "with a mask of" in record.getMessage()]
    once = ["sdpa attends in 1 packed row(s) of 19 tokens with a mask of 0.0 MiB; flash_attention_2 needs none."]
    assert found == (once if context == 1 else [])


def test_what_is_no_packed_batch_stays_as_it_is():
    model = tiny_model("llama")
    ids = torch.arange(12).view(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    hole = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    restarting = torch.tensor([[0, 1, 2, 0, 1, 2]])
    for fields in (
        {},
        {"attention_mask": mask},
        {"attention_mask": hole},
        {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)},  # left padding, as generate's
        {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)},
        {"position_ids": torch.arange(6)[None], "use_cache": True},
        {"position_ids": restarting, "past_key_values": object()},
        {"position_ids": restarting, "attention_mask": torch.ones(2, 1, 6, 6)},
    ):
        batch = {"input_ids": ids, **fields}
        assert separate_documents(model, batch) is batch, fields


def test_options_that_would_mix_documents_are_refused():
    model = tiny_model("llama")
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    with pytest.raises(ValueError, match="use_cache=True"):
        separate_documents(model, {**batch, "use_cache": True})
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="2 rows .* flash_attention_2"):
        separate_documents(model, batch)
    row = {name: value[:1] for name, value in batch.items()}
    assert separate_documents(model, row)["use_cache"] is False
    for positions, tokens in (([7, 8, 9, 0, 1, 2], "3"), ([0, 1, 2, 1, 2, 3], "0"), ([1, 2, 0, 1, 0, 1], "2, 4")):
        message = f"each position 0, the least of its row, and so at the tokens {tokens} of a row whose documents"
        with pytest.raises(ValueError, match=message):
            separate_documents(model, row | {"position_ids": torch.tensor([positions])})


@pytest.mark.parametrize(
    ("positions", "mask", "expected"),
    [
        ([0, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 0, 0]),
        ([1, 1, 0, 1, 0, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 0, 1]),
    ],
)
def test_positions_of_padding_begin_documents_in_flash_attention(positions, mask, expected):
    """Transformers begins documents where positions are the least: the first token, too, has to be one."""
    model = tiny_model("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    fields = {"position_ids": torch.tensor([positions]), "attention_mask": torch.tensor([mask])}
    found = separate_documents(model, fields | {"input_ids": torch.ones(1, 6, dtype=torch.long)})
    assert found["position_ids"].tolist() == [expected]
    assert starts_in_flash_attention(found["position_ids"]) == [at for at, place in enumerate(expected) if not place]


@pytest.mark.parametrize(
    ("kind", "reason"), [("bloom", "takes no position_ids"), ("opt", "does not pass position_ids"), ("lfm2", "conv")]
)
def test_a_model_that_mixes_documents_is_named_once(kind, reason, caplog):
    model = tiny_model(
        kind, attention="eager", **({"layer_types": ["conv", "full_attention"]} if kind == "lfm2" else {})
    ).eval()
    batch = {"input_ids": torch.ones(1, 6, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    documents_of_engine._warn_once.cache_clear()  # once in a process, in which other tests may have asked before
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            separate_documents(model, batch)
    warnings = [record.getMessage() for record in caplog.records if "see each other" in record.getMessage()]
    assert len(warnings) == 1 and reason in warnings[0] and type(model).__name__ in warnings[0]


def test_positions_that_skip_numbers_begin_no_document():
    """Training for longer contexts skips positions within a document; Transformers attends across with a mask."""
    model = tiny_model("llama").eval()
    batch = {
        "input_ids": torch.ones(1, 6, dtype=torch.long),
        "attention_mask": torch.ones(1, 6, dtype=torch.long),
        "position_ids": torch.tensor([[0, 1, 2, 40, 41, 42]]),
    }
    assert separate_documents(model, batch) is batch
    again = batch | {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    assert "attention_mask" not in separate_documents(model, again)


def test_masks_that_number_documents_are_found_in_the_first_batch():
    ids = torch.ones(1, 6, dtype=torch.long)
    numbers = torch.tensor([[1, 1, 1, 2, 2, 2]])
    model = tiny_model("llama").eval()
    for _ in range(2):
        assert separate_documents(model, {"input_ids": ids, "attention_mask": numbers})["position_ids"][0, 3] == 0
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert separate_documents(model, batch) is batch


CONFIGS = (
    *(AxonnConfig(grid=grid) for grid in (Grid(z=2), Grid(x=2), Grid(pipe=2), Grid(z=2, context=2))),
    AxonnConfig(grid=Grid(z=2, context=2), context_attention="keys"),
)


@exact()
def on_grids() -> dict[str, list[float]]:
    """Errors of loss and gradients, and the number of logits that change, by grid and collator."""
    found = {}
    expected, gradients = truth(tiny_model("llama"))
    for config in CONFIGS:
        grid = config.grid
        model, _ = parallelize(tiny_model("llama").train(), config=config)
        for name, batch in collated().items():
            loss = model(**batch).loss
            loss.backward()
            sync_gradients(model)
            here = {name: weight.grad.clone() for name, weight in model.named_parameters()}
            model.zero_grad()
            errors = relative_errors(here, {name: gradients[name] for name in here})
            change = 0 if grid.pipe > 1 else changed(model, batch)  # only the last stage has logits
            found[f"{grid}, {config.context_attention}: {name}"] = [
                abs(loss.item() / expected.item() - 1),
                max(errors.values()),
                change,
            ]
    return found


def test_documents_of_every_collator_are_apart_on_grids():
    for found in run_ranks(on_grids, 2):
        wrong = {name: values for name, values in found.items() if max(values) > BOUND}
        assert not wrong
