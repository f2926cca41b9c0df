"""Hidden states and attention weights that a model returns: of all tokens and heads, as on one process."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hf_axonn import Grid, parallelize
from hf_axonn.architectures.plan import plan_for
from hf_axonn.compat.torch import fake_world
from hf_axonn.parallel import decoder
from hf_axonn.parallel.decoder import install_decoder
from tests.benchmarks.architectures.tiny_configs import tiny_model as surveyed_model
from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.parallel.test_sharded_model import sharded


LAGUNA = dict(num_experts=2, num_experts_per_tok=1, mlp_layer_types=["dense", "dense"], attention="eager")
CASES: dict[str, tuple[Callable[[], nn.Module], dict]] = {
    # Its first hidden states are those that its first layer returns.
    "mamba2": (
        functools.partial(tiny_model, "mamba2", num_heads=4, head_dim=24, state_size=4, n_groups=2, attention="eager"),
        dict(output_hidden_states=True),
    ),
    "selected": (functools.partial(tiny_model, "llama"), dict(output_hidden_states=[0, 1])),
    # x = 2 divides the heads of the second layer alone.
    "laguna": (
        functools.partial(tiny_model, "laguna", num_attention_heads_per_layer=[3, 4], num_key_value_heads=1, **LAGUNA),
        dict(output_attentions=True),
    ),
    "bart": (
        functools.partial(surveyed_model, "bart"),
        dict(output_attentions=True, encoder_hidden_states=torch.linspace(-1, 1, 2 * 3 * 48).double().view(2, 3, 48)),
    ),
}


def returned(grid: Grid | None) -> dict[str, list[Tensor | None]]:
    found = {}
    for name, (make, options) in CASES.items():
        model = make().eval()
        model.set_attn_implementation("eager")
        if grid is not None:
            parallelize(model, grid)
        with torch.no_grad(), Float64():
            output = model(input_ids=tiny_batch(2, 5)["input_ids"], **options)
        found[name] = [*(output.hidden_states or output.get("cross_attentions") or output.attentions)]
    return found


@pytest.mark.slow
def test_what_layers_return_is_whole() -> None:
    truth = returned(None)
    for ours in run_ranks(returned, 2, Grid(x=2)):
        for name, states in truth.items():
            for state, own in zip(states, ours[name], strict=True):
                assert (own is None) == (state is None), name
                if state is not None:
                    torch.testing.assert_close(own, state, rtol=1e-10, atol=1e-10)


def test_states_of_a_single_token_are_gathered_as_those_of_several(monkeypatch) -> None:
    """A rank's part of it has the shape of the whole; only what came to the layers is whole."""
    gathered: list[Tensor] = []
    monkeypatch.setattr(decoder, "gather_tokens", lambda hidden, *_: gathered.append(hidden) or hidden)
    with fake_world(2):
        model, _ = parallelize(tiny_model("llama").train(), Grid(x=2))
        for tokens in (1, 4):
            states = model(input_ids=torch.ones(1, tokens, dtype=torch.long), output_hidden_states=True).hidden_states
            assert [any(state is part for part in gathered) for state in states] == [False, True, True], tokens


def test_layers_that_are_left_out_at_random_are_refused_in_training() -> None:
    model = tiny_model("opt", layerdrop=0.5, ffn_dim=40, word_embed_proj_dim=48)
    state, plan = sharded(model, Grid(x=2)), plan_for(model)
    state.take_plan(model, plan, {})
    install_decoder(state, model, plan)
    with pytest.raises(ValueError, match="layerdrop is 0.5: .* over the grid data=1,z=1,y=1,x=2: set layerdrop"):
        model.train()(**tiny_batch(2, 5))
