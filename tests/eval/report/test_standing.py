"""What a report says of the protocol: as published, or each deviation, and what the answers decide."""

from hf_axonn_eval import compare, write_report
from hf_axonn_eval.data.protocols import check_protocol, protocol
from hf_axonn_eval.report import tables
from hf_axonn_eval.report.answer import answer
from hf_axonn_eval.report.protocols import standing
from tests.helpers.eval_support import result


RUN = {"dtype": "bfloat16", "family": "apertus", "generate": True, "sampler": None, "stop_early": False, "eos": [2]}


def record(made, run=RUN) -> dict:
    return {
        "identity": {"samples_sha256": "x", "model_fingerprint": "f", "dtype": "bfloat16", "samples": 2},
        "model": {}, "grid": None, "device": {}, "versions": {}, "settings": {"protocol": check_protocol(made, run)},
    }  # fmt: skip


def sc24(**facts) -> dict:
    known = {"prefix_tokens": {"least": 1998, "most": 1998}, "suffix_tokens": {"least": 50, "most": 50}}
    return protocol("sc24").record(known | facts)


def results(holds_eos=0) -> list:
    return [result(name, metrics={"holds_eos": holds_eos if name == "a" else 0}) for name in "ab"]


def compared(*made, **options) -> dict:
    names = [f"run{place}" for place in range(len(made))]
    return compare(
        {name: results(**options) for name in names}, records=dict(zip(names, map(record, made), strict=True))
    )


def test_as_published():
    told = standing(compared(sc24()))
    assert told == "This is protocol sc24 as published (5 of 11 lines met, 6 not checked)."
    assert answer(compared(sc24()))[0].endswith(f"without any controls. {told}") or told in answer(compared(sc24()))[0]


def test_each_deviation_is_told():
    comparison = compared(sc24(prefix_tokens={"least": 112, "most": 1408}))
    told = (
        "This is protocol sc24, not as published (4 of 11 lines met, 6 not checked, 1 not met). prefix: published the "
        "first 1,998 of a document's first 2,048 tokens, here 112 to 1,408 tokens."
    )
    assert standing(comparison) == told and told in answer(comparison)[0]
    facts = tables.provenance(comparison)["run0"]
    assert facts["protocol"] == told and "protocol" not in facts.get("settings", "")


def test_runs_that_differ_are_told_apart(tmp_path):
    comparison = compared(sc24(), sc24(suffix_tokens={"least": 9, "most": 50}))
    told = standing(comparison)
    assert told.startswith("run0: This is protocol sc24 as published")
    assert "run1: This is protocol sc24, not as published" in told
    [table] = tables.protocol(comparison)
    suffixes = [row for row in table.rows if row[0] == "suffix"]
    assert [(row[2], row[4]) for row in suffixes] == [("met", "run0"), ("deviation", "run1")]
    assert [row[4] for row in table.rows if row[0] == "documents"] == ["run0, run1"]
    write_report(comparison, tmp_path)
    for name in ("report.md", "report.html"):
        assert "9 to 50 tokens" in (tmp_path / name).read_text()


def test_an_eos_among_the_answers_is_a_deviation_of_a_protocol_that_bans_it():
    apertus = protocol("apertus").record({"left_out": {}})
    for holds_eos, state, here in ((0, "met", ""), (1, "deviation", "1 continuations hold an EOS")):
        comparison = compared(apertus, holds_eos=holds_eos)
        [row] = [row for row in tables.protocol(comparison)[0].rows if row[0] == "EOS"]
        assert row[2:4] == [state, here]
        assert (here in standing(comparison)) is True


def test_records_without_a_protocol_or_of_an_earlier_version():
    nothing = compare({"a": results()})
    assert standing(nothing) == "" and tables.protocol(nothing) == [] and not answer(nothing)[0].endswith(" ")
    assert standing(compared({"name": None, "source": None, "settings": {}, "changed": []})) == ""
    old = compare({"a": results()}, records={"a": {**record(None), "settings": {"protocol": {"name": "sc24"}}}})
    assert standing(old) == "The samples are of protocol sc24; whether this is as published was not recorded."
    assert tables.protocol(old) == []
