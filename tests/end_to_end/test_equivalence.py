"""A grid changes where numbers live, never what they are: loss, gradients, clipped norm, parameters after 5 steps.

`python -m tests.end_to_end.test_equivalence` prints the table of docs/numerics.md.
"""

import contextlib
import functools
import itertools

import pytest
import torch

from hf_axonn.config import AxonnConfig, Overlap
from hf_axonn.topology.grid import Grid
from tests.helpers.devices import rank_device
from tests.helpers.equality import Case, compare, local, too_large, worst_ratio
from tests.helpers.float64 import checkpointed, relative_errors
from tests.helpers.models import BLOCKWISE, tiny_batch, tiny_model
from tests.helpers.ranks import all_grids, run_ranks


pytestmark = pytest.mark.usefixtures("device")


FIVE_STEPS = 5
TWO_STEPS = 2  # the second with what the first has changed: weights, moments and the order of gathers
EIGHT_RANKS = [Grid(data=2, z=2, y=2), Grid(z=2, y=2, x=2), Grid(data=2, y=2, x=2), Grid(data=2, z=2, x=2)]
SIX_RANKS = [Grid(y=2, x=3)]


def five_steps(kind, steps=FIVE_STEPS):
    # One of them clips and steps as Trainer does: it has tied weights, and is on grids of every size.
    return Case(kind, functools.partial(tiny_model, kind), steps=steps, as_trainer=kind == "smollm2")


two_steps = functools.partial(five_steps, steps=TWO_STEPS)


def run(cases, grids, timeout=240):
    """Each case on each grid, all in one launch; the errors by (case, grid)."""
    world = grids[0].size
    with_truth = [(case, case.truth()) for case in cases]
    return run_ranks(compare, world, with_truth, grids, timeout=timeout)[0]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_five_steps_on_every_grid(world):
    table = run([five_steps(kind) for kind in BLOCKWISE], all_grids(world))
    assert len(table) == len(BLOCKWISE) * {1: 1, 2: 4}[world]
    assert not too_large(table, 1e-10)


def test_some_steps_on_grids_of_four():
    """One model on each grid of data and another axis; on y and x the one that is trained as by Trainer, five steps.

    On z and x, which cut weights twice, the one with norms of heads. The other axes two by two are those of the eight
    ranks below, and every model is on every grid in the slow tests.
    """
    some = [
        (two_steps("llama"), [Grid(data=2, **{axis: 2}) for axis in "zyx"]),
        (five_steps("smollm2"), [Grid(y=2, x=2)]),
        (two_steps("qwen3"), [Grid(z=2, x=2)]),
    ]
    table = run_ranks(compare_some, 4, [(case, case.truth(), grids) for case, grids in some])[0]
    assert len(table) == 5
    assert not too_large(table, 1e-10)


def compare_some(some):
    tables = [compare([(case, truth)], grids) for case, truth, grids in some]
    return {case: errors for table in tables for case, errors in table.items()}


@pytest.mark.slow
def test_five_steps_of_every_model_on_every_grid_of_four():
    table = run([five_steps(kind) for kind in BLOCKWISE], all_grids(4), timeout=560)
    assert len(table) == len(BLOCKWISE) * 10
    assert not too_large(table, 1e-10)


@pytest.mark.slow
def test_six_ranks_with_different_x_and_y():
    assert not too_large(run([five_steps("llama"), five_steps("smollm2")], SIX_RANKS), 1e-10)


def test_eight_ranks():
    assert not too_large(run([two_steps("llama")], [Grid(z=2, y=2, x=2)]), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("grids", [SIX_RANKS, EIGHT_RANKS], ids=["six", "eight"])
def test_six_and_eight_ranks_with_every_model(grids):
    assert not too_large(run([five_steps(kind) for kind in BLOCKWISE], grids, timeout=560), 1e-10)


def llama(**changes):
    return functools.partial(tiny_model, "llama", **changes)


# For what happens before the layers, after them or in each of them by itself.
short = functools.partial(llama, num_hidden_layers=1)


def logits_loss(model, batch, dp_size, **more):
    """A loss of the caller's own, on full logits."""
    logits = model(input_ids=batch["input_ids"], **more).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, : logits.shape[1]].flatten())


def hidden_states_loss(model, batch, dp_size):
    output = model(**batch, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert all(states.shape == (*batch["input_ids"].shape, 48) for states in output.hidden_states)
    return output.loss + sum(weight * states.pow(2).mean() for weight, states in enumerate(output.hidden_states, 1))


def hidden_states_only_loss(model, batch, dp_size):
    states = model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states
    return sum(weight * states.pow(2).mean() for weight, states in enumerate(states, 1))


def attention_loss(model, batch, dp_size):
    output = model(**batch, output_attentions=True)
    heads = torch.arange(1.0, 13, dtype=torch.float64).view(-1, 1, 1)
    assert all(weights.shape[1] == len(heads) for weights in output.attentions)
    return output.loss + sum((weights.pow(2) * heads).mean() for weights in output.attentions)


def two_shapes_loss(model, batch, dp_size):
    """Two forward passes of different shapes, then one backward pass of both."""
    short = {key: value[:, :4].contiguous() for key, value in batch.items()}
    return model(**batch).loss + model(**short).loss


def embeds_loss(model, batch, dp_size):
    table = torch.arange(131.0 * 48, dtype=torch.float64).view(131, 48).sin()
    rest = {key: value for key, value in batch.items() if key != "input_ids"}
    return model(inputs_embeds=table[batch["input_ids"]], **rest).loss


def eval_loss(model, batch, dp_size):
    model.eval()
    output = model(**batch)
    assert output.logits.shape == (*batch["input_ids"].shape, 131)
    return output.loss


def base_model_loss(model, batch, dp_size):
    return model.model(input_ids=batch["input_ids"]).last_hidden_state.pow(2).mean()


def tuple_loss(model, batch, dp_size):
    return model(**batch, return_dict=False)[0]


def left_padded():
    batch = tiny_batch(8, 7)
    for row in range(8):
        batch["attention_mask"][row] = (torch.arange(7) >= row % 3).long()
    batch["labels"].masked_fill_(batch["attention_mask"] == 0, -100)
    return batch


def packed():
    batch = tiny_batch(8, 7)
    batch["position_ids"] = torch.tensor([0, 1, 2, 0, 1, 0, 1]).repeat(8, 1)
    del batch["attention_mask"]
    return batch


def without_cache(model):
    """With a cache, one process does not separate documents."""
    model.config.use_cache = False


def counted(batch):
    """With num_items_in_batch, as Trainer passes it: all kept targets of the step."""
    return batch | {"num_items_in_batch": (batch["labels"][:, 1:] != -100).sum()}


def frozen_start(model):
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)


def frozen_head(model):
    model.lm_head.requires_grad_(False)


def one_sided(grid):
    return AxonnConfig(grid=grid, overlap=Overlap(**dict.fromkeys(vars(Overlap()), False)))


SITUATIONS = [
    Case("num_items_in_batch", short(), [counted(tiny_batch(8, 7))]),
    Case("tokens not divisible", short(), [tiny_batch(2, 7)]),
    Case("one token a row", short(), [tiny_batch(2, 1)], loss_of=logits_loss),
    Case("left padding", short(), [left_padded()]),
    Case("eager attention", short(attention="eager"), [left_padded()]),
    Case("sliding window, eager", functools.partial(tiny_model, "mistral", attention="eager")),
    Case("packed rows", short(), [packed()], before=without_cache),
    Case("packed rows, smollm2", functools.partial(tiny_model, "smollm2"), [packed()], before=without_cache),
    Case("accumulation of two shapes", llama(), [tiny_batch(8, 7), tiny_batch(4, 5, seed=9)], steps=2),
    Case("two forwards, one backward", llama(), loss_of=two_shapes_loss),
    Case("checkpointing", llama(), before=functools.partial(checkpointed, reentrant=False), steps=2),
    Case("reentrant checkpointing", llama(), before=functools.partial(checkpointed, reentrant=True), steps=2),
    Case(
        "checkpointing, two shapes",
        llama(),
        before=functools.partial(checkpointed, reentrant=False),
        loss_of=two_shapes_loss,
    ),
    Case(
        "reentrant checkpointing, two shapes",
        llama(),
        before=functools.partial(checkpointed, reentrant=True),
        loss_of=two_shapes_loss,
    ),
    Case("inputs_embeds", short(), loss_of=embeds_loss, steps=2),
    Case("loss of one's own", short(), loss_of=logits_loss),
    Case("loss of one's own, logits_to_keep", short(), loss_of=functools.partial(logits_loss, logits_to_keep=3)),
    Case("loss on hidden states", llama(), loss_of=hidden_states_loss),
    Case("loss on hidden states of one token", llama(), [tiny_batch(2, 1)], loss_of=hidden_states_only_loss),
    Case("loss on attention weights", short(attention="eager"), loss_of=attention_loss),
    Case("loss on the base model", short(), loss_of=base_model_loss, steps=2),
    Case("loss in a tuple", short(), loss_of=tuple_loss),
    Case("loss in eval mode", short(), loss_of=eval_loss),
    Case("frozen start", llama(), before=frozen_start, steps=2),
    Case("frozen head", llama(), before=frozen_head, steps=2),
    Case("tied llama", llama(tie_word_embeddings=True), steps=2),
    Case("untied smollm2", functools.partial(tiny_model, "smollm2", tie_word_embeddings=False), steps=2),
    Case("biases everywhere", llama(attention_bias=True, mlp_bias=True), steps=2),
    Case("no overlap", llama(), config=one_sided, steps=2),
]


# Each is two of the others together, or another of two kinds; they run with the slow tests.
MORE = {
    "left padding",  # eager attention has it
    "two forwards, one backward",
    "tied llama",
    "no overlap",
    "sliding window, eager",  # Mistral has a window above
    "packed rows, smollm2",
    "reentrant checkpointing",
    "checkpointing, two shapes",
    "loss of one's own",  # logits_to_keep is one, too
    "loss on hidden states of one token",
    "frozen head",
    "untied smollm2",
    "checkpointing",  # Trainer has it on a grid
    "tokens not divisible",  # one token a row is not, either
    "loss in a tuple",
}


# Quick ones that are about heads, features and the vocabulary; the others are about rows and gathers of weights.
OVER_X = {
    "eager attention",
    "loss of one's own, logits_to_keep",
    "loss on hidden states",
    "loss on attention weights",
    "loss on the base model",
    "loss in eval mode",
    "biases everywhere",
}


def test_situations():
    """Each on the axis that it is about; on two axes at once all are slow."""
    quick = [case for case in SITUATIONS if case.name not in MORE]
    assert len(quick) == len(SITUATIONS) - len(MORE) and OVER_X < {case.name for case in quick}
    some = [(case, case.truth(), [Grid(x=2) if case.name in OVER_X else Grid(z=2)]) for case in quick]
    table = run_ranks(compare_some, 2, some)[0]
    assert len(table) == len(quick)
    assert not too_large(table, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [Grid(y=2, x=2), Grid(z=2, x=2)], ids=str)
def test_every_situation(grid):
    table = run(SITUATIONS, [grid])
    assert not too_large(table, 1e-10)


def rounded_model(dtype):
    """A llama whose weights are numbers of `dtype`, so that a model of any wider dtype has the same."""
    return tiny_model("llama").to(dtype)


def autocast():
    return torch.autocast(rank_device().type, torch.bfloat16)


ROUNDED = {  # dtype of the weights, the narrowest one that is computed in, and its context
    "float32": (torch.float32, torch.float32, contextlib.nullcontext),
    "bfloat16 autocast": (torch.float32, torch.bfloat16, autocast),
    "bfloat16 weights": (torch.bfloat16, torch.bfloat16, contextlib.nullcontext),
}


@pytest.mark.parametrize(
    "grids",
    [[Grid(x=2)], pytest.param([Grid(y=2, x=2), Grid(data=2, z=2), Grid(z=2, x=2)], marks=pytest.mark.slow)],
    ids=["x", "two axes"],
)
def test_rounding_is_as_on_one_process(grids):
    """A grid adds in another order. Its distance from the float64 truth is that of one process, up to a small factor.

    Each number is a sum of some 50 rounded terms in either case; the largest of some thousand such errors varies by
    less than a factor of three. Gradients that a grid reduces are summed in float32 (reduce_dtype), which is no worse.
    The loss is one number, which may be right by luck on one process, so it is allowed two roundings more.
    """
    cases, alone = [], {}
    for name, (dtype, _, context) in ROUNDED.items():
        exact_truth = Case("float64", lambda dtype=dtype: rounded_model(dtype).double()).truth()
        case = Case(name, functools.partial(rounded_model, dtype), context=context)
        alone[name] = errors_of(case.truth(), exact_truth)
        assert 1e-8 < alone[name]["gradients"] < 0.2, name
        cases.append((case, exact_truth))
    for errors in run_ranks(rounding_errors, grids[0].size, cases, grids):
        assert len(errors) == len(ROUNDED) * len(grids)
        for (name, grid), ours in errors.items():
            assert ours["gradients"] <= 3 * alone[name]["gradients"], (name, grid)
            loss = 3 * alone[name]["loss"] + 2 * torch.finfo(ROUNDED[name][1]).eps
            assert ours["loss"] <= loss, (name, grid)


def errors_of(outcome, truth):
    return {
        "loss": worst_ratio([loss.double() for loss in outcome.losses], truth.losses),
        "gradients": max(relative_errors(outcome.gradients, truth.gradients).values()),
    }


def rounding_errors(cases, grids):
    return {(case.name, str(grid)): errors_of(case.on_grid(grid), truth) for grid in grids for case, truth in cases}


def one_wrong_number(truth):
    """`compare` where on one rank one number of a gradient or of a loss is not as on one process."""
    found = []
    for kind, wrong in itertools.product(("loss", "gradients"), (float("nan"), 0.5)):

        class Wrong(Case):
            def on_grid(self, grid, kind=kind, wrong=wrong):
                ours = super().on_grid(grid)
                if torch.distributed.get_rank() == 1:
                    tensor = ours.losses[0] if kind == "loss" else ours.gradients["model.layers.1.mlp.up_proj.weight"]
                    local(tensor).detach().view(-1)[-1] = wrong
                return ours

        case = Wrong(f"{wrong} in {kind}", functools.partial(tiny_model, "llama"))
        found.append((f"{case.name} on data=1,z=1,y=2,x=1: {kind}", compare([(case, truth)], [Grid(y=2)])))
    return found


def test_one_wrong_number_on_one_rank_is_not_equal():
    truth = Case("llama", functools.partial(tiny_model, "llama")).truth()
    for found in run_ranks(one_wrong_number, 2, truth):
        for said, table in found:
            (line,) = too_large(table, 1e-10)
            assert line.startswith(said)


def print_table():
    """Largest relative errors by grid and model, as Markdown."""
    print("| data,z,y,x | model | loss | norm | gradients | parameters |\n|---|---|---|---|---|---|")
    models = [five_steps(kind) for kind in BLOCKWISE]
    for grids in (all_grids(2), all_grids(4), SIX_RANKS, EIGHT_RANKS):
        for (kind, grid), errors in run(models, grids, timeout=900).items():
            sizes = ",".join(size.partition("=")[2] for size in grid.split(","))
            numbers = " | ".join(f"{error:.1e}" for error in errors.values())
            print(f"| {sizes} | {kind} | {numbers} |", flush=True)


if __name__ == "__main__":
    print_table()
