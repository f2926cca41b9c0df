"""The picture and the table of packages in docs/architecture.md, made of the imports.

    python -m tests.tools.package_graph       writes them anew (`make picture`)

A package is a folder or a file directly below one of FOLDERS; `hf_axonn` and `hf_axonn_eval` themselves stand for
their public names, as others import them. The table has every import between packages, those inside of functions too.
The picture leaves an arrow out where a longer way says the same: with a -> b -> c there is none from a to c.
"""

import ast
import sys
from configparser import ConfigParser
from pathlib import Path

import grimp

from tests.helpers import ROOT


DOCUMENT = ROOT / "docs" / "architecture.md"
FOLDERS = {
    "hf_axonn": ROOT / "hf_axonn",
    "hf_axonn_eval": ROOT / "eval",
    "hf_axonn_scripts": ROOT / "training_scripts",
    "hf_axonn_scripts.study": ROOT / "training_scripts" / "study",
}
PUBLIC = ("hf_axonn_eval", "hf_axonn")
CONTRACTS = {
    "hf_axonn": "importlinter:contract:layers",
    "hf_axonn_eval": "importlinter:contract:eval_layers",
    "hf_axonn_scripts": "importlinter:contract:scripts_layers",
    "hf_axonn_scripts.study": "importlinter:contract:study_layers",
}
BEGIN = "<!-- made by `make picture`: {} -->"
END = "<!-- end -->"

Graph = dict[str, set[str]]


def layers() -> list[str]:
    """Every package, from the highest to the lowest, as setup.cfg has them; those of the study first."""
    configuration = ConfigParser()
    configuration.read(ROOT / "setup.cfg")
    names = []
    for root in reversed(FOLDERS):
        text = configuration[CONTRACTS[root]]["layers"]
        names += [f"{root}.{name}" for name in text.replace("|", " ").split()]
    return [name for name in names if name not in FOLDERS]


def imports() -> Graph:
    """package -> the packages that it imports; also whether it imports the public names of hf_axonn or eval."""
    roots = [name for name in FOLDERS if "." not in name]
    modules = grimp.build_graph(*roots, exclude_type_checking_imports=False, cache_dir=None)
    graph: Graph = {name: set() for name in [*layers(), *PUBLIC]}
    for module in modules.modules:
        for imported in modules.find_modules_directly_imported_by(module):
            upper, lower = package_of(module), package_of(imported)
            within = lower in PUBLIC and folder_of(upper) == lower  # such as the version
            if upper in graph and lower in graph and upper != lower and not within:
                graph[upper].add(lower)
    return graph


def package_of(module: str) -> str:
    """`hf_axonn.engine` of `hf_axonn.engine.state`."""
    root = folder_of(module)
    return module if module == root else f"{root}.{module.removeprefix(f'{root}.').partition('.')[0]}"


def folder_of(name: str) -> str:
    """The one of FOLDERS that a package or a module is in."""
    return max((root for root in FOLDERS if f"{name}.".startswith(f"{root}.")), key=len)


def reachable(graph: Graph, start: str) -> set[str]:
    """All that `start` imports, by any way."""
    found: set[str] = set()
    left = [start]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return found


def reduced(graph: Graph) -> Graph:
    """The same graph without arrows that a longer way replaces. It must have no circle."""
    below = {name: reachable(graph, name) for name in graph}
    return {name: {end for end in ends if not any(end in below[by] for by in ends)} for name, ends in graph.items()}


def mermaid(graph: Graph) -> str:
    """The picture, top to bottom."""
    few, order = reduced(graph), list(graph)
    lines = ["```mermaid", "flowchart TD"]
    for root in reversed(FOLDERS):
        lines.append(f'  subgraph {node(root)}["{FOLDERS[root].relative_to(ROOT).as_posix()}/"]')
        own = [name for name in graph if folder_of(name) == root != name]
        lines += [f'    {node(name)}["{short(name)}"]' for name in own]
        lines.append("  end")
    for name in graph:
        lines += [f"  {node(name)} --> {node(end)}" for end in sorted(few[name], key=order.index)]
    return "\n".join([*lines, "```"])


def node(name: str) -> str:
    return name.replace(".", "__")


def short(name: str) -> str:
    return name.rpartition(".")[2]


def table(graph: Graph) -> str:
    """A row for each package: where it is, what its docstring says, what it imports."""
    lines = ["| package | what lives there | imports |", "| --- | --- | --- |"]
    for name in layers():
        path = source_of(name)
        says = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).split("\n\n")[0].replace("\n", " ")
        where = path.parent if path.name == "__init__.py" else path
        link = f"[`{where.relative_to(ROOT).as_posix()}`](../{where.relative_to(ROOT).as_posix()})"
        below = [end if folder_of(end) != folder_of(name) else short(end) for end in graph if end in graph[name]]
        lines.append(f"| {link} | {says.replace('|', '/')} | {', '.join(below) or 'nothing'} |")
    return "\n".join(lines)


def source_of(name: str) -> Path:
    """The file whose docstring speaks for a package."""
    path = FOLDERS[folder_of(name)] / short(name)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def written(text: str) -> str:
    """The text of docs/architecture.md with its made parts as they are now.

    Raises:
        ValueError: the text has no place for one of them.
    """
    graph = imports()
    for name, part in {"picture": mermaid(graph), "table": table(graph)}.items():
        begin = BEGIN.format(name)
        before, found, rest = text.partition(begin)
        _, end, after = rest.partition(END)
        if not (found and end):
            raise ValueError(f"{DOCUMENT.name} has no lines {begin} and {END}: put them where the {name} belongs.")
        text = f"{before}{begin}\n{part}\n{end}{after}"
    return text


def main() -> None:
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{DOCUMENT.relative_to(ROOT)} has the packages as they are")


if __name__ == "__main__":
    sys.exit(main())
