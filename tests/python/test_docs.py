"""Files, links, public names, command-line options and make targets in the documentation exist, and the API pages have
all public names. Quoted benchmark results are in the result files."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.cli.parsers import COMMANDS, parser_of

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import doc_tables  # noqa: E402

pytestmark = pytest.mark.any_torch

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
SUFFIXES = ("py", "cpp", "h", "cu", "json", "svg", "md", "toml", "txt")

# File names that are examples, or files that a reader of the page writes.
NOT_OURS = {
    "topology.json",
    "before.json",
    "after.json",
    "quick.py",
    "shard.py",
    "local.py",
    "hide.py",
    "cross.py",
    "differences.py",
    "train.py",
    "serve.py",
    "from.json",
    "to.json",
    "rules.json",
}
NOT_OURS |= {"build/gpu/summary.json", "test_redistribute.py"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def files() -> list[str]:
    """Returns the files of the source tree, relative to its root, without builds and environments."""
    found = []
    for top in (ROOT, *(p for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith((".", "build", "site")))):
        found += [p.relative_to(ROOT).as_posix() for p in (top.iterdir() if top is ROOT else top.rglob("*"))]
    return [*found, ".ci/run"]


FILES = files()


def backticked(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@pages
def test_files_exist(page: Path) -> None:
    """A name with a known suffix, or that begins with a known folder, is the end of some file's path."""
    folders = {name.partition("/")[0] for name in FILES}
    missing = []
    for name in backticked(page):
        is_file = re.fullmatch(rf"[\w./-]+\.({'|'.join(SUFFIXES)})", name) is not None
        is_path = re.fullmatch(r"[\w./-]+/[\w./-]*", name) is not None and name.partition("/")[0] in folders
        if not (is_file or is_path) or name in NOT_OURS or name.startswith("build/"):
            continue
        wanted = name.rstrip("/")
        if not any(path == wanted or path.endswith("/" + wanted) for path in FILES):
            missing.append(name)
    assert not missing


def anchor(heading: str) -> str:
    """Returns the anchor that GitHub makes for a heading."""
    text = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@pages
def test_links_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text):
        if target.startswith("http"):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            wrong.append(target)
        elif fragment:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
            if fragment not in map(anchor, headings):
                wrong.append(target)
    assert not wrong


@pages
def test_names_of_the_package_exist(page: Path) -> None:
    missing = []
    for dotted in sorted(set(re.findall(r"\bsw((?:\.[A-Za-z_]\w*)+)", page.read_text()))):
        found: object = sw
        for name in dotted[1:].split("."):
            if not hasattr(found, name):
                missing.append("sw" + dotted)
                break
            found = getattr(found, name)
    assert not missing


@pages
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set()
    for line in [*backticked(page), *re.findall(r"^    (.*)$", page.read_text(), flags=re.MULTILINE)]:
        if found := re.match(r"make ([a-z][a-z-]*)", line):
            named.add(found[1])
    assert named <= targets


@pages
def test_options_of_the_command_line_exist(page: Path) -> None:
    for command, rest in re.findall(r"shardwright (\w+)((?: [^\n`]*)?)", page.read_text()):
        if command in COMMANDS:
            assert options_in(rest) <= options_of(command), rest


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def options_of(command: str) -> set[str]:
    return {option for action in parser_of(command)._actions for option in action.option_strings} - {"-h", "--help"}


def test_command_line_page_has_every_option() -> None:
    page = (ROOT / "docs" / "command_line.md").read_text()
    sections = dict(re.findall(r"^## (\w+).*\n((?:(?!## ).*\n)*)", page, flags=re.MULTILINE))
    for command in COMMANDS:
        of_others = {"--version", "--nproc-per-node"}  # of `shardwright` itself and of torchrun
        assert options_in(sections[command]) - of_others == options_of(command), command


MODULES = ("attention", "calibration", "checkpoints", "debug", "experts", "fsdp", "graph", "parallel", "placements")
MODULES += ("planning", "rules", "runtime", "views")
HELPERS = {"placements.of_others", "placements.is_ragged_shard", "placements.is_cut", "placements.text_of"}


def public_names() -> list[str]:
    """Returns the names of the package and of its public modules, such as "plan" and "fsdp.Options"."""
    names = list(sw.__all__)
    for name in MODULES:
        module = getattr(sw, name)
        defined = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        listed = getattr(module, "__all__", [key for key in defined if not key.startswith("_")])
        names += [f"{name}.{key}" for key in listed if f"{name}.{key}" not in HELPERS and key not in sw.__all__]
    return names


def api_entries() -> list[str]:
    """Returns the names on the API pages, each of which becomes its signature and docstring."""
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    return re.findall(r"^::: shardwright\.(\S+)", text, flags=re.MULTILINE)


def test_api_pages_have_every_public_name_once() -> None:
    entries = api_entries()
    assert len(set(entries)) == len(entries)
    shown = {entry.replace("_runtime.", "runtime.") for entry in entries}
    assert [name for name in public_names() if name not in shown] == []


def test_table_of_the_api_has_every_public_name() -> None:
    rows = re.findall(r"^\| \[.*$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    words = {word for row in rows for name in re.findall(r"`([^`]+)`", row) for word in (name, name.rpartition(".")[2])}
    assert [name for name in public_names() if name.rpartition(".")[2] not in words] == []


@pytest.mark.parametrize("name", api_entries())
def test_entries_of_the_api_have_docstrings(name: str) -> None:
    """Each entry exists. Its docstring names every argument that a caller can pass."""
    found: object = importlib.import_module("shardwright")
    for part in name.split("."):
        found = getattr(found, part, None) or importlib.import_module(f"{getattr(found, '__name__', '')}.{part}")
    text = inspect.getdoc(found) or ""
    assert text
    try:
        parameters = inspect.signature(found).parameters if inspect.isfunction(found) else {}
    except ValueError:  # a function of C++
        parameters = {}
    if "Args:" in text:
        assert [key for key in parameters if not re.search(rf"^ +[\w, ]*\b{key}\b[\w, ]*:", text, re.MULTILINE)] == []


@pages
def test_examples_compile(page: Path) -> None:
    """Code blocks compile, and their imports from the package exist, except those that import another library."""
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardwright"):
                if "integrations" in str(node.module) and not importlib.util.find_spec("transformers"):
                    continue
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize("page", doc_tables.PAGES, ids=lambda page: page.name)
def test_pages_match_the_benchmark_results(page: Path) -> None:
    """The parts written by benchmarks/doc_tables.py are up to date."""
    text = page.read_text()
    assert text == doc_tables.with_parts(text), "run python benchmarks/doc_tables.py"
    assert (
        text.count("(python benchmarks/doc_tables.py)")
        == sum(doc_tables.begin(name) in text for name in doc_tables.PARTS)
        > 0
    )


def test_every_generated_table_is_on_some_page() -> None:
    pages = [page.read_text() for page in doc_tables.PAGES]
    assert [name for name in doc_tables.PARTS if not any(doc_tables.begin(name) in text for text in pages)] == []


def test_changed_results_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    results = doc_tables.results

    def changed(name: str) -> object:
        found = results(name)
        for row in found.get("rows", []):
            if "cpp_us" in row:
                row["cpp_us"] *= 2
        return found

    monkeypatch.setattr(doc_tables, "results", changed)
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert doc_tables.with_parts(page) != page
