"""`generate` on a grid writes what one process writes, whatever divides the model, and nobody waits for ever."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    CompileConfig,
    GenerationConfig,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
)

from hf_axonn import parallelize
from hf_axonn.engine.gradient_sync import sync_gradients
from hf_axonn.topology.grid import Grid
from tests.helpers.devices import moved, rank_device
from tests.helpers.equality import exact
from tests.helpers.models import tiny_batch, tiny_model, unplanned_model
from tests.helpers.ranks import run_ranks


pytestmark = pytest.mark.usefixtures("device")


ALL_GRIDS = [Grid(y=2, x=2), Grid(z=2, x=2), Grid(y=4), Grid(z=4), Grid(z=2, y=2), Grid(data=2, x=2)]
NEW = {"max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
# 6 query heads divide by x = 2 and not by x * y = 4; 3 kv heads do not divide by x = 2 either.
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}


def llama(**changes):
    """Larger than usual numbers in the head, so that probabilities are far from even; other kinds have two layers."""
    model = tiny_model("llama", **{"num_hidden_layers": 1} | changes).eval()
    model.lm_head.weight.data.mul_(5)
    return model


def unplanned():
    return unplanned_model().eval()


def adapted_llama():
    with torch.device("cpu"):  # where the truth is made, by other random numbers than on a GPU
        model = get_peft_model(llama(), LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
    return model.to(rank_device()).eval()


def left_padded(rows, seq):
    """Prompts of unequal length."""
    ids = tiny_batch(rows, seq)["input_ids"]
    mask = (torch.arange(seq) >= torch.arange(rows).unsqueeze(1) % 3).long()
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def write(model, prompt, **options):
    """The tokens that a model generates; the seed is that of every rank."""
    torch.manual_seed(11)
    with torch.no_grad(), exact():
        return model.generate(**(NEW | moved(prompt, model.device) | options))


def can_be_compared(way):
    """The truth of what is drawn is that of a CPU."""
    return "sampl" not in way or rank_device().type == "cpu"


PROMPTS = left_padded(3, 5)
ONE_PROMPT = {"input_ids": torch.tensor([[7, 8, 9, 7, 8, 9, 7, 8]])}
WAYS = {
    "greedy": functools.partial(write, prompt=PROMPTS, do_sample=False),
    "sampling": functools.partial(write, prompt=PROMPTS, do_sample=True, top_k=0),
    "several samples": functools.partial(write, prompt=PROMPTS, do_sample=True, top_p=0.9, num_return_sequences=2),
    "beams": functools.partial(write, prompt=PROMPTS, do_sample=False, num_beams=2),
    "static cache": functools.partial(
        write, prompt=PROMPTS, do_sample=False, cache_implementation="static", prefill_chunk_size=2
    ),
    "prompt of one token": functools.partial(write, prompt={"input_ids": torch.tensor([[5], [9]])}, do_sample=False),
    "prompt lookup": functools.partial(write, prompt=ONE_PROMPT, do_sample=False, prompt_lookup_num_tokens=3),
}
MODELS = {
    "six heads": functools.partial(llama, **SIX_HEADS),
    "smollm2": lambda: tiny_model("smollm2").eval(),
    "mistral": lambda: tiny_model("mistral").eval(),
    "qwen2": lambda: tiny_model("qwen2").eval(),
    "qwen3": lambda: tiny_model("qwen3").eval(),
    "unlisted": unplanned,
    "adapted llama": adapted_llama,
}


def _generate(some, ways, models):
    """Llama in ways on grids, and models greedily; what differs from one process."""
    wrong = []
    for grid, here, kinds in some:
        model, _ = parallelize(llama(), grid)
        for way in here:
            if can_be_compared(way) and not torch.equal(WAYS[way](model), ways[way]):
                wrong.append(f"{way} on {grid}")
        for name in kinds:
            model, _ = parallelize(MODELS[name](), grid)
            if not torch.equal(WAYS["greedy"](model), models[name]):
                wrong.append(f"{name} on {grid}")
    return wrong


QUICK = [  # each way on one of the grids, and the models whose caches the test below does not look into
    (Grid(y=2, x=2), list(WAYS)[::2], ["qwen3", "adapted llama"]),
    (Grid(z=2, x=2), list(WAYS)[1::2], ["qwen2", "unlisted"]),
]
EVERY = [(grid, list(WAYS), MODELS if place < 3 else ()) for place, grid in enumerate(ALL_GRIDS)]


@pytest.mark.parametrize("some", [QUICK, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["two", "six"])
def test_every_way_and_every_model_as_on_one_process(some):
    model = llama()
    ways = {way: function(model) for way, function in WAYS.items()}
    assert not torch.equal(ways["greedy"], ways["sampling"])
    assert not torch.equal(ways["greedy"], ways["beams"])
    names = {name for _, _, kinds in some for name in kinds}
    models = {name: WAYS["greedy"](MODELS[name]()) for name in names}
    for rank, wrong in enumerate(run_ranks(_generate, 4, some, ways, models)):
        assert not wrong, (rank, wrong)


def own_kv_heads(query, kv, grid, here):
    """The kv head that each cached head of a rank must be, from the sizes alone."""
    for axes in (("x", "y"), ("x",), ()):
        parts = {"x": grid.x if "x" in axes else 1, "y": grid.y if "y" in axes else 1}
        if query % (parts["x"] * parts["y"]) == 0:
            break
    own = query // (parts["x"] * parts["y"])
    first = own * ((here["x"] if "x" in axes else 0) * parts["y"] + (here["y"] if "y" in axes else 0))
    read = [head // (query // kv) for head in range(first, first + own)]
    return read if kv % (parts["x"] * parts["y"]) else sorted(set(read))


def _cached_heads(grids, kinds, truths):
    for grid in grids:
        here = grid.coordinates(dist.get_rank())
        for (make, query, kv), truth in zip(kinds, truths, strict=True):
            model, _ = parallelize(make(), grid)
            heads = own_kv_heads(query, kv, grid, here)
            for cached, layer in zip(keys_and_values(model), truth, strict=True):
                for ours, whole in zip(cached, layer, strict=True):
                    torch.testing.assert_close(ours, whole[:, heads], rtol=1e-10, atol=1e-10)


def keys_and_values(model):
    with torch.no_grad(), exact():
        cache = model(**moved(PROMPTS, model.device), use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


HEAD_GRIDS = [Grid(y=2, x=2), Grid(z=2, x=2)]
MORE_HEAD_GRIDS = [Grid(x=4), Grid(y=4), Grid(z=2, y=2)]
KINDS = [(llama, 12, 6), (MODELS["six heads"], 6, 3), (MODELS["smollm2"], 9, 3)]


@pytest.mark.parametrize(
    "grids", [HEAD_GRIDS, pytest.param(MORE_HEAD_GRIDS, marks=pytest.mark.slow)], ids=["two", "three"]
)
def test_a_rank_caches_the_kv_heads_of_its_queries_and_no_others(grids):
    assert own_kv_heads(12, 6, Grid(x=2), {"x": 1, "y": 0}) == [3, 4, 5]
    assert own_kv_heads(12, 6, Grid(y=2, x=2), {"x": 1, "y": 0}) == [3, 3, 4]
    assert own_kv_heads(6, 3, Grid(y=2, x=2), {"x": 1, "y": 0}) == [1, 2, 2]
    assert own_kv_heads(9, 3, Grid(y=2, x=2), {"x": 1, "y": 0}) == [0, 1, 2]
    run_ranks(_cached_heads, 4, grids, KINDS, [keys_and_values(make()) for make, _, _ in KINDS])


UNEQUAL = [Grid(z=2, x=2), Grid(data=2, z=2)]
MORE_UNEQUAL = [Grid(z=4), Grid(z=2, y=2), Grid(data=2, x=2)]
UNEQUAL_WAYS = {
    "greedy": {"do_sample": False},
    "without a cache": {"do_sample": False, "use_cache": False},
    "sampling, static": {"do_sample": True, "top_k": 0, "cache_implementation": "static"},
    "beams": {"do_sample": False, "num_beams": 2, "early_stopping": True},
    "with scores": {"do_sample": False, "return_dict_in_generate": True, "output_scores": True},
}
# Each (data, z) position its own number of prompts, of its own lengths, and its own number of tokens to write at most.
UNEQUAL_PROMPTS = [left_padded(1 + place % 3, 4 + place) | {"max_new_tokens": 6 + 2 * place} for place in range(4)]


def sequences(given):
    return given if isinstance(given, torch.Tensor) else given.sequences


def end_early(model, options):
    """A token to end with, that ends the first place early and the second not, and what each place then gives."""
    longest = [sequences(write(model, prompt, **options)).shape[1] for prompt in UNEQUAL_PROMPTS]
    for end in sequences(write(model, UNEQUAL_PROMPTS[0], **options))[0, 4:-1].tolist():
        given = [write(model, prompt, **(options | {"eos_token_id": end})) for prompt in UNEQUAL_PROMPTS]
        early = [sequences(its).shape[1] < longest[place] for place, its in enumerate(given)]
        if early[0] and not early[1]:
            return end, given
    raise AssertionError("no token ends the first place alone: choose other prompts")


def _generate_unequally(grids, truths):
    wrong = []
    for grid in grids:
        here = grid.coordinates(dist.get_rank())
        place = here["data"] * grid.z + here["z"]
        for name, ways in truths.items():
            if name != "llama" and grid != UNEQUAL[0]:
                continue
            model, _ = parallelize(UNEQUAL_MODELS[name](), grid)
            for way, (end, given) in ways.items():
                if not can_be_compared(way) or (grid == UNEQUAL[1] and way not in ("sampling, static", "with scores")):
                    continue
                ours = write(model, UNEQUAL_PROMPTS[place], **(UNEQUAL_WAYS[way] | {"eos_token_id": end}))
                if not torch.equal(sequences(ours), sequences(given[place])):
                    wrong.append(f"{name}, {way}, {grid}")
                if way == "with scores" and len(ours.scores) != len(given[place].scores):
                    wrong.append(f"{name}, scores, {grid}")
    return wrong


UNEQUAL_MODELS = {
    "llama": functools.partial(llama, num_hidden_layers=2),
    "unlisted": unplanned,
    "adapted llama": adapted_llama,
}


@pytest.mark.parametrize("grids", [UNEQUAL, pytest.param(MORE_UNEQUAL, marks=pytest.mark.slow)], ids=["two", "three"])
def test_no_rank_waits_for_one_that_is_done(grids):
    truths = {}
    for name, make in UNEQUAL_MODELS.items():
        ways = {*UNEQUAL_WAYS} - {"greedy"} if name == "llama" else {"greedy"}  # with scores it is greedy, too
        truths[name] = {way: end_early(make(), UNEQUAL_WAYS[way]) for way in ways}
    for rank, wrong in enumerate(run_ranks(_generate_unequally, 4, grids, truths, timeout=120)):
        assert not wrong, (rank, wrong)


def _may_be_told_otherwise():
    """All ranks see the same prompt, so nobody needs to wait; the caller's own word counts."""
    model, _ = parallelize(llama(), Grid(z=2))
    reduced = []
    original = dist.all_reduce

    def counting(value, *args, **kwargs):
        reduced.append(value.numel() == 1 and value.dim() == 0)
        return original(value, *args, **kwargs)

    dist.all_reduce = counting
    try:
        write(model, PROMPTS, do_sample=False, synced_gpus=False)
        asked_to_leave = sum(reduced)
        write(model, PROMPTS, do_sample=False)
    finally:
        dist.all_reduce = original
    return asked_to_leave, sum(reduced) - asked_to_leave


def test_the_ranks_of_z_agree_after_every_token_unless_told_otherwise():
    left, agreed = run_ranks(_may_be_told_otherwise, 2)[0]
    assert left == 0
    assert agreed >= NEW["max_new_tokens"]


REFUSED = {
    "max_time": (60.0, "max_time over the grid .*y=2.* each rank has a clock of its own"),
    "assistant_early_exit": (1, "assistant_early_exit .* the last layer, which it leaves out"),
    "use_mtp": (True, "use_mtp .* not compared"),
    "speculation_type": ("dflash", "speculation_type .* not compared"),
    "compile_config": (CompileConfig(), "compile_config .* Omit it"),
}


def _without_cache(truth):
    model, _ = parallelize(llama(), Grid(y=2))
    assert torch.equal(write(model, PROMPTS, do_sample=False, use_cache=False), truth)
    for name, (value, message) in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            write(model, ONE_PROMPT, generation_config=GenerationConfig(**{name: value}))
    with pytest.raises(ValueError, match=REFUSED["max_time"][1]):
        write(model, ONE_PROMPT, stopping_criteria=StoppingCriteriaList([MaxTimeCriteria(60.0)]))


def test_without_cache_and_what_is_refused():
    """Without a cache over z it is with the prompts of unequal length."""
    run_ranks(_without_cache, 2, write(llama(), PROMPTS, do_sample=False, use_cache=False))


def drafted(model, place):
    """The first row is drafted by the model itself, and done after fewer passes than the second."""
    prompt = {"input_ids": PROMPTS["input_ids"][place : place + 1]}
    drafter = llama(seed=5 * place)
    return [
        write(model, prompt, do_sample=False, **way)
        for way in ({"assistant_model": drafter}, {"prompt_lookup_num_tokens": 2})
    ] + [healed(model, place)]


def healed(model, place):
    """The first row ends with a part of other words, so its last token is written anew; the second does not."""
    words = {word: place for place, word in enumerate(["<pad>", "a", "b", "ab", "y"])}
    backend = Tokenizer(WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<pad>")
    prompt = {"input_ids": torch.tensor([[2, 4, [1, 4][place]]])}
    return write(model, prompt, do_sample=False, token_healing=True, tokenizer=tokenizer)


def _drafted(truths):
    model, _ = parallelize(llama(), Grid(z=2))
    place = dist.get_rank()
    for ours, truth in zip(drafted(model, place), truths[place], strict=True):
        assert torch.equal(ours, truth)
    drafter, _ = parallelize(llama(), Grid(z=2))
    with pytest.raises(ValueError, match="assistant_model is sharded over z=2"):
        write(model, PROMPTS, assistant_model=drafter)


@pytest.mark.slow
def test_ranks_of_z_draft_tokens_as_often_as_each_needs():
    run_ranks(_drafted, 2, [drafted(llama(), place) for place in range(2)], timeout=60)


def step_and_write(model):
    """A training step between two generations: weights that were gathered ahead must not be used again."""
    before = write(model, PROMPTS, do_sample=False)
    with exact():
        model.train()(**tiny_batch(2, 6)).loss.backward()
    sync_gradients(model)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return before, write(model.eval(), PROMPTS, do_sample=False)


def _after_a_step(grids, truth):
    for grid in grids:
        model, _ = parallelize(llama(), grid)
        for ours, its in zip(step_and_write(model), truth, strict=True):
            assert torch.equal(ours, its), grid


@pytest.mark.parametrize(
    "grids", [ALL_GRIDS[1:2], pytest.param([ALL_GRIDS[0], *ALL_GRIDS[2:]], marks=pytest.mark.slow)], ids=len
)
def test_generation_after_a_training_step(grids):
    before, after = step_and_write(llama())
    assert not torch.equal(before, after)
    run_ranks(_after_a_step, 4, grids, (before, after))


def test_one_rank_keeps_the_plain_generate():
    model = llama()
    before = model.generate
    assert parallelize(model, Grid())[0].generate == before
