"""A server of a model that knows some of the samples."""

import pytest

from tests.helpers.eval_support import topics_tokenizer, trained_llama
from tests.helpers.vllm_server import Served, vllm_server


@pytest.fixture(scope="module")
def trained():
    return trained_llama()


@pytest.fixture
def served(trained):
    with vllm_server(Served(trained, topics_tokenizer())) as running:
        yield running
