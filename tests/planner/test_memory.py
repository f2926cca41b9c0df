"""What a rank holds, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import AutoConfig

from hf_axonn.layers import moe
from hf_axonn.planner.dense import DenseShape
from hf_axonn.planner.memory import (
    FOREIGN_BYTES,
    MOMENT_BUCKET,
    _saved_by_experts,
    local_parameters,
    low_bit_bytes,
    memory,
)
from hf_axonn.planner.shapes import ExpertsShape
from hf_axonn.planner.step import Step
from hf_axonn.profiling.read_shape import build_shape
from hf_axonn.topology.grid import Grid
from tests.planner.test_predict import LLAMA, SOME


def test_memory_by_hand():
    """Two layers of hidden 8, 2 heads, MLP 16, vocabulary 10, on z = 2, x = 2: sizes that divide."""
    shape = DenseShape(layers=2, hidden=8, heads=2, intermediate=16, vocab=12)
    grid, step = Grid(z=2, x=2), Step(rows=1, seq=4, checkpointing=True)
    layer = 4 * 8 * 8 + 3 * 8 * 16
    local = (2 * layer + 2 * 12 * 8) // 4 + 5 * 8
    assert local_parameters(shape, grid) == local
    needed = memory(shape, grid, step)
    assert needed.states == 16 * local and needed.by_kind()["optimizer"] == 8 * local
    offloaded = memory(shape, grid, replace(step, offload="optimizer"))  # one bucket holds all of it
    assert offloaded.total == needed.total + 2 * (2 * layer + 12 * 8) // 4  # and copies of Linears and head in bf16
    # two layers in bf16, half of the features each; the gradients of up and gate, and of down, in fp32
    assert needed.gathered == 2 * (layer // 2) * 2 + (16 * 8 + 8 * 8) * 4
    # the inputs of two layers in fp32 [4 tokens / 2, 8], and what the last norm keeps, twice that
    assert needed.activations == (2 + 2) * (4 * 8 // 2) * 4
    # one layer's own; dI of the first products over x before its reduction: [4, 8] in bf16
    inside = 2 * (4 * 8 // 2) * 4 * 2 + (2 * 8 + 2 * 8) * 4 // 2 * 2 + 3 * 4 * 16 // 2 * 2
    inside += (2 * 4 * 8 + 4 * 16 // 2) * 2 + 4 * 4 // 2 * 2 + 4 * 4 * 2 // 2
    assert needed.layer == inside + 4 * 8 * 2
    # logits [4, 6] in fp32, their gradient in bf16; the input [2, 8] in fp32 and bf16, and gathered; the head's block
    assert needed.logits == 4 * 6 * (4 + 2) + 2 * 8 * (4 + 2) + 4 * 8 * 2 + 6 * 8 * 2
    assert needed.head == 6 * 8 * 4 + 2 * 8 * 2
    # the gradient of the output [4, 8] twice; [6, 8] for z and once more to travel
    assert needed.embedding == 2 * 4 * 8 * 4 + 6 * 8 * (4 + 4)
    rest = needed.gradients - needed.last
    assert rest == 4 * (local - layer // 4 - 12 * 8 // 4) and needed.buckets == 0
    moments = (
        needed.activations + needed.head + max(needed.logits, needed.gathered + needed.layer),
        rest + needed.gathered + needed.layer,
        needed.gradients + needed.embedding,
    )
    assert needed.total == 12 * local + max(moments)
    # torch's AdamW makes its moments in the dtype of the weights.
    for size in (4, 2):
        kinds = memory(shape, grid, replace(step, param_bytes=size)).by_kind()
        assert kinds["parameters"] == kinds["gradients"] == size * local and kinds["optimizer"] == 2 * size * local
    # With a second micro-batch all gradients are there from the beginning.
    again = memory(shape, grid, replace(step, micro_batches=2))
    assert again.total == 16 * local + max(moments[0], needed.gathered + needed.layer, needed.embedding)


@pytest.mark.parametrize("grid", SOME, ids=str)
def test_shards_of_all_ranks_make_the_model(grid):
    whole = LLAMA.parameters() - sum(LLAMA.replicated)
    local = local_parameters(LLAMA, grid) - sum(LLAMA.replicated)
    assert local * grid.x * grid.y * grid.z == whole


@pytest.mark.parametrize(("y", "kv_heads"), [(1, 16), (1, 2), (2, 16)])
def test_context_divides_what_is_saved_of_a_row(y, kv_heads):
    """Attention saves what has arrived, kv heads repeated until each rank has one, and its output before and after."""
    shape = DenseShape(layers=3, hidden=96, heads=16, kv_heads=kv_heads, intermediate=160, vocab=256)
    step = Step(rows=2, seq=64)
    whole, divided = (memory(shape, Grid(z=4, y=y, context=context), step) for context in (1, 4))
    fewer = memory(shape, Grid(z=4, y=y), replace(step, rows=1, seq=32))  # as many tokens
    assert divided.states == whole.states and divided.gathered == whole.gathered
    assert (divided.logits, divided.head, divided.embedding) == (fewer.logits, fewer.head, fewer.embedding)
    features = 6 * (16 if y == 1 else 0) + 2 * 6 * max(0, 4 - kv_heads)  # the output once more; k and v
    # Values of whole rows keep queries and keys alive where y makes them one tensor, exchanged ones do not.
    features -= 6 * (16 + kv_heads) / y if y == 2 else 0
    assert divided.activations - fewer.activations == 3 * 32 * features * 2
    ratio = memory(shape, Grid(z=4, y=y, context=2), step).activations / divided.activations
    assert ratio == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("kv_heads", [16, 2])
def test_keys_and_values_of_a_whole_row_are_saved_where_they_are_gathered(kv_heads):
    shape = DenseShape(layers=3, hidden=96, heads=16, kv_heads=kv_heads, intermediate=160, vocab=256)
    step = Step(rows=2, seq=64, context_attention="keys")
    divided = memory(shape, Grid(z=4, context=4), step)
    fewer = memory(shape, Grid(z=4), replace(step, rows=1, seq=32))  # as many tokens
    features = 6 * 16 + 3 * 2 * 6 * kv_heads  # the output once more; k and v of the three other ranks
    assert divided.activations - fewer.activations == 3 * 32 * features * 2
    assert divided.states == fewer.states and divided.gathered == fewer.gathered


@pytest.mark.parametrize("grid", [Grid(x=2), Grid(z=2, x=2), Grid(y=2), Grid(z=2)], ids=str)
def test_on_gloo_the_largest_reduction_of_a_mixture_is_there_twice(grid):
    """That of the gradient of all tokens [rows * seq, hidden] in bf16, which experts give."""
    sizes = dict(hidden_size=48, intermediate_size=24, num_hidden_layers=2, num_attention_heads=6, vocab_size=131)
    sizes |= dict(num_key_value_heads=3, num_local_experts=4, max_position_embeddings=64)
    shape, step = build_shape(AutoConfig.for_model("mixtral", **sizes).to_dict()), Step(rows=3, seq=8)
    found = [memory(shape, grid, step, gloo=gloo).layer for gloo in (False, True)]
    assert found[1] - found[0] == (3 * 8 * 48 * 2 if grid.x * grid.y > 1 else 0)


def test_few_pairs_of_other_ranks_are_taken_along_on_gpus():
    """16 hidden states a pair, and 2 * 24 features of its expert, in bf16; of many, or by gloo, only its own."""
    assert FOREIGN_BYTES == moe.FOREIGN_BYTES
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, vocab_size=131)
    sizes |= dict(num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64)
    shape, step = build_shape(AutoConfig.for_model("mixtral", **sizes).to_dict()), Step(rows=3, seq=8)
    few = FOREIGN_BYTES // (2 * 8 * 16 * 2) * 2  # rows, half of whose two pairs are of the other rank
    for rows, grid, gloo, pairs, features in (
        (few, Grid(x=2), False, 2, 2 * 16 + 2 * 48),
        (few, Grid(x=2), True, 1, 3 * 16 + 2 * 48),
        (few + 2, Grid(x=2), False, 1, 3 * 16 + 2 * 48),
        (few, Grid(x=4), False, 0.5, 3 * 16 + 2 * 48),  # one expert a rank, three of four pairs of others
        (few // 2, Grid(x=4), False, 2, 2 * 16 + 2 * 48),
    ):
        experts = next(part for layer, _ in shape.kinds for part in layer.parts if isinstance(part, ExpertsShape))
        saved = _saved_by_experts(shape, experts, grid, replace(step, rows=rows), gloo)
        assert saved == pairs * rows * 8 * features * 2


def test_moments_in_host_memory_are_on_the_device_in_buckets():
    shape, grid = DenseShape(layers=32, hidden=4096, heads=32, intermediate=14336, vocab=128256), Grid(z=8)
    step = Step(rows=1, seq=4096, checkpointing=True)
    needed, offloaded = (memory(shape, grid, replace(step, offload=kind)) for kind in ("none", "optimizer"))
    rounded = 2 * (32 * (4096 * (2 * 4096 + 2 * 4096) + 3 * 4096 * 14336) + 128256 * 4096) // 8
    saved = needed.moments - 3 * MOMENT_BUCKET
    assert needed.states - offloaded.states == needed.total - offloaded.total == saved + rounded
    assert offloaded.by_kind()["parameters"] == needed.by_kind()["parameters"] - rounded
    single, plain = replace(step, compute_bytes=4), replace(step, param_bytes=2)  # not mixed: weights stay
    for each in (single, plain):
        needed, offloaded = (memory(shape, grid, replace(each, offload=kind)) for kind in ("none", "optimizer"))
        assert needed.states - offloaded.states == needed.moments - 3 * MOMENT_BUCKET
        assert offloaded.by_kind()["parameters"] == needed.by_kind()["parameters"]
    alone = memory(shape, Grid(), replace(step, offload="optimizer"))
    assert alone.by_kind()["parameters"] == memory(shape, Grid(), step).by_kind()["parameters"]


def test_moments_in_8_bits_are_counted_as_bitsandbytes_keeps_them():
    """Embeddings in 32 bits as Trainer leaves them, norms (of 64) as they are small, all else 2 bytes and scales."""
    sizes = dict(layers=2, hidden=64, heads=4, intermediate=256, vocab=512)
    for tied, heads in ((False, 1), (True, 0)):
        shape, grid = DenseShape(**sizes, tied=tied), Grid(z=2)
        step = Step(rows=1, seq=4, checkpointing=True)
        needed, low = (memory(shape, grid, replace(step, optimizer=kind)) for kind in ("adamw", "adamw_8bit"))
        small, quantized = 5 * 64, 2 * (4 * 64 * 64 + 3 * 64 * 256) // 2 + heads * 512 * 64 // 2
        quantized -= 2 * 4 * 64 * 64 // 2  # of which attention's, of 2,048 elements a rank, are small, too
        small += 2 * 4 * 64 * 64 // 2
        assert low.moments == 8 * (small + 512 * 64 // 2) + quantized * 2 + quantized // 256 * 8
        assert needed.states - low.states == needed.moments - low.moments
    assert low_bit_bytes(4095) == 8 * 4095 and low_bit_bytes(4097) == 2 * 4097 + 17 * 8
    lora = memory(shape, grid, replace(step, lora=64, optimizer="adamw_8bit"))
    adapters = shape.adapters(64)
    assert min(adapters) == 64 * 64 and lora.moments == sum(2 * each + each // 32 for each in adapters)
    with pytest.raises(ValueError, match="offload: optimizer is not possible with adamw_8bit"):
        replace(step, offload="optimizer", optimizer="adamw_8bit")


def test_of_the_matrices_of_layers_muon_keeps_one_moment():
    """The vocabulary and norms (of 64, two in a layer and a last one) have AdamW's two; adapters are matrices."""
    shape, grid = DenseShape(layers=2, hidden=64, heads=4, intermediate=256, vocab=512), Grid(z=2)
    step = Step(rows=1, seq=4, checkpointing=True, optimizer="muon")
    matrices = 2 * (4 * 64 * 64 + 3 * 64 * 256) // 2
    found = memory(shape, grid, step)
    assert found.moments == 4 * (matrices + 2 * (2 * 512 * 64 // 2 + 5 * 64))
    assert memory(shape, grid, replace(step, optimizer="adamw")).states - found.states == 4 * matrices
    assert memory(shape, grid, replace(step, lora=64)).moments == 4 * sum(shape.adapters(64))
    sizes = dict(hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
    mixture = build_shape(
        AutoConfig.for_model("mixtral", **sizes, num_key_value_heads=4, num_local_experts=4).to_dict()
    )
    adamw, muon = (memory(mixture, Grid(), replace(step, optimizer=kind)) for kind in ("adamw", "muon"))
    assert adamw.moments - muon.moments == 4 * 2 * 4 * 64 * 64  # experts lie in tensors of three dims
    with pytest.raises(ValueError, match="offload: optimizer is not possible with muon"):
        replace(step, offload="optimizer")
