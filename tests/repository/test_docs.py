"""The documents say what is there: their code parses, and the names, options, files and headings in them exist."""

import ast
import contextlib
import functools
import importlib.util
import inspect
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import hf_axonn
from hf_axonn.cli.main import main as hf_axonn_main
from hf_axonn.launch import launch_file
from hf_axonn.launch.command import accelerate_options
from hf_axonn_eval.__main__ import main as eval_main
from tests.benchmarks.gpu.__main__ import main as gpu_main
from tests.benchmarks.gpu.rehearsal import main as rehearsal_main
from tests.helpers import ROOT
from tests.tools.documents import DOCUMENTS, FENCE, SHELL, Block, blocks, defined_in
from tests.versions.environments import main as versions_main


PACKAGES = ("hf_axonn", "hf_axonn_eval", "hf_axonn_scripts")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OPTION = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")
DOTTED = re.compile(r"\bhf_axonn(?:_eval|_scripts)?(?:\.[A-Za-z_]\w*)+")
# Programs by the words that begin them in a command line; the longest that fits counts.
TRAINING = {name: f"hf_axonn_scripts.{name}" for name in ("finetune", "finetune_no_trainer", "finetune_chat")}
TRAINING["study"] = "hf_axonn_scripts.study.study"
EVAL, LAUNCH, CLI, GPU, VERSIONS = "hf_axonn_eval", "launch", "hf-axonn", "gpu", "versions"
REHEARSAL = "rehearsal"
PROGRAMS = {
    ("accelerate", "launch"): LAUNCH,
    ("accelerate-launch",): LAUNCH,
    ("axonn-launch",): LAUNCH,
    ("python", "-m", "accelerate.commands.launch"): LAUNCH,
    ("python", "-m", "hf_axonn_eval"): EVAL,
    ("-m", "hf_axonn_eval"): EVAL,
    ("-m", "trl.scripts.sft"): "trl.scripts.sft",
    ("hf-axonn-eval",): EVAL,
    ("hf-axonn", "finetune"): "finetune",
    ("hf-axonn", "study"): "study",
    ("hf-axonn",): CLI,
    ("python", "-m", "tests.benchmarks.gpu"): GPU,
    ("python", "-m", "tests.benchmarks.gpu.rehearsal"): REHEARSAL,
    ("python", "-m", "tests.versions.environments"): VERSIONS,
}


def prose(document: Path) -> str:
    """A document without its fenced blocks."""
    return FENCE.sub("", document.read_text(encoding="utf-8"))


def inline_code() -> Iterator[tuple[str, str]]:
    """Yield document and text; not of the changelog, which names what is gone, too."""
    for document in DOCUMENTS:
        for match in INLINE.finditer(prose(document) if document.name != "CHANGELOG.md" else ""):
            yield str(document.relative_to(ROOT)), match[1]


def cases(items):
    return [pytest.param(item, id=item.place) for item in items]


def look_up(dotted: str):
    """The object that `package.module.name.attribute` names."""
    module, *rest = dotted.split(".")
    value = importlib.import_module(module)
    for part in rest:
        if inspect.ismodule(value) and not hasattr(value, part):
            value = importlib.import_module(f"{value.__name__}.{part}")
        else:
            value = getattr(value, part)
    return value


def resolve(dotted: str):
    """`look_up`, with an AssertionError where there is no such thing."""
    try:
        return look_up(dotted)
    except (ImportError, AttributeError) as problem:
        raise AssertionError(f"{dotted} is not there: {problem}") from problem


def test_every_document_is_found():
    names = {document.name for document in DOCUMENTS}
    assert {"README.md", "CHANGELOG.md", "algorithm.md", "usage.md", "design.md", "evaluation.md"} <= names
    assert len(blocks("python")) >= 5 and len(blocks("yaml")) >= 1 and len(blocks(*SHELL)) >= 5


@pytest.mark.parametrize("block", cases(blocks("python")))
def test_python_uses_what_exists(block):
    tree = ast.parse(block.text, filename=block.place)
    known: dict[str, str] = {}  # name in the block -> what it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {item.asname or item.name.partition(".")[0]: item.name for item in node.names}
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in PACKAGES:
            for item in node.names:
                resolve(f"{node.module}.{item.name}")
                known[item.asname or item.name] = f"{node.module}.{item.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := _ours(node, known)):
            resolve(name)
        if isinstance(node, ast.Call) and (name := _ours(node.func, known)):
            accepted = inspect.signature(resolve(name)).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
                unknown = {keyword.arg for keyword in node.keywords} - {*accepted, None}
                assert not unknown, f"{name} takes no {', '.join(unknown)}"


def _ours(node: ast.expr, known: dict[str, str]) -> str | None:
    """The full dotted name of an expression of our packages, None of any other."""
    first, dot, rest = ast.unparse(node).partition(".")
    name = known.get(first, "") + dot + rest
    return name if re.fullmatch(r"hf_axonn(_eval|_scripts)?(\.\w+)*", name) else None


@pytest.mark.parametrize("block", cases(blocks("yaml")))
def test_yaml_is_a_launch_file_that_would_be_taken(block):
    settings = yaml.safe_load(block.text)
    here = {"distributed_type": "MULTI_GPU", "use_cpu": True}  # whatever devices this machine has
    assert launch_file.resolve(here | settings | {"use_cpu": True}, {}).config
    known = {option.lstrip("-") for option in accelerate_options()}
    extra = {"compute_environment", "distributed_type", "axonn_config", "use_cpu", "parallelism_config"}
    assert not set(settings) - known - extra


# What makes the ranks of a launch meet. A model before it has nothing to be divided among.
MEETINGS = ("Accelerator", "TrainingArguments", "GoldfishConfig", "GoldfishSFTConfig", "init_process_group")


@pytest.mark.parametrize("block", cases(blocks("python")))
def test_ranks_meet_before_a_model_is_divided(block):
    """Where a block has both; `prepare` and Trainer divide a model that is loaded whole, later."""
    calls = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Call)]
    lines = {name: [] for name in ("meet", "divide")}
    for call in calls:
        name = ast.unparse(call.func).rpartition(".")[2]
        if name in MEETINGS:
            lines["meet"].append(call.lineno)
        if name in ("from_pretrained", "parallelize") and any("grid" in ast.unparse(each) for each in ast.walk(call)):
            lines["divide"].append(call.lineno)
    assert not all(lines.values()) or min(lines["meet"]) < min(lines["divide"])


def test_dotted_names_in_the_text_exist():
    names = {name for _, code in inline_code() for name in DOTTED.findall(code)}
    assert len(names) > 5
    for name in sorted(names):
        resolve(name)


def test_names_of_files_in_the_text_exist():
    folders = ("hf_axonn/", "training_scripts/", "tests/", "docs/", "eval/")
    paths = {code for _, code in inline_code() if code.startswith(folders) and re.fullmatch(r"[\w./]+", code)}
    assert len(paths) > 5
    assert not sorted(path for path in paths if not (ROOT / path).exists())


@functools.cache
def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    wrong = []
    for target in LINK.findall(prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(target)
    assert not wrong


def options_in(text: str) -> set[str]:
    return {option.replace("-", "_").replace("__", "--", 1) for option in OPTION.findall(text)}


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """What each program takes, with underscores, as its own --help says."""
    commands = ("init", "convert", "verify", "env", "doctor", "certify", "survey", "plan", "bench-links", "kit")
    own = _help(hf_axonn_main, "", *commands)
    known = {CLI: own}
    names = ("samples", "overlaps", "extract", "report", "compare", "tokens", "canaries make", "canaries rank")
    names += ("bundle", "verify", "export")
    known[EVAL] = _help(eval_main, "", *names)
    known[GPU] = _help(gpu_main, "")
    known[REHEARSAL] = _help(rehearsal_main, "")
    known[VERSIONS] = _help(versions_main, "")
    known[LAUNCH] = options_in(" ".join(accelerate_options())) | {"--config"}
    pytest.importorskip("datasets", reason="training scripts need the extra `data`")
    for script, module in TRAINING.items():
        known[script] = _help(importlib.import_module(module).parse, "")
    known["finetune"] |= {"--config"}  # of hf-axonn finetune
    known["trl.scripts.sft"] = known["finetune_chat"] | {"--dataset_name"}  # the same arguments of TRL
    return known


def _help(main, *commands: str) -> set[str]:
    text = io.StringIO()
    for command in commands:
        with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
            main([*command.split(), "--help"])
    return options_in(text.getvalue())


def command_lines(block: Block) -> list[list[str]]:
    """The words of every command of a shell block."""
    text = block.text.replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def uses(words: list[str]) -> Iterator[tuple[str | None, str]]:
    """(program, option) for every option of a command line; None for a program that is not ours."""
    program = None
    for position, word in enumerate(words):
        here = {length: tuple(words[position : position + length]) for length in (3, 2, 1)}
        begun = next((PROGRAMS[part] for part in here.values() if part in PROGRAMS), None)
        script = next((name for name in TRAINING if word.endswith(f"{name}.py")), None)
        if script is not None:
            begun = script
        elif word.endswith(".py"):
            begun, program = None, None
        program = begun or program
        if OPTION.match(word):
            yield program, OPTION.match(word)[0]


@pytest.mark.parametrize("block", cases(blocks(*SHELL)))
def test_options_in_commands_exist(block, options):
    for words in command_lines(block):
        for program, option in uses(words):
            if program is not None:
                assert options_in(option) <= options[program], f"{program} takes no {option}"


def test_options_in_the_text_exist(options):
    every = set().union(*options.values()) | {"--help"}
    # pip's, sbatch's and srun's, lm-evaluation-harness's, and TRL's
    every |= {"--extra_index_url", "--requeue", "--signal", "--network", "--cpu_bind", "--device", "--tasks"}
    every |= {"--ntasks", "--ntasks_per_node", "--accelerate_config"}
    wrong = {(place, option) for place, code in inline_code() for option in options_in(code) if option not in every}
    assert not wrong


def test_every_public_name_is_there_and_named_in_the_documents():
    text = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    for name in dir(hf_axonn):
        resolve(f"hf_axonn.{name}")
        assert re.search(rf"\b{name}\b", text), f"{name} is not documented"


def test_the_tests_behind_the_table_of_reliability_exist():
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", text)
    assert len(named) > 15
    for file, test in named:
        assert any(test in defined_in(path) for path in (ROOT / "tests").rglob(file)), f"{file}::{test}"


def test_benchmarks_have_a_row_each_and_results_that_are_there():
    folder = ROOT / "tests" / "benchmarks"
    text = (folder / "README.md").read_text(encoding="utf-8")
    scripts = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__main__")
        for path in folder.rglob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    assert set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)) == scripts
    targets = [folder / target for target in LINK.findall(text)]
    assert len(targets) > 10 and all(target.resolve().is_file() for target in targets)


def test_modules_that_a_command_runs_exist():
    """`python -m tests...` and `python -m hf_axonn...` in documents, results and docstrings."""
    sources = [*DOCUMENTS, *ROOT.glob("docs/results/*.md"), *ROOT.glob("tests/**/*.md"), *ROOT.glob("tests/**/*.py")]
    found = set()
    for source in sources:
        found |= set(
            re.findall(r"-m ((?:tests|hf_axonn(?:_eval|_scripts)?)(?:\.\w+)*)", source.read_text(encoding="utf-8"))
        )
    assert len(found) > 15
    assert not [name for name in found if importlib.util.find_spec(name) is None]


@pytest.mark.parametrize(
    ("beginning", "file"),
    [
        ('"stablelm mllama_text_model"', "hf_axonn/architectures/table.py"),
        ("def floating_point_ops", "hf_axonn/trainer/hooks.py"),
    ],
)
def test_worked_examples_are_those_of_the_code(beginning, file):
    examples = [block.text for block in blocks("text", "python") if block.text.startswith(beginning)]
    code = {line.strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()}
    (example,) = examples
    body = [line.strip() for line in example.splitlines() if not line.startswith("def ")]
    assert body and not [line for line in body if line not in code]
