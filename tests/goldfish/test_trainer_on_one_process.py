"""GoldfishTrainer on a tiny Llama: against the stock Trainer, against sums by hand, and on two processes."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForCausalLM,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from hf_axonn.goldfish.mask import goldfish_mask
from hf_axonn.goldfish.table import TABLE_SIZE, save_table, table_sha256
from hf_axonn.goldfish.trainer import UNMASKED_LABELS, GoldfishConfig, GoldfishMixin, GoldfishTrainer
from hf_axonn.losses.causal_lm import CausalLMLoss
from hf_axonn.topology.grid import Grid, GridPosition
from tests.helpers.ranks import run_ranks


VOCAB = 61
LENGTHS = (24, 3, 17, 30, 9, 2, 14)  # 7 samples: no number of ranks or batch size here divides them
PAD = 0
HASHES = ("hash-table", "hash", "hash-avalanche")


def tiny_model(kind: str = "llama") -> torch.nn.Module:
    torch.manual_seed(0)
    # Wide weights, so that tokens differ in what they cost and no mean is right by accident.
    if kind == "gpt2":
        sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
        plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.3}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **sizes, **plain))
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, initializer_range=0.3))


def samples(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row, "title": index} for index, row in enumerate(rows)]


def collate(features: list[dict]) -> dict[str, torch.Tensor]:
    """Pad to the longest of the batch, as tokenizers do."""
    longest = max(len(one["input_ids"]) for one in features)

    def pad(key: str, value: int) -> torch.Tensor:
        return torch.stack(
            [F.pad(torch.tensor(one[key]), (0, longest - len(one[key])), value=value) for one in features]
        )

    ids = pad("input_ids", PAD)
    return {"input_ids": ids, "labels": pad("labels", -100), "attention_mask": (ids != PAD).long()}


def config(path: Path, **options: object) -> GoldfishConfig:
    defaults = {
        "output_dir": str(path), "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1,
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "num_train_epochs": 1,
        "train_sampling_strategy": "sequential", "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "save_strategy": "no", "goldfish_context_width": 3,
    }  # fmt: skip
    return GoldfishConfig(**(defaults | options))


def trainer_for(args: GoldfishConfig, *, model: torch.nn.Module | None = None, **options: object) -> GoldfishTrainer:
    data = Dataset.from_list(samples())
    defaults = {"train_dataset": data, "eval_dataset": data, "data_collator": collate}
    return GoldfishTrainer(model=tiny_model() if model is None else model, args=args, **(defaults | options))


def tokenizer_of_words() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<pad>": PAD, "<unk>": 1}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")


def test_rows_of_any_length_need_a_tokenizer_alone(tmp_path):
    """As the snippets of README and docs/goldfish.md: no data_collator, and rows with input_ids and labels."""
    rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in samples()]
    assert len({len(row["labels"]) for row in rows}) > 1
    options = {"data_collator": None, "processing_class": tokenizer_of_words()}
    trainer = trainer_for(config(tmp_path), train_dataset=rows, **options)
    padded, wanted = trainer.data_collator(rows[:2]), collate(rows[:2])
    assert padded["labels"].tolist() == wanted["labels"].tolist()
    trainer.train()
    by_hand = trainer_for(config(tmp_path), train_dataset=Dataset.from_list(rows))
    by_hand.train()
    losses, same = ([entry["loss"] for entry in steps_logged(each)] for each in (trainer, by_hand))
    assert losses == pytest.approx(same, rel=1e-6) and losses


def steps_logged(trainer: Trainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def nll_by_hand(model: torch.nn.Module, row: list[int]) -> torch.Tensor:
    """[S] nll of each label of one unpadded sample, 0 for the first, which nothing predicts."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1].double()
    return F.pad(F.cross_entropy(logits, torch.tensor(row[1:]), reduction="none"), (1, 0))


def full_loss(model: torch.nn.Module) -> float:
    """Total nll over total target tokens of all samples."""
    total = sum(nll_by_hand(model, one["input_ids"]).sum().item() for one in samples())
    return total / sum(length - 1 for length in LENGTHS)


def losses_by_hand(model: torch.nn.Module, rows: list[dict], **options: object) -> dict[str, float]:
    """Mean nll over all, kept and dropped labels of some samples, each masked on its own."""
    nll = torch.cat([nll_by_hand(model, one["input_ids"])[1:] for one in rows])
    drop = torch.cat([goldfish_mask(torch.tensor([one["input_ids"]]), **options)[0, 1:] for one in rows])
    return {
        "loss_all": nll.mean().item(),
        "loss_kept": nll[~drop].mean().item(),
        "loss_dropped": nll[drop].mean().item(),
        "goldfish_dropped_fraction": drop.float().mean().item(),
    }


@pytest.mark.parametrize("kind", ("llama", "gpt2"))
def test_where_nothing_is_dropped_it_is_the_stock_trainer(tmp_path, kind):
    runs = []
    for kind_of_trainer, options in ((Trainer, {}), (GoldfishTrainer, {"goldfish_context_width": 40})):
        args = config(tmp_path, gradient_accumulation_steps=2, max_grad_norm=1.0, optim="adamw_torch", **options)
        trainer = kind_of_trainer(
            model=tiny_model(kind), args=args, train_dataset=Dataset.from_list(samples()), data_collator=collate
        )
        trainer.train()
        runs.append((steps_logged(trainer), trainer.model.state_dict()))
    for stock, ours in zip(runs[0][0], runs[1][0], strict=True):
        assert stock["loss"] == ours["loss"] and stock["grad_norm"] == ours["grad_norm"]
        assert ours["loss_kept"] == ours["loss_all"] and ours["goldfish_dropped_fraction"] == 0
        assert "loss_dropped" not in ours
    for name, tensor in runs[0][1].items():
        assert torch.equal(tensor, runs[1][1][name]), name


def test_the_loss_is_the_mean_over_kept_tokens_of_the_whole_step(tmp_path):
    """Two micro-batches with very different numbers of tokens: loss, logs and the step of SGD, by hand."""
    model, before = tiny_model(), tiny_model()
    args = config(tmp_path, gradient_accumulation_steps=2, max_steps=1)
    trainer = trainer_for(args, model=model)
    trainer.train()
    (logged,) = steps_logged(trainer)
    expected = losses_by_hand(before, samples()[:4], k=4, context_width=3)
    assert 0.1 < expected["goldfish_dropped_fraction"] < 0.4
    assert logged["loss"] == pytest.approx(expected["loss_kept"], rel=1e-5)
    assert {key: logged[key] for key in expected} == pytest.approx(expected, rel=1e-5)

    total, count = 0.0, 0
    for one in samples()[:4]:
        ids = torch.tensor([one["input_ids"]])
        labels = ids.masked_fill(goldfish_mask(ids, k=4, context_width=3), -100)[0, 1:]
        total = total + F.cross_entropy(before(input_ids=ids).logits[0, :-1], labels, reduction="sum")
        count += (labels != -100).sum()
    (total / count).backward()
    for (name, parameter), old in zip(model.named_parameters(), before.parameters(), strict=True):
        assert torch.allclose(parameter, old - 0.1 * old.grad, atol=1e-6), name


def test_evaluation_is_unmasked_and_weighted_by_tokens(tmp_path):
    model = tiny_model()
    expected = full_loss(model)
    seen = []
    for size in (1, 2, 3, 7):
        trainer = trainer_for(config(tmp_path, per_device_eval_batch_size=size), model=model)
        seen.append(trainer.evaluate()["eval_loss"])
    assert seen == pytest.approx([expected] * 4, rel=1e-6)
    assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] == pytest.approx(expected, rel=1e-6)
    stock = Trainer(model=model, args=trainer.args, eval_dataset=trainer.eval_dataset, data_collator=collate)
    stock.args.per_device_eval_batch_size = 2
    assert stock.evaluate()["eval_loss"] != pytest.approx(expected, rel=1e-2)  # the mean of batch means is another


def test_evaluation_of_several_sets_during_training(tmp_path):
    data = Dataset.from_list(samples())
    args = config(tmp_path, eval_strategy="steps", eval_steps=2, learning_rate=0.0)
    trainer = trainer_for(args, eval_dataset={"all": data, "one": data.select([2])})
    trainer.train()
    (logged,) = [entry["eval_all_loss"] for entry in trainer.state.log_history if "eval_all_loss" in entry][:1]
    one = [entry["eval_one_loss"] for entry in trainer.state.log_history if "eval_one_loss" in entry]
    assert logged == pytest.approx(full_loss(trainer.model), rel=1e-6)
    assert one[0] == pytest.approx(nll_by_hand(trainer.model, samples()[2]["input_ids"])[1:].mean().item(), rel=1e-6)
    assert all("loss_all" in entry for entry in steps_logged(trainer))


@pytest.mark.parametrize("strategy", ("random", "seeded_random"))
def test_a_resumed_run_logs_what_an_unbroken_one_does(tmp_path, strategy):
    options = {"goldfish_strategy": strategy, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3}
    whole = trainer_for(config(tmp_path, **options))
    whole.train()
    torch.manual_seed(99)
    resumed = trainer_for(config(tmp_path, **options))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(steps_logged(whole)) == 8
    keys = ("loss", "loss_all", "loss_kept", "goldfish_dropped_fraction")
    assert [[entry[key] for key in keys] for entry in steps_logged(resumed)] == [
        [entry[key] for key in keys] for entry in steps_logged(whole)
    ]


@pytest.mark.parametrize("strategy", ("random", "seeded_random"))
def test_random_masks_do_not_depend_on_how_a_step_is_cut_and_change_with_steps_and_seed(tmp_path, strategy):
    def fractions(**options):
        trainer = trainer_for(config(tmp_path, goldfish_strategy=strategy, learning_rate=0.0, **options))
        trainer.train()
        return [[entry["loss_kept"], entry["loss_dropped"]] for entry in steps_logged(trainer)]

    whole = fractions(per_device_train_batch_size=4, num_train_epochs=2)
    halves = fractions(per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=2)
    assert [sum(one) for one in whole] == pytest.approx([sum(one) for one in halves], rel=1e-5)
    assert whole[0] != pytest.approx(whole[2], rel=1e-4)  # the second epoch drops others
    assert whole[0] != pytest.approx(fractions(per_device_train_batch_size=4, goldfish_seed=7)[0], rel=1e-4)
    assert whole[0] == fractions(per_device_train_batch_size=4, goldfish_seed=42)[0]  # 42: the default seed of a run


def test_place_in_the_step_on_a_grid(tmp_path, monkeypatch):
    """Ranks that share samples draw the same masks; others go on counting where their neighbour stops."""
    trainer = trainer_for(config(tmp_path))
    for grid, z in ((Grid(data=2, z=3, x=2), 1), (Grid(data=2, z=6, context=2), 2), (Grid(data=2, z=6, context=2), 3)):
        mesh = GridPosition(grid, {"data": 1, "z": z, "x": grid.x - 1, "y": 0})
        state = SimpleNamespace(grid=grid, grid_mesh=mesh)
        monkeypatch.setattr("hf_axonn.goldfish.trainer.parallel_state", lambda model, state=state: state)
        assert trainer._sample_ids(0, 2).tolist() == [8, 9]
        assert trainer._sample_ids(2, 2).tolist() == [32, 33]


@pytest.mark.parametrize("strategy", HASHES)
def test_packed_rows_are_masked_as_their_documents_are_and_short_ones_are_reported(tmp_path, caplog, strategy):
    """Flattened batches know their documents by position_ids. 3 of the 7 are not longer than a width of 9."""
    options = {"learning_rate": 0.0, "logging_strategy": "epoch", "num_train_epochs": 2}
    args = config(tmp_path, goldfish_strategy=strategy, goldfish_context_width=9, **options)
    trainer = trainer_for(args, data_collator=DataCollatorWithFlattening())
    with caplog.at_level(logging.WARNING):
        trainer.train()
    expected = losses_by_hand(trainer.model, samples(), strategy=strategy, context_width=9)
    for logged in steps_logged(trainer):
        assert {key: logged[key] for key in expected} == pytest.approx(expected, rel=1e-4)
    warnings = [record.getMessage() for record in caplog.records if "not protected" in record.getMessage()]
    assert len(warnings) == 1 and warnings[0].startswith("3 of the 7 documents")
    assert "shorter than 10 tokens" in warnings[0]


@pytest.mark.parametrize("collator", ["its own", "flattening", "cu_seq_lens alone"])
def test_packed_documents_do_not_see_each_other(tmp_path, collator):
    """In training and in evaluation: as if each were a row of its own, whose first label is ignored."""
    every = samples()
    packed = [[every[index] for index in indices] for indices in ((0, 1, 2), (3, 6))]  # 44 tokens each
    rows = [
        {
            "input_ids": sum((part["input_ids"] for part in parts), []),
            "labels": sum(([-100, *part["labels"][1:]] for part in parts), []),
            "position_ids": [place for part in parts for place in range(len(part["labels"]))],
        }
        for parts in packed
    ]
    options = {"data_collator": None, "processing_class": tokenizer_of_words()}
    data = Dataset.from_list(rows)
    if collator != "its own":
        data = Dataset.from_list(sum(packed, []))
        alone = {"return_position_ids": False, "return_flash_attn_kwargs": True} if "alone" in collator else {}
        options = {"data_collator": DataCollatorWithFlattening(**alone)}
    args = config(tmp_path, learning_rate=0.0, logging_strategy="epoch", use_cache=True)
    trainer = trainer_for(args, train_dataset=data, eval_dataset=data, **options)
    trainer.train()
    expected = losses_by_hand(trainer.model, sum(packed, []), context_width=3)
    assert {key: steps_logged(trainer)[0][key] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected["loss_all"], rel=1e-6)


def test_short_documents_are_reported_without_logs_and_not_for_static(tmp_path, caplog):
    for strategy, expected in (("hash", 1), ("static", 0)):
        caplog.clear()
        trainer = trainer_for(config(tmp_path, goldfish_strategy=strategy, logging_strategy="no"))
        trainer.train()
        assert sum("2 of the 7 documents" in record.getMessage() for record in caplog.records) == expected


def test_prompts_and_shift_labels(tmp_path):
    """A batch that brings shift_labels too is masked in both, at the same tokens."""
    trainer = trainer_for(config(tmp_path, goldfish_k=2))
    batch = collate(samples()[:2])
    batch["labels"][0, :10] = -100
    plain = trainer._mask_batch(0, batch)
    shifted = trainer._mask_batch(0, {**batch, "shift_labels": F.pad(batch["labels"][:, 1:], (0, 1), value=-100)})
    dropped = (plain["labels"] != batch["labels"]).nonzero()
    assert len(dropped) > 3 and all(row == 1 or place >= 10 for row, place in dropped.tolist())
    assert torch.equal(shifted["shift_labels"][:, :-1], plain["labels"][:, 1:])
    assert plain[UNMASKED_LABELS] is batch["labels"] and UNMASKED_LABELS not in batch
    loss = trainer.compute_loss(trainer.model, plain)
    sums = trainer.model.loss_function.record.pop()
    assert torch.equal(trainer.compute_loss(trainer.model, shifted), loss)
    assert trainer.model.loss_function.record.pop() == sums
    assert sums["all_count"] - sums["kept_count"] == len(dropped)


def test_packed_rows_and_prompts_as_the_reference_masks_them(tmp_path):
    batch = DataCollatorWithFlattening()(samples())
    batch["labels"][0, 30:50] = -100
    found = {}
    for as_reference in (False, True):
        trainer = trainer_for(
            config(tmp_path, goldfish_k=2, goldfish_context_width=5, goldfish_as_reference=as_reference)
        )
        found[as_reference] = trainer._mask_batch(0, batch)["labels"] != batch["labels"]
    expected = goldfish_mask(batch["input_ids"], batch["labels"], k=2, context_width=5, hash_labels=True)
    assert torch.equal(found[True], expected)
    assert not torch.equal(found[True], found[False])


def test_every_setting_reaches_the_mask(tmp_path):
    """One batch by each setting is masked as by the function with the same option, and not as without it."""
    save_table(tmp_path / "table", "cpu")
    table = torch.rand(TABLE_SIZE, generator=torch.Generator().manual_seed(1))
    about = {"format": "hf_axonn goldfish table 1", "sha256": table_sha256(table)}
    save_file({"table": table}, tmp_path / "other", metadata=about)
    batch = DataCollatorWithFlattening()(samples())
    del batch["position_ids"]
    batch["labels"][0, 30:50] = -100
    ids, labels = batch["input_ids"], batch["labels"]
    for settings, options in (
        ({"goldfish_strategy": "hash-avalanche"}, {"strategy": "hash-avalanche"}),
        ({"goldfish_strategy": "seeded_random"}, {"strategy": "seeded_random", "seed": 42}),
        ({"goldfish_strategy": "static", "goldfish_start_position": 5}, {"strategy": "static", "start_position": 5}),
        ({"goldfish_table": str(tmp_path / "other")}, {"table": table}),
        (
            {"goldfish_as_reference": True, "goldfish_ignored_token": 7},
            {"hash_labels": True, "ignored_token": 7},
        ),
    ):
        trainer = trainer_for(config(tmp_path, goldfish_k=2, **settings))
        found = trainer._mask_batch(0, batch)["labels"] != labels
        assert torch.equal(found, goldfish_mask(ids, labels, k=2, context_width=3, **options)), settings
        assert not torch.equal(found, goldfish_mask(ids, labels, k=2, context_width=3)), settings
    same = trainer_for(config(tmp_path, goldfish_k=2, goldfish_table=str(tmp_path / "table")))
    found = same._mask_batch(0, batch)["labels"] != labels
    assert torch.equal(found, goldfish_mask(ids, labels, k=2, context_width=3))


def test_ordinary_loss_with_the_same_logs(tmp_path):
    """goldfish=False: the stock loss, and label smoothing is allowed; then the logs and eval_loss are stock ones."""
    plain = trainer_for(config(tmp_path, goldfish=False, max_steps=1))
    plain.train()
    (logged,) = steps_logged(plain)
    assert logged["loss_all"] == logged["loss_kept"] == pytest.approx(logged["loss"], rel=1e-6)
    assert logged["goldfish_dropped_fraction"] == 0
    smooth = trainer_for(config(tmp_path, goldfish=False, max_steps=1, label_smoothing_factor=0.1))
    smooth.train()
    assert "loss_all" not in steps_logged(smooth)[0]


def test_evaluation_loss_that_is_not_the_models_is_called_so(tmp_path, caplog):
    trainer = trainer_for(config(tmp_path, goldfish=False, label_smoothing_factor=0.1))
    with caplog.at_level(logging.WARNING):
        assert trainer.evaluate()["eval_loss"] > 0
    assert any("eval_loss is the stock Trainer's" in record.getMessage() for record in caplog.records)


def test_peft_model(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    trainer = trainer_for(config(tmp_path, max_steps=1, eval_strategy="steps"), model=model)
    trainer.train()
    expected = losses_by_hand(tiny_model(), samples()[:2], context_width=3)
    assert steps_logged(trainer)[0]["loss_kept"] == pytest.approx(expected["loss_kept"], rel=1e-5)
    assert isinstance(model.get_base_model().loss_function, CausalLMLoss)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(full_loss(model.eval()), rel=1e-5)


def test_model_init_bf16_and_checkpointing(tmp_path):
    args = config(tmp_path, bf16=True, activation_checkpointing=True, max_steps=2)
    data = Dataset.from_list(samples())
    trainer = GoldfishTrainer(model_init=tiny_model, args=args, train_dataset=data, data_collator=collate)
    trainer.train()
    expected = losses_by_hand(tiny_model(), samples()[:2], context_width=3)
    assert steps_logged(trainer)[0]["loss_kept"] == pytest.approx(expected["loss_kept"], rel=1e-2)
    assert len(steps_logged(trainer)) == 2


def test_a_users_own_log_is_left_alone(tmp_path):
    trainer = trainer_for(config(tmp_path))
    trainer.log({"loss": 1.0})
    assert "loss_all" not in trainer.state.log_history[-1]


def test_mixin_goes_before_any_trainer(tmp_path):
    class Counting(Trainer):
        steps = 0

        def training_step(self, *args, **kwargs):
            self.steps += 1
            return super().training_step(*args, **kwargs)

    class Both(GoldfishMixin, Counting):
        pass

    trainer = Both(
        model=tiny_model(), args=config(tmp_path), train_dataset=Dataset.from_list(samples()), data_collator=collate
    )
    trainer.train()
    assert trainer.steps == 4 and "loss_dropped" in steps_logged(trainer)[0]


def test_options_from_a_command_line(tmp_path):
    parser = HfArgumentParser(GoldfishConfig)
    line = ["--output_dir", str(tmp_path), "--goldfish_k", "3", "--goldfish_strategy", "hash", "--no_goldfish"]
    (args,) = parser.parse_args_into_dataclasses(line)
    assert (args.goldfish_k, args.goldfish_strategy, args.goldfish, args.goldfish_seed) == (3, "hash", False, None)
    assert json.loads(args.to_json_string())["goldfish_k"] == 3
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses([*line, "--goldfish_strategy", "hash-legacy"])


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"goldfish_k": 1}, "k is 1"),
        ({"goldfish_strategy": "hash-legacy"}, "hash-table, hash, hash-avalanche, static, random, seeded_random"),
        ({"goldfish_context_width": 0}, "context_width is 0"),
        ({"goldfish_start_position": 3}, "start_position is 3, but hash-table has none"),
        ({"goldfish_ignored_token": 0}, "goldfish_ignored_token is 0, but without goldfish_as_reference"),
    ),
)
def test_wrong_options_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "warning"),
    (
        ({}, ""),
        ({"goldfish_k": 8}, ""),
        ({"goldfish_strategy": "random", "goldfish_seed": 7, "goldfish_context_width": 13}, ""),
        ({"loss_strategy": "entrodrop", "goldfish_seed": 7, "goldfish_context_width": 13}, ""),
        ({"goldfish_seed": 7}, "(hash-table, k=4, h=3, table=33025be4fa64): goldfish_seed=7 has no effect"),
        ({"goldfish_strategy": "static"}, "goldfish_context_width=3 has no effect"),
        ({"loss_strategy": "tf-idf", "goldfish_k": 8}, "tf-idf: goldfish_k=8, goldfish_context_width=3 has no effect"),
        ({"goldfish": False}, "ordinary loss: goldfish_context_width=3 has no effect"),
    ),
    ids=str,
)
def test_options_without_effect_are_named(tmp_path, caplog, options, warning):
    with caplog.at_level(logging.WARNING):
        trainer_for(config(tmp_path, **options))
    assert ("has no effect" in caplog.text) == bool(warning) and warning in caplog.text


def test_what_does_not_go_together_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="label_smoothing_factor.*goldfish=False"):
        trainer_for(config(tmp_path, label_smoothing_factor=0.1))
    with pytest.raises(ValueError, match="compute_loss_func.*goldfish=False"):
        trainer_for(
            config(tmp_path), compute_loss_func=lambda outputs, labels, num_items_in_batch: outputs.logits.sum()
        )
    with pytest.raises(ValueError, match="TrainingArguments: pass args=GoldfishConfig"):
        trainer_for(TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))


def test_batches_without_labels_and_models_with_a_loss_of_their_own(tmp_path):
    def unlabelled(features):
        return {key: value for key, value in collate(features).items() if key != "labels"}

    with pytest.raises(ValueError, match="attention_mask, input_ids, but no labels, which the goldfish loss"):
        trainer_for(config(tmp_path), data_collator=unlabelled).train()
    filled = trainer_for(config(tmp_path), data_collator=lambda rows: {**collate(rows), "labels": None})
    with pytest.raises(ValueError, match="has attention_mask, input_ids, but no labels"):  # as Transformers' collator
        filled.train()
    own = BartForCausalLM(
        BartConfig(vocab_size=VOCAB, d_model=8, decoder_layers=1, decoder_attention_heads=1, decoder_ffn_dim=8)
    )
    with pytest.raises(ValueError, match="BartForCausalLM computes its loss without calling model.loss_function"):
        trainer_for(config(tmp_path), model=own).train()


def run_both(path: Path, processes: int) -> dict[str, list]:
    """What two processes and one must agree on: a step of 4 samples, all logs, and the evaluation of 7 samples."""
    found = {}
    for strategy in ("hash-table", "random"):
        args = config(
            path,
            goldfish_strategy=strategy,
            per_device_train_batch_size=2 // processes,
            gradient_accumulation_steps=2,
            per_device_eval_batch_size=2,
            eval_strategy="epoch",
        )
        trainer = trainer_for(args)
        trainer.train()
        keys = ("loss", "grad_norm", "loss_all", "loss_kept", "loss_dropped", "goldfish_dropped_fraction")
        found[strategy] = [[entry[key] for key in keys] for entry in steps_logged(trainer)[:1]]
        found[f"{strategy} documents"] = bool(trainer._warned_unprotected)
        trainer = trainer_for(args)
        found[f"{strategy} eval"] = [trainer.evaluate()["eval_loss"]]
    return found


def test_two_processes_equal_one(tmp_path):
    """DDP over gloo. The last evaluation batch is filled up by repeating samples: none of them may count twice."""
    expected = run_both(tmp_path / "one", processes=1)
    for found in run_ranks(run_both, 2, tmp_path / "two", 2):
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            assert torch.allclose(torch.tensor(found[key]).double(), torch.tensor(values).double(), rtol=1e-5), key
        assert found["hash-table eval"] == pytest.approx([full_loss(tiny_model())], rel=1e-6)
        assert found["hash-table documents"]
