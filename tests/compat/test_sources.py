"""Sources are read whatever other threads do with Python's cache of lines."""

from __future__ import annotations

import ast
import linecache

import pytest
from transformers.models.llama import modeling_llama

from hf_axonn.compat.sources import parse_source


def test_code_of_a_file_has_its_source_while_another_thread_reads_it(monkeypatch):
    codes = (modeling_llama.LlamaMLP.forward, modeling_llama)
    expected = [ast.dump(parse_source(code)) for code in codes]
    # What a reader finds while another one has the file's entry out of the cache.
    monkeypatch.setattr(linecache, "getlines", lambda *_: [])
    assert [ast.dump(parse_source(code)) for code in codes] == expected
    decorated = modeling_llama.LlamaModel.forward
    assert hasattr(decorated, "__wrapped__") and parse_source(decorated).body[0].name == "forward"


def test_a_function_without_a_file_has_none(monkeypatch):
    text = "def another(x): return x + 1"  # as of the `python -c` that began the process
    monkeypatch.setitem(linecache.cache, "<string>", (len(text), None, [text], "<string>"))
    made = {}
    exec("def function(x): return x", made)
    with pytest.raises(OSError, match="source"):
        parse_source(made["function"])
