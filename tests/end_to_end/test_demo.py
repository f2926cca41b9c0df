"""training_scripts/demo: the texts, the order of training, the steps, and the report."""

import bz2
import json
import subprocess
import sys
import zipfile
from collections import Counter

import pytest

from hf_axonn_scripts import finetune
from hf_axonn_scripts.demo import corpus, inputs, report, run, wikipedia
from hf_axonn_scripts.demo.pipeline import Pipeline, call
from tests.helpers import ROOT


FOLDER = ROOT / "training_scripts" / "demo"


@pytest.mark.parametrize(
    ("wikitext", "expected"),
    [
        ("'''Albedo''' is ''whiteness''.", "Albedo is whiteness."),
        ("a [[diffuse reflection|reflecting power]] of a [[surface]]", "a reflecting power of a surface"),
        ("{{Infobox|a={{b|c}}|d=[[e]]}}\nText {{citation needed}}stays.", "Text stays."),
        ("[[File:x.svg|thumb|A [[link]] in a caption]]\nText.", "Text."),
        ("Text.<ref name=a>{{cite|x}}</ref> More<ref name=b/> text<!-- no -->.", "Text. More text."),
        ("Two.<ref name=a /> Three.<ref>four</ref> Five.", "Two. Three. Five."),
        ("{| class=a\n|-\n| {| b\n|} c\n|}\nText.", "Text."),
        ("'''Achilles''' ({{IPAc-en|x}}; Akhilleus, {{lang|grc|A}}{{x}},) was", "Achilles (Akhilleus, A) was"),
        ("Born ({{x}}) in", "Born in"),
        ("It is {{convert|29|km|mi|abbr=on}} long{{snd}}or so.", "It is 29 km long\u2013or so."),
        ("[http://example.org A site] and [[:Category:Cats]] &amp;nbsp;&lt;", "A site and Category:Cats <"),
        ("One.\n\n== Facts ==\n* item\n# item\nTwo.\n== See also ==\nThree.", "One.\n\nTwo."),
        ("One.\n== Notes and queries ==\nTwo.", "One.\n\nTwo."),
        ("Where <math>x^2</math> is a square.", "Where is a square."),
    ],
)
def test_prose(wikitext, expected):
    assert wikipedia.prose(wikitext) == expected


def wheel_with(pages, path, *, member=None):
    """A wheel that holds a dump of (title, namespace, redirect, text)."""
    mark = '<redirect title="x"/>'
    xml = "".join(
        f"<page><title>{title}</title><ns>{space}</ns>{mark if redirect else ''}"
        f"<revision><text>{text}</text></revision></page>"
        for title, space, redirect, text in pages
    )
    dump = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{xml}</mediawiki>'
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member or wikipedia.DUMP, bz2.compress(dump.encode()))
    return path


def test_articles_of_a_dump(tmp_path):
    wheel = wheel_with(
        [
            ("Long", 0, False, "word " * 120 + "'''end'''."),
            ("Short", 0, False, "word"),
            ("Talk:Long", 1, False, "word " * 200),
            ("Moved", 0, True, "word " * 200),
            # A page's fields must not be taken over from the page before.
            ("Last", 0, False, "other " * 120),
        ],
        tmp_path / "gensim-x.whl",
    )
    found = wikipedia.articles(wheel)
    assert list(found) == ["Long", "Last"] and found["Long"].endswith("word end.")
    assert list(wikipedia.articles(wheel, minimum_characters=1)) == ["Long", "Short", "Last"]


def test_a_file_without_the_dump_is_named(tmp_path):
    other = wheel_with([], tmp_path / "other.whl", member="nothing")
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"PK no")
    for file in (other, broken):
        with pytest.raises(ValueError, match=f"{file.name} holds no Wikipedia dump"):
            wikipedia.articles(file)


def test_every_article_is_seen_as_often_as_its_bucket_says():
    repetitions = {f"{bucket}-{index}": bucket for bucket, count in corpus.BUCKETS.items() for index in range(count)}
    batches = corpus.schedule(repetitions, batch_size=8, seed=3)
    seen = Counter(title for batch in batches for title in batch)
    assert seen == {title: count for title, count in repetitions.items() if count}
    assert len(batches) == 23 and all(len(set(batch)) == 8 for batch in batches)
    # Spread: no title of the 12x bucket rests for more than 5 of the 23 steps, none has its turns in one half.
    for title in (title for title, count in repetitions.items() if count == 12):
        turns = [step for step, batch in enumerate(batches) if title in batch]
        assert max(b - a for a, b in zip(turns, turns[1:], strict=False)) <= 5
        assert min(turns) < 5 and max(turns) > 17
    assert batches == corpus.schedule(repetitions, batch_size=8, seed=3)
    assert batches != corpus.schedule(repetitions, batch_size=8, seed=4)


@pytest.mark.parametrize("repetitions", [{"a": 3, "b": 3, "c": 3, "d": 2, "e": 1}, {"a": 6, "b": 5, "c": 1}])
def test_a_full_schedule_still_has_no_title_twice_in_a_batch(repetitions):
    for seed in range(20):
        size = 4 if len(repetitions) == 5 else 2
        batches = corpus.schedule(repetitions, batch_size=size, seed=seed)
        assert all(len(set(batch)) == size for batch in batches)
        assert Counter(title for batch in batches for title in batch) == repetitions


def test_schedules_that_cannot_be_are_named():
    with pytest.raises(ValueError, match="7 repetitions in all are no multiple of the batch size 4: take 1 more"):
        corpus.schedule({"a": 4, "b": 3}, batch_size=4)
    with pytest.raises(ValueError, match="a title is seen 4 times but the run has 2 batches"):
        corpus.schedule({"a": 4}, batch_size=2)


class Words:
    """Stands where the demo uses a tokenizer: one id a word."""

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [len(word) for word in text.split()]}


def test_articles_are_dealt_to_buckets_once(tmp_path):
    texts = {f"article {index}": "word " * (70 if index % 10 else 5) for index in range(80)}
    built = corpus.build_corpus(texts, Words())
    assert Counter(built.buckets.values()) == corpus.BUCKETS
    assert len(built.held_out) == 16 and not set(built.held_out) & set(built.buckets)
    assert {len(ids) for ids in built.passages.values()} == {64}
    assert set(built.passages) == set(built.buckets) | set(built.held_out)
    assert built.buckets != corpus.build_corpus(texts, Words(), seed=1).buckets
    with pytest.raises(ValueError, match="56 articles of at least 64 tokens are needed, 27 of 30 are as long"):
        corpus.build_corpus(dict(list(texts.items())[:30]), Words())

    train, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    corpus.write_training_set(built, train)
    corpus.write_held_out(built, held_out)
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    assert [row["title"] for row in rows] == [title for batch in built.batches for title in batch]
    assert all(row["input_ids"] == built.passages[row["title"]] for row in rows)
    assert Counter(row["title"] for row in rows) == {title: n for title, n in built.buckets.items() if n}
    assert [json.loads(line)["title"] for line in held_out.read_text().splitlines()] == built.held_out


def test_steps_are_done_once(tmp_path, capsys):
    """A step is done again if a file is gone or cut short, or its settings or an earlier step's changed; else not."""
    done = []

    def go(*, first="a", second="b", fail=False):
        pipeline = Pipeline(tmp_path)

        def write(name, content):
            done.append(name)
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").write_text(content)
            if fail:
                raise KeyboardInterrupt

        options = {"doing": "writing"}
        for name, content, after in (("one", first, []), ("two", second, ["one"]), ("three", "c", [])):
            pipeline.step(
                name, lambda n=name, c=content: write(n, c), outputs=[tmp_path / name], settings={"content": content},
                after=after, **options,
            )  # fmt: skip
        assert set(pipeline.seconds) == {"one", "two", "three"}
        result, done[:] = list(done), []
        return result

    assert go() == ["one", "two", "three"]
    assert go() == []
    assert capsys.readouterr().out.count("there already") == 3
    (tmp_path / "two" / "file").unlink()
    assert go() == ["two"]
    (tmp_path / "three" / "file").write_text("longer than it was")
    assert go() == ["three"]
    assert (tmp_path / "three" / "file").read_text() == "c"
    assert go(second="other") == ["two"]
    assert go(first="other", second="other") == ["one", "two"]
    with pytest.raises(KeyboardInterrupt):
        go(first="new", second="other", fail=True)
    done.clear()
    assert go(first="new", second="other") == ["one", "two"]


def test_a_step_that_leaves_nothing_is_named(tmp_path):
    pipeline = Pipeline(tmp_path)
    with pytest.raises(ValueError, match="the step lazy ended without .*nothing"):
        pipeline.step("lazy", lambda: None, doing="resting", outputs=[tmp_path / "nothing"], settings={})


def test_a_program_that_fails_ends_the_demo(tmp_path, capfdbinary):
    log = tmp_path / "logs" / "x.log"
    script = "import os; print(os.environ['COLOUR'], flush=True); raise SystemExit(3)"
    with pytest.raises(SystemExit, match="ended with code 3; its output is in .*x.log"):
        call([sys.executable, "-c", script], log=log, environment={"COLOUR": "green"})
    assert log.read_bytes() == b"green\n"
    assert b"green\n" in capfdbinary.readouterr().out


def test_the_wheel_is_found(tmp_path):
    with pytest.raises(ValueError, match="holds 0 gensim wheels"):
        inputs.wheel_in(tmp_path)
    (tmp_path / "gensim-4.4.0-x.whl").touch()
    assert inputs.wheel_in(tmp_path).name == "gensim-4.4.0-x.whl"


def test_the_command_line_of_training_is_one_that_finetune_takes(tmp_path):
    grid = run.read_grid(ROOT / "training_scripts" / "grids" / "cpu_4_z2_x2.yaml")
    assert (grid.z, grid.x, grid.size) == (2, 2, 4)
    files = {name: tmp_path / name for name in ("train", "held_out", "samples")}
    for name, loss in run.LOSSES.items():
        script, *command = run.finetune(tmp_path / "model", files, tmp_path / name, grid, loss)
        model, data, args = finetune.parse(list(map(str, command)))
        assert script.is_file() and model.model == str(tmp_path / "model") and data.sequence_length == 64
        # 8 articles a step over the ranks with different samples, which are 2 here
        assert args.per_device_train_batch_size == 4 and args.gradient_accumulation_steps == 1
        assert args.goldfish is (name == "goldfish") and args.goldfish_k == 4 and args.goldfish_context_width == 13
        assert args.learning_rate == 1e-4 and args.adam_beta2 == 0.95 and args.train_sampling_strategy == "sequential"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is no file"),
        ("num_processes: 4\n", "has no axonn_config"),
        ("- 1\n", "has no axonn_config"),
        ("axonn_config: {grid: {z: 3}}\n", "3 ranks with different samples .* batch of 8"),
    ],
)
def test_launch_files_that_do_not_fit_are_named(tmp_path, content, message):
    file = tmp_path / "launch.yaml"
    if content:
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        run.demo(tmp_path / "out", file)
    assert not (tmp_path / "out").exists()


def results(*, right, bucket_of):
    """Results of a run in which `right` of the 4 suffix tokens of every document in a bucket are right."""
    from hf_axonn_eval.data.results import SampleResult

    return [
        SampleResult(
            sample_id=f"{document}@0", document_id=document, bucket=bucket, offset=0, prefix_length=4, suffix_length=4,
            exact_match=right[bucket] == 4, token_accuracy=right[bucket] / 4, divergence_point=right[bucket],
            extraction_strength=right[bucket] / 4, logprob=-4.0, logprobs=[-1.0] * 4,
            hits=[place < right[bucket] for place in range(4)], rouge1=0.5, rouge2=0.5, rougeL=right[bucket] / 4,
            sampled_logprob=-2.0 * (4 - right[bucket]) if right[bucket] > 2 else float("-inf"),
        )
        for document, bucket in bucket_of.items()
    ]  # fmt: skip


def figures(**right):
    from hf_axonn_eval import compare

    bucket_of = {f"d{index}": 12 if index < 12 else 0 for index in range(24)}
    comparison = compare({name: results(right=runs, bucket_of=bucket_of) for name, runs in right.items()})
    logs = {
        name: {"held_out_loss_before": 2.5, "held_out_loss": 3.0, "dropped_fraction": 0.2, "last_step_loss_kept": 0.1}
        for name in right
        if name != "base"
    }
    return report.summary(comparison, logs)


def test_claims_hold_only_if_measured():
    base, learnt, hidden = {0: 1, 12: 1}, {0: 1, 12: 4}, {0: 2, 12: 3}
    good = figures(base=base, ordinary=learnt, goldfish=hidden)
    assert [claim["holds"] for claim in good["claims"]] == [True, True, True]
    assert good["claims"][0]["measured"] == "12 of 12"
    verbatim = good["runs"]["ordinary"]["buckets"]["12"]["verbatim"]
    assert (verbatim["count"], verbatim["of"], verbatim["kind"]) == (12, 12, "clopper-pearson")
    assert verbatim["interval"] == pytest.approx([0.7354, 1.0], abs=1e-4)  # 0.025^(1 / 12)
    assert good["runs"]["base"]["held_out_loss"] == 2.5 and good["runs"]["goldfish"]["held_out_loss"] == 3.0
    for runs, holds in (
        ({"ordinary": hidden, "goldfish": hidden}, [False, True, True]),
        ({"ordinary": learnt, "goldfish": learnt}, [True, False, True]),
        ({"ordinary": {0: 4, 12: 4}, "goldfish": hidden}, [True, True, False]),
    ):
        found = figures(base=base, **runs)["claims"]
        assert [claim["holds"] for claim in found] == holds


def test_the_report_says_what_goldfish_does_not_do():
    content = figures(base={0: 1, 12: 1}, ordinary={0: 1, 12: 4}, goldfish={0: 1, 12: 3})
    content |= {
        "settings": {
            "prefix_tokens": 4, "suffix_tokens": 4, "held_out_articles": 2, "grid": {"z": 2, "x": 2},
            "sampler": "temperature=1,top_k=40",
        },
        "versions": {"torch": "2"}, "machine": {"cores": 2}, "seconds": {"model": 1.25},
    }  # fmt: skip
    text = report.markdown(content)
    # exp(-2) a draw: five give an even chance; greedy decoding finds none of these, and 1,000 draws all
    assert "| 12x | goldfish | 0 of 12 [0.00, 0.26] | 12 of 12 [0.74, 1.00] | 12 of 12 [0.74, 1.00] |" in text
    assert "0 of 12 after the goldfish loss and 12 of 12 after the ordinary loss, 1,000 draws 12 of 12 and 12" in text
    assert "sampler temperature=1,top_k=40" in text
    headings, body = report.many_draws(content["runs"], interval=False)
    assert headings == ["seen", "model", "n = 1", "n = 100", "n = 1,000", "n = 1,000,000"]
    assert ["12x", "goldfish", "0 of 12", "12 of 12", "12 of 12", "12 of 12"] in body and ["0x", "base"] in [
        cells[:2] for cells in body
    ]
    assert "raises ROUGE-L from 0.25 to 0.75 and token accuracy from 0.25 to 0.75" in " ".join(text.split())
    assert "| 12x | ordinary | 12 of 12 [0.74, 1.00] | 1.000 | 1.000 |" in text
    assert "| 12x | goldfish | 0 of 12 [0.00, 0.26] |" in text
    assert "worsened it: ordinary and goldfish." in text
    assert "| base | 2.500 | - | - | - |" in text and "| goldfish | 3.000 | 0.200 | 0.100 | - |" in text
    assert "z=2, x=2" in text and "grid | z 2, x 2" in text


def test_what_training_logged(tmp_path):
    entry = {"loss_kept": 2.0, "loss_all": 2.1, "loss_dropped": 3.0, "goldfish_dropped_fraction": 0.25, "loss": 2.0}
    history = [
        {"eval_loss": 2.5, "step": 0}, entry, {**entry, "loss_kept": 1.0, "goldfish_dropped_fraction": 0.15},
        {"train_loss": 1.5}, {"eval_loss": 3.5, "step": 2},
    ]  # fmt: skip
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert report.training(tmp_path) == {
        "held_out_loss_before": 2.5, "held_out_loss": 3.5, "steps": 2, "dropped_fraction": pytest.approx(0.2),
        "last_step_loss_kept": 1.0, "last_step_loss_dropped": 3.0,
    }  # fmt: skip
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history[:2]}))
    with pytest.raises(ValueError, match="1 logged steps and 1 evaluations"):
        report.training(tmp_path)


@pytest.mark.slow
def test_the_whole_demo_on_a_tiny_model(tmp_path, monkeypatch, capsys):
    """Every step with a random model and invented articles, by real launches; the second call does nothing."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [f"w{index}" for index in range(90)]

    def download(directory):
        directory.mkdir()
        texts = {
            f"Article {a}": " ".join(words[(a * 7 + i * (a % 5 + 1)) % 90] for i in range(200)) for a in range(60)
        }
        wheel_with([(title, 0, False, text) for title, text in texts.items()], directory / "gensim-1.whl")

    def convert(directory):
        core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", "<eos>", *words])}, "<unk>"))
        core.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>").save_pretrained(directory)
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=92, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=128, eos_token_id=1, pad_token_id=1, bos_token_id=None,
            )
        ).save_pretrained(directory)  # fmt: skip

    monkeypatch.setattr(inputs, "install_model_package", lambda: None)
    monkeypatch.setattr(inputs, "download_texts", download)
    monkeypatch.setattr(inputs, "convert_model", convert)
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    launch_file = ROOT / "training_scripts" / "grids" / "cpu_2_x2.yaml"
    assert run.demo(tmp_path / "out", launch_file) == 1  # a random model learns nothing in 23 steps at this rate
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [claim["holds"] for claim in report["claims"]] == [False, True, True]
    assert set(report["runs"]) == {"base", "ordinary", "goldfish"}
    assert report["runs"]["ordinary"]["steps"] == 23 and report["runs"]["ordinary"]["dropped_fraction"] == 0
    assert 0.05 < report["runs"]["goldfish"]["dropped_fraction"] < 0.35
    assert report["runs"]["ordinary"]["held_out_loss"] != report["runs"]["goldfish"]["held_out_loss"]
    assert list((tmp_path / "out" / "goldfish").glob("shard-*.safetensors"))
    assert (tmp_path / "out" / "plot.png").stat().st_size > 1000
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "ordinary generated" in page and "Prefix, 32 tokens" in page
    assert "The runs do not record what was left out" not in page
    record = json.loads((tmp_path / "out" / "extraction" / "base" / "run.json").read_text())
    assert record["tokenizer"]["checked"] is True
    assert "supervised minus dropped" in page and "Expected queries and tokens to extract a text" in page
    assert report["settings"]["sampler"] == "temperature=1,top_k=40" and "n = 1,000,000" in capsys.readouterr().out
    drawn = report["runs"]["base"]["buckets"]["12"]["draws"]
    assert list(drawn) == ["1", "100", "1000", "1000000"] and (drawn["1000"]["count"], drawn["1000"]["of"]) == (0, 12)
    assert run.demo(tmp_path / "out", launch_file) == 1
    assert capsys.readouterr().out.count("there already") == 6


def test_wrong_arguments_end_with_code_2(tmp_path):
    command = [
        sys.executable,
        str(FOLDER / "run.py"),
        "--output",
        str(tmp_path / "out"),
        "--launch_file",
        "nowhere.yaml",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and "nowhere.yaml is no file" in ended.stderr
    assert not (tmp_path / "out").exists()
