"""Embedding and head on their own: look-ups, logits, the padding word, and words that are none."""

import pytest
import torch
from torch import nn

from hf_axonn import parallel_state, parallelize
from hf_axonn.engine.activation_layouts import Tokens
from hf_axonn.engine.gradient_sync import sync_gradients
from hf_axonn.layers.vocabulary import DeferredLogits
from hf_axonn.topology.grid import Grid
from tests.helpers.devices import seeded
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks


pytestmark = pytest.mark.usefixtures("device")


GRIDS = [Grid(y=2, x=2), Grid(z=2, x=2), Grid(z=2, y=2)]


class WordModel(nn.Module):
    """An embedding and a head with a bias, which no model of ours has."""

    def __init__(self, size=11, width=6, padding_idx=None):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(size, width, padding_idx=padding_idx, dtype=torch.float64)
        self.head = nn.Linear(width, size, dtype=torch.float64)

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):
        return self.head(self.table(ids))


def same_as_one_process(size, padding_idx):
    ids = torch.tensor([[0, 1, 2, size - 1], [2, 2, 1, 0]])
    truth = WordModel(size, padding_idx=padding_idx)
    expected = truth(ids)
    weights = torch.randn(expected.shape, generator=seeded(1), dtype=torch.float64)
    (expected * weights).sum().backward()
    for grid in GRIDS:
        model, report = parallelize(WordModel(size, padding_idx=padding_idx), grid)
        assert [(entry.name, entry.kind) for entry in report.entries] == [
            ("table", "vocabulary"),
            ("head", "vocabulary"),
        ]
        output = model(ids)
        torch.testing.assert_close(output, expected)
        check_spread_logits(model, ids[:, 1:], expected[:, 1:].detach())  # tokens that no four ranks share evenly
        (output * weights).sum().backward()
        sync_gradients(model)
        for (name, parameter), its in zip(model.named_parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), its.grad, msg=f"{name} {grid}")


def check_spread_logits(model, ids, expected):
    """Each rank forms logits of its share of the tokens, and all get what each makes of them."""
    shapes = []

    def read(logits, words):
        shapes.append(logits.shape)
        return logits.gather(-1, words.unsqueeze(-1)).squeeze(-1), logits.argmax(-1)

    with torch.no_grad(), parallel_state(model).context.spreading_logits():
        logits = model(ids)
        of_words, largest = logits.map_positions(read, ids)
        assert logits.shape == expected.shape and logits._full is None
    torch.testing.assert_close(of_words, expected.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
    assert torch.equal(largest, expected.argmax(-1))
    torch.testing.assert_close(logits.full(), expected)
    assert logits.full().stride(-1) == 1  # who looks through the numbers of a place finds them side by side
    ranks = parallel_state(model).grid_mesh.size("x", "y")
    assert shapes == [(1, -(-ids.numel() // ranks), expected.shape[-1])]


@pytest.mark.parametrize("size", [11, 3])
def test_look_up_and_logits(size):
    """With 3 words on 4 ranks some hold none."""
    run_ranks(same_as_one_process, 4, size, None)


def test_the_padding_word_gets_no_gradient():
    run_ranks(same_as_one_process, 4, 11, 2)


def outside_of_the_vocabulary():
    model, _ = parallelize(tiny_model("llama"), Grid(x=2))
    for ids in ([[1, 131]], [[-1, 2]]):
        try:
            model(input_ids=torch.tensor(ids))
        except ValueError as error:
            assert "outside of the vocabulary of 131" in str(error)
        else:
            raise AssertionError("an id that is no word was looked up")


def test_an_id_outside_of_the_vocabulary_is_an_error_on_every_rank():
    run_ranks(outside_of_the_vocabulary, 2)


class ScaledWordEmbedding(nn.Embedding):
    """As Bart and Gemma have it."""

    embed_scale = torch.tensor(3.0, dtype=torch.float64)

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale


class BentEmbedding(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids).tanh()


class ManyTables(nn.Module):
    """Embeddings of several sizes and classes; one lends its weight to a Linear that is no head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = ScaledWordEmbedding(13, 6)
        self.positions = nn.Embedding(5, 6)
        self.kinds = nn.Embedding(2, 6)
        self.bent = BentEmbedding(13, 6)
        self.lent = nn.Embedding(13, 6)
        self.scores = nn.Linear(6, 13)
        self.scores.weight = self.lent.weight

    def forward(self, ids):
        hidden = self.words(ids) + self.positions(torch.arange(ids.shape[1])) + self.kinds(ids % 2)
        return self.scores(hidden * self.bent(ids) + self.lent(ids))


def tables_as_on_one_process():
    ids = torch.tensor([[0, 1, 2, 12, 5], [2, 2, 1, 0, 7]])
    truth = ManyTables().double()
    expected = truth(ids)
    expected.square().sum().backward()
    for grid in GRIDS:
        model, report = parallelize(ManyTables().double(), grid)
        output = model(ids)
        torch.testing.assert_close(output, expected)
        output.square().sum().backward()
        sync_gradients(model)
        for (name, parameter), its in zip(model.named_parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), its.grad, msg=f"{name} {grid}")
    return {entry.name: entry.kind for entry in report.entries}


def test_which_tables_are_cut_and_that_all_are_right():
    assert run_ranks(tables_as_on_one_process, 4)[0] == {
        "words": "vocabulary",
        "positions": "vocabulary",
        "kinds": "gathered",  # much smaller than the largest
        "bent": "gathered",  # its forward is its own
        "lent": "replicated",  # two modules use it in different ways
        "scores": "replicated",
    }


def test_logits_that_are_not_formed_have_the_operators_of_a_tensor():
    full = torch.arange(6.0).view(1, 2, 3)
    logits = DeferredLogits(None, full, Tokens(1, 2, sharded=True))
    logits._full = full.clone()
    for made, of_tensor in [
        (logits - 1, full - 1),
        (1 - logits, 1 - full),
        (1 + logits, 1 + full),
        (-logits, -full),
        (logits**2, full**2),
        (logits > 2, full > 2),
        (logits == full, full == full),
        (logits != logits, full != full),
        (torch.stack([*logits]), full),
    ]:
        assert made.equal(of_tensor)
    logits[..., 0] = 7
    assert (logits[..., 0] == 7).all() and len(logits) == 1 and isinstance(hash(logits), int)
