"""The mutation proof finds the text of each mutation exactly once in the sources."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_torch

ROOT = Path(__file__).resolve().parents[2]


def test_each_text_occurs_once_in_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("mutation_proof", str(ROOT / "tools" / "mutation_proof"))
    spec = importlib.util.spec_from_loader("mutation_proof", loader)
    assert spec is not None
    tool = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutation_proof", tool)  # for its dataclasses
    loader.exec_module(tool)
    assert len(tool.MUTATIONS) > 20
    for mutation in tool.MUTATIONS:
        assert (ROOT / mutation.file).read_text().count(mutation.old) == 1, mutation.name
        assert mutation.new != mutation.old
