"""docs/gpu.md names every file with a branch for GPUs, and no other, with tests that exist; no code makes a stream."""

import ast
import functools
import re
from collections.abc import Iterator

from tests.helpers import ROOT


KINDS = {"cpu", "cuda", "gloo", "nccl"}
COPIES = {"non_blocking", "_non_blocking", "pin_memory"}
STREAMS = {"Stream", "stream", "set_stream", "wait_stream", "ExternalStream", "default_stream"}


def constants(node: ast.expr) -> Iterator[object]:
    """Yield the constants of an expression, or of what it lists."""
    for each in node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]:
        if isinstance(each, ast.Constant):
            yield each.value


def asks_for_a_device(node: ast.AST) -> bool:
    """Return whether a piece of code calls CUDA or NCCL, copies without waiting, or compares devices or backends."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name) if re.search("cuda|nccl", name, re.IGNORECASE):
            return True
        case ast.Attribute(value=ast.Name(id="torch"), attr="accelerator") | ast.Attribute(attr="get_device_module"):
            return True
        case ast.keyword(arg=name):
            return name in COPIES
        case ast.Compare(left=left, comparators=others):
            return any(value in KINDS for each in (left, *others) for value in constants(each))
        case ast.Dict(keys=keys):
            return any(isinstance(key, ast.Constant) and key.value in ("cuda", "nccl") for key in keys)
    return False


@functools.cache
def sources() -> dict[str, ast.Module]:
    paths = [path for package in ("hf_axonn", "eval") for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def rows() -> dict[str, str]:
    """The table of branches: file -> how it was looked at."""
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    table = page.partition("### Every branch for GPUs")[2]
    found = re.findall(r"^\| ((?:hf_axonn|eval)/\S+\.py) \| .+ \| (.+) \|$", table, re.MULTILINE)
    assert len(found) == len(dict(found)) > 20
    return dict(found)


def test_every_file_with_a_branch_for_gpus_is_in_the_table_and_no_other():
    branching = {name for name, tree in sources().items() if any(map(asks_for_a_device, ast.walk(tree)))}
    assert set(rows()) == branching


def test_each_was_looked_at_in_a_way_that_is_named():
    for name, how in rows().items():
        tests = re.findall(r"`(tests/\S+\.py)`", how)
        assert tests or re.search(r"\bread\b", how), name
        assert not [test for test in tests if not (ROOT / test).is_file()], name


def test_nothing_makes_a_stream():
    """Then a collective is waited for on the stream on which its buffers were made, and no `record_stream` is due, but
    where a step ends (tests/end_to_end/test_fake_cuda.py). Moments are copied on streams without collectives."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree in sources().items()
        if name != "hf_axonn/engine/host_moments.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in STREAMS and ast.unparse(node.value) != "self"
    ]
    assert not found


def test_a_branch_is_seen():
    seen = {
        "if device.type == 'cuda': pass": True,
        "x = device.type in ('cpu', 'mps')": True,
        "torch.cuda.synchronize()": True,
        "value.to(device, non_blocking=True)": True,
        "sizes = {'cuda': 1, 'cpu': 2}": True,
        "torch.accelerator.device_count()": True,
        "raise ValueError('no CUDA here')": False,
        "x = value.to('cpu')": False,
    }
    assert {code: any(map(asks_for_a_device, ast.walk(ast.parse(code)))) for code in seen} == seen
