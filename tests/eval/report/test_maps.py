"""Maps of a document that was asked window by window."""

import xml.etree.ElementTree as ElementTree
from math import log

import pytest
from matplotlib.image import imread

from hf_axonn_eval.report.maps import FAINTEST, SHADES, Stretch, document_maps, maps_png, maps_svg
from tests.helpers.eval_support import result


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
    assert "a: 2 of 7 windows word for word, 25.0% of the text" in "".join(ElementTree.tostring(drawing, "unicode"))


def test_a_book_is_drawn_coarsely_and_loses_nothing():
    results = [window("long", 10 * place, known=place == 7000) for place in range(10_000)]
    maps = document_maps(results)
    drawing = ElementTree.fromstring(maps_svg({"a": maps}))
    kinds = [shape.get("class") for shape in drawing]
    assert kinds.count("verbatim") == 1 and kinds.count("shade") == 1
    (mark,) = [shape for shape in drawing if shape.get("class") == "verbatim"]
    assert float(mark.get("width")) == 1.0, "thinner would not be seen"


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
