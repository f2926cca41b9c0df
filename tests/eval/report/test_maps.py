"""Maps of a document that was asked window by window."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from math import log

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from hf_axonn_eval import Sampling, build_samples
from hf_axonn_eval.report.maps import FAINTEST, SHADES, DocumentMap, Stretch, document_maps, maps_png, maps_svg
from tests.helpers.eval_support import documents, result, topics_tokenizer


def window(document: str, offset: int, *, known: bool = False, probability: float = 1e-30, **changes):
    return result(
        f"{document}@{offset}",
        document_id=document,
        offset=offset,
        prefix_length=5,
        suffix_length=5,
        exact_match=known,
        logprob=0.0 if known else log(probability),
        bucket=3,
        **changes,
    )


def book(name: str = "book"):
    """Forty tokens, a window at each fifth; those at 10 and 15 come back, the one at 30 nearly."""
    return [
        window(name, offset, known=offset in (10, 15), probability=10 ** (FAINTEST / 2) if offset == 25 else 1e-30)
        for offset in range(0, 35, 5)
    ]


def test_a_map_says_which_tokens_come_back():
    (drawn,) = document_maps([*book(), window("asked once", 0, known=True)])
    assert (drawn.document_id, drawn.bucket, drawn.tokens, drawn.windows, drawn.extracted) == ("book", 3, 40, 7, 2)
    assert drawn.verbatim == ((15, 25),) and drawn.share == pytest.approx(10 / 40)
    assert drawn.stretches == (Stretch(15, 25, SHADES), Stretch(30, 35, SHADES // 2))


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("unit", ["tokens", "characters"])
def test_a_map_marks_the_tokens_that_were_asked_for_with_and_without_bos(bos, unit):
    """Every suffix whose tokens the document has is where the document has it, at each kind of stride."""
    text, tokenizer = documents()[0]["text"][:900], topics_tokenizer()
    sampling = Sampling(
        kind="sliding", prefix_length=6, suffix_length=4, stride=1, stride_unit=unit, add_special_tokens=bos
    )
    asked = build_samples([{"id": "d", "bucket": 3, "text": text}], tokenizer=tokenizer, sampling=sampling)
    tokens = tokenizer(text, add_special_tokens=bos)["input_ids"]
    spans = tokenizer(text, add_special_tokens=bos, return_offsets_mapping=True)["offset_mapping"]
    begins = {begin for begin, _ in spans[bos:]}
    found = 0
    for sample in asked:
        if unit == "characters" and int(sample.sample_id[2:-1]) not in begins:
            continue  # it begins within a token, so that its tokens may be others than the document's
        answer = result(
            sample.sample_id, document_id="d", offset=sample.offset, prefix_length=6, suffix_length=4, exact_match=True
        )
        (drawn,) = document_maps([answer, result("elsewhere", document_id="d", offset=500)])
        ((start, end),) = drawn.verbatim
        assert tokens[start:end] == list(sample.suffix), sample.sample_id
        found += 1
    assert found > 100


def test_overlapping_windows_take_the_likeliest():
    (drawn,) = document_maps([window("d", 0, known=True), window("d", 2), window("d", 4, known=True)])
    assert drawn.verbatim == ((5, 14),) and drawn.stretches == (Stretch(5, 14, SHADES),)


def test_the_strip_is_drawn_to_scale():
    maps = {"a": document_maps(book()), "b": document_maps(book())}
    drawing = ElementTree.fromstring(maps_svg(maps))
    ground, *_ = [shape for shape in drawing if shape.get("class") == "ground"]
    marks = [shape for shape in drawing if shape.get("class") == "verbatim"]
    shades = [shape for shape in drawing if shape.get("class") == "shade"]
    left, width = float(ground.get("x")), float(ground.get("width"))
    assert len(marks) == 2 and len(shades) == 4
    assert float(marks[0].get("x")) == pytest.approx(left + width * 15 / 40, abs=0.01)
    assert float(marks[0].get("width")) == pytest.approx(width * 10 / 40, abs=0.01)
    assert [float(shape.get("fill-opacity")) for shape in shades[:2]] == [1.0, 0.5]
    assert "a: 2 of 7 windows verbatim, 25.0% of the text" in "".join(ElementTree.tostring(drawing, "unicode"))


@pytest.mark.parametrize("known", [7000, 9999])
def test_a_book_is_drawn_coarsely_and_loses_nothing(known):
    results = [window("long", 10 * place, known=place == known) for place in range(10_000)]
    maps = document_maps(results)
    drawing = ElementTree.fromstring(maps_svg({"a": maps}))
    kinds = [shape.get("class") for shape in drawing]
    assert kinds.count("verbatim") == 1 and kinds.count("shade") == 1
    (mark,) = [shape for shape in drawing if shape.get("class") == "verbatim"]
    assert float(mark.get("width")) == 1.0, "thinner would not be seen"
    assert float(mark.get("x")) + 1.0 <= float(drawing.get("viewBox").split()[2]), "it lies on the paper"


def test_files(tmp_path):
    maps = {
        "a": document_maps([*book("one"), *book("<two> & $x$")]),
        "b": document_maps([*book("one"), *book("<two> & $x$")]),
    }
    alone = maps_svg(maps, alone=True)
    assert ElementTree.fromstring(alone).tag == "{http://www.w3.org/2000/svg}svg" and "<style>" in alone
    maps_png(maps, tmp_path / "maps.png")
    image = imread(tmp_path / "maps.png")
    assert image.shape[1] > 1000 and image[..., :3].min() < 0.5


@pytest.mark.parametrize(
    ("logarithm", "shade"),
    [
        (0.0, 8), (0.001, 8), (-0.5, 8),  # certain, or more than that by rounding
         (-1.0, 7), (-1.01, 7), (-4.0, 4), (-4.01, 4), (-3.99, 5), (-7.0, 1), (-7.9, 1), (-8.0, 0),
        (-50.0, 0), (float("-inf"), 0), (None, 0),
    ],
)  # fmt: skip
def test_eight_shades_for_eight_powers_of_ten(logarithm, shade):
    logprob = None if logarithm is None else logarithm * log(10)
    results = [window("d", offset, known=False) for offset in (0, 20)]
    (drawn,) = document_maps([replace(results[0], logprob=logprob), results[1]])
    assert drawn.stretches == ((Stretch(5, 10, shade),) if shade else ())


def test_a_passage_that_comes_back_is_marked_though_its_probability_is_not_known():
    results = [replace(window("d", offset, known=offset == 4), logprob=None) for offset in (0, 4)]
    (drawn,) = document_maps(results)
    assert drawn.verbatim == ((9, 14),) and drawn.stretches == () and drawn.tokens == 14


def a_map(name: str, tokens: int, *, stretches=(), verbatim=()) -> DocumentMap:
    return DocumentMap(
        document_id=name, bucket=3, tokens=tokens, windows=9, extracted=4, stretches=stretches, verbatim=verbatim
    )


def drawn_shades(drawn: DocumentMap) -> list[tuple[float, float, float]]:
    """Where the shades of a strip begin and end, as shares of it, and how dark they are."""
    drawing = ElementTree.fromstring(maps_svg({"a": [drawn]}))
    (ground,) = [shape for shape in drawing if shape.get("class") == "ground"]
    left, width = float(ground.get("x")), float(ground.get("width"))
    shades = [shape for shape in drawing if shape.get("class") == "shade"]
    ends = [(float(shape.get("x")), float(shape.get("width"))) for shape in shades]
    return [
        ((x - left) / width, (x + wide - left) / width, float(shape.get("fill-opacity")))
        for (x, wide), shape in zip(ends, shades, strict=True)
    ]


@pytest.mark.parametrize(
    ("tokens", "stretch", "begin", "end"),
    [
        (480, (1, 2), 1, 2),  # as many tokens as places: each has its own
        (4800, (10, 11), 1, 2),  # ten tokens a place
        (4800, (10, 20), 1, 2),
        (4800, (9, 20), 0, 2),
        (4800, (10, 21), 1, 3),
        (4800, (4799, 4800), 479, 480),
        (9600, (0, 9600), 0, 480),
    ],
)
def test_a_place_of_a_long_document_is_as_dark_as_any_of_its_tokens(tokens, stretch, begin, end):
    [(first, last, dark)] = drawn_shades(a_map("d", tokens, stretches=(Stretch(*stretch, 6),)))
    assert (first, last) == (pytest.approx(begin / 480, abs=1e-4), pytest.approx(end / 480, abs=1e-4))
    assert dark == 0.75


def test_of_two_shades_in_one_place_the_darker_one_is_seen():
    stretches = (Stretch(0, 4, 8), Stretch(4, 12, 2), Stretch(12, 13, 5))
    assert [dark for *_, dark in drawn_shades(a_map("d", 4800, stretches=stretches))] == [1.0, 0.625]
    assert len(drawn_shades(a_map("d", 40, stretches=stretches))) == 3, "a short document has room for all"


def test_no_document_is_an_empty_picture():
    assert 'viewBox="0 0 720 1"' in maps_svg({}) and maps_svg({"a": []}).endswith('maps of documents"></svg>')


def test_the_picture_shows_what_the_drawing_shows(monkeypatch, tmp_path):
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: kept.append((figure, path, options)))
    one = [
        a_map("one", 40, stretches=(Stretch(5, 10, 8), Stretch(10, 30, 2)), verbatim=((5, 10), (12, 13))),
        a_map("two", 50, stretches=(Stretch(0, 1, 4),)),
    ]
    other = [a_map("one", 30, verbatim=((7, 9),)), a_map("two", 60)]
    maps_png({"a run": one, "a name of 17 long": other}, tmp_path / "maps.png")
    [(figure, path, options)] = kept
    assert path == tmp_path / "maps.png" and options == {"dpi": 150}
    assert figure.get_size_inches() == pytest.approx([10, 2 * (2 * 0.28 + 0.55) + 0.3]), "by runs and documents"
    first, second = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "one (seen 3x)",
        "two (seen 3x)",
    ]
    assert [axes.get_xlim() for axes in figure.axes] == [(0, 40), (0, 60)], "as long as the longest of the runs"
    assert [axes.get_ylim() for axes in figure.axes] == [(2, -0.4)] * 2, "the first run is above"
    assert (first.get_xlabel(), second.get_xlabel()) == ("", "token")
    assert [text.get_text() for text in first.get_yticklabels()] == ["a run", "a name of 17 lo\u2026"]
    assert first.get_yticks().tolist() == [0.3, 1.3]

    def bars(axes):
        """Left, right, top, bottom, darkness and redness of what is drawn."""
        found = []
        for collection in axes.collections:
            red, _, _, alpha = collection.get_facecolor()[0]
            for outline in collection.get_paths():
                (left, top), (right, bottom) = outline.vertices.min(axis=0), outline.vertices.max(axis=0)
                found.append(tuple(round(float(number), 6) for number in (left, right, top, bottom, alpha, red > 0.5)))
        return found

    assert bars(first) == [
        (5, 10, 0, 0.6, 1, 0), (10, 30, 0, 0.6, 0.25, 0), (5, 10, -0.2, -0.04, 1, 1), (12, 13, -0.2, -0.04, 1, 1),
        (7, 9, 0.8, 0.96, 1, 1),
    ]  # fmt: skip
    assert bars(second) == [(0, 1, 0, 0.6, 0.5, 0)]


def test_a_picture_of_one_run(tmp_path):
    maps_png({"only": document_maps(book())}, tmp_path / "maps.png")
    assert imread(tmp_path / "maps.png").shape[:2] == (169, 1500), "150 times 0.28 + 0.55 + 0.3 inches"


@pytest.mark.parametrize("draw", [maps_svg, lambda maps: maps_png(maps, "nowhere.png")], ids=["svg", "png"])
def test_runs_of_other_documents_are_not_drawn_beside_each_other(draw):
    with pytest.raises(ValueError, match="shorter"):
        draw({"a": document_maps([*book("one"), *book("two")]), "b": document_maps(book("one"))})


def test_the_memory_of_a_map_does_not_grow_with_the_document():
    far = 10**13
    [drawn] = document_maps(
        [result(f"{offset}", document_id="d", offset=offset, exact_match=offset == far) for offset in (0, far)]
    )
    assert (drawn.tokens, drawn.verbatim) == (far + 4, ((far + 2, far + 4),))
    assert {stretch[:2] for stretch in drawn.stretches} == {(2, 4), (far + 2, far + 4)}
    assert "<svg" in maps_svg({"a": [drawn]})
