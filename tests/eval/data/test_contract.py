"""Lines of a protocol: what is met, what is not, and what nobody can say."""

import pytest

from hf_axonn_eval import PROTOCOLS
from hf_axonn_eval.data.contract import DEVIATION, MET, OPEN, UNCHECKED, Line, close_lines, deviations
from hf_axonn_eval.data.protocols import check_protocol, protocol, read_protocol


def line(**how) -> Line:
    return Line(what="x", published="p", source="s", **how)


def state(facts: dict, **how) -> tuple[str, str]:
    found = line(**how).check(facts)
    return found["state"], found.get("here", "")


def states(record: dict, **run) -> dict[str, str]:
    return {line["line"]: line["state"] for line in check_protocol(record, run)["lines"]}


def full(name: str, samples: dict | None = None, **settings) -> dict:
    """A record of samples that are all that the protocol asks for, `samples` apart."""
    facts = {
        "samples": 200, "prefix_tokens": {"least": 1998, "most": 1998}, "suffix_tokens": {"least": 50, "most": 50},
        "documents_used": {str(bucket): 200 for bucket in (0, 1, 4, 6)}, "begin_with_bos": 200, "has_bos": True,
        "tokenizer_adds_bos": True, "eos_within_suffix": 0, "duplicates_of_other_documents": 0, "left_out": {},
        "known_dropped": {"v1": 16, "v2": 0},
    }  # fmt: skip
    return protocol(name, **settings).record(facts | (samples or {}))


RUN = {"dtype": "bfloat16", "family": "llama", "generate": True, "sampler": None, "stop_early": False, "eos": [2]}


def test_a_run_as_published_has_no_deviation():
    assert set(states(full("sc24"), **RUN).values()) == {MET, UNCHECKED}
    goldfish = full("goldfish", {"documents_used": {"0": 500, "3": 500}})
    assert deviations(check_protocol(goldfish, RUN)["lines"]) == []


def test_shorter_documents_are_told():
    """The defect that a contract is against: prefixes of 112 to 1,408 tokens, and nothing called changed."""
    short = {"prefix_tokens": {"least": 112, "most": 1408}}
    lines = deviations(check_protocol(full("sc24", short), RUN)["lines"])
    assert lines == ["prefix: published the first 1,998 of a document's first 2,048 tokens, here 112 to 1,408 tokens"]
    lines = deviations(check_protocol(full("sc24", short, min_document_tokens=100), RUN)["lines"])
    assert lines[0].startswith("documents: published English Wikipedia pages of at least 2,048 tokens, here min_docu")
    assert len(lines) == 2


def test_a_setting_that_no_line_names_is_a_deviation_too():
    record = full("sc24", max_documents=200)
    assert deviations(check_protocol(record, RUN)["lines"]) == ["setting max_documents: published none, here 200"]
    # what a line names without checking it, because nothing was published, is one when it is changed
    assert states(full("sc24", add_special_tokens=False), **RUN)["setting add_special_tokens"] == DEVIATION
    assert states(full("sc24"), **RUN)["BOS"] == UNCHECKED


def test_what_a_run_decides_is_open_until_it_does():
    before = states(full("goldfish", {"documents_used": {"0": 500}}))
    assert {name for name, found in before.items() if found == OPEN} == {"dtype", "decoding", "EOS", "metrics"}
    other = RUN | {"dtype": "float32", "generate": False}
    texts = deviations(check_protocol(full("goldfish", {"documents_used": {"0": 499}}), other)["lines"])
    assert [text.partition(":")[0] for text in texts] == ["documents", "dtype", "decoding", "metrics"]
    assert "dtype: published bfloat16, here float32" in texts and texts[0].endswith("here 499 documents of bucket 0")


def test_the_dtype_of_a_family():
    wanted = {"default": "float16", "bfloat16": ["qwen", "gemma", "llama-3"]}
    for family, dtype in {
        "gpt_neox": "float16",
        "llama": "float16",
        "llama-3": "bfloat16",
        "qwen2": "bfloat16",
    }.items():
        for mine in ("float16", "bfloat16"):
            facts = {"family": family, "dtype": mine}
            assert state(facts, require={"dtype": wanted})[0] == (MET if mine == dtype else DEVIATION)


def test_a_model_that_does_not_say_what_it_is():
    """A server tells neither its dtype nor what its model is."""
    for require in ({"dtype": "bfloat16"}, {"bos_by_hand": ["gpt_neox"]}):
        facts = {"dtype": None, "family": None, "tokenizer_adds_bos": False, "begin_with_bos": 3}
        found, why = state(facts, require=require)
        assert found == UNCHECKED and "does not say" in why


def test_all_samples_have_the_length():
    for least, most, expected in ((50, 50, MET), (9, 50, DEVIATION), (50, 51, DEVIATION), (51, 51, DEVIATION)):
        facts = {"prefix_tokens": {"least": least, "most": most}}
        assert state(facts, require={"prefix_tokens": 50})[0] == expected


def test_bos():
    facts = {"samples": 10, "begin_with_bos": 10, "has_bos": True, "tokenizer_adds_bos": False}
    assert state(facts, require={"bos": "first"})[0] == MET
    assert state(facts, require={"bos": "none"}) == (DEVIATION, "10 of 10 prefixes begin with a BOS")
    assert state(facts | {"begin_with_bos": 9}, require={"bos": "first"})[0] == DEVIATION
    assert state({"samples": 10, "begin_with_bos": 0, "has_bos": False}, require={"bos": "first"})[0] == MET
    hand = {"require": {"bos_by_hand": ["gpt_neox"]}}
    assert state(facts, **hand) == (OPEN, "until a model is asked")
    assert state(facts | {"family": "gpt_neox"}, **hand)[0] == MET
    assert state(facts | {"family": "olmo"}, **hand) == (DEVIATION, "a BOS by hand for olmo, too")
    assert state(facts | {"family": "olmo", "tokenizer_adds_bos": True}, **hand)[0] == MET


def test_documents_dropped_by_name():
    def found(v1: int, v2: int) -> tuple[str, str]:
        return state({"known_dropped": {"v1": v1, "v2": v2}}, require={"known_dropped": {"v1": 16, "v2": 5}})

    assert found(16, 0)[0] == found(0, 5)[0] == found(16, 5)[0] == MET
    assert found(0, 0) == (UNCHECKED, "no document has one of these ids")
    assert found(15, 5) == (DEVIATION, "dropped 15 of 16 of v1")


def test_an_eos_that_was_to_be_banned_is_decided_by_the_answers():
    banned = line(require={"eos_banned": True})
    waits = [banned.check(RUN)]
    assert waits[0]["state"] == OPEN and close_lines(waits, {}) == waits
    assert close_lines(waits, {"eos_generated": 0})[0]["state"] == MET
    assert deviations(close_lines(waits, {"eos_generated": 3})) == ["x: published p, here 3 continuations hold an EOS"]
    other = [line(require={"dtype": "bfloat16"}).check({})]
    assert close_lines(other, {"eos_generated": 0}) == other and other[0]["state"] == OPEN, (
        "it does not wait for answers"
    )
    assert banned.check(RUN | {"eos": []})["state"] == UNCHECKED
    assert banned.check(RUN | {"generate": False})["state"] == MET


def test_the_sampler_is_compared_by_what_it_does():
    wanted = {"extract": {"sampler": {"temperature": 1.0, "top_k": 40}}}
    assert state({"sampler": {"temperature": 1.0, "top_k": 40, "top_p": None}}, **wanted)[0] == MET
    assert state({"sampler": None}, **wanted) == (DEVIATION, "sampler none")
    other = {"sampler": {"temperature": 1.0, "top_k": 40, "top_p": 0.9}}
    assert state(other, **wanted) == (DEVIATION, "sampler (temperature 1.0, top_k 40, top_p 0.9)")


def test_a_line_that_is_never_met_and_one_that_is_never_checked():
    assert state({}, differs="we count") == (DEVIATION, "we count")
    assert state({}, unchecked="nobody knows") == (UNCHECKED, "nobody knows")
    assert state({}, sampling={"kind": "first"}) == (UNCHECKED, "the samples do not say how they were cut")
    assert state({}, require={"buckets": [0]}) == (UNCHECKED, "the samples do not say")


def test_records_of_earlier_versions():
    """They have settings, fewer of them, and no facts about the samples."""
    settings = {"kind": "sliding", "prefix_length": [50], "suffix_length": [50], "stride": 10}
    settings |= {"stride_unit": "characters", "add_special_tokens": True, "deduplicate": True}
    record = {"name": "cooper100", "source": "", "settings": settings, "changed": []}
    run = RUN | {"sampler": {"top_k": 40, "temperature": 1.0}}
    found = {line["line"]: line for line in check_protocol(record, run)["lines"]}
    assert found["stride"]["state"] == MET
    assert found["slice"]["here"] == "slice_characters none", "a window of few tokens was filled then"
    assert found["BOS"]["here"] == "bos tokenizer" and found["duplicates"]["state"] == UNCHECKED
    assert states({"name": "cooper100"}, **RUN)["stride"] == UNCHECKED
    for record in (None, {"name": None, "settings": {}}, {"name": "one of yours"}):
        assert check_protocol(record, RUN) == record


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_run_that_changes_all_it_can_meets_no_line_that_it_changed(name):
    published = PROTOCOLS[name].sampling.settings()
    changes = {"deduplicate": not published["deduplicate"], "max_documents": 3}
    found = states(protocol(name, **changes).record())
    assert list(found.values()).count(DEVIATION) >= 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "'x' must have sampling"),
        ({"differs": "a", "unchecked": "b"}, "no two of these three"),
        ({"differs": "a", "require": {"bos": "first"}}, "no two of these three"),
        ({"require": {"stars": 5}}, "'x' requires 'stars'; there are prefix_tokens"),
    ],
)
def test_lines_that_cannot_be(how, message):
    with pytest.raises(ValueError, match=message):
        line(**how)


def test_two_lines_that_say_one_thing():
    head = 'name = "n"\nsource = "s"\nsummary = "u"\n'
    one = '[[line]]\nwhat = "{}"\npublished = "p"\nsource = "s"\nsampling = {{ kind = "first" }}\n'
    assert read_protocol(head + one.format("a")).sampling.kind == "first"
    with pytest.raises(ValueError, match="protocol n: two lines say kind"):
        read_protocol(head + one.format("a") + one.format("b"))
