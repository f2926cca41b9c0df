"""Metrics as some publications define them: over token ids, up to the EOS, over the full suffix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from hf_axonn_eval import extract
from hf_axonn_eval.extraction.prefix_matching import Match
from hf_axonn_eval.extraction.runner import eos_ids, result_of
from hf_axonn_eval.metrics import text as metrics
from hf_axonn_eval.metrics.registry import METRICS
from tests.helpers.eval_support import samples, topics_tokenizer, trained_llama


IDS = st.lists(st.integers(0, 4), min_size=1, max_size=12)


def longest_subsequence(one, other) -> int:
    """The textbook recurrence."""
    row = [0] * (len(other) + 1)
    for left in one:
        before = row
        row = [0]
        for place, right in enumerate(other):
            row.append(before[place] + 1 if left == right else max(before[place + 1], row[-1]))
    return row[-1]


@settings(max_examples=200)
@given(IDS, IDS)
def test_rouge_l_over_ids_is_that_of_the_recurrence(generated, suffix):
    """As calculate_rouge_l of swiss-ai/apertus_memorization: F1 of the longest common subsequence."""
    common = longest_subsequence(generated, suffix)
    precision, recall = common / len(generated), common / len(suffix)
    expected = 2 * precision * recall / (precision + recall) if common else 0
    assert metrics.rouge_l_tokens(generated, suffix) == pytest.approx(expected)


def test_variants_by_hand():
    assert metrics.rouge_l_tokens([1, 2, 3, 4], [1, 3, 4, 5]) == 0.75  # 1, 3, 4
    assert metrics.rouge_l_tokens([1, 2], [3, 4]) == 0
    assert metrics.lccs([9, 1, 2, 3, 8], [1, 2, 3, 7, 9]) == 0.6  # 1, 2, 3 of five
    assert metrics.lccs([1, 2, 3], [1, 2, 3]) == 1
    assert metrics.suffix_types([5] * 99 + [7]) == 0.02, "over all tokens"
    assert metrics.type_token_ratio([5] * 99 + [7]) == pytest.approx((50 * 1 + 2) / 51 / 50), "over windows of 50"
    assert [metrics.holds_eos([4, 2, 7], eos) for eos in ((2,), (3,), (9, 7), ())] == [1, 0, 1, None]
    for metric in (metrics.rouge_l_tokens, metrics.lccs):
        with pytest.raises(ValueError, match="without tokens"):
            metric([1], [])
    with pytest.raises(ValueError, match="without tokens"):
        metrics.suffix_types([])


def test_no_variant_is_one_more_test_of_every_report():
    """Shares enter Holm's correction, and columns of the terminal its width."""
    to_eos = ("rouge1_to_eos", "rouge2_to_eos", "rougeL_to_eos")
    for name in (*to_eos, "rougeL_tokens", "lccs", "suffix_types", "holds_eos", "guess_nll"):
        assert METRICS[name].mean == "number" and METRICS[name].shown_in == "summary"


def test_up_to_the_eos_is_what_generate_gives_that_ends_there():
    """For every id that the model says somewhere: `generate` with it as the EOS, and ROUGE of that text."""
    model, tokenizer = trained_llama(), topics_tokenizer()
    plain = extract(model, tokenizer, samples(), progress=False)
    said = {token for result in plain for token in result.generated}
    ended = 0
    for eos in sorted(said)[::7]:
        model.generation_config = GenerationConfig(eos_token_id=[eos, 799])
        assert eos_ids(model, tokenizer) == (eos, 799)
        for sample, result in zip(samples(), extract(model, tokenizer, samples(), progress=False), strict=True):
            prompt = torch.tensor([sample.prefix])
            config = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=eos, pad_token_id=0)
            ids = model.generate(prompt, generation_config=config)[0, len(sample.prefix) :].tolist()
            before = ids[: ids.index(eos)] if eos in ids else ids
            text = tokenizer.decode(before, skip_special_tokens=True)
            true = tokenizer.decode(list(sample.suffix), skip_special_tokens=True)
            expected = metrics.rouge(text, true)
            for name in ("rouge1", "rouge2", "rougeL"):
                assert result.metric(f"{name}_to_eos") == expected[name]
            assert result.metric("holds_eos") == (eos in result.generated) == (len(before) < len(result.generated))
            ended += eos in ids
    assert ended > 10


def test_without_an_eos_or_a_continuation_nothing_is_said_of_it():
    sample = samples()[0]
    match = Match(known=list(sample.suffix), tokens=len(sample.suffix), margin=1.0)
    names = ("rouge1_to_eos", "rouge2_to_eos", "rougeL_to_eos", "holds_eos")
    for continuation, eos, expected in (
        (sample.suffix, (), [None] * 4),
        (None, (7,), [None] * 4),
        (sample.suffix, (799,), [1.0, 1.0, 1.0, 0]),
    ):
        result = result_of(sample, match, continuation, topics_tokenizer(), bound=0.1, eos=eos)
        assert [result.metric(name) for name in names] == expected


def test_the_eos_of_a_model_is_that_of_its_generation_config():
    model, tokenizer = trained_llama(), topics_tokenizer()
    model.generation_config = GenerationConfig()
    assert eos_ids(model, tokenizer) == (model.config.eos_token_id,) == (2,)
    model.config.eos_token_id = None
    assert eos_ids(model, tokenizer) == (tokenizer.eos_token_id,)
    assert eos_ids(model, None) == ()
