"""Rows that are decoded together: what comes of them, and how few steps and copies it takes."""

import functools

import pytest
import torch

from hf_axonn_eval.extraction import decoding
from hf_axonn_eval.extraction.decoding import Decoder
from hf_axonn_eval.extraction.kv_cache import Row, empty_cache
from hf_axonn_eval.extraction.scoring import last_logits
from tests.helpers.eval_families import family, generated


LENGTHS = (9, 4, 7, 9, 5, 6, 9, 3, 8)
PROMPTS = tuple(tuple((7 * row + 3 * place) % 96 for place in range(length)) for row, length in enumerate(LENGTHS))
LONGEST = 12


@functools.cache
def answers() -> list[list[int]]:
    """What the model says after each of PROMPTS."""
    model = family("llama")
    return [generated(model, prompt, LONGEST) for prompt in PROMPTS]


class Told(Decoder):
    """A decoder that is given rows by the place of their prompt, after the first token of the answer."""

    def __init__(self, *, rows: int) -> None:
        super().__init__(family("llama"), rows=rows)
        self.steps: list[int] = []
        forward = self.model.forward

        @functools.wraps(forward)
        def noted(input_ids, **options):
            if input_ids.shape[1] == 1:
                self.steps.append(len(input_ids))
            return forward(input_ids=input_ids, **options)

        self.model.forward = noted

    def ask(self, *wants: tuple[int, int]) -> None:
        """Pairs of a place and a number of tokens."""
        cache = empty_cache()
        last_logits(self.model, [PROMPTS[place] for place, _ in wants], keep=1, cache=cache)
        width = max(len(PROMPTS[place]) for place, _ in wants)
        for number, (place, want) in enumerate(wants):
            length = len(PROMPTS[place])
            self.add(place, Row(cache, number, width - length, length), answers()[place][0], want)

    def reported(self, *, drain: bool) -> dict[int, list[int]]:
        """What is done, and that it is what the model says."""
        found = dict(self.run(drain=drain))
        for place, tokens in found.items():
            assert tokens == answers()[place][1 : 1 + len(tokens)]
        return {place: len(tokens) for place, tokens in found.items()}


@pytest.mark.parametrize(
    ("rows", "wants", "steps", "copies"),
    [
        (4, [3, 3, 3, 3], [4, 4, 4], 1),
        (9, [5], [1] * 5, 1),
        # a row that is done goes along until what is lost with it is more than half a step of the others
        (4, [1, 4, 4, 4], [4, 4, 3, 3], 2),
        (4, [1, 1, 4, 4], [4, 2, 2, 2], 2),
        (9, [1, 9, 9, 9, 9, 9, 9, 9, 9], [9, 9, 9, 9, 9, 8, 8, 8, 8], 2),
        # or until others that wait take its place
        (4, [1, 3, 3, 3, 3], [4, 4, 4, 1, 1], 3),
        (2, [1, 1, 1, 1, 1], [2, 2, 1], 3),
        (1, [2, 1, 3], [1] * 6, 3),
        # a batch that is not full while others wait is filled up at once
        (3, [1, 1, 6, 6, 6], [3] * 7, 2),
    ],
)
def test_steps_and_copies(monkeypatch, rows, wants, steps, copies):
    decoder, copied, join_rows = Told(rows=rows), [], decoding.join_rows
    monkeypatch.setattr(decoding, "join_rows", lambda some, room: copied.append(len(some)) or join_rows(some, room))
    decoder.ask(*enumerate(wants))
    assert decoder.reported(drain=True) == dict(enumerate(wants))
    assert (decoder.steps, len(copied)) == (steps, copies)
    assert decoder._cache is None and decoder._live == [], "nothing stays in memory"


def test_without_draining_only_full_batches_are_decoded():
    decoder = Told(rows=3)
    decoder.ask((0, 2), (1, 5))
    assert decoder.reported(drain=False) == {} and decoder.steps == []
    decoder.ask((2, 4))
    assert decoder.reported(drain=False) == {0: 2} and decoder.steps == [3, 3], (
        "two are left, with 3 and 2 tokens to go"
    )
    decoder.ask((3, 3))
    assert decoder.reported(drain=False) == {2: 4} and decoder.steps[2:] == [3, 3]
    assert decoder.reported(drain=True) == {1: 5, 3: 3}
    assert decoder.reported(drain=True) == decoder.reported(drain=False) == {}
    decoder.ask((8, 11))
    assert decoder.reported(drain=True) == {8: 11}


def test_a_row_that_goes_along_when_it_is_done_disturbs_nobody():
    """Beside rows of other lengths, and rows that came later."""
    decoder = Told(rows=4)
    decoder.ask((0, 1), (1, 8), (2, 3), (4, 2))
    decoder.ask((5, 7), (7, 9))
    assert decoder.reported(drain=True) == {0: 1, 1: 8, 2: 3, 4: 2, 5: 7, 7: 9}


def test_the_generation_config_comes_back_after_an_error():
    model = family("llama")
    config = model.generation_config
    with pytest.raises(RuntimeError, match="stop"), decoding._neutral_generation_config(model):
        assert model.generation_config is not config
        raise RuntimeError("stop")
    assert model.generation_config is config
    with torch.no_grad(), decoding.weights_in_place(model):
        pass
