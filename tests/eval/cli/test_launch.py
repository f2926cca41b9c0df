"""`extract` on a grid, slow as a user starts it: stock `accelerate launch --config ... -m hf_axonn_eval extract`."""

import json

import pytest

from hf_axonn import Grid
from hf_axonn_eval import extract
from hf_axonn_eval.data.results import read_run
from hf_axonn_eval.data.samples import write_samples
from tests.helpers.eval_support import LEARNT, samples, topics_tokenizer, trained_llama
from tests.helpers.launching import assert_quiet, forked, launch


# The quick one is in forks of this process; a quick launch, of a script, is in tests/end_to_end/test_end_to_end.py.
@pytest.mark.parametrize("start", [forked, pytest.param(launch, marks=pytest.mark.slow)])
def test_a_launch_on_two_ranks_answers_as_one_process_does(tmp_path, start):
    trained_llama().save_pretrained(tmp_path / "model")
    topics_tokenizer().save_pretrained(tmp_path / "model")
    write_samples(samples(), tmp_path / "samples.jsonl")
    command = "-m hf_axonn_eval extract --model model --samples samples.jsonl --output out --batch_size 4"
    ended = start(tmp_path, Grid(x=2), *command.split())
    assert_quiet(ended)
    record, results = read_run(tmp_path / "out")
    assert record["processes"] == 2 and record["grid"] == str(Grid(x=2))
    expected = extract(trained_llama(), topics_tokenizer(), samples(), batch_size=4, progress=False)
    for field in ("generated", "exact_match", "divergence_point", "rougeL"):
        assert {one.sample_id: getattr(one, field) for one in results} == {
            one.sample_id: getattr(one, field) for one in expected
        }
    assert sum(result.exact_match for result in results) == LEARNT
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["all"]["samples"] == len(samples())
    assert ended.output.count("verbatim") == 1  # the table, told by one rank
