"""Documents that share text: every pair and every number against sets of word tuples, and the drop list."""

import random

import numpy as np
import pytest

from hf_axonn_eval import find_overlaps
from hf_axonn_eval.data.overlaps import read_drop, write_drop
from tests.helpers.eval_support import topics_tokenizer


WORDS = [f"w{number}" for number in range(400)]


def text(seed: int, length: int = 60) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(length))


def document(name: str, bucket: int, content: str) -> dict:
    return {"id": name, "bucket": bucket, "text": content}


def runs(content: str, n: int) -> set[tuple[str, ...]]:
    words = content.split()
    n = min(n, len(words))
    return {tuple(words[place : place + n]) for place in range(len(words) - n + 1)} if words else set()


def drawn_documents(count: int) -> list[dict]:
    """Texts that are put together from few passages, so that they share some, much, all or nothing."""
    draw = random.Random(0)
    passages = [text(number, draw.randint(3, 40)) for number in range(30)]
    made = []
    for number in range(count):
        parts = draw.choices(passages, k=draw.randint(0, 4)) + [text(1000 + number, draw.choice([0, 0, 30]))]
        made.append(document(f"d{number}", draw.choice([0, 0, 1, 12]), " ".join(parts)))
    return made


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("least", [0.05, 0.5, 1.0])
def test_every_pair_and_every_number(n, least, monkeypatch):
    monkeypatch.setattr("hf_axonn_eval.data.overlaps._ROWS_AT_ONCE", 7)
    inside, outside = drawn_documents(60), [{**some, "id": f"h{some['id']}"} for some in drawn_documents(70)[60:]]
    found = find_overlaps(inside, outside, n=n, least=least)
    labels = {some["id"]: str(some["bucket"]) for some in inside} | {some["id"]: "held_out" for some in outside}
    sets = {some["id"]: runs(some["text"], n) for some in inside + outside}
    wanted = {}
    names = list(sets)
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            both = len(sets[one] & sets[other])
            if labels[one] != labels[other] and both and both / min(len(sets[one]), len(sets[other])) >= least:
                wanted[frozenset((one, other))] = both
    assert len(wanted) > 5 and len(found.pairs) == len(wanted)
    for pair in found.pairs:
        one, other = (sets[name] for name in pair.ids)
        assert pair.buckets == tuple(labels[name] for name in pair.ids) and pair.runs == (len(one), len(other))
        assert pair.shared == wanted[frozenset(pair.ids)] == len(one & other)
        assert pair.jaccard == pytest.approx(len(one & other) / len(one | other))
        assert pair.containment == pytest.approx(len(one & other) / min(len(one), len(other)))
    assert [pair.containment for pair in found.pairs] == sorted(
        (pair.containment for pair in found.pairs), reverse=True
    )
    trained = set().union(*(some for name, some in sets.items() if labels[name] in ("1", "12")))
    not_trained = [name for name in names if labels[name] in ("0", "held_out") and sets[name]]
    shares = {name: len(sets[name] & trained) / len(sets[name]) for name in not_trained}
    assert found.covered == {name: pytest.approx(share) for name, share in shares.items() if share >= least}
    near = {name for pair in wanted for name in pair if any(labels[other] in ("1", "12") for other in pair)}
    assert found.drop == [name for name in not_trained if name in found.covered or name in near]
    assert found.without_runs == sum(not some for some in sets.values())
    assert list(found.documents) == ["0", "1", "12", "held_out"] and sum(found.documents.values()) == 70


def test_what_overlaps_and_what_does_not():
    page = text(1)
    found = find_overlaps(
        [
            document("member", 3, page),
            document("same", 0, page.upper().replace(" ", ",\n")),  # neither case nor what parts words counts
            document("full width", 0, "".join(chr(ord(c) + 0xFEE0) if c != " " else " " for c in page)),
            document("passage", 0, " ".join(page.split()[20:35])),
            document("around", 0, f"{text(2, 300)} {page} {text(3, 300)}"),
            document("seven words", 0, " ".join(page.split()[:7])),  # a run of fewer words is none of the member's
            document("another", 0, text(4)),
            document("empty", 0, " ... "),
            document("copy of another", 0, text(4)),  # in one bucket, which is no contamination
        ]
    )
    assert found.drop == ["same", "full width", "passage", "around"]
    numbers = {next(name for name in pair.ids if name != "member"): pair for pair in found.pairs}
    assert numbers["same"].jaccard == numbers["full width"].jaccard == 1
    # a short text in a long one: all of it is shared, though the two are not alike
    assert numbers["passage"].containment == 1 and numbers["passage"].jaccard == pytest.approx(8 / 53)
    assert numbers["around"].containment == 1 and numbers["around"].jaccard < 0.1
    assert set(found.covered) == {"same", "full width", "passage"}
    assert found.without_runs == 1
    [summary] = found.by_buckets()
    assert summary == {
        "buckets": ["0", "3"], "pairs": 4, "documents": [4, 1], "most_jaccard": 1.0, "most_containment": 1.0,
    }  # fmt: skip
    assert find_overlaps([document("a", 0, text(5)), document("b", 1, text(6))]).by_buckets()[0]["pairs"] == 0


def test_a_control_from_many_members_is_covered_though_no_pair_is_near():
    members = [document(f"m{number}", 1, text(number)) for number in range(10)]
    quotes = " ".join(" ".join(member["text"].split()[:13]) for member in members)
    found = find_overlaps([*members, document("quotes", 0, quotes)], least=0.2)
    assert found.pairs == [] and found.drop == ["quotes"]
    assert found.covered["quotes"] == pytest.approx(10 * 6 / (130 - 7))


def test_buckets_of_members_are_compared_and_nothing_of_them_is_dropped():
    page = text(1)
    found = find_overlaps(
        [document("once", 1, page), document("often", 12, page)],
        [document("held", 0, text(2)), document("out", 0, page + " " + text(3))],
    )
    assert sorted(pair.buckets for pair in found.pairs) == [("1", "12"), ("1", "held_out"), ("12", "held_out")]
    assert found.drop == ["out"]


def test_token_ids_and_texts_of_a_tokenizer():
    tokenizer, page = topics_tokenizer(), text(1)
    ids = tokenizer(page, add_special_tokens=False)["input_ids"]
    documents = [document("text", 1, page), {"id": "ids", "bucket": 0, "input_ids": ids}]
    with pytest.raises(ValueError, match="'ids' is compared by ids and the ones before it by words: .*--tokenizer"):
        find_overlaps(documents)
    found = find_overlaps(documents, tokenizer=tokenizer)
    assert found.pairs[0].jaccard == 1 and found.settings["runs_of"] == "ids"
    as_array = [
        {"id": "a", "bucket": 1, "input_ids": np.arange(40)},
        {"id": "b", "bucket": 0, "input_ids": range(20, 60)},
    ]
    [pair] = find_overlaps(as_array).pairs
    assert pair.runs == (33, 33) and pair.shared == 13
    empty = [{"id": "a", "bucket": 1, "input_ids": []}, {"id": "b", "bucket": 0, "input_ids": []}]
    assert find_overlaps(empty).without_runs == 2


def test_one_in_so_many_runs_estimates_the_numbers():
    page = text(1, 20_000)
    documents = [document("member", 1, page), document("half", 0, " ".join([*page.split()[:10_000], text(2, 10_000)]))]
    [exact], [estimate] = find_overlaps(documents).pairs, find_overlaps(documents, one_in=16).pairs
    assert exact.runs[1] / 20 < estimate.runs[1] < exact.runs[1] / 13
    assert estimate.containment == pytest.approx(exact.containment, abs=4 * (0.25 / estimate.runs[1]) ** 0.5)
    assert estimate.jaccard == pytest.approx(exact.jaccard, abs=0.06)


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([], {}, "no documents to compare"),
        ([document("a", 0, "x")], {"n": 0}, "n is 0"),
        ([document("a", 0, "x")], {"one_in": 0}, "one_in 0"),
        ([document("a", 0, "x")], {"least": 0.0}, "least 0.0"),
        ([document("a", 0, "x")], {"least": 1.1}, "least 1.1"),
        ([document("a", 0, "x"), document("a", 1, "y")], {}, "'a' occurs twice"),
        ([document("a", "often", "x")], {}, "bucket 'often'"),
        ([{"id": "a", "bucket": 1}], {}, "document 1 has no 'text'"),
        ([document("a", 0, 5)], {}, "the text of document 'a' is int"),
        ([{"id": "a", "bucket": 0, "input_ids": [1.5]}], {}, "input_ids of document 'a'"),
        ([{"id": "a", "bucket": 0, "input_ids": [[1, 2]]}], {}, "input_ids of document 'a'"),
    ],
)
def test_what_cannot_be_compared_is_named(documents, options, message):
    with pytest.raises(ValueError, match=message):
        find_overlaps(documents, **options)


def test_a_passage_that_most_documents_share_is_named_and_not_listed(monkeypatch):
    licence = text(1, 40)
    documents = [document(str(number), number % 2, f"{licence} {text(number)}") for number in range(10)]
    monkeypatch.setattr("hf_axonn_eval.data.overlaps.MOST_PAIRS", 25)
    assert len(find_overlaps(documents).pairs) == 25
    monkeypatch.setattr("hf_axonn_eval.data.overlaps.MOST_PAIRS", 24)
    with pytest.raises(ValueError, match="more than 24 pairs of documents overlap, .* a licence .*--least"):
        find_overlaps(documents)


def test_an_id_twice_among_held_out_and_others_is_named():
    with pytest.raises(ValueError, match="'a' occurs twice"):
        find_overlaps([document("a", 1, "x")], [document("a", 0, "y")])


def test_the_drop_list_of_any_ids(tmp_path):
    ids = ["a", " b ", "pages.parquet:17", "\u00e9"]
    write_drop(ids, tmp_path / "drop.txt")
    assert read_drop(tmp_path / "drop.txt") == set(ids)
    write_drop([], tmp_path / "drop.txt")
    assert read_drop(tmp_path / "drop.txt") == set()
    (tmp_path / "drop.txt").write_bytes(b"\xef\xbb\xbfa\r\n\r\nb")
    assert read_drop(tmp_path / "drop.txt") == {"a", "b"}
    for name in ("a\nb", "a\u2028b", ""):
        with pytest.raises(ValueError, match="is not one line"):
            write_drop([name], tmp_path / "drop.txt")
    with pytest.raises(ValueError, match="is not a file"):
        read_drop(tmp_path / "absent")
