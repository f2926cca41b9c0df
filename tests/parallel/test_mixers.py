"""Mixers over (x, y) and context: by heads or channels, equal to one process, with a quarter of its work and
activations on four ranks.

Loss and gradients of every type with mixers on every kind of grid are compared by the survey, what is saved, exported
and adapted by tests/architectures/test_kinds_in_use.py, tokens by tests/parallel/test_generate_planned.py.
"""

from __future__ import annotations

import functools
import inspect
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeShortConv

from hf_axonn import Grid, parallelize
from hf_axonn.architectures.mixers import divide_mixer
from hf_axonn.architectures.plan import plan_for
from hf_axonn.engine.documents import separate_documents, why_documents_mix
from tests.benchmarks.architectures.survey import in_float64
from tests.benchmarks.architectures.tiny_configs import tiny_config, tiny_model
from tests.helpers.adapting import Adapted, adapt
from tests.helpers.equality import Case, compare, too_large
from tests.helpers.models import tiny_batch
from tests.helpers.ranks import refused, run_ranks


# One of each kind. On x=4 a group of Mamba 2's norm lies on two ranks, and two ranks read the same B, C, q and k.
KINDS = ("nemotron_h", "qwen3_5", "lfm2_moe", "mamba")
OTHERS = (
    "mamba2",
    "falcon_h1",
    "bamba",
    "zamba2",
    "qwen3_next",
    "olmo_hybrid",
    "lfm3",
    "jamba",
    "falcon_mamba",
    "zamba",
)
IN_PLACE = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")


def steps_of(kind):
    """Three steps on rows some of which are padded, so that mixers mask their input before they project it."""
    return Case(kind, functools.partial(tiny_model, kind), [tiny_batch(4, 7)], steps=3, context=in_float64)


def errors(kinds, grids):
    cases = [(case, case.truth()) for case in map(steps_of, kinds)]
    table = run_ranks(_unfused, grids[0].size, cases, grids, timeout=560)[0]
    assert len(table) == len(kinds) * len(grids)
    return too_large(table, 1e-10)


def _unfused(cases, grids):
    """Compare where every fused kernel that would be handed full weights fails."""

    def fail(*_, **__):
        raise AssertionError("a fused kernel was called with full weights")

    for case, _ in cases:
        names = vars(sys.modules[type(case.make()).__module__])
        names |= {name: fail for name in FUSED if name in names}
    return compare(cases, grids)


def test_three_steps_of_two_kinds():
    assert not errors(("nemotron_h", "mamba"), [Grid(x=4), Grid(z=2, x=2, context=2)])


ROWS_OF_TWO = [Grid(z=2, context=2)]
ROWS_OF_FOUR = [Grid(z=4, context=4), Grid(z=4, context=2), Grid(z=2, x=2, context=2), Grid(z=2, y=2, context=2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "grids",
    [[Grid(x=2), Grid(y=2)], [Grid(x=4), Grid(y=4), Grid(z=2, x=2)], ROWS_OF_TWO, ROWS_OF_FOUR],
    ids=["two", "four", "rows of two", "rows of four"],
)
def test_three_steps_of_every_kind(grids):
    assert not errors((*KINDS, *OTHERS), grids)


def of_heads(kind, length):
    """A model in which everything that reads along the row has heads and groups for four ranks."""
    config = tiny_config(kind)
    sizes = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=16, hidden_size=64, vocab_size=128)
    sizes |= dict(max_position_embeddings=length, intermediate_size=128, num_hidden_layers=4)
    if kind == "nemotron_h":
        sizes |= dict(mamba_num_heads=8, n_groups=4, mamba_head_dim=16, ssm_state_size=16, chunk_size=32)
        sizes |= dict(layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"])
    else:
        sizes |= dict(linear_num_value_heads=8, linear_num_key_heads=4, linear_key_head_dim=16)
        sizes |= dict(linear_value_head_dim=16, mlp_only_layers=[0, 1, 2, 3])
        sizes |= dict(layer_types=["linear_attention"] * 3 + ["full_attention"])
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(type(config)(**{**config.to_dict(), **sizes})).train()


def work(kind, grid):
    """FLOPs of a step, and the bytes that one more position of a row keeps for backward.

    Without the gradients of convolutions, which torch counts as if every channel met every other.
    """
    kept, flops = [], 0
    for length in (64, 128):
        model, _ = parallelize(of_heads(kind, length), grid)
        ids = torch.arange(length).remainder(100)[None] + 3
        storages: dict[int, torch.UntypedStorage] = {}

        def keep(tensor, storages=storages):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model(input_ids=ids, labels=ids).loss
            kept.append(sum(storage.nbytes() for storage in storages.values()))
            loss.backward()
        found = counter.get_flop_counts()["Global"]
        flops = sum(count for name, count in found.items() if name is not torch.ops.aten.convolution_backward)
    return flops, (kept[1] - kept[0]) / 64


@pytest.mark.parametrize(
    ("kind", "grid"),
    [
        ("nemotron_h", Grid(x=4)),
        pytest.param("qwen3_next", Grid(x=4), marks=pytest.mark.slow),
        pytest.param("nemotron_h", Grid(z=2, x=2, context=2), marks=pytest.mark.slow),
        pytest.param("qwen3_next", Grid(z=4, context=4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_work_and_activations_of_a_rank_fall_as_one_over_x_and_context(kind, grid):
    assert not plan_for(of_heads(kind, 64)).full_sequence
    ((whole, kept),) = run_ranks(work, 1, kind, Grid())
    for flops, bytes_ in run_ranks(work, 4, kind, grid):
        assert flops == pytest.approx(whole / 4, rel=0.1)
        assert bytes_ == pytest.approx(kept / 4, rel=0.1)


def test_layers_without_a_state_are_not_named_among_those_that_mix_documents():
    assert "layers of type linear_attention carry a state" in why_documents_mix(tiny_model("nemotron_h"))


PACKED = torch.tensor([[*range(7), *range(9)]])  # the second document begins at 7, on the first rank of two


def changes(kinds, grid):
    """Return for each kind the logits of a row of two documents, and the positions at which they change with a token
    of the first one."""
    found = {}
    for kind in kinds:
        model, _ = parallelize(tiny_model(kind).eval(), grid)
        ids = tiny_batch(1, 16)["input_ids"]
        other = ids.clone()
        other[0, 3] += 1
        fields = {"position_ids": PACKED} if "position_ids" in inspect.signature(model.forward).parameters else {}
        with in_float64(), torch.no_grad():
            batches = [separate_documents(model, {"input_ids": each, **fields}) for each in (ids, other)]
            before, after = (model(**batch).logits[0] for batch in batches)
        found[kind] = before, (before - after).abs().amax(dim=-1).gt(1e-12).nonzero().flatten().tolist()
    return found


@pytest.mark.slow
def test_over_context_a_token_changes_what_it_changes_on_one_process():
    """States run on into the next document, on CPUs and without seq_idx, and no further than on one process."""
    kinds = (*KINDS, *OTHERS)
    expected = changes(kinds, Grid())
    for found in run_ranks(changes, 2, kinds, ROWS_OF_TWO[0], timeout=560):
        for kind, (logits, places) in expected.items():
            assert places[0] == 3 and places[-1] > 7, "its documents are apart on one process"
            assert found[kind][1] == places, kind
            assert (found[kind][0] - logits).abs().max() < 1e-10, kind


COLUMNS = r".*(in_proj\w*|[qkv]_proj|up_proj|w1)"
ADAPTERS = {  # PEFT takes none on the last projections of Mamba 2
    "columns": (COLUMNS, ("nemotron_h", "qwen3_5", "lfm2_moe")),
    "rows": (r".*(out_proj|o_proj)", ("qwen3_5", "lfm2_moe")),
    "attention": (r".*(q_proj|v_proj|up_proj|w1)", ("nemotron_h", "qwen3_5", "lfm2_moe")),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", ADAPTERS)
def test_adapters_over_context(where):
    """Mixers with adapters on their projections gather rows; those with adapters elsewhere exchange them for heads."""
    names, kinds = ADAPTERS[where]
    adapter = functools.partial(adapt, target_modules=names)
    cases = [
        Adapted(kind, base=functools.partial(tiny_model, kind), batches=[tiny_batch(4, 7)], adapter=adapter)
        for kind in kinds
    ]
    for each in cases:
        each.context = in_float64
    assert not too_large(
        run_ranks(compare, 2, [(each, each.truth()) for each in cases], ROWS_OF_TWO, timeout=560)[0], 1e-10
    )


def adapted(kind):
    model = tiny_model(kind)
    columns = plan_for(model).blocks[0].columns
    return get_peft_model(model, LoraConfig(r=3, target_modules=[*columns], init_lora_weights=False))


def _exchanges():
    """The reports of a mixer, of one that has adapters, of one whose heads do not divide; and a refusal."""
    grid = Grid(z=2, context=2)
    model, report = parallelize(tiny_model("nemotron_h"), grid)
    linear = plan_for(tiny_model("nemotron_h")).blocks[0].columns[0]
    late = refused(get_peft_model, model, LoraConfig(r=3, target_modules=[linear]))
    odd = tiny_config("nemotron_h")
    odd.mamba_num_heads, odd.n_groups, odd.mamba_head_dim = 3, 3, 16
    others = (adapted("nemotron_h"), AutoModelForCausalLM.from_config(odd, experts_implementation="eager"))
    return [str(report), *(str(parallelize(other, grid)[1]) for other in others)], late


@pytest.mark.slow
def test_mixers_gather_rows_where_heads_do_not_divide_or_have_adapters():
    for (plain, with_adapters, three_heads), late in run_ranks(_exchanges, 2):
        assert "1 mixers exchange heads or channels for positions" in plain and "run on whole rows" not in plain
        for text in (with_adapters, three_heads):
            assert "1 modules run on whole rows (model.layers.0.mixer ...)" in text and "channels for" not in text
        assert "exchange positions for heads over context" in late and "add adapters before" in late


class PlantedMask(Lfm2MoeShortConv):
    """A short convolution that does more with its mask than to multiply by it."""

    def forward(self, hidden_states, past_key_values=None, attention_mask=None, **kwargs):
        if attention_mask is not None:
            hidden_states = hidden_states.masked_fill(~attention_mask.bool()[:, :, None], 0.5)
        return super().forward(hidden_states, past_key_values, None, **kwargs)


def test_a_trial_finds_what_a_mixer_does_with_its_mask():
    conv = tiny_model("lfm2_moe").model.layers[0].conv
    assert divide_mixer(conv).masks is True
    conv.__class__ = PlantedMask
    assert divide_mixer(conv).direct and divide_mixer(conv).masks is None


def test_heads_that_do_not_divide_are_repeated_and_reported():
    for lines in run_ranks(_report_of, 3, "qwen3_next"):
        assert "2 heads are not divisible by x = 3: attention on all heads on every rank" in lines


def _report_of(kind):
    return "\n".join(parallelize(tiny_model(kind), Grid(x=3))[1].lines())


class Planted(Lfm2MoeShortConv):
    """A short convolution whose code takes a mean over all channels."""

    def forward(self, hidden_states, past_key_values=None, attention_mask=None, **kwargs):
        gate, out, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        hidden = (gate * x).transpose(1, 2)
        hidden = torch.nn.functional.conv1d(hidden, self.conv.weight, groups=hidden.shape[1], padding=2)
        hidden = hidden[..., : hidden_states.shape[1]].transpose(1, 2)
        return self.out_proj(out * (hidden - hidden.mean(dim=-1, keepdim=True)))


def test_a_mixer_whose_code_reads_all_channels_is_repeated_with_the_reason():
    model = tiny_model("lfm2_moe")
    model.model.layers[0].conv = Planted(model.config, 0)
    assert plan_for(model).full_sequence == {
        "model.layers.0.conv": "its code computes something else of some of its heads"
    }


def test_packages_of_kernels_are_not_asked_about_mixers(monkeypatch):
    """Functions of the model's file call causal-conv1d and mamba-ssm where these are installed, for GPUs alone."""
    mixer = tiny_model("nemotron_h").model.layers[0].mixer
    names = inspect.unwrap(type(mixer).forward).__globals__
    for name in ("causal_conv1d_fn", "mamba2_chunk_scan"):

        @functools.wraps(inspect.unwrap(names[name]))
        def fail(*_, **__):
            raise RuntimeError("expected a CUDA tensor")

        monkeypatch.setitem(names, name, fail)
    monkeypatch.setattr("hf_axonn.architectures.mixers._TRIED", {})
    assert not isinstance(divide_mixer(mixer), str)
