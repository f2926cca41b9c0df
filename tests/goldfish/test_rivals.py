"""Rivals of goldfish: each against its definition in loops of plain Python, and on grids against one process."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

from hf_axonn import GoldfishConfig, GoldfishTrainer, Grid, LossStrategy
from hf_axonn.goldfish import draws
from hf_axonn.goldfish.record import describe_loss
from hf_axonn.goldfish.rivals import EntroDrop, NgramPenalty, TfIdf
from hf_axonn.goldfish.strategy import TokenStatistics, TrainingBatch
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, make_trainer, token_data, train, worst_difference


BRIEF = {"max_steps": 3, "save_strategy": "no", "eval_strategy": "no"}
RIVALS = [
    {"loss_strategy": "entrodrop", "entrodrop_rate": 1.0},
    {"loss_strategy": "entrodrop", "entrodrop_rate": 1.0, "entrodrop_source": "frozen"},
    {"loss_strategy": "tf-idf"},
    {"loss_strategy": "ngram", "ngram_length": 2, "ngram_margin": 0.0},
]


def batch_of(rows: int = 3, length: int = 17, *, progress: float = 0.7, packed: bool = False) -> TrainingBatch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 9, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, :5], labels[1, 12:] = -100, -100
    documents = (torch.arange(length) // 7).expand(rows, length) if packed else None
    return TrainingBatch(ids, labels, documents, torch.arange(4, 4 + rows), 5, progress)


def statistics_of(batch: TrainingBatch, seed: int) -> TokenStatistics:
    generator = torch.Generator().manual_seed(seed)
    log_probs, entropy = (torch.rand(2, *batch.labels.shape, generator=generator, dtype=torch.float64)).unbind()
    return TokenStatistics(-log_probs, entropy)


def test_entrodrop_leaves_out_sure_labels_by_its_schedule():
    for progress in (0.0, 0.5, 0.9):
        batch = batch_of(progress=progress)
        outputs = {"frozen": statistics_of(batch, 1)}
        kept = EntroDrop(rate=0.8, share=0.4, source="frozen", seed=9).weigh_outputs(batch, outputs)
        rate = 0.8 / (1 + math.exp(-10 * (progress - 0.5)))
        for row, labels in enumerate(batch.labels.tolist()):
            places = [place for place, label in enumerate(labels) if place and label != -100]
            sure = sorted(places, key=lambda place, row=row: outputs["frozen"].entropy[row, place].item())
            sure = sure[: int(0.4 * len(places))]
            coins = draws.coins_below(rate, torch.tensor([4 + row]), len(labels), 9, 5)[0].tolist()
            assert kept[row].tolist() == [not (place in sure and coins[place]) for place in range(len(labels))]
    many = draws.coins_below(0.3, torch.arange(100), 1000, 1, 2).double().mean().item()
    assert many == pytest.approx(0.3, abs=0.01)  # of 100,000 coins: seven standard deviations


@pytest.mark.parametrize("packed", [False, True])
def test_tf_idf_is_counted_in_documents(packed):
    batch = batch_of(packed=packed)
    corpus = [row["input_ids"] for row in token_data(9, seed=2)] + batch.input_ids[:2].tolist()
    strategy = TfIdf()
    strategy.prepare([{"input_ids": ids} for ids in corpus])
    weights = strategy.weigh_ids(batch)
    df = Counter(token for ids in corpus for token in set(ids))
    for row, ids in enumerate(batch.input_ids.tolist()):
        documents = [0] * len(ids) if batch.document_ids is None else batch.document_ids[row].tolist()
        for place, token in enumerate(ids):
            tf = sum(other == token and where == documents[place] for other, where in zip(ids, documents, strict=True))
            expected = (1 + math.log(tf)) * (1 + math.log((1 + len(corpus)) / (1 + df[token])))
            assert weights[row, place].item() == pytest.approx(expected, rel=1e-12)


def test_tf_idf_counts_packed_documents_apart_and_refuses_streams():
    strategy = TfIdf()
    strategy.prepare([{"input_ids": [5, 5, 6, 5], "position_ids": [0, 1, 0, 1]}, {"input_ids": [6]}])
    assert strategy._documents == 3 and strategy._frequency[5:7].tolist() == [2, 2]
    strategy.prepare([{"input_ids": [5, 0, 0], "attention_mask": [1, 0, 0]}])
    assert strategy._documents == 1 and strategy._frequency.tolist() == [0, 0, 0, 0, 0, 1], "padding is no token"
    with pytest.raises(ValueError, match="streamed"):
        strategy.prepare(iter([]))
    with pytest.raises(ValueError, match="prepare"):
        TfIdf().weigh_ids(batch_of())


@pytest.mark.parametrize("packed", [False, True])
def test_ngram_weights_have_the_gradient_of_the_penalty(packed):
    batch = batch_of(packed=packed)
    ours, frozen = statistics_of(batch, 1), statistics_of(batch, 2)
    nll = (-ours.log_probs).requires_grad_()
    penalty, n, count = 0.0, 3, 0
    for row, labels in enumerate(batch.labels.tolist()):
        for start in range(1, len(labels) - n + 1):
            span = range(start, start + n)
            crossing = packed and len({place // 7 for place in span}) > 1
            if crossing or any(labels[place] == -100 for place in span):
                continue
            sure = torch.exp(-nll[row, start : start + n].mean())
            before = torch.exp(frozen.log_probs[row, start : start + n].mean())
            penalty = penalty + torch.clamp(sure - before - 0.05, min=0)
            count += int(sure - before > 0.05)
    (nll.sum() + 1.5 * penalty).backward()
    strategy = NgramPenalty(length=n, weight=1.5, margin=0.05)
    weights = strategy.weigh_outputs(batch, {"model": ours, "frozen": frozen})
    assert count > 3 and torch.allclose(weights, nll.grad, rtol=1e-12, atol=0)
    assert (strategy.weigh_outputs(batch, {"model": frozen, "frozen": frozen}) == 1).all()


class Focal(LossStrategy):
    """Weighs a label by how unsure the model is of it."""

    sources = ("model",)
    denominator = "weights"

    def weigh_outputs(self, batch, outputs):
        return (1 - outputs["model"].log_probs.exp()) ** 2


def probabilities(model: torch.nn.Module, row: list[int]) -> torch.Tensor:
    """[S-1] negative log-likelihoods of an unpadded row, with their graph."""
    logits = model(input_ids=torch.tensor([row])).logits[0, :-1]
    return F.cross_entropy(logits, torch.tensor(row[1:]), reduction="none")


def test_a_step_is_the_weighted_mean_over_its_micro_batches(tmp_path):
    """A strategy of one's own: loss and SGD step by hand, over two micro-batches of unequal rows."""
    options = {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    before = tiny_model("llama").double()
    trainer = make_trainer(
        tmp_path, None, model=tiny_model("llama").double(), given={"loss_strategy": Focal()},
        **BRIEF | {"max_steps": 1, "train_sampling_strategy": "sequential", "weight_decay": 0.0, **options},
    )  # fmt: skip
    trainer.train()
    nll = torch.cat([probabilities(before, row["input_ids"]) for row in token_data(64, seed=0).select(range(8))])
    weights = (1 - nll.detach().neg().exp()) ** 2
    loss = (nll * weights).sum() / weights.sum()
    loss.backward()
    logged = trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert (
        logged["loss_all"] == pytest.approx(nll.mean().item(), rel=1e-6) and logged["goldfish_dropped_fraction"] == 0
    )
    for parameter, old in zip(trainer.model.parameters(), before.parameters(), strict=True):
        assert torch.allclose(parameter, old - 0.1 * old.grad, rtol=0, atol=1e-7)
    assert trainer._training_record.as_dict()["parts"][0]["strategy"] == "Focal"


def frozen_of(options: dict) -> dict:
    reads = options.get("loss_strategy") == "ngram" or options.get("entrodrop_source") == "frozen"
    if not reads:
        return {}
    torch.manual_seed(5)
    model = tiny_model("llama", num_hidden_layers=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
    return {"frozen_model": model}


def adapted(**options) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options)
        return get_peft_model(tiny_model("llama", num_hidden_layers=2), config)


def history_of(folder: Path, grid: Grid | None, options: dict) -> list[dict]:
    kept = {name: value for name, value in options.items() if value is not None}
    if kept.pop("adapters", False):
        return train(folder, grid, model=adapted(), **BRIEF | kept)
    own = frozen_of(options) if "loss_strategy" in kept else {"loss_strategy": Focal()}
    return train(folder, grid, model=tiny_model("llama", num_hidden_layers=2), given=own, **BRIEF | kept)


def histories(folder: Path, grids: list[Grid], cases: list[dict]) -> list[list]:
    return [[history_of(folder / "run", grid, options) for options in cases] for grid in grids]


@pytest.mark.slow
def test_rivals_on_grids_equal_one_process(tmp_path):
    """Train in float64 on 8 ragged rows a step, in two micro-batches; over context ranks have parts of these rows."""
    cases = [*RIVALS, {"loss_strategy": None}, RIVALS[-1] | {"adapters": True}]
    grids = [Grid(x=2), Grid(z=2), Grid(data=2), Grid(z=2, context=2), Grid(pipe=2)]
    truth = [history_of(tmp_path / "truth", None, options) for options in cases]
    last = [history[2]["grad_norm"] for history in truth]
    assert len({round(norm, 6) for norm in last}) == len(cases), "each trains otherwise"
    for found in run_ranks(histories, 2, tmp_path, grids, cases, timeout=500):
        for grid, runs in zip(grids, found, strict=True):
            worst = [worst_difference(ours, true) for ours, true in zip(runs, truth, strict=True)]
            assert max(worst) < 1e-10, (grid, worst)


def test_a_model_with_its_adapters_off_is_the_frozen_one(tmp_path):
    options = BRIEF | {"loss_strategy": "ngram", "ngram_length": 2, "ngram_margin": 0.0, "learning_rate": 0.05}
    given = {"frozen_model": tiny_model("llama", num_hidden_layers=2)}
    apart = train(tmp_path, model=adapted(), given=given, **options)
    assert train(tmp_path, model=adapted(), **options) == apart
    assert train(tmp_path, model=adapted(), **options | {"ngram_weight": 0.0}) != apart
    trained = r"still uses what is trained beside them \(base_model.model.model.norm.weight; 1 in all\)"
    model = adapted()
    model.base_model.model.model.norm.weight.requires_grad_()
    with pytest.raises(ValueError, match=trained):
        make_trainer(tmp_path, None, model=model, **options)


def test_settings_name_a_rival_and_wrong_ones_are_refused(tmp_path):
    def config(**options):
        return GoldfishConfig(str(tmp_path), use_cpu=True, report_to=[], **options)

    assert isinstance(config(loss_strategy="tf-idf").make_rival(), TfIdf) and config().make_rival() is None
    rival = config(loss_strategy="entrodrop", entrodrop_rate=0.3, entrodrop_share=0.2, goldfish_seed=4).make_rival()
    assert describe_loss(rival.settings()) == "entrodrop (rate=0.3, share=0.2, source=model, seed=4)"
    assert describe_loss(TfIdf().settings()) == "tf-idf"
    for options, message in (
        ({"loss_strategy": "salmon"}, "choose one of goldfish, entrodrop"),
        ({"loss_strategy": "ngram", "goldfish": False}, "set one"),
        ({"ngram_length": 3}, "is of loss_strategy=ngram, but loss_strategy is goldfish"),
        ({"loss_strategy": "ngram", "ngram_length": 0}, "at least 1"),
        ({"loss_strategy": "ngram", "ngram_weight": -1.0}, "at least 0"),
        ({"loss_strategy": "ngram", "ngram_margin": 2.0}, "from 0 to 1"),
        ({"loss_strategy": "entrodrop", "entrodrop_rate": 1.5}, "from 0 to 1"),
        ({"loss_strategy": "entrodrop", "entrodrop_share": 0.0}, "from 0 to 1"),
        ({"loss_strategy": "entrodrop", "entrodrop_source": "teacher"}, "model, frozen"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**options)
    model = tiny_model("llama")
    for args, given, message in (
        (config(loss_strategy="ngram"), {}, "reads a frozen model, but none is given"),
        (config(), {"frozen_model": tiny_model("llama")}, "reads no frozen model"),
        (config(loss_strategy="ngram"), {"frozen_model": model}, "load it a second time"),
        (config(goldfish=False), {"loss_strategy": Focal()}, "omit one"),
    ):
        with pytest.raises(ValueError, match=message):
            GoldfishTrainer(model=model, args=args, **given)


class Wide(LossStrategy):
    """Returns weights of the wrong shape."""

    def weigh_ids(self, batch):
        return batch.labels[:, 1:].double()


def test_weights_have_the_shape_of_labels(tmp_path):
    trainer = make_trainer(tmp_path, None, given={"loss_strategy": Wide()}, **BRIEF)
    with pytest.raises(ValueError, match=r"Wide returned weights of shape \(2, 19\) for labels of shape \(2, 20\)"):
        trainer._mask_batch(0, collate(list(token_data(2, seed=0))))


class Odd(LossStrategy):
    """Gives a label of each batch of the second step a weight, and NaN to those that nothing predicts."""

    def __init__(self, weight: float, denominator: str) -> None:
        self.weight, self.denominator = weight, denominator

    def weigh_ids(self, batch):
        weights = torch.ones_like(batch.labels, dtype=torch.float64)
        weights[:, 0] = math.nan
        if batch.step == 1:
            weights[0, 3] = self.weight
        return weights


@pytest.mark.parametrize(
    ("weight", "denominator", "said"),
    [
        (-0.5, "weights", "not finite or below 0, up to step 2: .* of at least 0, as it divides by their sum"),
        (math.inf, "kept", "not finite, up to step 2: these steps are wrong. Return finite numbers, or False"),
        (-0.5, "kept", ""),
        (0.0, "weights", ""),
    ],
)
def test_weights_that_make_a_step_wrong_end_training_with_a_log(tmp_path, weight, denominator, said):
    """Steps before it are logged; a penalty below 0 is for a strategy to choose where it is in no denominator."""
    trainer = make_trainer(tmp_path, None, given={"loss_strategy": Odd(weight, denominator)}, **BRIEF)
    if not said:
        trainer.train()
        assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history[:-1])
        return
    with pytest.raises(ValueError, match=f"Odd has given 2 kept labels weights that are {said}"):
        trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history] == [1]


class Forgotten(LossStrategy):
    """Has weigh_outputs, which nothing calls."""

    def weigh_outputs(self, batch, outputs):
        return outputs["model"].log_probs > -1


class Unread(LossStrategy):
    """Names a source whose outputs it does not read."""

    sources = ("model",)


class Misnamed(Focal):
    """Names a source that does not exist."""

    sources = ("frozen_model",)


class Text(Focal):
    """Names its source without a tuple."""

    sources = "model"


class Misspelt(Focal):
    """Names a denominator that does not exist."""

    denominator = "weight"


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Forgotten(), r"Forgotten has weigh_outputs and no sources, so that it is never called"),
        (Unread(), r"Unread has sources and no weigh_outputs"),
        (Misnamed(), r"the sources of Misnamed are \('frozen_model',\): write a tuple of some of model, frozen"),
        (Text(), r"the sources of Text are 'model': write a tuple"),
        (Misspelt(), r"the denominator of Misspelt is 'weight': choose one of kept, weights"),
        (Focal, r"loss_strategy is <class .*Focal'>: pass an object of a subclass of LossStrategy"),
    ],
    ids=lambda value: None if isinstance(value, str) else getattr(value, "__name__", type(value).__name__),
)
def test_a_strategy_that_would_do_something_else_is_refused(tmp_path, strategy, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, None, given={"loss_strategy": strategy}, **BRIEF)
