"""Shapes of models whose type the planner does not know by name."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_axonn import Grid, parallelize
from hf_axonn.architectures.divided_layers import why_layers_stay
from hf_axonn.architectures.divided_rows import why_rows_stay_whole
from hf_axonn.architectures.plan import plan_for
from hf_axonn.cli.main import main
from hf_axonn.compat.torch import fake_world
from hf_axonn.planner.dense import FAMILIES, shape_from_config
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import load_machine
from hf_axonn.planner.predict import refusal
from hf_axonn.planner.shapes import BlockShape, ExpertsShape, LinearShape, UnshardedModule
from hf_axonn.profiling.read_shape import build_shape, read_shape, shape_of
from tests.benchmarks.architectures import tiny_configs as tiny_types
from tests.helpers.models import tiny_config


SIZES = dict(hidden_size=48, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6, vocab_size=131)
SIZES |= dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, num_key_value_heads=3)
KNOWN = ("llama", "qwen2", "qwen3", "gemma2", "starcoder2", "phi3")  # read both ways, the same comes out


@pytest.mark.parametrize("kind", KNOWN)
def test_modules_say_what_the_families_say(kind):
    config = AutoConfig.for_model(kind, **SIZES, head_dim=8).to_dict()
    built, known = build_shape(config), shape_from_config(config)
    (layer, count), (same, layers) = built.runs[0], known.runs[0]
    assert (count, layer.parts, layer.norms, layer.ends) == (layers, same.parts, same.norms, same.ends)
    # In the order of the model here, of the blocks there.
    assert sorted(built.weights) == sorted(known.weights) and sorted(built.replicated) == sorted(known.replicated)
    assert (built.tied, built.centered, built.tables) == (known.tied, known.centered, known.tables)
    assert (built.features, built.ends_full, built.loose) == (True, known.ends_full, False)


def test_families_have_what_transformers_takes_where_a_config_says_nothing():
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 32, "vocab_size": 50}
    for kind in set(FAMILIES) - {"gpt2", "opt"}:  # which have to say how many positions they learn
        config = {"model_type": kind, "intermediate_size": 40, "pad_token_id": 0, **sizes}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        assert shape_from_config(config).parameters() == model.num_parameters(), kind
    for wrong in ({"num_key_value_heads": "8"}, {"head_dim": 0.5}, {"sliding_window": "4096"}):
        with pytest.raises(ValueError, match=f"{[*wrong][0]} is .*, but it is a whole number above 0"):
            shape_from_config(config | {"model_type": "mistral", "intermediate_size": 40} | wrong)


def test_families_divide_rows_and_layers_where_a_grid_with_context_and_pipe_takes_them():
    for kind in FAMILIES:
        config = AutoConfig.for_model(kind)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        known = shape_from_config(config.to_dict())
        assert known.divides_rows == (not why_rows_stay_whole(model, plan_for(model))), kind
        assert known.divides_layers == (not why_layers_stay(model, plan_for(model))), kind


@pytest.mark.parametrize(("kind", "divides"), [("mixtral", True), ("qwen3_moe", True), ("falcon", False)])
def test_other_types_divide_rows_where_attention_exchanges_heads_and_all_else_works_token_by_token(kind, divides):
    assert shape_of(tiny_config(kind).to_dict()).divides_rows == divides


@pytest.mark.parametrize(("kind", "divides"), [("mixtral", True), ("bert", False), ("camembert", False)])
def test_layers_are_planned_over_pipe_where_the_engine_divides_them(kind, divides):
    """BERT has its embeddings in a module, CamemBERT parameters of its head beside the decoder."""
    config = tiny_config(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with fake_world(2), nullcontext() if divides else pytest.raises(ValueError, match="not known to which stage"):
        parallelize(model, Grid(pipe=2))
    job = Job(shape=shape_of(config.to_dict()), machine=load_machine("dgx-h100"), sequences=8, seq=32)
    assert refusal(job, Grid(pipe=2)) == (
        "" if divides else "pipe is 2, but the layers of this model cannot be divided into stages"
    )


UNKNOWN = {"ministral": {"head_dim": 8}, "helium": {"head_dim": 8}, "stablelm": {}, "cohere": {}, "glm": {}}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_type_that_is_not_known_by_name_is_built(kind, tmp_path):
    config = AutoConfig.for_model(kind, **SIZES | UNKNOWN[kind])
    assert kind not in FAMILIES
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_shape(str(tmp_path))
    assert shape.parameters() == sum(parameter.numel() for parameter in model.parameters())
    ((layer, count),) = shape.runs
    attention, mlp = layer.blocks
    assert (count, shape.hidden, attention.query, attention.kv, mlp.row.cols) == (3, 48, 6, 3, 40)
    assert not shape.notes and shape.features


def test_a_mixture_by_hand():
    """Two of four experts on each token: 3 * 48 * 24 a piece, chosen by a router [4, 48]; all with their own norms."""
    config = AutoConfig.for_model("mixtral", **SIZES | {"intermediate_size": 24}, num_local_experts=4)
    shape = build_shape(config.to_dict())
    ((layer, count),) = shape.runs
    attention, experts = layer.parts
    assert count == 3 and attention.query == 6 and isinstance(experts, ExpertsShape)
    assert (experts.number, experts.chosen, experts.weights) == (4, 2, (LinearShape(48, 48), LinearShape(48, 24)))
    assert layer.routed == 4 and not shape.features  # a router works on whole tokens
    linears = 2 * 48 * 48 + 2 * 48 * 24
    squares = 2 * 7 * 2 * 48
    assert shape.flops(7) == 3 * (2 * (linears + 2 * 3 * 48 * 24 + 4 * 48) + squares)
    assert shape.parameters() == 3 * (linears + 4 * 3 * 48 * 24 + 4 * 48 + 2 * 48) + 2 * 131 * 48 + 48


def test_layers_that_differ_are_runs():
    sizes = SIZES | dict(num_key_value_heads=6, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    sizes |= dict(n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16)
    sizes |= dict(qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
    shape = build_shape(AutoConfig.for_model("deepseek_v3", **sizes).to_dict())
    (dense, one), (sparse, two) = shape.runs
    assert (one, two, shape.depth) == (1, 2, 3) and shape.kinds[0] == (sparse, 2)
    assert len(dense.parts) == 2 and [type(part) for part in sparse.parts] == [BlockShape, ExpertsShape, BlockShape]
    latent = dense.parts[0]
    assert (latent.down, latent.rotary) == ((LinearShape(24, 48), LinearShape(16, 48)), 8)
    assert (latent.query_features, latent.value_features) == (6 * 16, 6 * 8)


def test_heads_count_once_where_each_has_its_query_key_and_value_side_by_side():
    shape = build_shape(AutoConfig.for_model("gpt_neox", **SIZES | {"num_key_value_heads": 6}).to_dict())
    ((layer, count),) = shape.runs
    attention = layer.blocks[0]
    assert (attention.query_features, attention.kv_features, attention.value_features) == (48, 96, 48)
    assert shape.attention_flops(7) == count * 2 * 7 * (48 + 48)
    gated = replace(attention, columns=tuple(LinearShape(rows, 48) for rows in (96, 24, 24)), kv=3)
    gated = replace(gated, segments=(("query",), ("kv",), ("kv",)))
    assert (gated.query_features, gated.kv_features) == (48, 48)
    # A gate of each head is first.
    gate, query, kv = LinearShape(6, 48), LinearShape(6 * 16, 48), LinearShape(6 * 24, 48)
    latent = BlockShape(
        columns=(gate, query, kv),
        segments=3 * (("query",),),
        row=LinearShape(48, 6 * 8),
        query=6,
        kv=6,
        down=(LinearShape(24, 48),),
    )
    assert (latent.query_features, latent.value_features) == (6 * 16, 6 * 8)


def test_what_needs_whole_sequences_is_noted():
    shape = build_shape(
        AutoConfig.for_model("codegen", **SIZES | {"num_attention_heads": 4, "rotary_dim": 4}).to_dict()
    )
    (note,) = shape.notes
    assert note.startswith("modules that need full sequences (attn) are estimated by their Linears")
    loose = build_shape(AutoConfig.for_model("unlisted", **SIZES).to_dict())
    assert loose.loose and len(loose.notes) == 1 and loose.notes[0].startswith("it is sharded Linear by Linear")
    assert {type(part) for layer, _ in loose.runs for part in layer.parts} == {UnshardedModule}


def test_a_frozen_table_that_is_gathered_is_noted():
    (note,) = build_shape(tiny_types.tiny_config("roformer").to_dict()).notes
    assert note.startswith("its frozen tables (roformer.encoder.embed_positions) are gathered in each pass")


def test_what_a_shape_cannot_describe_is_refused(tmp_path, capsys):
    config = AutoConfig.for_model("bart", d_model=48, decoder_layers=2, decoder_attention_heads=4, vocab_size=131)
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="model_type is 'bart', which the planner cannot describe: it computes its loss"
    ):
        read_shape(str(tmp_path))
    command = ["plan", "--model", str(tmp_path), "--machine", "perlmutter", "--gpus", "4"]
    assert main([*command, "--batch-tokens", "1M", "--seq", "2048"]) == 2
    assert "cannot describe" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing-like-it"}))
    with pytest.raises(ValueError, match="'nothing-like-it', which cannot be built"):
        read_shape(str(tmp_path))
    with pytest.raises(ValueError, match="there is no model 'gpt-9b'"):
        read_shape("gpt-9b")


def test_a_block_that_runs_twice_is_refused(monkeypatch):
    from transformers.models.stablelm.modeling_stablelm import StableLmMLP

    once = StableLmMLP.forward
    monkeypatch.setattr(StableLmMLP, "forward", lambda self, hidden: once(self, once(self, hidden)))
    with pytest.raises(ValueError, match="it runs .*mlp.* more than once"):
        build_shape(AutoConfig.for_model("stablelm", **SIZES).to_dict())


def test_a_plan_of_a_mixture(tmp_path, capsys):
    AutoConfig.for_model("mixtral").save_pretrained(tmp_path)
    command = ["plan", "--model", str(tmp_path), "--machine", "alps", "--gpus", "256"]
    fixed = ["--fix", "checkpointing=on", "keep_gathered=recomputed"]
    assert main([*command, "--batch-tokens", "4.2M", "--seq", "4096", "--top", "2", "--json", *fixed]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["ranked"][0]
    (layer,) = first["layer_seconds"]
    # q, k and v; o; the experts of this rank in one.
    assert layer["layers"] == 32 and len(layer["gathers"]) == 3
    assert 0.1 < first["mfu"] < first["hfu"] < 0.6
