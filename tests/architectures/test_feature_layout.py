"""The feature layout: when a model has it, that it equals one process, and that no layer issues an all-to-all.

tests/end_to_end/test_equivalence.py runs its models in it too, wherever y > 1, because it is what `auto` takes.
"""

import dataclasses
import functools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from hf_axonn import Grid, parallelize
from hf_axonn.architectures.feature_layout import choose_layout
from hf_axonn.architectures.plan import plan_for
from hf_axonn.config import AxonnConfig
from hf_axonn.engine.state import parallel_state
from tests.end_to_end.test_equivalence import SITUATIONS
from tests.helpers.equality import Case, compare, exact, rows_of, too_large
from tests.helpers.float64 import checkpointed
from tests.helpers.models import BLOCKWISE, tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.traffic_counter import count_traffic


HIDDEN = 50  # 3 and 4 do not divide it: 17, 17, 16 and 13, 13, 13, 11
mistral = functools.partial(tiny_model, "mistral", hidden_size=HIDDEN, sliding_window=None)


def with_norms(make, **changes):
    """A Mistral whose norms are others, with random parameters."""
    model = mistral(**changes)
    generator = torch.Generator().manual_seed(4)
    for layer in model.model.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm = make(HIDDEN).double()
            for parameter in norm.parameters():
                parameter.data += 0.3 * torch.randn(HIDDEN, generator=generator, dtype=torch.float64)
            setattr(layer, name, norm)
    return model


def choose(model, requested="auto", y=2):
    return choose_layout(model, plan_for(model), y=y, requested=requested)


@pytest.mark.parametrize("kind", BLOCKWISE)
def test_models_with_plain_norms_have_it(kind):
    model = tiny_model(kind)
    choice = choose(model)
    assert choice.features == model.config.hidden_size and choice.reason.startswith("feature layout: 4 norms")
    names = {name for name, module in model.named_modules() if module in choice.norms}
    assert names == {
        f"model.layers.{index}.{norm}_layernorm" for index in (0, 1) for norm in ("input", "post_attention")
    }


def test_a_model_on_the_meta_device_has_it():
    with torch.device("meta"):
        assert choose(mistral()).features == HIDDEN


def test_one_rank_on_y_has_nothing_to_choose():
    for requested in ("auto", "token", "feature"):
        choice = choose(mistral(), requested, y=1)
        assert not choice.features and "y = 1" in choice.reason
    assert choose(mistral(), "token").reason == "token layout, as configured"


class L2Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden):
        return self.weight * nn.functional.normalize(hidden, dim=-1)


def strange_norm(model):
    model.model.layers[1].post_attention_layernorm = L2Norm(HIDDEN).double()
    return "model.layers.1.post_attention_layernorm, a L2Norm, is neither"


def own_parameter(model):
    model.model.layers[1].scale = nn.Parameter(torch.ones(HIDDEN))
    return "model.layers.1, a MistralDecoderLayer, is neither"


def mixing_layer(model):
    layer = model.model.layers[1]
    original = layer.forward

    def forward(hidden_states, **kwargs):
        return original(hidden_states * hidden_states.square().mean(-1, keepdim=True).rsqrt(), **kwargs)

    layer.forward = forward
    return "model.layers.1, a MistralDecoderLayer, does more"


def reads_the_size(model):
    layer = model.model.layers[0]
    original = layer.forward
    layer.forward = lambda hidden_states, **kwargs: original(hidden_states.view(1, -1, HIDDEN), **kwargs)
    return "model.layers.0, a MistralDecoderLayer, does more"


@pytest.mark.parametrize("spoil", [strange_norm, own_parameter, mixing_layer, reads_the_size])
def test_what_stands_in_the_way_is_named(spoil):
    model = mistral().train()
    culprit = spoil(model)
    forwards = [vars(module).get("forward") for module in model.modules()]
    choice = choose(model)
    assert not choice.features and choice.reason.startswith(f"token layout: {culprit}")
    with pytest.raises(ValueError, match=f"layout is feature.*{culprit}"):
        choose(model, "feature")
    # The trial leaves the model as it was.
    assert all(module.training for module in model.modules())
    assert forwards == [vars(module).get("forward") for module in model.modules()]


def elementwise_layer(model):
    layer = model.model.layers[1]
    original = layer.forward
    layer.forward = lambda hidden_states, **kwargs: original(torch.tanh(hidden_states) * 2, **kwargs)


def test_elementwise_code_in_a_layer_does_not():
    model = mistral()
    elementwise_layer(model)
    assert choose(model).features


def test_a_model_without_blocks_cannot_have_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert choose(model).reason == "" and not choose(model).features
    with pytest.raises(ValueError, match="this model cannot have it: no block plan"):
        choose(model, "feature")


def adapted_mistral(**options):
    torch.manual_seed(7)
    config = LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False, **options)
    return get_peft_model(mistral(), config)


def only_norms(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layernorm" in name)


def frozen_norms(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)


def layout(name):
    return lambda grid: AxonnConfig(grid=grid, layout=name)


FEATURE = functools.partial(Case, batches=[tiny_batch(4, 7)], config=layout("feature"), steps=2)
CASES = [
    FEATURE("mistral", mistral),
    FEATURE("layer norms", functools.partial(with_norms, nn.LayerNorm)),
    FEATURE("norms of 1 + weight", functools.partial(with_norms, GemmaRMSNorm)),
    FEATURE("norms without parameters", functools.partial(with_norms, functools.partial(nn.LayerNorm, bias=False,
                                                                                        elementwise_affine=False))),
    FEATURE("smollm2", functools.partial(tiny_model, "smollm2")),
    FEATURE("qwen2", functools.partial(tiny_model, "qwen2", hidden_size=HIDDEN)),
    FEATURE("qwen3", functools.partial(tiny_model, "qwen3", hidden_size=5)),
    FEATURE("LoRA", adapted_mistral),
    FEATURE("only norms are trained", mistral, before=only_norms),
    FEATURE("norms are frozen", mistral, before=frozen_norms),
    FEATURE("checkpointing", functools.partial(with_norms, nn.LayerNorm),
            before=functools.partial(checkpointed, reentrant=False)),
    FEATURE("reentrant checkpointing", mistral, before=functools.partial(checkpointed, reentrant=True)),
    FEATURE("elementwise code in a layer", mistral, before=elementwise_layer),
]  # fmt: skip


def run(cases, grids, timeout=400):
    """The worst of any rank, after making sure that what was asked for is what is run."""
    cases = [(case, case.truth()) for case in cases]
    return run_ranks(compare, grids[0].size, cases, grids, timeout=timeout)[0]


NORMS = {"norms of 1 + weight", "qwen3", "only norms are trained"}
BESIDE_X = {"smollm2", "checkpointing", "elementwise code in a layer"}


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        (Grid(y=2), NORMS),
        (Grid(y=2, x=2), BESIDE_X),
        pytest.param(Grid(y=2, x=2), {case.name for case in CASES} - BESIDE_X, marks=pytest.mark.slow),
    ],
    ids=["y", "y and x", "more of y and x"],
)
def test_it_equals_one_process(grid, names):
    cases = [case for case in CASES if case.name in names]
    assert len(cases) == len(names)
    assert not too_large(run(cases, [grid]), 1e-10)


@pytest.mark.slow
def test_it_equals_one_process_where_nothing_divides():
    assert not too_large(run(CASES[:7], [Grid(y=3)]), 1e-10)


SLOW = [[Grid(y=4), Grid(z=2, y=2), Grid(data=2, y=2)], [Grid(y=3, x=2), Grid(y=2, x=3)], [Grid(y=2, x=2, z=2)]]


@pytest.mark.slow
@pytest.mark.parametrize("grids", SLOW, ids=["4", "6", "8"])
def test_it_equals_one_process_on_every_kind_of_grid(grids):
    assert not too_large(run(CASES, grids), 1e-10)


TOKEN = {"tokens not divisible", "one token a row", "accumulation of two shapes", "checkpointing", "inputs_embeds",
         "loss of one's own", "loss on hidden states", "loss on attention weights", "loss on the base model",
         "loss in eval mode", "frozen start", "biases everywhere"}  # fmt: skip


@pytest.mark.slow
def test_the_token_layout_equals_one_process_too():
    cases = [case for case in SITUATIONS if case.name in TOKEN]
    assert len(cases) == len(TOKEN)
    cases = [dataclasses.replace(case, config=layout("token")) for case in (*cases, *CASES[:2])]
    cases.append(Case("a norm that is none", spoiled))
    assert not too_large(run(cases, [Grid(y=2, x=2)]), 1e-10)


def spoiled():
    model = mistral()
    strange_norm(model)
    return model


def train_once(grid, name, layers, reentrant):
    model, report = parallelize(mistral(num_hidden_layers=layers).train(), grid, config=layout(name)(grid))
    assert report.layout.startswith(f"{name} layout") and report.layout in str(report)
    state = parallel_state(model)
    assert bool(state.features) == (name == "feature")
    if reentrant is not None:
        checkpointed(model, reentrant=reentrant)
    batch = rows_of(tiny_batch(8, 7), grid, dist.get_rank())
    with exact(), count_traffic(grid) as counter:
        model(**batch).loss.backward()
    entries = Counter()
    for entry, its in counter.ledger.chosen():
        entries[entry.phase, entry.kind, entry.axes] += its.calls
    return entries


def count_exchanges(grid, ways):
    every = {}
    for reentrant in ways:
        for name in ("token", "feature"):
            for layers in (2, 3):
                every[name, reentrant, layers] = train_once(grid, name, layers, reentrant)
    return every


@pytest.mark.parametrize(
    ("grid", "ways"),
    [
        (Grid(y=2), [None, False]),
        pytest.param(Grid(y=2, x=2), [None, False, True], marks=pytest.mark.slow),
        pytest.param(Grid(y=4), [None, False, True], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_layer_issues_an_all_to_all(grid, ways):
    for every in run_ranks(count_exchanges, grid.size, grid, ways):
        for (name, reentrant, layers), entries in every.items():

            def calls(kind, entries=entries):
                return sum(its for (_, which, axes), its in entries.items() if (which, axes) == (kind, ("y",)))

            again = reentrant is not None  # a checkpointed layer runs a second time
            if name == "feature":
                # What the last layer hands on, and its backward.
                assert calls("all_to_all") == 2, (reentrant, layers)
            else:
                # Without reentrance a layer is recomputed up to the last tensor that is needed.
                assert calls("all_to_all") == layers * {None: 8, False: 11, True: 12}[reentrant], layers
            if layers == 3:
                # Two norms a layer: their statistics, forward and backward.
                more = calls("all_reduce") - calls("all_reduce", every[name, reentrant, 2])
                assert more == (2 * (2 + again) if name == "feature" else 0), (name, reentrant)


class NormThenDropout(nn.Sequential):
    """Norm and dropout on the residual stream."""


def with_dropout():
    """Dropout on the residual stream."""
    model = tiny_model("llama", hidden_size=48)
    for layer in model.model.layers:
        layer.post_attention_layernorm = NormThenDropout(layer.post_attention_layernorm, nn.Dropout(0.5))
    return model.train()


def masks():
    grid = Grid(y=2, x=2)
    seen = []
    model, report = parallelize(with_dropout(), grid)
    assert report.layout.startswith("feature layout: 4 norms")
    for layer in model.model.layers:
        layer.post_attention_layernorm[1].register_forward_hook(lambda *call: seen.append(call[2].detach() == 0))
    losses = []
    for _ in range(2):
        torch.manual_seed(2)
        loss = model(**tiny_batch(8, 7)).loss
        losses.append(loss.detach())
        loss.backward()
    assert torch.equal(losses[0], losses[1]) and all(map(torch.equal, seen[:2], seen[2:]))
    return seen[:2], losses[0]


def test_dropout_drops_every_feature_of_every_token_by_itself():
    results = run_ranks(masks, 4)
    assert len({float(loss) for _, loss in results}) == 1
    for layer in (0, 1):
        mine = [seen[layer] for seen, _ in results]
        assert all(mask.shape == (1, 28, 24) for mask in mine)
        for rank, mask in enumerate(mine):
            # 672 coins: 6 standard deviations are 0.12.
            assert 0.38 < float(mask.double().mean()) < 0.62
            for other in mine[:rank]:
                assert 0.38 < float((mask == other).double().mean()) < 0.62


def evaluate(grid):
    model, _ = parallelize(mistral().eval(), grid, config=layout("feature")(grid))
    return answers(model)


def answers(model):
    batch = {key: value for key, value in tiny_batch(4, 6).items() if key != "labels"}
    with torch.no_grad(), exact():
        output = model(**batch, output_hidden_states=True)
        written = model.generate(batch["input_ids"], max_new_tokens=4, eos_token_id=None, pad_token_id=0)
    return [output.logits, *output.hidden_states], written


@pytest.mark.parametrize("grid", [pytest.param(Grid(y=4), marks=pytest.mark.slow), Grid(y=2, x=2)], ids=str)
def test_evaluation_and_generation_equal_one_process(grid):
    model = mistral().eval()
    expected, written = answers(model)
    for ours, tokens in run_ranks(evaluate, 4, grid):
        assert torch.equal(tokens, written)
        for mine, its in zip(ours, expected, strict=True):
            assert mine.shape == its.shape and float((mine - its).abs().max()) < 1e-10


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="layout is 'tokens', but it is one of auto, token, feature"):
        AxonnConfig(grid=Grid(y=2), layout="tokens")
    assert AxonnConfig.from_mapping({"grid": {"y": 2}, "layout": "token"}).layout == "token"
