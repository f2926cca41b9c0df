"""Specs of blocks: every way of packing and of dividing heads equals one process; and what a spec is not for."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from hf_axonn.architectures.block_checks import GLOBAL_SIZES, head_counts
from hf_axonn.architectures.plan import derive, is_per_token, plan_for
from hf_axonn.architectures.table import CHECKED, TABLE
from hf_axonn.architectures.weight_kinds import weight_kinds
from hf_axonn.topology.weight_kind import WeightKind
from tests.benchmarks.architectures import tiny_configs
from tests.benchmarks.architectures.survey import BOUND, prepare, survey_grid
from tests.benchmarks.architectures.tiny_configs import HIDDEN, SIZES
from tests.benchmarks.architectures.tiny_configs import tiny_model as surveyed_model
from tests.helpers.models import tiny_model, unplanned_model


QUERY_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
# Packed in turn, packed by head, packed halves, one key for all, ALiBi, latents, norms over all heads, sinks, a block
# whose row layer lies outside of it, projections that stand in the layer itself.
TYPES = "gpt2 gpt_neox phi3 gpt_bigcode bloom mpt falcon deepseek_v2 olmo2 gpt_oss bert opt".split()
# On x=2, y=2: divided over x alone; on no axis; over both with kv heads that are shared or repeated.
HEADS = {"over x": (2, 1), "on no axis": (3, 3), "kv heads shared": (8, 2), "kv heads repeated": (12, 6)}


# Every type in the way that asks most of it, but for a second one with ALiBi, and one type in every way.
OFTEN = {"kv heads repeated": [each for each in TYPES if each != "mpt"], **dict.fromkeys([*HEADS][:-1], ["falcon"])}


@pytest.mark.parametrize(
    ("way", "types"),
    [
        *(pytest.param(way, types, id=way) for way, types in OFTEN.items()),
        *(
            pytest.param(
                way, [each for each in TYPES if each not in OFTEN[way]], id=f"{way}, others", marks=pytest.mark.slow
            )
            for way in HEADS
        ),
    ],
)
def test_every_way_of_dividing_heads(way, types, monkeypatch):
    query, kv = HEADS[way]
    for names, value in ((QUERY_HEADS, query), (KV_HEADS, kv), (("head_dim", "v_head_dim"), HIDDEN // query)):
        for name in names:
            monkeypatch.setitem(SIZES, name, value)
    monkeypatch.setattr(tiny_configs, "HEADS", query)
    specimens = [prepare(model_type) for model_type in types]
    survey_grid(specimens, "x2y2")
    assert not [its.row.line(BOUND) for its in specimens if its.row.verdict(BOUND) != "planned"]


def test_a_block_in_groups_has_as_many_units_as_kv_heads():
    """Falcon's new architecture packs a kv head with its query heads, here two of them."""
    sizes = dict(hidden_size=24, num_attention_heads=4, num_kv_heads=2, num_hidden_layers=1, vocab_size=31)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("falcon", new_decoder_architecture=True, **sizes))
    attention, _ = TABLE["falcon"](model.config)
    assert head_counts(model, model.transformer.h[0], attention) == (2, 2)


def test_a_block_that_does_not_fit_is_left_whole():
    model = tiny_model("llama")
    model.model.layers[0].self_attn.extra = torch.nn.Linear(4, 4)
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)
    plan = plan_for(model)
    assert plan.full_sequence == {
        "model.layers.0.self_attn": "its extra has parameters of all heads",
        "model.layers.1.mlp": "mlp.up_proj is a Sequential, not an nn.Linear",
    }
    assert [block.entry for block in plan.blocks] == ["model.layers.0.mlp", "model.layers.1.self_attn"]
    assert "2 modules on full sequences" in plan.summary()


def of_helper(attention):
    class Reads(attention):
        def forward(self, hidden_states, **kwargs):
            return self.helper(hidden_states, **kwargs)

        def helper(self, hidden_states, **kwargs):
            assert self.num_heads
            return attention.forward(self, hidden_states, **kwargs)

    return Reads


def of_inner_function(attention):
    class Reads(attention):
        def forward(self, hidden_states, **kwargs):
            divide = lambda tensor: tensor / self.num_heads  # noqa: E731
            return divide(hidden_states), None

    return Reads


def of_parent(attention):
    class Reads(of_helper(attention)):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states, **kwargs)

        def helper(self, hidden_states, **kwargs):
            return super().helper(hidden_states, **kwargs)

    return Reads


@pytest.mark.parametrize("reading", [of_helper, of_inner_function, of_parent])
def test_code_that_reads_a_number_of_the_whole_model_is_not_trusted(reading):
    model = tiny_model("llama")
    kind = reading(type(model.model.layers[0].self_attn))
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    assert "num_heads" in GLOBAL_SIZES
    (reason,) = set(plan_for(model).full_sequence.values())
    lines, first = inspect.getsourcelines(of_inner_function if reading is of_inner_function else of_helper)
    line = first + next(place for place, text in enumerate(lines) if "self.num_heads" in text)
    assert reason == f"its attention reads num_heads of the whole model at test_table.py:{line}"


def test_what_is_not_listed_has_no_plan():
    assert plan_for(unplanned_model()).reason.startswith("no block plan for unlisted models")
    assert plan_for(torch.nn.Linear(2, 2)).reason.startswith("no block plan for Linear")


def test_every_checked_type_is_one_of_transformers():
    assert CHECKED <= set(CONFIG_MAPPING)


def test_attention_may_have_keys_of_another_layer_where_that_divides_its_heads_alike():
    model = surveyed_model("gemma4_text")
    plan = derive(model, "gemma4_text")
    attention = [block for block in plan.blocks if block.query]
    assert [block.borrows for block in attention] == [False, False, True, True]
    assert [(block.query, block.kv) for block in attention] == [(4, 2), (4, 1)] * 2
    assert attention[1].segments == (("query",), ("kv",))  # its values are its keys
    assert plan.per_token == ("per_layer_input",) and "other layers" in plan.why_undivided()
    model.model.layers[1].self_attn.extra = torch.nn.Linear(4, 4)
    assert derive(model, "gemma4_text").reason.startswith("attention has keys of another layer")


def test_layers_have_numbers_of_kv_heads_of_their_own():
    plan = derive(surveyed_model("mimo_v2_flash"), "mimo_v2_flash")
    assert [(block.query, block.kv) for block in plan.blocks if block.query] == [(4, 2), (4, 4), (4, 2)]


def test_norms_before_row_layers_and_gates_of_heads_are_parts_of_blocks():
    attention, mlp = derive(surveyed_model("bitnet"), "bitnet").blocks[:2]
    for block, name in ((attention, "attn_sub_norm"), (mlp, "ffn_sub_norm")):
        ((kind, layer),) = (block.inner_norms[f"{block.entry}.{name}"],)
        assert layer == block.row and not kind.centered
    for kind, gate in (("afmoe", "gate_proj"), ("lfm3", "g_proj")):
        block = next(block for block in derive(surveyed_model(kind), kind).blocks if block.query)
        assert block.columns[-1].endswith(gate) and block.segments[-1] == ("query",)


def test_an_mlp_that_computes_with_all_of_its_features_is_left_whole():
    """The first of these layers cuts what lies below a quantile of its gate's features."""
    plan = derive(surveyed_model("gemma3n_text"), "gemma3n_text")
    assert plan.full_sequence == {"model.layers.0.mlp": "its code computes with all of its features"}
    assert [block.entry for block in plan.blocks if not block.query] == ["model.layers.1.mlp", "model.layers.2.mlp"]


def test_a_bias_that_a_layer_adds_after_its_attention_is_no_parameter_of_heads():
    plan = derive(surveyed_model("gpt_neox_japanese"), "gpt_neox_japanese")
    assert not plan.full_sequence and {block.added for block in plan.blocks if block.query} == {("dense_bias",)}


def test_groups_of_heads_are_divided_where_they_end_in_low_ranks_together():
    model = surveyed_model("deepseek_v4")
    plan = derive(model, "deepseek_v4")
    attention = [block for block in plan.blocks if block.is_attention]
    assert [block.query for block in attention] == [2, 2, 2] and not plan.full_sequence  # 4 heads in 2 groups
    shared = [[name.rpartition(".")[2] for name in block.shared] for block in attention]
    assert shared == [
        ["kv_norm"],
        ["kv_norm", "compressor"],
        ["kv_norm", "compressor"],
    ]  # the first has a window alone
    assert all(name.endswith("o_a_proj.weight") for block in attention for name in block.parts)
    model.config.o_groups = 3
    assert "numbers of heads do not explain" in str(derive(model, "deepseek_v4").full_sequence)


def test_modules_that_mix_copies_of_the_residual_stream_run_on_tokens_and_keep_layers_together():
    for kind, copies, final in (
        ("deepseek_v4", "last", ["model.norm", "model.hc_head"]),
        ("qwen4_exp_text", "last", ["model.hyper_connection_mixer"]),
        ("gemma3n_text", "first", None),
        ("llama", "", ["model.norm"]),
    ):
        plan = derive(surveyed_model(kind), kind)
        assert (plan.copies, plan.final) == (copies, final)
        assert bool(plan.why_undivided()) == bool(copies)


def test_attention_whose_projections_are_experts_is_divided_by_heads_where_its_sizes_are_known():
    model = surveyed_model("jetmoe")
    plan = plan_for(model)
    assert not plan.full_sequence and [block.query for block in plan.blocks] == [2, 2]
    assert [block.row for block in plan.blocks] == [
        f"{name}.self_attention.experts.output_linear" for name in plan.layers
    ]
    model.model.layers[0].self_attention.experts.output_linear.num_experts += 1
    problem = "self_attention.experts.output_linear is a JetMoeParallelExperts, not an nn.Linear"
    assert plan_for(model).full_sequence == {"model.layers.0.self_attention": problem}


def test_attention_that_chooses_its_keys_gets_full_sequences_where_rows_are_divided():
    for kind in ("qwen4_exp_text", "deepseek_v4", "hy_v4"):
        model = surveyed_model(kind)
        assert not any("self_attn" in name for name in derive(model, kind).full_sequence)
        assert any("self_attn" in name for name in derive(model, kind, divided_rows=True).full_sequence)


class Own(nn.Module):
    """A module of a class that nothing is known of.

    Args:
        parts: its modules and parameters.
    """

    def __init__(self, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def test_a_module_of_an_unknown_class_with_parameters_or_parts_is_not_taken_for_one_that_treats_each_token_by_itself():
    weight = nn.Parameter(torch.zeros(2))
    assert is_per_token(Own())
    assert not any(map(is_per_token, (Own(weight=weight), Own(part=Own()), Own(part=Own(weight=weight)))))


def test_large_parameters_of_mixers_that_are_no_linear_s_are_sharded():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_configs.tiny_config("mamba"))
    kinds = weight_kinds(model, plan_for(model))
    for name in ("conv1d.weight", "A_log"):
        assert kinds[id(model.get_parameter(f"backbone.layers.0.mixer.{name}"))] == WeightKind.GATHERED
