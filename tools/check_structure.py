#!/usr/bin/env python3
"""Checks the structure of the sources. `make lint` runs it.

- C++ (csrc/): a folder includes only itself and folders before it in FOLDERS. There are no circular includes; a header
  and the source of the same name count as one file. Only a transport's own folder, and the code that binds programs to
  groups, may include the transport.
- Python (torch_ext/shardwright): a module imports only from its own package and from packages before it in ORDER, never
  from the root. There are no circular imports; imports within functions count.
- No file is longer than MAX_FILE_LINES, and no function longer than MAX_FUNCTION_LINES without its docstring. The parts
  of the Python package have limits (MAX_CODE_LINES).
- No two places outside the tests share more than MAX_SHARED_LINES lines of code.

Prints every violation. The exit status is 1 if there are any.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "torch_ext" / "shardwright"

FOLDERS = (
    "support",
    "layout",
    "cost",
    "exchange",
    "moves",
    "search",
    "program",
    "planning",
    "views",
    "batch",
    "products",
    "attention",
    "schedule",
    "simulate",
    "picture",
    "runtime",
    "bindings",
)
# The simulator is an oracle, so the code that it checks must not use it. (_runtime is built without picture.)
FORBIDDEN = {("picture", "simulate"), ("runtime", "simulate"), ("runtime", "picture")}

# Folders of transports. Other code of runtime uses them through runtime/transport.h; code that finds groups by their
# names is an exception.
TRANSPORTS = ("runtime/c10d", "runtime/peers")
MAY_FIND_GROUPS = ("runtime/operators.cpp",)

# The Python package: its modules and sub-packages. Each imports only itself and those before it.
ORDER = (
    "_planner",
    "_runtime",
    "progress_bar",
    "free_memory",
    "source_build",
    "builds",
    "doctor",
    "_native",
    "placements",
    "layouts",
    "planning",
    "pages",
    "rules",
    "runtime",
    "graph",
    "dtensor",
    "many",
    "matmul",
    "attention",
    "experts",
    "views",
    "spmd",
    "versions",
    "transfers",
    "loaders",
    "checkpoints",
    "debug",
    "fsdp",
    "calibration",
    "parallel",
    "cli",
    "__main__",
    "drop_in",
    "integrations",
)

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_SHARED_LINES = 10  # consecutive lines; comments, blank lines and imports do not count
SOURCES = ("csrc", "torch_ext", "benchmarks", "examples", "tools")  # folders that are searched for shared lines

# Lines of code of each sub-package, and of the modules next to them ("."). Python only checks arguments and connects
# C++ to torch. Code that plans, decides or computes belongs in csrc/, where it is tested without torch and is the same
# for both modules. Before raising a limit, look for code that belongs there. Docstrings, comments and blank lines do
# not count.
MAX_CODE_LINES = {
    ".": 1050,
    "attention": 790,
    "builds": 91,
    "calibration": 489,
    "cli": 777,
    "debug": 213,
    "dtensor": 929,
    "experts": 603,
    "fsdp": 6023,
    "graph": 317,
    "integrations": 191,
    "integrations/torchtitan": 309,
    "integrations/verl": 197,
    "integrations/vllm": 368,
    "layouts": 502,
    "loaders": 350,
    "many": 224,
    "matmul": 641,
    "pages": 356,
    "parallel": 207,
    "planning": 219,
    "rules": 719,
    "runtime": 2306,
    "spmd": 100,
    "transfers": 1249,
    "versions": 624,
    "views": 1083,
}

COMPILED = {path.stem for path in PACKAGE.glob("*.pyi")}

Graph = dict[str, set[str]]


def circles(graph: Graph) -> list[list[str]]:
    """Returns the strongly connected components of more than one node, by Tarjan's algorithm."""
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


def may_know(name: str, other: str) -> bool:
    """Returns whether a file of csrc/runtime may include another: transports are private to their folders."""
    home = Path(other).parent.as_posix()
    return home not in TRANSPORTS or Path(name).parent.as_posix() == home or name in MAY_FIND_GROUPS


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
            if target == folder == "runtime" and not may_know(name, other):
                yield f"csrc/{name}: must not include {other}; what it needs of a transport is in runtime/transport.h"
            module, wanted = Path(name).with_suffix("").as_posix(), Path(other).with_suffix("").as_posix()
            if module != wanted:
                graph.setdefault(module, set()).add(wanted)
    for circle in circles(graph):
        yield f"csrc: files include each other in a circle: {', '.join(circle)}"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def statements(tree: ast.AST) -> Iterable[ast.AST]:
    """Yields all statements, nested ones included."""
    for child in ast.iter_child_nodes(tree):
        if not is_for_types(child):
            yield child
            yield from statements(child)


def imported(path: Path, modules: set[str]) -> set[str]:
    """Returns the modules of the package that a file imports, also within functions."""
    own = module_name(path)
    package = own if path.name == "__init__.py" else own.rpartition(".")[0]
    found = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("shardwright.")}
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 0:
            name, _, base = (node.module or "").partition(".")
            if name != "shardwright":
                continue
        else:
            above = package.split(".") if package else []
            above = above[: len(above) - (node.level - 1)]
            base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{base}.{alias.name}" if base else alias.name
            found.add(inner if inner in modules else base)
            if not base and alias.name in COMPILED and own != "_native":
                found.add("")
    # Importing a part of a package runs the package's own __init__ first; that is no import of the file's own.
    return {name for name in found if name != own and not own.startswith(name + ".")}


def check_python() -> Iterable[str]:
    paths = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    graph = {name: imported(path, set(paths) | COMPILED) for name, path in paths.items() if name}
    for circle in circles(graph):
        yield f"shardwright: modules import each other in a circle: {', '.join(circle)}"
    for name, targets in graph.items():
        mine = name.partition(".")[0]
        if mine not in ORDER:
            yield f"shardwright: '{mine}' is not in ORDER of tools/check_structure.py"
            continue
        for target in sorted(targets):
            if target == "":
                yield f"shardwright: {name} must not import the package's root; compiled modules come from _native"
            elif ORDER.index(target.partition(".")[0]) > ORDER.index(mine):
                yield f"shardwright: {name} must not import {target}, which is after it in ORDER"


def python_functions(text: str) -> Iterable[tuple[str, int]]:
    """Returns name and number of lines of each function, without decorators and docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node) is not None:
                lines -= (first.end_lineno or first.lineno) - first.lineno + 1
            yield node.name, lines


# Comments, strings and characters, whose braces do not count. The quote in 1'000 is not a character.
_NOT_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])*'|^\#(?:\\\n|[^\n])*""",
    re.DOTALL | re.MULTILINE,
)


def cpp_functions(text: str) -> Iterable[tuple[str, int]]:
    """Returns name and number of lines of each function, from its name to its closing brace, including lambdas."""
    code = _NOT_CODE.sub(lambda found: "\n" * found[0].count("\n"), text)
    begin = 0  # start of the text before the next brace
    at = 0
    while (at := _next(code, at)) < len(code):
        head = code[begin:at].strip()
        if code[at] != "{":
            begin = at = at + 1
            continue
        is_scope = re.match(r"(template\s*<[^;{]*>\s*)?(inline\s+)?(namespace|class|struct|union|enum|extern)\b", head)
        if is_scope and not head.startswith("enum") and not head.endswith("="):
            begin = at = at + 1
            continue
        end = _closing(code, at)
        named = re.search(r"((?:\w+::)*~?(?:operator\s*[^\s\w(]+|operator\s*\(\)|\w+))\s*\(", head)
        is_initializer = not named or head.endswith("=") or bool(re.search(r"\)\s*:[^:].*\w$", head, re.DOTALL))
        if is_initializer:
            at = end
            continue
        assert named is not None
        line = begin + code[begin:at].index(named[1])
        yield named[1], code.count("\n", line, end) + 1
        begin = at = end


def _next(code: str, at: int) -> int:
    found = re.compile(r"[{};]").search(code, at)
    return found.start() if found else len(code)


def _closing(code: str, at: int) -> int:
    """Returns the position after the brace that closes the one at `at`."""
    depth = 0
    for found in re.compile(r"[{}]").finditer(code, at):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return found.end()
    return len(code)


def check_lengths() -> Iterable[str]:
    for path in sorted([*CSRC.rglob("*"), *PACKAGE.rglob("*.py")]):
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh", ".py"):
            continue
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        lines = len(text.splitlines())
        if lines > MAX_FILE_LINES:
            yield f"{name}: {lines} lines, must be at most {MAX_FILE_LINES}"
        for function, lines in python_functions(text) if path.suffix == ".py" else cpp_functions(text):
            if lines > MAX_FUNCTION_LINES:
                yield f"{name}: {function} has {lines} lines, must have at most {MAX_FUNCTION_LINES}"


def docstring_lines(text: str) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node) is not None:
            found |= set(range(node.body[0].lineno, (node.body[0].end_lineno or node.body[0].lineno) + 1))
    return found


_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(text: str) -> int:
    """Returns the number of lines with code: no docstrings, comments or blank lines."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(text))


def check_code_lines() -> Iterable[str]:
    counts: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "."
        own = path.parent.relative_to(PACKAGE).as_posix()
        part = own if own in MAX_CODE_LINES else part
        counts[part] = counts.get(part, 0) + code_lines(path.read_text())
    for part, count in counts.items():
        if part not in MAX_CODE_LINES:
            yield f"shardwright/{part}: has no limit in MAX_CODE_LINES of tools/check_structure.py"
        elif count > MAX_CODE_LINES[part]:
            yield f"shardwright/{part}: {count} lines of code, must be at most {MAX_CODE_LINES[part]}"


def lines_to_compare(text: str) -> list[tuple[int, str]]:
    """Returns number and code of each line that counts."""
    stripped = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [
        (number, line) for number, line in stripped if line and not line.startswith(("//", "#", "import ", "from "))
    ]


def check_copies(root: Path = ROOT) -> Iterable[str]:
    first_seen: dict[tuple[str, ...], tuple[Path, int]] = {}
    for path in sorted(path for folder in SOURCES for path in (root / folder).rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh", ".py"):
            continue
        lines = lines_to_compare(path.read_text())
        reported = 0  # the line up to which a copy has been reported
        for at in range(len(lines) - MAX_SHARED_LINES):
            shared = lines[at : at + MAX_SHARED_LINES + 1]
            other, number = first_seen.setdefault(tuple(line for _, line in shared), (path, shared[0][0]))
            if (other, number) == (path, shared[0][0]) or shared[0][0] <= reported:
                continue
            reported = shared[-1][0]
            yield (
                f"{path.relative_to(root).as_posix()}: line {shared[0][0]} and what follows is also in "
                f"{other.relative_to(root).as_posix()}, line {number}; at most {MAX_SHARED_LINES} lines may be equal"
            )


def main() -> int:
    wrong = [*check_cpp(), *check_python(), *check_lengths(), *check_code_lines(), *check_copies()]
    print("\n".join(wrong) if wrong else "the structure is as promised")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
