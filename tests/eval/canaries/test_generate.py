"""Canaries: drawn from their space without repetition, and in the training data as often as they say."""

import json
import random
from collections import Counter

import pytest

from hf_axonn_eval import insert_canaries, make_canaries
from hf_axonn_eval.canaries.generate import (
    Canary,
    Format,
    _different,
    interleave,
    read_canaries,
    write_canaries,
)


def test_a_format_numbers_all_its_texts():
    form = Format("{hex:1}-{digits:2}!")
    texts = [form.candidate(number) for number in range(form.space)]
    assert form.space == len(set(texts)) == 1600
    assert texts[0] == "0-00!" and texts[101] == "1-01!" and texts[-1] == "f-99!"
    assert Format("a {letters:3} b").space == 26**3


def test_canaries_and_candidates_are_all_different():
    drawn = make_canaries("{digits:3}", insertions=(0, 1, 5), each=2, candidates=100, seed=3)
    assert [canary.insertions for canary in drawn.canaries] == [0, 0, 1, 1, 5, 5]
    texts = [*(canary.text for canary in drawn.canaries), *drawn.candidates]
    assert len(set(texts)) == 106 and not drawn.complete and drawn.space == 1000
    assert drawn == make_canaries("{digits:3}", insertions=(0, 1, 5), each=2, candidates=100, seed=3)
    other = make_canaries("{digits:3}", insertions=(0, 1, 5), each=2, candidates=100, seed=4)
    assert drawn.canaries != other.canaries


def test_a_small_space_is_used_whole():
    drawn = make_canaries("{digits:2}", insertions=(1,), candidates=10_000)
    assert len(drawn.candidates) == 99 and drawn.complete


def test_a_space_larger_than_any_range():
    drawn = make_canaries("{letters:40}", insertions=(1,), candidates=50)
    assert drawn.space == 26**40 and len(set(drawn.candidates)) == 50


def test_each_is_put_in_as_often_as_it_says_and_the_rest_stays(tmp_path):
    rows = [json.dumps({"name": str(place), "body": "\u00e9" * place}, ensure_ascii=False) for place in range(40)]
    source, copy = tmp_path / "train.jsonl", tmp_path / "new" / "copy.jsonl"
    source.write_bytes("\n\n".join(rows).encode())  # empty lines, none at the end
    drawn = make_canaries("my number is {digits:4}", insertions=(0, 1, 7), each=2, candidates=10)
    assert insert_canaries(source, copy, drawn, id_key="name", text_key="body") == 16
    lines = copy.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if "canary" not in line] == rows
    added = [json.loads(line) for line in lines if "canary" in line]
    counts = Counter(row["body"] for row in added)
    assert counts == Counter({canary.text: canary.insertions for canary in drawn.canaries if canary.insertions})
    assert len({row["name"] for row in added}) == 16 and set(added[0]) == {"name", "body"}
    places = [place for place, line in enumerate(lines) if "canary" in line]
    assert min(places) < 20 < max(places)  # everywhere between the rows


def test_canaries_among_documents_with_buckets_are_seen_once_a_line(tmp_path):
    """`finetune` repeats a line as often as its bucket says, and refuses a line without one among lines with it."""
    (tmp_path / "train.jsonl").write_text(
        '{"id": "a", "text": "words", "bucket": 3}\n{"id": "b", "text": "b", "bucket": 0}\n'
    )
    drawn = make_canaries("{digits:4}", insertions=(2,), each=1, candidates=10)
    assert insert_canaries(tmp_path / "train.jsonl", tmp_path / "copy.jsonl", drawn) == 2
    rows = [json.loads(line) for line in (tmp_path / "copy.jsonl").read_text().splitlines()]
    assert Counter(row["bucket"] for row in rows) == {1: 2, 3: 1, 0: 1}


def test_places_are_even():
    """Each of 10 places gets the one extra row in a tenth of 2000 draws: 200, standard deviation 13.4."""
    counts = Counter(list(interleave("r" * 9, "e", total=9, seed=seed)).index("e") for seed in range(2000))
    assert set(counts) == set(range(10)) and all(abs(count - 200) < 5 * 13.4 for count in counts.values())


def test_round_trip_and_damage(tmp_path):
    drawn = make_canaries("my number is {digits:4}", insertions=(0, 3), candidates=20)
    write_canaries(drawn, tmp_path / "c")
    assert read_canaries(tmp_path / "c") == drawn
    candidates = tmp_path / "c" / "candidates.jsonl"
    candidates.write_text(candidates.read_text().replace("my", "no", 1))
    with pytest.raises(ValueError, match="candidates.jsonl is not the one that was written with canaries.json"):
        read_canaries(tmp_path / "c")
    write_canaries(drawn, tmp_path / "c")
    (tmp_path / "c" / "canaries.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        read_canaries(tmp_path / "c")
    with pytest.raises(ValueError, match="holds no canaries.json"):
        read_canaries(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "no field"}, "needs one or more fields like {digits:9}"),
        ({"format": "{words:2}"}, "needs one or more fields"),
        ({"format": "{digits:0}"}, "needs one or more fields"),
        ({"format": "{digits:1}", "each": 10}, "only 10 texts like .* too few for 10 canaries"),
        ({"insertions": ()}, "insertions are"),
        ({"insertions": (1, 1)}, "insertions are .1, 1."),
        ({"insertions": (-1,)}, "insertions are"),
        ({"each": 0}, "each is 0"),
        ({"candidates": 0}, "candidates are 0"),
    ],
)
def test_what_cannot_be_drawn_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_canaries(**{"format": "a {digits:4}", "insertions": (1,), **arguments})


def test_wrong_training_data_is_named(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"text": "a"}\n{"body": "b"}\n')
    drawn = make_canaries("{digits:4}", insertions=(1,), candidates=5)
    with pytest.raises(ValueError, match="line 2 has no field 'text'"):
        insert_canaries(file, tmp_path / "copy.jsonl", drawn)
    file.write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match="is the training data itself"):
        insert_canaries(file, file, drawn)
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]
    assert Canary(canary_id="canary-1", text=drawn.canaries[0].text, insertions=1) == drawn.canaries[0]


@pytest.mark.parametrize("space", [2**62 - 1, 2**62, 2**62 + 1, 2**70])
def test_numbers_of_a_large_space_are_different_and_within_it(space):
    drawn = _different(random.Random(0), space, 50)
    assert len(set(drawn)) == len(drawn) == 50 and 0 <= min(drawn) and space // 2 < max(drawn) < space
    assert drawn == _different(random.Random(0), space, 50)


def test_the_least_and_the_most_that_can_be_drawn():
    drawn = make_canaries("{digits:1}", insertions=(0,), each=9, candidates=1)
    assert len(drawn.canaries) == 9 and len(drawn.candidates) == 1 and drawn.complete and drawn.space == 10
    drawn = make_canaries("{digits:1}", insertions=(3,), candidates=8)
    assert len(drawn.candidates) == 8 and not drawn.complete
    assert [canary.canary_id for canary in make_canaries("{digits:1}", insertions=(0, 2), each=2).canaries] == [
        "canary-1", "canary-2", "canary-3", "canary-4",
    ]  # fmt: skip
    drawn = make_canaries("{digits:6}", insertions=(1,))
    assert (len(drawn.canaries), len(drawn.candidates), drawn.seed) == (1, 10_000, 0)
    with pytest.raises(ValueError, match="only 10 texts like .* too few for 11 canaries"):
        make_canaries("{digits:1}", insertions=(1,), each=11)


def test_texts_of_a_format_are_counted_from_behind():
    form = Format("{letters:1}{digits:1} {hex:2}")
    assert [form.candidate(number) for number in (0, 1, 16, 256, 2560)] == [
        "a0 00",
        "a0 01",
        "a0 10",
        "a1 00",
        "b0 00",
    ]
    assert form.space == 26 * 10 * 256


def test_extra_rows_are_all_there_and_the_rows_keep_their_order():
    for rows, extra in (("", "xyz"), ("abc", ""), ("abcdef", "xyz"), ("a", "x")):
        mixed = list(interleave(rows, extra, total=len(rows), seed=3))
        assert [row for row in mixed if row in rows] == list(rows) and sorted(set(mixed) - set(rows)) == list(extra)
        assert len(mixed) == len(rows) + len(extra)


def test_lines_that_are_added_are_numbered_from_one(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    drawn = make_canaries("{digits:4}", insertions=(2, 0, 1), candidates=5)
    assert insert_canaries(tmp_path / "train.jsonl", tmp_path / "copy.jsonl", drawn) == 3
    lines = [json.loads(line) for line in (tmp_path / "copy.jsonl").read_text().splitlines()]
    assert sorted(line["id"] for line in lines if "id" in line) == ["canary-1#1", "canary-1#2", "canary-3#1"]


def test_a_format_has_an_end():
    with pytest.raises(ValueError, match="more than 1000 random characters"):
        Format("{digits:99999999999999}")


@pytest.mark.parametrize(
    "changes",
    [
        {"space": "[/]"},
        {"format": []},
        {"canaries": []},
        {"canaries": [{"canary_id": "a", "text": 2, "insertions": 1}]},
        {"canaries": [{"canary_id": "a", "text": "x", "insertions": "[/]"}]},
    ],
)
def test_canaries_that_cannot_be_are_refused(tmp_path, changes):
    write_canaries(make_canaries("{digits:3}", insertions=(1,), candidates=5), tmp_path)
    file = tmp_path / "canaries.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=f"{tmp_path} is damaged"):
        read_canaries(tmp_path)
