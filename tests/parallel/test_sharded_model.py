"""The registry of what is installed on the modules of a model."""

import copy

import pytest
from torch import nn

from hf_axonn import parallelize, sync_gradients
from hf_axonn.architectures.plan import plan_for
from hf_axonn.compat.torch import fake_world
from hf_axonn.config import AxonnConfig
from hf_axonn.engine.report import Report
from hf_axonn.parallel.install import _install_heads
from hf_axonn.parallel.sharded_model import ShardedModel, sharded_model
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.heads import Heads
from tests.helpers.models import tiny_model
from tests.helpers.ranks import fake_mesh


def sharded(model: nn.Module, grid: Grid) -> ShardedModel:
    return ShardedModel(fake_mesh(grid, 0), AxonnConfig(grid=grid), model, report=Report(str(grid), ""))


@pytest.mark.parametrize(("grid", "heads"), [(Grid(x=2), ("x",)), (Grid(x=2, y=2), ("x", "y"))], ids=str)
def test_a_plan_says_where_ranks_do_different_work(grid, heads):
    model = tiny_model("llama")
    state = sharded(model, grid)
    assert state.axes("model.layers.0.self_attn") == ()  # there is no plan yet
    state.take_plan(model, plan_for(model), {})
    assert state.layers == list(model.model.layers) and state.full_sequence == set()
    assert all(set(axes) >= set(heads) for axes in state.attention_axes)
    for name, axes in (
        ("model.layers.1.self_attn.q_proj", state.attention_axes[1]),
        ("model.layers.1.mlp.act_fn", ("x", "y")),
        ("model.layers.1.input_layernorm", ("x", "y")),
        ("model.embed_tokens", ()),
        ("lm_head", ()),
    ):
        assert state.axes(name) == axes, name


def test_a_module_with_numbers_of_its_own_follows_the_config_of_the_model():
    model = tiny_model("phi3")
    state, plan, attention = sharded(model, Grid(x=2)), plan_for(model), model.model.layers[0].self_attn
    _install_heads(state, attention, Heads(12, 6, ("x",), replicate_kv=False), plan.blocks[0])
    model.set_attn_implementation("eager")
    own = copy.copy(attention.config)
    assert (own.num_attention_heads, own._attn_implementation) == (6, "eager")
    assert model.config.num_attention_heads == 12


def test_copies_get_the_layers_of_their_originals_or_are_refused():
    model, calls = tiny_model("llama"), []
    state = sharded(model, Grid(x=2))
    norm, head, entry, linear = model.model.norm, model.lm_head, model.model.layers[0], model.model.layers[0].mlp
    state.install(norm, calls.append, lambda module: calls.append(type(module)))
    assert calls == [norm, type(norm)]
    state.install_copy(norm, copy := nn.Identity())
    assert calls[2:] == [copy, nn.Identity] and state.can_copy(norm)
    state.refuse_copies(entry, linear)
    state.install(entry, calls.append)  # on the module itself, not on copies
    state.install_copy(entry, copy)
    assert calls[4:] == [entry] and not state.can_copy(entry)
    state.install_copies_by(linear, calls.append)  # a Linear that is the entry of its block
    state.install_copy(linear, copy)
    assert calls[5:] == [copy] and state.can_copy(linear) and state.can_copy(head)


def test_a_module_of_peft_is_new_once():
    model = tiny_model("llama")
    state = sharded(model, Grid(x=2))
    assert [state.claim(model.lm_head) for _ in range(2)] == [True, False]
    assert sharded_model(model) is None
    model.axonn = state
    assert sharded_model(model) is state


def test_new_parameters_in_decoder_layers_are_refused_where_ranks_have_other_tokens():
    with fake_world(2):
        model, _ = parallelize(tiny_model("llama", num_hidden_layers=1), Grid(x=2))
        model.model.norm.weight = nn.Parameter(model.model.norm.weight.to_local())
        model.lm_head = nn.Linear(48, 131)
        sync_gradients(model)
        model.model.layers[0].mlp = nn.Linear(48, 48)
        with pytest.raises(ValueError, match="layer 0 has a new Linear mlp .* before hf_axonn.parallelize"):
            sync_gradients(model)
        model.model.layers[0].mlp.requires_grad_(False)
        sync_gradients(model)
