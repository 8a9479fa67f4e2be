"""tools/check_structure.py, which `make lint` runs, finds violations of the sources' structure."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.any_torch

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_structure.py"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns the tool, set up for a package in a temporary folder."""
    spec = importlib.util.spec_from_file_location("check_structure", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    monkeypatch.setattr(module, "ORDER", ("_planner", "_native", "lower", "low", "part", "top"))
    return module


def _write(folder: Path, **modules: str) -> None:
    for name, text in {"__init__": "", **modules}.items():
        path = folder / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_allowed_imports(tool: ModuleType, tmp_path: Path) -> None:
    _write(tmp_path, low="from .lower import x", lower="", top="def f():\n    from . import part")
    _write(tmp_path / "part", __init__="from .. import low\nfrom . import a", a="")
    assert list(tool.check_python()) == []


@pytest.mark.parametrize(
    ("low", "said"),
    [
        ("from . import top", "low must not import top,"),
        ("def f():\n    from .part.a import x", "low must not import part.a,"),
        ("class C:\n    def f(self):\n        import shardwright.top", "low must not import top,"),
        ("if x:\n    from shardwright import top", "low must not import top,"),
    ],
)
def test_imports_of_higher_modules_are_refused(tool: ModuleType, tmp_path: Path, low: str, said: str) -> None:
    _write(tmp_path, low=low, top="")
    _write(tmp_path / "part", a="")
    (found,) = tool.check_python()
    assert said in found


def test_type_checking_imports_are_ignored(tool: ModuleType, tmp_path: Path) -> None:
    _write(tmp_path, low="if TYPE_CHECKING:\n    from . import top", top="")
    assert list(tool.check_python()) == []


def test_import_cycle_through_a_function(tool: ModuleType, tmp_path: Path) -> None:
    _write(tmp_path / "part", a="from . import b", b="def f():\n    from .a import x")
    _write(tmp_path)
    (found,) = tool.check_python()
    assert "circle: part.a, part.b" in found


def test_imports_of_the_root_package_are_refused(tool: ModuleType, tmp_path: Path) -> None:
    _write(tmp_path, low="from . import _planner", lower="from . import plan", _native="from . import _planner")
    assert [line.split(" must")[0] for line in tool.check_python()] == ["shardwright: low", "shardwright: lower"]


def test_module_missing_from_the_order(tool: ModuleType, tmp_path: Path) -> None:
    _write(tmp_path, other="")
    (found,) = tool.check_python()
    assert "'other' is not in ORDER" in found


def test_transport_headers_are_private(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "CSRC", tmp_path)
    (tmp_path / "runtime" / "c10d").mkdir(parents=True)
    (tmp_path / "bindings").mkdir()
    (tmp_path / "runtime/c10d/groups.h").touch()
    for name in ("runtime/operators.cpp", "runtime/lanes.cpp", "runtime/c10d/groups.cpp", "bindings/groups.cpp"):
        (tmp_path / name).write_text('#include "runtime/c10d/groups.h"\n')
    (found,) = tool.check_cpp()
    assert found.startswith("csrc/runtime/lanes.cpp: must not include runtime/c10d/groups.h")


CPP = """
#define LONG {
namespace a {
struct S {
  int x = 0;  // not a brace: {
  int get() const {
    if (x) {
      return '{';
    }
    return 1'000;
  }
};
const char* const text = "}";
constexpr int kNumbers[] = {
    f(1),
};
S::S(int given)
    : x{given},
      y(2) {
  auto inner = [] {
    return 1;
  };
}
template <typename T>
bool S::operator==(const T& other) const {
  return true;
}
}  // namespace a
"""


def test_finds_functions_of_cpp(tool: ModuleType) -> None:
    assert list(tool.cpp_functions(CPP)) == [("get", 6), ("S::S", 7), ("S::operator==", 3)]


def test_finds_functions_of_python(tool: ModuleType) -> None:
    text = (
        'def f(\n    a,\n):\n    """Of\n    two lines."""\n    return a\n\n\nclass C:\n    def g(self):\n        pass\n'
    )
    assert sorted(tool.python_functions(text)) == [("f", 4), ("g", 2)]


def test_counts_lines_of_code(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        '"""About\nthe module."""\n\n# a comment\ndef f():\n    """Docs."""\n    return """two\nlines"""  # of code\n'
    )
    assert tool.code_lines(text) == 3
    _write(tmp_path, top=text)
    _write(tmp_path / "part", a=text, b="x = 1")
    monkeypatch.setattr(tool, "MAX_CODE_LINES", {".": 3, "part": 4})
    assert list(tool.check_code_lines()) == []
    monkeypatch.setattr(tool, "MAX_CODE_LINES", {".": 2})
    high, none = tool.check_code_lines()
    assert high == "shardwright/.: 3 lines of code, must be at most 2"
    assert none.startswith("shardwright/part: has no limit")


@pytest.mark.parametrize(("shared", "found"), [(10, 0), (11, 1), (14, 1)])
def test_finds_copied_code(tool: ModuleType, tmp_path: Path, shared: int, found: int) -> None:
    """Indentation, comments and blank lines are ignored, and a copy is reported once."""
    lines = [f"call({number})" for number in range(shared)]
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.cpp").write_text("\n".join(["first()", *lines, "last()"]))
    (tmp_path / "csrc" / "b.cpp").write_text(
        "\n".join(["begin()", *(f"  {line}\n  // why\n" for line in lines), "end()"])
    )
    messages = list(tool.check_copies(tmp_path))
    assert len(messages) == found
    assert all("csrc/b.cpp: line 2" in message and "csrc/a.cpp, line 2" in message for message in messages)
