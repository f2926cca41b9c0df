"""Lines of JSON: their numbers and places, files that appear complete or not at all."""

import json
import math

import pytest

from hf_axonn_eval.data.jsonl import (
    Line,
    LineFile,
    decode_utf8,
    is_count,
    json_lines,
    json_text,
    replacing,
    write_json,
)


def test_lines_have_numbers_and_begin_at_bytes(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \n[2]\r\n"\xc3\xa9"')
    lines = list(json_lines(file))
    assert lines == [Line(1, 0, {"a": 1}), Line(4, 16, [2]), Line(5, 21, "\u00e9")]
    content = file.read_bytes()
    read = LineFile(file, [line.start for line in lines[1:]], lambda line: line)
    assert [content[16:21], content[21:]] == list(read) == [read[0], read[-1]] == read[:]
    assert len(read) == 2 and read[1:] == [content[21:]]
    with pytest.raises(IndexError):
        read[2]


def test_a_mark_is_one_at_the_beginning_only(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b"1\n\xef\xbb\xbf2\n")
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        list(json_lines(file))


def test_the_byte_that_is_not_utf8_is_counted_from_the_beginning_of_the_file(tmp_path):
    with pytest.raises(ValueError, match="byte 0xff at position 2 of the file"):
        decode_utf8(b"ab\xff", "here")
    with pytest.raises(ValueError, match="here is not UTF-8: byte 0x80 at position 7 of the file"):
        decode_utf8(b"\x80", "here", before=7)
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'\xef\xbb\xbf1\n"\xff"\n')
    with pytest.raises(ValueError, match="line 2 is not UTF-8: byte 0xff at position 6"):
        list(json_lines(file))


def test_a_file_is_there_when_it_is_complete(tmp_path):
    file = tmp_path / "new" / "folder" / "file.json"
    write_json(file, {"a": [1, None]})
    assert file.read_text() == '{\n  "a": [\n    1,\n    null\n  ]\n}\n'
    with pytest.raises(KeyError), replacing(file) as unfinished:
        unfinished.write(b"half")
        raise KeyError
    assert file.read_text().startswith("{") and [path.name for path in file.parent.iterdir()] == ["file.json"]


def test_infinities_are_texts_and_what_is_no_number_is_null():
    content = {"logprob": -math.inf, "of each": [1.5, math.inf, math.nan], "count": 2}
    found = json.loads(json_text(content), parse_constant=pytest.fail)
    assert found == {"logprob": "-inf", "of each": [1.5, "inf", None], "count": 2}


def test_what_is_a_count():
    assert all(is_count(value) for value in (0, 1, 10**30)) and is_count(1, least=1)
    assert not any(is_count(value) for value in (-1, True, 1.0, "1", None)) and not is_count(0, least=1)
