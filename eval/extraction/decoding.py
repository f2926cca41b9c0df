"""Greedy continuations of the model after the first token that is not the suffix's.

Rows come with the keys and values of the tokens before (kv_cache.py), so nothing is computed twice. They are decoded
together, and when some are done others that wait take their places, so that the batch stays full.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_axonn import parallel_state
from hf_axonn_eval.extraction.kv_cache import Row, join_rows
from hf_axonn_eval.extraction.scoring import core, device_of, first_largest, logits_after, read_logits


@dataclass
class _Request:
    key: int
    row: Row | None  # what comes before, until it is copied into the batch
    length: int  # tokens that the cache holds of it
    last: int
    want: int
    tokens: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.tokens) == self.want


class Decoder:
    """Decode many rows, a batch of them at a time.

    Args:
        model: a causal LM whose cache can be kept (`kv_cache.can_be_kept`).
        rows: in a forward pass.
    """

    def __init__(self, model, *, rows: int) -> None:
        self.model = model
        self.rows = rows
        self._waiting: list[_Request] = []
        self._live: list[_Request] = []
        self._cache = None
        self._idle = 0  # places in the batch, step by step, that were unused since the last copy

    def add(self, key: int, row: Row, token: int, want: int) -> None:
        """Ask for `want` tokens, one or more, after `token`, which follows the tokens of `row`."""
        self._waiting.append(_Request(key, row, row.length, token, want))

    def run(self, *, drain: bool) -> Iterator[tuple[int, list[int]]]:
        """Decode for as long as there are enough rows for a full batch, or with `drain` until none is left.

        A forward pass of one token a row and step; on a parallelized model collective over its x, y and z.

        Yields:
            the key of a row that is done, and its tokens.
        """
        while True:
            undone = [(place, request) for place, request in enumerate(self._live) if not request.done]
            left = len(undone) + len(self._waiting)
            if left == 0:
                self._live, self._cache, self._idle = [], None, 0
            if left == 0 or not drain and left < self.rows:
                return
            self._idle += (self.rows if self._waiting else len(self._live)) - len(undone)
            # to copy a row costs about half of what a step does: no more is lost than that, one way or the other
            if not undone or 2 * self._idle > len(undone):
                self._refill(undone)
                self._idle = 0
            yield from self._step()

    def _refill(self, undone: list[tuple[int, _Request]]) -> None:
        """Let waiting rows take the places of those that are done, and forget these."""
        free = self.rows - len(undone)
        columns = self._cache.get_seq_length() if self._cache is not None else 0
        rows = [Row(self._cache, place, columns - request.length, request.length) for place, request in undone]
        new, self._waiting = self._waiting[:free], self._waiting[free:]
        self._live = [request for _, request in undone] + new
        room = max(request.want - len(request.tokens) for request in self._live)
        self._cache = join_rows(rows + [request.row for request in new], room)
        for request in new:
            request.row = None  # the pass that it came from may be forgotten

    def _step(self) -> Iterator[tuple[int, list[int]]]:
        tokens = torch.tensor([[request.last] for request in self._live], device=device_of(self.model))
        columns = self._cache.get_seq_length()
        # rows that are done go along until they are replaced, and see nothing but their own last token
        padding = [columns if request.done else columns - request.length for request in self._live]
        logits = logits_after(self.model, tokens, padding, keep=1, cache=self._cache)
        (choices,) = read_logits(logits, lambda some: (first_largest(some),))
        for request, choice in zip(self._live, choices[:, -1].tolist(), strict=True):
            if not request.done:
                request.last = choice
                request.tokens.append(choice)
                request.length += 1
                if request.done:
                    yield request.key, request.tokens


def check_decoding(model, **decoding: Any) -> None:
    """Refuse to decode over a grid with context. No communication.

    Args:
        decoding: options of `extract` that decode; those that are set are named.
    Raises:
        ValueError: one is set, and the positions of a row are divided among ranks.
    """
    parallel, given = parallel_state(model), [name for name, value in decoding.items() if value]
    if given and parallel is not None and parallel.grid.context > 1:
        raise ValueError(
            f"{' and '.join(given)} over a grid with context ({parallel.grid}) is not possible: each rank has a part "
            "of the positions of a row, and decoding needs the keys and values of all. Score only: generate=False "
            "(--no_generation) without stop_early and near_copies; or load the checkpoint on a grid without context."
        )


@torch.no_grad()
def continue_greedily(model, prompts: Sequence[Sequence[int]], *, steps: int, beams: int = 1) -> list[list[int]]:
    """Return `steps` greedy tokens after each prompt: nothing but the model's own first choices.

    For models whose cache cannot be kept. Nothing ends a row early and nothing is penalized or suppressed, whatever
    the model's generation config says: the question is what the model holds, not how it is usually sampled. One
    `generate` call; on a parallelized model collective over its x, y and z, so all of these ranks must ask for the
    same number of steps, but in `weights_in_place` over x and y only.

    Args:
        prompts: token ids, of any lengths; they are padded on the left.
        steps: new tokens for every row.
        beams: of a beam search, whose likeliest continuation is returned; 1: greedy decoding.
    """
    from transformers import GenerationConfig

    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device_of(model))
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=tokens.device)
    config = GenerationConfig(do_sample=False, max_new_tokens=steps, pad_token_id=0, num_beams=beams)
    alone = {"synced_gpus": False} if (kept := _gather_cache(model)) is not None and kept.everything else {}
    with _neutral_generation_config(model):
        output = model.generate(input_ids=tokens, attention_mask=mask, generation_config=config, **alone)
    return output[:, width:].tolist()


@contextlib.contextmanager
def weights_in_place(model) -> Iterator[None]:
    """Gather the weights of a grid with z > 1 in the first pass, and keep them: later passes need no other rank of z.

    All ranks must make a first pass, and only there wait for each other. Memory: that of the same grid with z = 1.
    Nothing happens for other models.
    """
    kept = _gather_cache(model)
    with kept.keep_everything() if kept is not None else contextlib.nullcontext():
        yield


def _gather_cache(model):
    parallel = parallel_state(model)
    return parallel.gather_cache if parallel is not None and parallel.grid.z > 1 else None


@contextlib.contextmanager
def _neutral_generation_config(model) -> Iterator[None]:
    """Take the model's own generation config away.

    `generate` fills every field that its caller left at None from it: an EOS to stop at, a penalty, a list of
    suppressed tokens. None of them can be undone from outside.
    """
    from transformers import GenerationConfig

    owners = list(dict.fromkeys([model, core(model)]))
    kept = [owner.generation_config for owner in owners]
    for owner in owners:
        owner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for owner, config in zip(owners, kept, strict=True):
            owner.generation_config = config
