"""Files, links, public names, signatures, command-line options and make targets in the documentation exist. Quoted
benchmark results are in the result files."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import re
import sys
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import doc_tables  # noqa: E402

pytestmark = pytest.mark.any_torch

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
SUFFIXES = ("py", "cpp", "h", "cu", "json", "svg", "md", "toml", "txt")

# File names that are examples, or files that a reader of the page writes.
NOT_OURS = {
    "topology.json",
    "before.json",
    "after.json",
    "quick.py",
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
    known = {}
    for command in ("plan", "transfer", "doctor", "calibrate"):
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            cli.main([command, "--help"])
        known[command] = set(re.findall(r"--[a-z-]+", printed.getvalue()))
    for command, rest in re.findall(r"shardwright (\w+)((?: [^\n`]*)?)", page.read_text()):
        if command in known:
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest)) <= known[command], rest


def test_api_page_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in sw.__all__ if not re.search(rf"^#+ .*\b{name}\b", text, flags=re.MULTILINE)] == []
    contents = text.partition("\n## ")[0]
    assert [name for name in sw.__all__ if f"`{name}`" not in contents] == []


def signatures() -> list[tuple[str, str]]:
    """Returns (name, arguments) of every heading `sw.name(arguments)` of api.md."""
    found = []
    for heading in re.findall(r"^### (.*)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE):
        found += re.findall(r"sw\.(\w+)\((.*?)\)(?= ->|:?`)", heading)
    return found


@pytest.mark.parametrize(("name", "written"), signatures(), ids=lambda value: value if value.isidentifier() else "")
def test_api_page_has_the_arguments(name: str, written: str) -> None:
    """Names, order, kinds and defaults of arguments equal those that Python reports."""
    documented = ast.parse(f"def f({written}): pass").body[0]
    assert isinstance(documented, ast.FunctionDef)
    function = getattr(sw, name)
    try:
        actual = inspect.signature(function)
    except ValueError:  # a class or function of C++
        pytest.skip("has no signature that Python can read")
    parameters = [p for p in actual.parameters.values() if p.name != "self"]
    only_anything = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    if isinstance(function, type) and [p.kind for p in parameters] == only_anything:
        pytest.skip("has no signature that Python can read")
    given = documented.args
    positional = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    keyword_only = [p.name for p in parameters if p.kind == p.KEYWORD_ONLY]
    assert [a.arg for a in given.args] == positional
    assert [a.arg for a in given.kwonlyargs] == keyword_only
    defaults = dict(zip([a.arg for a in given.args][len(given.args) - len(given.defaults) :], given.defaults))
    defaults.update((a.arg, d) for a, d in zip(given.kwonlyargs, given.kw_defaults) if d is not None)
    expected = {p.name: repr(p.default) for p in parameters if p.default is not p.empty}
    assert {argument: ast.unparse(value) for argument, value in defaults.items()} == expected


@pages
def test_examples_compile(page: Path) -> None:
    """Code blocks compile, and their imports from the package exist."""
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardwright"):
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
