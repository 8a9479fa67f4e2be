#!/usr/bin/env python3
"""Checks what the layout of the sources promises: `make lint` runs it.

C++ (csrc/): a folder includes only itself and folders before it in FOLDERS, and no files include each other in a
circle, where a header and the source of the same name count as one. Python (torch_ext/shardwright): no modules import
each other in a circle at import time, and a package imports only what PACKAGES allows.

Prints every violation; exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "torch_ext" / "shardwright"

FOLDERS = (
    "support",
    "layout",
    "cost",
    "moves",
    "search",
    "program",
    "planning",
    "products",
    "simulate",
    "picture",
    "runtime",
    "bindings",
)
# The simulator is an oracle: what it checks does not use it.
FORBIDDEN = {("picture", "simulate"), ("runtime", "simulate"), ("runtime", "picture")}

MAX_FILE_LINES = 600

Graph = dict[str, set[str]]


def circles(graph: Graph) -> list[list[str]]:
    """The strongly connected components of more than one node, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def included(path: Path) -> list[str]:
    return re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)


def check_cpp() -> Iterable[str]:
    graph: Graph = {}
    for path in sorted(CSRC.rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh"):
            continue
        name = path.relative_to(CSRC).as_posix()
        folder = name.split("/")[0]
        if folder not in FOLDERS:
            yield f"csrc/{name}: folder '{folder}' is not in FOLDERS of tools/check_structure.py"
            continue
        for other in included(path):
            if not (CSRC / other).exists():
                yield f"csrc/{name}: includes {other}, which is not there"
                continue
            target = other.split("/")[0]
            if FOLDERS.index(target) > FOLDERS.index(folder) or (folder, target) in FORBIDDEN:
                yield f"csrc/{name}: {folder} must not include {target} ({other})"
            module, wanted = Path(name).with_suffix("").as_posix(), Path(other).with_suffix("").as_posix()
            if module != wanted:
                graph.setdefault(module, set()).add(wanted)
    for circle in circles(graph):
        yield f"csrc: files include each other in a circle: {', '.join(circle)}"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, modules: set[str]) -> set[str]:
    """The modules of the package that a file imports when it is imported, not within functions."""
    own = module_name(path)
    package = own if path.name == "__init__.py" else own.rpartition(".")[0]
    found = set()
    tree = ast.parse(path.read_text())
    top = [*tree.body]
    for node in top:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        for child in ast.walk(node) if isinstance(node, (ast.If, ast.Try)) else [node]:
            if not isinstance(child, ast.ImportFrom):
                continue
            if child.level == 0 and not (child.module or "").startswith("shardwright"):
                continue
            if child.level == 0:
                base = (child.module or "").partition(".")[2]
            else:
                above = package.split(".") if package else []
                above = above[: len(above) - (child.level - 1)]
                base = ".".join([*above, *([child.module] if child.module else [])])
            for alias in child.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                found.add(inner if inner in modules else base)
    return {name for name in found if name != own}


def check_python() -> Iterable[str]:
    paths = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    modules = set(paths)
    # Importing a part of a package runs the package's own __init__ first; that is no import of the file's own.
    graph = {name: imported(path, modules) - {""} for name, path in paths.items() if name}
    for circle in circles(graph):
        yield f"shardwright: modules import each other in a circle: {', '.join(circle)}"


def check_lengths() -> Iterable[str]:
    for path in [*CSRC.rglob("*"), *PACKAGE.rglob("*.py")]:
        if path.suffix in (".h", ".cpp", ".cu", ".py"):
            lines = len(path.read_text().splitlines())
            if lines > MAX_FILE_LINES:
                yield f"{path.relative_to(ROOT)}: {lines} lines; allowed are {MAX_FILE_LINES}"


def main() -> int:
    wrong = [*check_cpp(), *check_python(), *check_lengths()]
    print("\n".join(wrong) if wrong else "the structure is as promised")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
