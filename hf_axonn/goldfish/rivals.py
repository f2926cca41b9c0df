"""Other losses against memorization, as strategies of `GoldfishTrainer` (strategy.py).

    entrodrop   leaves out labels where a model is sure, more of them the longer training lasts     2512.23422
    tf-idf      weighs a label by how rare its token is among the training documents                TF-IDF loss
    ngram       weighs down n-grams that the model has come to know better than a frozen one        2510.11372

The full texts of these papers were not at hand when this was written: docs/rivals.md says which details are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_axonn.engine.documents import document_fields, find_document_ids
from hf_axonn.goldfish import draws
from hf_axonn.goldfish.strategy import SOURCES, LossStrategy, Source, TokenStatistics, TrainingBatch
from hf_axonn.losses.causal_lm import IGNORE_INDEX, widest_float


STEEPNESS = 10.0  # of EntroDrop's schedule, over the whole training


class EntroDrop(LossStrategy):
    """Leave out labels of low entropy, by a schedule.

    Candidates are the `share` of a row's labels that `source` predicts with the lowest entropy. At each step each
    candidate is left out with probability rate / (1 + exp(-10 * (progress - 1/2))): few early, `rate` at the end.

    Args:
        rate: the largest probability, from 0 to 1.
        share: of a row's labels, above 0 and up to 1.
        source: whose entropies.
        seed: of the coins, which also depend on the step and the row's place in it.
    Raises:
        ValueError: a number out of range, or an unknown source.
    Source: arXiv 2512.23422 (entropy-guided token dropout).
    """

    def __init__(self, *, rate: float = 0.5, share: float = 0.5, source: Source = "model", seed: int = 42) -> None:
        if not 0 <= rate <= 1:
            raise ValueError(f"entrodrop_rate is {rate}: the share of candidates that is left out is from 0 to 1.")
        if not 0 < share <= 1:
            raise ValueError(f"entrodrop_share is {share}: the share of labels that may be left out is from 0 to 1.")
        if source not in SOURCES:
            raise ValueError(f"entrodrop_source is {source!r}: choose one of {', '.join(SOURCES)}.")
        self.rate, self.share, self.seed = rate, share, seed
        self.sources = (source,)

    def weigh_outputs(self, batch: TrainingBatch, outputs: Mapping[str, TokenStatistics]) -> Tensor:
        """Return [B, S] bool: False for a candidate whose coin says so."""
        targets = batch.targets
        entropy = outputs[self.sources[0]].entropy.masked_fill(~targets, math.inf)
        candidates = (targets.sum(dim=1, keepdim=True) * self.share).long()
        rank = entropy.argsort(dim=1, stable=True).argsort(dim=1)
        probability = self.rate / (1 + math.exp(-STEEPNESS * (batch.progress - 0.5)))
        samples = batch.sample_ids.to(entropy.device).long()
        coins = draws.coins_below(probability, samples, entropy.shape[1], self.seed, batch.step)
        return ~((rank < candidates) & targets & coins)

    def settings(self) -> dict[str, Any]:
        """Return the settings, for the training record."""
        about = {"rate": self.rate, "share": self.share, "source": self.sources[0], "seed": self.seed}
        return {"strategy": "entrodrop", **about}


class TfIdf(LossStrategy):
    """Weigh a label by TF-IDF: (1 + ln tf) * (1 + ln((1 + N) / (1 + df))).

    tf is how often its token is in its document as the batch has it, df in how many of the N training documents. The
    denominator is the sum of the weights. `prepare` counts df over all rows of the training set, once.
    """

    denominator = "weights"

    def __init__(self) -> None:
        self._frequency: Tensor | None = None
        self._documents = 0

    def prepare(self, train_dataset: Any) -> None:
        """Count in how many documents each token is.

        Raises:
            ValueError: the rows are streamed, or have no input_ids.
        """
        if not isinstance(train_dataset, Sized):
            raise ValueError(
                "loss_strategy=tf-idf counts tokens in all training documents before it starts, but the rows are "
                "streamed: pass a data set with a length."
            )
        counts: dict[int, int] = {}
        self._documents = 0
        for place in range(len(train_dataset)):
            row = train_dataset[place]  # type: ignore[index]
            if "input_ids" not in row:
                raise ValueError(
                    f"row {place} of the training set has no input_ids, which loss_strategy=tf-idf counts."
                )
            ids = torch.as_tensor(row["input_ids"]).view(1, -1)
            fields = {name: torch.as_tensor(value).view(1, -1) for name, value in row.items() if name in _FIELDS}
            numbers = find_document_ids(ids, **document_fields(fields))
            padding = fields["attention_mask"] == 0 if "attention_mask" in fields else torch.zeros_like(ids).bool()
            documents = [ids] if numbers is None else [ids[numbers == number] for number in numbers.unique()]
            pads = [padding] if numbers is None else [padding[numbers == number] for number in numbers.unique()]
            for document, pad in zip(documents, pads, strict=True):
                found = set(document[~pad].tolist())
                self._documents += bool(found)
                for token in found:
                    counts[token] = counts.get(token, 0) + 1
        frequency = torch.zeros(max(counts, default=0) + 1, dtype=torch.float64)
        frequency[list(counts)] = torch.tensor([float(count) for count in counts.values()], dtype=torch.float64)
        self._frequency = frequency

    def weigh_ids(self, batch: TrainingBatch) -> Tensor:
        """Return [B, S] weights, all above 0.

        Raises:
            ValueError: `prepare` has not counted.
        """
        if self._frequency is None:
            raise ValueError("TfIdf weighs a batch before it has counted: call prepare(train_dataset) first.")
        labels = batch.labels
        tokens = torch.where(labels == IGNORE_INDEX, batch.input_ids, labels).long()
        wide = widest_float(tokens.device)
        table = self._frequency = self._frequency.to(tokens.device, wide)
        df = torch.where(tokens < len(table), table[tokens.clamp(max=len(table) - 1)], 0)
        idf = 1 + torch.log((1 + self._documents) / (1 + df))
        return (1 + torch.log(_count_in_document(tokens, batch.document_ids).to(wide))) * idf

    def settings(self) -> dict[str, Any]:
        """Return the settings, for the training record."""
        return {"strategy": "tf-idf"}


class NgramPenalty(LossStrategy):
    """Penalize n-grams that the model has come to be surer of than a frozen one.

    With P(g) the geometric mean of the probabilities of the n labels of an n-gram g, the gradient is that of

        1/N * (sum of nll + weight * sum over g of max(0, P(g) - P_frozen(g) - margin))

    over the N labels and the n-grams of labels in a row, inside of a document. The logged loss is the sum of weighted
    nll that has this gradient: the weight of a label is 1 - weight / n * sum of P(g) over the penalized g with it.

    Args:
        length: n, at least 1.
        weight: of the penalty, at least 0. At 1 a label whose n-grams are known for certain is no longer learnt; above
            1 it is unlearnt.
        margin: by how much the model may be surer, from 0 to 1.
    Raises:
        ValueError: a number out of range.
    Source: arXiv 2510.11372 (n-gram-aware loss regularizer).
    """

    sources = ("model", "frozen")

    def __init__(self, *, length: int = 4, weight: float = 1.0, margin: float = 0.1) -> None:
        if length < 1:
            raise ValueError(f"ngram_length is {length}: an n-gram has at least 1 token.")
        if weight < 0:
            raise ValueError(f"ngram_weight is {weight}: the weight of the penalty is at least 0.")
        if not 0 <= margin <= 1:
            raise ValueError(f"ngram_margin is {margin}: a difference of probabilities is from 0 to 1.")
        self.length, self.weight, self.margin = length, weight, margin

    def weigh_outputs(self, batch: TrainingBatch, outputs: Mapping[str, TokenStatistics]) -> Tensor:
        """Return [B, S] weights: 1 for a label of no penalized n-gram, else less."""
        n, wide = self.length, widest_float(batch.labels.device)
        ours, theirs = (outputs[source].log_probs.to(wide) for source in self.sources)
        if ours.shape[1] < n:
            return torch.ones_like(ours)
        known, before = (each.unfold(1, n, 1).mean(dim=-1).exp() for each in (ours, theirs))
        whole = batch.targets.unfold(1, n, 1).all(dim=-1)
        if batch.document_ids is not None:
            numbers = batch.document_ids.expand_as(batch.labels).unfold(1, n, 1)
            whole &= (numbers == numbers[..., :1]).all(dim=-1)
        penalty = torch.where(whole & (known - before > self.margin), known, 0) * (self.weight / n)
        return 1 - F.pad(penalty, (n - 1, n - 1)).unfold(1, n, 1).sum(dim=-1)

    def settings(self) -> dict[str, Any]:
        """Return the settings, for the training record."""
        return {"strategy": "ngram", "length": self.length, "weight": self.weight, "margin": self.margin}


_FIELDS = ("position_ids", "seq_idx", "attention_mask")


def _count_in_document(tokens: Tensor, document_ids: Tensor | None) -> Tensor:
    """Return [B, S] how often each token is in its document."""
    rows = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
    numbers = torch.zeros_like(tokens) if document_ids is None else document_ids.expand_as(tokens)
    keys = torch.stack([rows, numbers, tokens], dim=-1).view(-1, 3)
    _, place, counts = keys.unique(dim=0, return_inverse=True, return_counts=True)
    found: Tensor = counts[place].view_as(tokens)
    return found
