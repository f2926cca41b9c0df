"""The steps of a case computed again, on this process in float64, from the parameters that the run had before each.

So one step does not hide the next one's mistake. explain.py and own_dtype.py compare with what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from hf_axonn.certificate.compare import Runs
from hf_axonn.certificate.float64 import Float64
from hf_axonn.certificate.hypotheses import (
    BATCH_MEANS,
    RANK_MEANS,
    TOKENS,
    MicroBatch,
    Positions,
    average,
    close,
    weigh,
)
from hf_axonn.certificate.job import FLOAT64, WITNESS, Job
from hf_axonn.certificate.loading import load_model, script_model
from hf_axonn.certificate.recording import Record
from hf_axonn.certificate.rounding import Batch, Context, Step
from hf_axonn.certificate.rows import collate, labels_of, pack, seen_in, spans, tokens_of
from hf_axonn.certificate.shards import assemble


OF_LABELS = ("ForMaskedLM", "ForTokenClassification")  # ends of classes whose loss is of the label at each place


class Steps:
    """Compute the steps of a case again.

    Args:
        job, runs, path: the case.
    Attributes:
        model: in float64, with the parameters of the last step that was computed.
        collate: makes a batch of rows.
        count: counts a batch's tokens as the run does.
    Raises:
        KeyError: the class of a script's model is none of Transformers.
    """

    def __init__(self, job: Job, runs: Runs, path: str) -> None:
        self.job, self.runs, self.path = job, runs, path
        self.model = script_model(runs.one) if job.script else load_model(job, parallel=False)
        self.collate = pack if job.packing else collate
        self._rows = [] if job.script else job.rows
        encodes = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        shifts = not job.script or not encodes and not type(self.model).__name__.endswith(OF_LABELS)
        self._predicted = tokens_of if shifts else labels_of
        self.count = self._find_count()
        # Trainer smooths labels, a loop of Accelerate does not; replicas in another dtype do not know of it.
        smooths = path != "loop" and job.dtype == FLOAT64
        smoothing = runs.one.facts["smoothing"] if job.script else job.trainer.get("label_smoothing_factor")
        self._smoothing = float(smoothing or 0.0) if smooths else 0.0
        self._decay = float(job.trainer.get("weight_decay", 0.0)) if path == "trainer" else 0.0
        unused: Any = None  # the method asks nothing of its Trainer
        self._decayed = set(Trainer.get_decay_parameter_names(unused, self.model) if self._decay else ())

    def _find_count(self) -> Callable[[Mapping[str, Tensor]], int]:
        """Find how the run counts tokens.

        Trainer counts those that are predicted, or all labels, as it knows the model's loss; a loop those that the
        loss is a mean over, which is of all labels where it does not shift them.
        """
        one = self.runs.one
        counted = one.facts.get("counted") or [None]
        if self.job.script:
            if counted[0] is None:
                return self._predicted
            return labels_of if counted[0] == labels_of(one.batches(1)[0]) else tokens_of
        at = 0
        for batches in one.samples:  # the first step in which both differ
            whole = collate([self._rows[index] for batch in batches for index in batch])
            if tokens_of(whole) != labels_of(whole):
                return labels_of if counted[at] == labels_of(whole) else tokens_of
            at += len(batches) if len(counted) > 1 else 0
        return tokens_of

    @property
    def documented(self) -> tuple[str, ...]:
        """The means of means that the user, or the model's class, asks for."""
        facts = self.runs.one.facts
        if self.job.script:  # a loop's loss is what its script says; a Trainer's is what its arguments say
            of_ranks = not facts["trainer"] or not facts["averages"] or not facts["sums_tokens"]
        else:
            of_ranks = self.path != "loop" and self.job.trainer.get("average_tokens_across_devices") is False
        return (BATCH_MEANS,) * (not facts["sums_tokens"]) + (RANK_MEANS,) * of_ranks

    @property
    def mean(self) -> str:
        """The mean of the losses that the ranks compute."""
        return next(iter(self.documented), TOKENS)

    def before(self, step: int) -> dict[str, Tensor]:
        """Return the parameters that the parallel run had before a step, counted from 1."""
        return assemble(record.parameters(step - 1) for record in self.runs.many)

    def inputs(self, record: Record, step: int) -> list[Batch]:
        """Return the micro-batches of a rank in a step, without those of rows that are not known."""
        kept = record.batches(step) if self.job.script else []
        return [
            kept[index] if self.job.script else self.collate([self._rows[row] for row in rows])
            for index, rows in enumerate(record.samples[step - 1])
            if rows and min(rows) >= 0
        ]

    def compute(self, before: Mapping[str, Tensor], inputs: Iterable[Iterable[Batch]]) -> list[list[MicroBatch]]:
        """Compute the micro-batches of all positions.

        Args:
            before: the parameters.
            inputs: of each position its micro-batches.
        Raises:
            KeyError: a script has changed the model after it was loaded.
        """
        put(self.model.train(), before)
        return [[self._compute(batch) for batch in position] for position in inputs]

    def _compute(self, inputs: Batch) -> MicroBatch:
        tokens = self._predicted(inputs)
        self.model.zero_grad()
        with Float64():
            loss = self.mean_loss(inputs) * tokens
            loss.backward()
        gradients = {name: weight.grad for name, weight in self.model.named_parameters() if weight.grad is not None}
        return MicroBatch(gradients, float(loss.detach()), tokens, self.count(inputs), inputs)

    def mean_loss(self, inputs: Batch) -> Tensor:
        """Return the mean loss of a batch: the model's own, or that of smoothed labels, as Trainer has it."""
        if not self._smoothing:
            own: Tensor = self.model(**inputs).loss
            return own
        outputs = self.model(**{name: value for name, value in inputs.items() if name != "labels"})
        smoother = LabelSmoother(epsilon=self._smoothing)
        smoothed: Tensor = smoother(outputs, inputs["labels"], shift_labels=True)
        return smoothed

    def change(self, step: Step, before: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
        """Return by how much SGD changes each parameter, computed in the dtype of `before`.

        Args:
            step: loss and gradients.
            before: the parameters.
            index: of the step, from 0.
        """
        one = self.runs.one
        rate = one.logged[index]["learning_rate"] if one.logged else self.job.rate(WITNESS)
        most = float(self.job.trainer.get("max_grad_norm", 1.0))
        clip = min(1.0, most / (step.norm + 1e-6)) if most > 0 else 1.0
        changes = {}
        for name, weight in before.items():
            gradient = torch.zeros_like(weight)
            if name in step.gradients:
                gradient = step.gradients[name].to(weight.dtype) * clip
                gradient = gradient + self._decay * weight if self._decay and name in self._decayed else gradient
            changes[name] = torch.add(weight, gradient, alpha=-rate).double() - weight.double()
        return changes

    def find_evaluation(self, groups: Sequence[Sequence[int]]) -> str:
        """Return the kind of the evaluation loss that all ranks have: a key of `known_evaluations`, or "other"."""
        losses = [record.evaluation["loss"] for record in self.runs.many]
        for kind, expected in self.known_evaluations(groups).items():
            if all(close(loss, expected) for loss in losses):
                return kind
        return "other"

    @torch.no_grad()
    def known_evaluations(self, groups: Sequence[Sequence[int]]) -> dict[str, float]:
        """Return the evaluation losses that are known, of the run's own last parameters.

        Trainer's loss is a mean over batches: of "one" process, of batches that Accelerate has "filled" up, or of
        those that are "counted" once for each rank that has them, but for the last one.
        """
        job, runs = self.job, self.runs
        put(self.model.eval(), self.before(job.steps + 1))
        sums_tokens = runs.one.facts["sums_tokens"]
        averaged = sums_tokens and job.trainer.get("average_tokens_across_devices") is not False
        whole, split = job.batch * job.positions, job.loaders["split_batches"]

        def evaluate(rounds: Sequence[Sequence[Sequence[int]]], same: int) -> float:
            losses: list[float] = []
            for rows_of_positions in rounds:  # at a time
                sums, tokens = [], []
                for rows in rows_of_positions:
                    batch = self.collate([job.evaluation_rows[row] for row in rows])
                    with Float64():
                        sums.append(float(self.mean_loss(batch)) * tokens_of(batch))
                    tokens.append(self.count(batch) if sums_tokens else tokens_of(batch))
                of_round: list[float] = []
                for total, number, rows in zip(sums, tokens, rows_of_positions, strict=True):
                    loss = total * len(rows_of_positions) / sum(tokens) if averaged else total / number
                    of_round += [loss] * (whole if split else len(rows)) * same
                last = rows_of_positions is rounds[-1]
                losses += of_round[: len(job.evaluation_rows) % whole or whole] if last else of_round
            return sum(losses) / len(losses)

        alone = [[rows] for rows in runs.one.evaluation["rows"]]
        together = zip(*(runs.many[group[0]].evaluation["rows"] for group in groups), strict=False)
        filled = [[rows for rows in rows_of_positions if rows] for rows_of_positions in together]
        return {
            "one": evaluate(alone, 1),
            "filled": evaluate(filled, 1),
            "counted": evaluate(filled, job.ranks // job.positions),
        }

    @torch.no_grad()
    def compute_logits(self, model: nn.Module, context: Context) -> tuple[float, dict[int, Tensor]]:
        """Return the mean loss over the tokens of the evaluation, and the logits of each of its rows, by a model."""
        rows = self.job.evaluation_rows
        total, tokens, logits = 0.0, 0, {}
        for indices in self.runs.one.evaluation["rows"]:
            batch = self.collate([rows[index] for index in indices])
            with context():
                outputs = model(**batch)
            total += float(outputs.loss.to(next(model.parameters()).dtype)) * tokens_of(batch)
            tokens += tokens_of(batch)
            for index, (line, places) in zip(seen_in(batch, rows), spans(batch), strict=True):
                logits[index] = outputs.logits[line, places]
        return total / tokens, logits


def average_step(positions: Positions, mean: str) -> Step:
    """Return loss and gradients of a step in float64, averaged in one way (a key of WEIGHTS)."""
    loss = sum(batch.loss * weight for own in weigh(positions, mean) for batch, weight in own)
    return Step(loss, average(positions, mean))


def weigh_inputs(positions: Positions, mean: str) -> list[tuple[Batch, float]]:
    """Return the inputs of all micro-batches, with the weights of their mean losses in a mean."""
    return [(batch.inputs, batch.tokens * weight) for own in weigh(positions, mean) for batch, weight in own]


@torch.no_grad()
def put(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a model these parameters."""
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])
