"""training_scripts/study/recipe/reader.py: recipes as they are read, and where and why one is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_axonn_scripts.study.recipe.planning import grid_of, shape_of
from hf_axonn_scripts.study.recipe.reader import read_recipe
from tests.study.conftest import FOLDER
from tests.study.smoke import write_smoke


RECIPES = FOLDER / "recipes"
SMOLLM2_VOCABULARY = 49_152


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Path:
    return write_smoke(tmp_path_factory.mktemp("smoke"))


def test_cpu_has_five_sizes_a_factor_of_three_apart(cpu):
    own = [model for model in cpu.models if model.config is not None]
    sizes = [shape_of(cpu, model).parameters() for model in own]
    assert len(sizes) >= 5 and 0.25e6 < sizes[0] < 0.35e6 and 25e6 < sizes[-1] < 35e6
    assert all(2.5 < after / before < 3.7 for before, after in zip(sizes, sizes[1:], strict=False))
    assert cpu.vocabulary <= 4096
    # The reason for a vocabulary of its own.
    assert SMOLLM2_VOCABULARY * own[0].config["hidden_size"] > sizes[0]
    # Models that say their names.
    assert [round(size / 1e6, 1 if size < 1e6 else 0) for size in sizes] == [0.3, 1, 3, 10, 31]


def test_parameters_are_those_of_the_model(cpu):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = cpu.model("0.3M")
    built = LlamaForCausalLM(LlamaConfig(**model.config, vocab_size=cpu.vocabulary))
    assert shape_of(cpu, model).parameters() == sum(weight.numel() for weight in built.parameters())


def test_sc24_has_both_70b_and_its_own_protocol():
    recipe = read_recipe(RECIPES / "sc24.yaml")
    assert {"Llama-2-70B", "Llama-3.1-70B", "Llama-3.1-405B"} <= {model.name for model in recipe.models}
    sizes = {model.name: shape_of(recipe, model).parameters() for model in recipe.models}
    # As the model cards have them.
    known = {
        "TinyLlama-1.1B": 1_100_048_384,
        "Llama-2-7B": 6_738_415_616,
        "Llama-3.1-8B": 8_030_261_248,
        "Llama-2-13B": 13_015_864_320,
        "Llama-2-70B": 68_976_648_192,
        "Llama-3.1-70B": 70_553_706_496,
        "Llama-3.1-405B": 405_853_388_800,
    }
    assert sizes == known
    assert recipe.losses["k2"] == {"goldfish_k": 2, "goldfish_context_width": 13}
    assert recipe.documents.length - recipe.documents.suffix == 1998 and recipe.evaluation.protocol == "sc24"
    assert recipe.deviations and recipe.documents.per_article == 1


@pytest.mark.parametrize("name", ["goldfish", "goldfish-extreme", "rivals"])
def test_the_other_recipes_are_good(name):
    recipe = read_recipe(RECIPES / f"{name}.yaml")
    assert {run.loss for run in recipe.runs} == set(recipe.losses)


def test_smoke_finds_the_files_beside_it(smoke):
    recipe = read_recipe(smoke)
    assert recipe.texts.articles == str((smoke.parent / "articles.jsonl").resolve())
    assert recipe.training["lr_scheduler_type"] == "constant" and recipe.path == smoke
    assert recipe.pilot.learning_rates == (3e-3,)  # written 3e-3, which YAML 1.1 calls a text


def test_grids_may_be_left_to_the_planner(smoke):
    text = smoke.read_text().replace("grid: {x: 2}", "grid: auto", 1)
    path = smoke.with_name("auto.yaml")
    path.write_text(text)
    recipe = read_recipe(path)
    assert [model.grid for model in recipe.models] == [None, None]
    assert grid_of(recipe, recipe.models[0]).as_dict() == {"data": 2, "z": 1, "y": 1, "x": 1}


GOOD = """\
name: good
machine: cpu
processes: 2
grid: {x: 2}
texts:
  source: files
  articles: articles.jsonl
  base: base.jsonl
  base_tokens: 8192
  held_out_tokens: 1024
vocabulary: 512
documents:
  buckets: [0, 1, 4]
  per_bucket: 8
  length: 32
models:
  small:
    config: {hidden_size: 32, intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: 2}
  large:
    config: {hidden_size: 64, intermediate_size: 176, num_hidden_layers: 2, num_attention_heads: 4}
base_length: 64
base_batch_sequences: 8
base_training: {learning_rate: 1e-3, warmup_steps: 2}
batch_sequences: 8
warm_up_sequences: 8
training: {lr_scheduler_type: constant}
pilot:
  model: large
  learning_rates: [3e-3]
  suffixes: [8, 16]
losses:
  ordinary: {goldfish: false}
  k2: {goldfish_k: 2}
runs:
  - {models: [small, large], losses: [ordinary, k2], seeds: [0]}
  - {models: [small], losses: [ordinary], seeds: [0], grid: {z: 2, x: 2}}
evaluation:
  sampler: temperature=1,top_k=40
  canaries: 3
"""
LARGE = "    config: {hidden_size: 64,"
RUNS = "[small, large], losses: [ordinary, k2], seeds: [0]}"
# (what is replaced, by what, what the error says). The error stands on the line of what is new, or where `|` is in it.
BAD = [
    # Keys and types.
    ("vocabulary: 512", "vocabulry: 512", "a recipe has no key 'vocabulry': did you mean vocabulary?"),
    ("  length: 32", "  lenght: 32", "documents has no key 'lenght': did you mean length?"),
    ("  per_bucket: 8", "  per_bucket: many", "documents.per_bucket is 'many', but it is a whole number"),
    ("  per_bucket: 8", "  per_bucket: true", "documents.per_bucket is True, but it is a whole number"),
    ("buckets: [0, 1, 4]", "buckets: 4", "documents.buckets is 4, but it is a list such as"),
    ("buckets: [0, 1, 4]", "buckets: [0, 1, 4.5]", "is 4.5, but it is a whole number"),
    ("  base_tokens: 8192", "  base_tokens: 8k", "texts.base_tokens is '8k', but it is a whole number"),
    ("name: good", "name: a/b", "name is 'a/b', but it names a folder"),
    ("machine: cpu", "machine: fugaku", "there is no machine 'fugaku': choose one of"),
    ("machine: cpu", "machine: cpu: 2", "it is not YAML"),
    ("  large:\n", "  small:\n", "models.small stands here a second time, after line"),
    ("  large:\n", "  study:\n", "'study', which names the study's tokenizer"),
    ("  large:\n", "  a b:\n", "a model is named 'a b'"),
    ("  k2: {goldfish_k: 2}", "  k-2: {goldfish_k: 2}", "a loss is named 'k-2'"),
    # Documents.
    ("buckets: [0, 1, 4]", "buckets: [1, 4]", "documents.buckets is [1, 4], without 0: add it"),
    ("buckets: [0, 1, 4]", "buckets: [0, 4, 4]", "documents.buckets has 4 more than once"),
    ("buckets: [0, 1, 4]", "buckets: [0, -1]", "write 0 and numbers of repetitions of at least 1"),
    ("buckets: [0, 1, 4]", "buckets: [0]", "write 0 and numbers of repetitions of at least 1"),
    ("  per_bucket: 8", "  per_bucket: 0", "documents.per_bucket is 0, but it is at least 1"),
    ("  length: 32", "  length: 32\n|  per_article: 2", "documents.per_article is 2, but with 3 buckets it is 1 or"),
    ("  per_bucket: 8", "  per_article: 6\n|  per_bucket: 9", "is 9, so that 3 buckets have 27 passages"),
    ("  length: 32", "  length: 32\n|  suffix: 8", "documents.suffix is 8, but the pilot chooses it as well"),
    (
        "  length: 32",
        "  length: 32\n|  suffix: 32",
        "documents.suffix is 32, which leaves no prefix in documents of 32",
    ),
    # Texts.
    ("  source: files", "  source: internet", "texts.source is 'internet', but it is one of packages, files"),
    ("  articles: articles.jsonl", "  articles: none.jsonl", "texts.articles is none.jsonl, which is not there"),
    (
        "  base_tokens: 8192",
        "  base_tokens: 100",
        "texts.base_tokens is 100, but one step of the base training takes 512",
    ),
    ("  held_out_tokens: 1024", "  held_out_tokens: 0", "texts.held_out_tokens is 0, but it is at least 1"),
    ("vocabulary: 512", "vocabulary: 100", "vocabulary is 100, but it is at least 257"),
    # Models.
    ("  large:\n", "  large:\n    checkpoint: x\n", "models.large has both config and checkpoint"),
    (LARGE, "    config: {hidden: 64,", "models.large.config: it has no hidden_size"),
    (LARGE, "    config: {vocab_size: 9, hidden_size: 64,", "models.large.config has a vocab_size"),
    (LARGE, "    config: {rope: 9, hidden_size: 64,", "models.large.config has no key 'rope'"),
    (LARGE, "    config: {hidden_size: 66,", "4 heads do not divide hidden_size 66"),
    (LARGE, "    config: {max_position_embeddings: 60, hidden_size: 64,", "has 60 positions, but rows have 64"),
    ("  large:\n", "  large:\n|    per_bucket: 4\n", "models with a config share their passages"),
    ("  large:\n", "  large:\n|    processes: 0\n", "models.large has 0 processes"),
    # Losses and runs.
    ("  ordinary: {goldfish: false}\n", "", "losses has no ordinary loss"),
    ("  ordinary: {goldfish: false}", "  ordinary:", "losses.ordinary is {}, but it is the loss without goldfish"),
    ("goldfish_k: 2", "goldfish_k: 1", "losses.k2.goldfish_k: goldfish k is 1: one label in k is dropped"),
    ("goldfish_k: 2", "goldfish_kk: 2", "losses.k2 has no key 'goldfish_kk': did you mean goldfish_k?"),
    ("goldfish_k: 2", "goldfish_strategy: hush", "goldfish strategy 'hush' is unknown"),
    ("goldfish_k: 2", "learning_rate: 0.1", "losses.k2.learning_rate is no argument of the loss"),
    ("goldfish_k: 2", "goldfish: false", "losses.k2 is the ordinary loss under another name"),
    ("  k2: {goldfish_k: 2}", "  k2: {goldfish_k: 2}\n|  k3: {goldfish_k: 3}", "no run has losses.k3"),
    (RUNS, "[small, large], losses: [ordinary, k22], seeds: [0]}", "losses has k22, which is not among"),
    (RUNS, "[0.05, large], losses: [ordinary], seeds: [0]}", "is 0.05, but it is a text"),
    (RUNS, "[smal, large], losses: [ordinary, k2], seeds: [0]}", "models has smal, which is not"),
    (RUNS, "[small], losses: [ordinary, k2], seeds: [0]}", "no run has models.large"),
    (RUNS, "[small, large], losses: [ordinary, k2], seeds: [0, 0]}", "has the run ordinary-s0 a second"),
    (RUNS, "[small, large], losses: [ordinary, k2], seeds: [-1]}", "seeds has -1, but a seed is at least 0"),
    (RUNS, "[small, large], losses: [k2], seeds: [0]}", "not the ordinary loss to compare with"),
    (
        "goldfish_k: 2}",
        "goldfish_k: 2}\n|  k3: {goldfish_k: 2}",
        "losses.k3 and losses.k2 are the same loss: remove one",
    ),
    (
        "losses: [ordinary], seeds: [0], grid",
        "losses: [ordinary], seeds: [1], grid",
        "on its own grid to compare with",
    ),
    # Grids.
    ("grid: {x: 2}", "grid: {x: 4}", "data * z * y * x = 1 * 1 * 1 * 4 = 4, but 2 process(es) are to run"),
    ("grid: {x: 2}", "grid: {w: 2}", "grid has no key 'w'"),
    ("grid: {x: 2}", "grid: {x: 0}", "grid axis x is 0"),
    ("grid: {z: 2, x: 2}", "grid: {z: 3}", "batch_sequences 8 is not divisible by data * z = 3"),
    ("grid: {z: 2, x: 2}", "grid: {x: 4}", "num_attention_heads 2 is not divisible by x * y = 4"),
    ("grid: {z: 2, x: 2}", "grid: {x: 2}", "grid is that of small: remove it, or write another"),
    # Rows.
    ("warm_up_sequences: 8", "warm_up_sequences: 12", "12 warm_up_sequences do not fill whole batches of 8: write 16"),
    (
        "warm_up_sequences: 8",
        "warm_up_sequences: 8000",
        "texts.base_tokens is 8,192, but warm_up_sequences takes 256,000",
    ),
    ("batch_sequences: 8\nwarm", "batch_sequences: 0\nwarm", "batch_sequences is 0, but it is at least 1"),
    (
        "  per_bucket: 8",
        "  per_bucket: 4",
        "small has 3 batches of 8, but a document is seen 4 times, once in a batch at most",
    ),
    (
        LARGE,
        f"    learning_rate: 0\n{LARGE}",
        "models.large.learning_rate is 0.0: write a number above 0",
    ),
    # The pilot.
    ("  model: large", "  model: 1M", "pilot.model is 1M, which is not among models"),
    ("  suffixes: [8, 16]", "  suffixes: [8, 32]", "pilot.suffixes is [8, 32]: write numbers from 1 to 31"),
    ("  learning_rates: [3e-3]", "  learning_rates: []", "pilot.learning_rates are to be one or more numbers above 0"),
    (
        "training: {lr_sch",
        "training: {learning_rate: 1e-3, lr_sch",
        "but the pilot chooses it: remove it, or the pilot",
    ),
    # Training arguments.
    ("training: {lr_sch", "training: {warmup: 3, lr_sch", "training has no key 'warmup': did you mean warmup_"),
    ("training: {lr_sch", "training: {num_train_epochs: 3, lr_sch", "training.num_train_epochs is not a setting of a"),
    ("training: {lr_sch", "training: {goldfish_k: 3, lr_sch", "training.goldfish_k is of a loss"),
    ("lr_scheduler_type: constant", "lr_scheduler_type: steady", "steady is not a valid SchedulerType"),
    ("base_training: {learning_rate: 1e-3", "base_training: {learning_rate: fast", "is 'fast', but it is a number"),
    (
        "base_training: {learning_rate: 1e-3",
        "base_training: {max_steps: 3",
        "the number of steps follows from the rows",
    ),
    # Evaluation.
    ("sampler: temperature=1,top_k=40", "sampler: temperature=0", "evaluation.sampler: temperature is 0"),
    ("sampler: temperature=1,top_k=40", "sampler: temp=1", "evaluation.sampler: "),
    ("sampler: temperature=1,top_k=40", "sampler: hot", "'hot' is not like name=number"),
    ("sampler: temperature=1,top_k=40", "near_copies: edits=16,beams=2", "ask for at most 15, or for longer suffixes"),
    ("  canaries: 3", "  canaries: -3", "evaluation.canaries is -3, but it is at least 0"),
    ("  canaries: 3", "  protocol: sc42", "evaluation.protocol is 'sc42', but it is one of apertus"),
    (
        "  canaries: 3",
        "  protocol: sc24",
        "the protocol sc24 needs documents of 2048 tokens, but documents.length is 32",
    ),
]


# Where an error stands that is not where the recipe was changed.
ELSEWHERE = {
    "losses has no ordinary": "losses:",
    "no run has models.large": "  large:",
    "models.large has both": "  large:",
    "base_tokens is 8,192": "  base_tokens:",
}


def refused(path: Path, text: str, message: str) -> int:
    """The line that the error names."""
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_recipe(path)
    file, line, _ = str(caught.value).split(":", 2)
    assert file == str(path)
    return int(line)


def test_the_recipe_that_cases_change_is_good(smoke):
    path = smoke.with_name("good.yaml")
    path.write_text(GOOD, encoding="utf-8")
    assert len(read_recipe(path).runs) == 5


@pytest.mark.parametrize(("old", "new", "message"), BAD, ids=[message[:60] for *_, message in BAD])
def test_a_bad_recipe_is_refused_with_its_line(smoke, old, new, message):
    assert GOOD.count(old) >= 1
    before, _, after = GOOD.partition(old)
    start = before + new.partition("|")[0] if "|" in new else before + new[: len(new) - len(new.lstrip("\n"))]
    text = before + new.replace("|", "") + after
    expected = start.count("\n") + 1
    for beginning, where in ELSEWHERE.items():
        if beginning in message:
            expected = next(number for number, line in enumerate(text.splitlines(), 1) if line.startswith(where))
    assert refused(smoke.with_name("bad.yaml"), text, message) == expected


def test_models_that_come_trained(smoke):
    """Without base text, repetitions have to fill batches; sizes are needed for the cost; a grid has to fit a GPU."""
    text = """\
name: trained
machine: perlmutter
processes: 8
grid: auto
texts: {source: files, articles: articles.jsonl}
documents:
  buckets: [0, 2]
  per_bucket: 8
  length: 64
  suffix: 16
models:
  some:
    checkpoint: org/name
    shape: {hidden_size: 4096, intermediate_size: 11008, num_hidden_layers: 32, num_attention_heads: 32, vocab_size: 9}
batch_sequences: 8
losses: {ordinary: {goldfish: false}}
runs: [{models: [some], losses: [ordinary]}]
"""
    path = smoke.with_name("trained.yaml")
    path.write_text(text, encoding="utf-8")
    recipe = read_recipe(path)
    assert grid_of(recipe, recipe.models[0]).size == 8
    lines = text.splitlines()

    def line(start: str) -> int:
        return next(number for number, each in enumerate(lines, 1) if each.strip().startswith(start))

    for old, new, message, where in (
        (
            "per_bucket: 8",
            "per_bucket: 9",
            "18 rows, which do not fill whole batches of 8, and there is no base text",
            "",
        ),
        (
            "    shape:",
            "    # shape:",
            "models.some has no shape, and org/name is no folder with a config.json",
            "some:",
        ),
        ("processes: 8", "processes: 2", "no grid of 2 GPUs fits: the smallest,", "grid:"),
        ("grid: auto", "grid: {data: 8}", "of 40 GiB of a GPU (a tenth is kept free): take more processes", "grid:"),
        ("  suffix: 16", "  # suffix", "there is neither documents.suffix nor a pilot that chooses it", "documents:"),
        ("suffix: 16", "suffix: 64", "documents.suffix is 64, which leaves no prefix in documents of 64", "suffix:"),
        ("grid: auto", "grid: auto\nbase_length: 8", "base_length is given, but no model has a config", "base_length"),
        (
            "grid: auto",
            "grid: auto\nvocabulary: 999",
            "vocabulary is 999, but every model comes with its",
            "vocabulary",
        ),
    ):
        changed = text.replace(old, new, 1)
        lines = changed.splitlines()
        assert refused(path, changed, message) == line(where or new)


def test_files_that_are_no_recipes(tmp_path):
    assert refused(tmp_path / "empty.yaml", "", "the file is empty") == 1
    assert refused(tmp_path / "list.yaml", "- 1\n", "the file is [1], but it is a mapping of names") == 1
    assert refused(tmp_path / "tab.yaml", "name: a\n\tb: c\n", "it is not YAML") == 2
    with pytest.raises(ValueError, match=r"none.yaml:1: it cannot be read"):
        read_recipe(tmp_path / "none.yaml")
