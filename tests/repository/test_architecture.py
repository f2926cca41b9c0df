"""Guards on the shape of the code: which file may import which, how long a file is, what is public."""

import ast
import subprocess
import sys

import pytest

import hf_axonn
from tests.helpers import ROOT


FLOORS = [
    {
        "goldfish",
        "gguf_files",
        "grid",
        "heads",
        "collectives",
        "gloo",
        "importing",
        "nodes",
        "pending",
        "placement",
        "compat",
        "compat_accelerate",
        "compat_loading",
        "compat_peft",
        "config",
        "environment",
        "reads",
        "report",
        "unread",
        "facts",
        "progress",
        "termination",
        "verdict",
        "perf.exposed",
        "perf.layer_volumes",
        "perf.layers",
        "perf.ledger",
        "perf.shapes",
        "perf.shares",
        "perf.volumes",
        "perf.machines",
        "perf.models",
        "perf.paper",
        "perf.links",
        "perf.compute",
        "perf.memory",
        "perf.schedules",
        "perf.model",
        "perf.planner",
        "perf.jobs",
    },
    {"layouts", "cuts", "kept", "matmul3d", "operand_layouts", "overlap", "state", "token_loss", "traffic", "tuning"}
    | {"agreement", "failures", "pieces", "shard_files", "manifest", "commit", "saving"},
    {
        "styles",
        "batch_check",
        "selection",
        "block_checks",
        "latent",
        "recipes",
        "blocks",
        "gathered",
        "dropout",
        "install",
        "plans",
        "loss",
        "label_statistics",
        "fused_head",
        "compat_trl",
        "vocabulary",
        "lora",
        "parameter_lora",
        "dora",
        "adapters",
        "adapter_checks",
        "adapter_merge",
        "decoder",
        "norms",
        "norm_probe",
        "feature_layout",
        "experts",
        "expert_weights",
        "router_loss",
    },
    {
        "adafactor",
        "built_shapes",
        "found_shapes",
        "layer_probe",
        "samplers",
        "plain_models",
        "plain_values",
        "whole_model",
    }
    | {"export", "parallelize", "gradients", "checkpoint", "adapter_files", "injection", "plain_checkpoint"},
    {"accelerator_data", "accelerator_files", "accelerator_training", "dispatching", "grid_accelerator"}
    | {
        "notebooks",
        "plugin",
        "trainer_checks",
        "trainer_hooks",
        "trainer_hub",
        "trainer_resume",
        "trainer_saving",
        "trainer_smoothing",
        "launch",
        "launch_file",
        "_autoload",
    },
    {"trainer", "trl", "cli", "doctor", "plan_cli", "plan_plots", "bench_links", "timings"},
]
FLOOR = {name: number for number, floor in enumerate(FLOORS) for name in floor}
ENGINE = ROOT / "hf_axonn"
# By dotted name within the package: grid, perf.volumes.
MODULES = {
    ".".join(path.relative_to(ENGINE).with_suffix("").parts): path
    for path in sorted(ENGINE.rglob("*.py"))
    if path.stem != "__init__"
}
EVAL_MODULES = {path.stem: path for path in sorted((ROOT / "eval").glob("*.py"))}
SOURCES = [*MODULES.values(), ROOT / "hf_axonn" / "__init__.py", *EVAL_MODULES.values()]
SOURCES += sorted((ROOT / "training_scripts").rglob("*.py"))
TRACKED = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "training_scripts").rglob("*.yaml"))]
TRACKED += [ROOT / name for name in ("setup.cfg", "pyproject.toml", "Makefile", ".ci/run")]
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "scatter", "gather")
MOST_LINES = 320


def at_runtime(tree):
    """Every node of a tree, without what stands under `if TYPE_CHECKING:`."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING":
            stack += node.orelse
            continue
        yield node
        stack += ast.iter_child_nodes(node)


def imports(nodes):
    """Dotted names of what is imported: `import a.b` gives a.b, `from a import b` gives a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def siblings(path, package, names, *, everywhere=True):
    """Modules of `package` that a file imports: anywhere in it, or only where it is itself imported."""
    tree = ast.parse(path.read_text())
    nodes = at_runtime(tree) if everywhere else [node for node in at_runtime(tree) if node in tree.body]
    for name in imports(nodes):
        parts = name.split(".")
        if parts[0] == package:
            yield from [".".join(parts[1:end]) for end in (2, 3) if ".".join(parts[1:end]) in names][:1]


def test_every_module_has_a_floor():
    assert set(MODULES) <= set(FLOOR), "give the new file its floor in FLOORS"


@pytest.mark.parametrize("name", MODULES)
def test_a_file_imports_nothing_from_a_higher_floor(name):
    for other in siblings(MODULES[name], "hf_axonn", MODULES):
        assert FLOOR[other] <= FLOOR[name], f"{name} (floor {FLOOR[name]}) imports {other} (floor {FLOOR[other]})"


@pytest.mark.parametrize(("package", "modules"), [("hf_axonn", MODULES), ("hf_axonn_eval", EVAL_MODULES)])
def test_no_two_files_import_each_other(package, modules):
    graph = {name: set(siblings(path, package, modules, everywhere=False)) for name, path in modules.items()}
    while graph:
        leaves = [name for name, needs in graph.items() if not needs & set(graph)]
        assert leaves, f"a circle of imports among {sorted(graph)}"
        for name in leaves:
            del graph[name]


@pytest.mark.parametrize("path", MODULES.values(), ids=list(MODULES))
def test_the_engine_does_not_know_its_users(path):
    for name in imports(ast.walk(ast.parse(path.read_text()))):
        assert name.split(".")[0] not in ("hf_axonn_eval", "eval", "training_scripts", "benchmarks", "tests")


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_private_names_of_dependencies_are_imported_in_one_file(path):
    if path == MODULES.get("compat"):
        return
    for name in imports(ast.walk(ast.parse(path.read_text()))):
        library, *rest = name.split(".")
        if library in ("torch", "accelerate", "transformers", "peft", "trl"):
            assert not [part for part in rest if part.startswith("_")], f"{name} belongs in compat.py"


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("collectives", "gloo")])
def test_collectives_are_called_in_one_file(name):
    tree = ast.parse(MODULES[name].read_text())
    aliases = {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            for alias in node.names:
                full = f"{module}.{alias.name}" if module else alias.name
                if full == "torch.distributed" and alias.asname or module == "torch":
                    aliases |= {alias.asname or alias.name} if full == "torch.distributed" else set()
                assert not (module == "torch.distributed" and alias.name.startswith(COLLECTIVES)), full
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if ast.unparse(node.func.value) in aliases:
                assert not node.func.attr.startswith(COLLECTIVES), f"line {node.lineno}: use collectives.py"


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_a_file_can_be_read_in_one_sitting(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MOST_LINES, f"{lines} lines: one idea a file"


@pytest.mark.parametrize("path", TRACKED, ids=[str(path.relative_to(ROOT)) for path in TRACKED])
def test_text_is_ascii_and_names_no_machine(path):
    text = path.read_text(encoding="ascii")
    for place in ("work", "root", "home/runner"):
        assert f"/{place}/" not in text


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_every_file_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("name", hf_axonn._EXPORTS)
def test_public_names_resolve_and_are_documented(name):
    value = getattr(hf_axonn, name)
    assert not isinstance(value, type(sys))
    assert value.__module__.startswith("hf_axonn.")
    doc = value.__doc__ or ""
    # A dataclass without a docstring is given its signature as one.
    assert len(doc.strip()) > 30 and not doc.startswith(f"{name}(")


def test_the_package_lists_its_names_and_refuses_others():
    assert set(hf_axonn._EXPORTS) | {"__version__"} == set(hf_axonn.__all__) <= set(dir(hf_axonn))
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        _ = hf_axonn.paralelize


def test_a_module_does_not_hide_the_public_name_it_shares():
    code = "import hf_axonn.parallelize; import hf_axonn; assert hf_axonn.parallelize.__name__ == 'parallelize'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_library():
    code = "import sys; import hf_axonn, hf_axonn.config, hf_axonn.launch.command; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
