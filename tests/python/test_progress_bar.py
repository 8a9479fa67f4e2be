"""Progress bars: on terminals only, with and without tqdm, and complete at the end of the work."""

from __future__ import annotations

import os
import pathlib
import pty
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwright as sw
from meshes import get_mesh
from pool import Pool
from shardwright import checkpoints, progress_bar, source_build
from shardwright.calibration import job
from shardwright.transfers import progress

WORLD = 2

# Counts to three mebibytes, by ones.
_COUNTING = """
from shardwright.progress_bar import Bar
with Bar("moving", 3 << 20, "B") as bar:
    for index in range(3):
        bar.advance(1 << 20, f"tensor {index}")
"""

# A module in place of tqdm, which prints the calls.
_TQDM = """
class tqdm:
    def __init__(self, **options):
        self.file = options.pop("file")
        self.print("bar", sorted(options.items()))
    def print(self, *words):
        print(*words, file=self.file)
    def set_postfix_str(self, text, refresh):
        self.print("note", text)
    def update(self, amount):
        self.print("more", amount)
    def close(self):
        self.print("end")
"""


def _on_terminal(code: str, folder: pathlib.Path) -> str:
    """Runs code whose stderr is a terminal, with `folder` first on its path. Returns what the terminal gets."""
    ours, theirs = pty.openpty()
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 4096):
            shown += data
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    assert process.wait(timeout=60) == 0, shown
    return shown.decode()


@pytest.mark.any_torch
def test_plain_bar_on_a_terminal(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tqdm.py").write_text("raise ImportError")
    shown = _on_terminal(_COUNTING, tmp_path)
    first, *_, last = shown.strip().split("\r")
    assert first.startswith(f"moving |{'#' * 10}{' ' * 20}| 1.0 of 3.0 MiB  tensor 0")
    assert last.startswith(f"moving |{'#' * 30}| 3.0 of 3.0 MiB  tensor 2")
    assert shown.endswith("\n")


@pytest.mark.any_torch
def test_bar_of_tqdm(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tqdm.py").write_text(_TQDM)
    lines = _on_terminal(_COUNTING, tmp_path).splitlines()
    assert lines[0].startswith("bar ") and "('total', 3145728)" in lines[0] and "('unit_divisor', 1024)" in lines[0]
    assert lines[1:] == [line for index in range(3) for line in (f"note tensor {index}", f"more {1 << 20}")] + ["end"]


@pytest.mark.any_torch
def test_no_bar_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    exec(_COUNTING)
    assert capsys.readouterr().err == ""


class _Recorded:
    """Takes the place of Bar, and keeps the bars that were made."""

    made: list[_Recorded] = []

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.what, self.total, self.done, self.notes, self.is_open = what, total, [0], [], True
        self.made.append(self)

    def __enter__(self) -> _Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, done: int, note: str = "") -> None:
        assert self.is_open
        self.done.append(done)
        self.notes.append(note)

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.show(self.done[-1] + amount, note)

    def close(self) -> None:
        self.is_open = False

    def facts(self) -> tuple[str, int, bool, bool]:
        """Returns the work, the total, and whether the bar is complete and closed."""
        is_rising = self.done == sorted(self.done)
        return self.what, self.total, is_rising and self.done[-1] == self.total, not self.is_open


def _bars(module: Any, call: Any) -> list[tuple[str, int, bool, bool]]:
    """Returns the facts of the bars that a call makes through this module."""
    _Recorded.made.clear()
    original, module.Bar = module.Bar, _Recorded
    try:
        call()
    finally:
        module.Bar = original
    return [bar.facts() for bar in _Recorded.made]


def _work(folder: str) -> dict[str, list[tuple[str, int, bool, bool]]]:
    """Returns the bars of a checkpoint, a transfer and a measurement."""
    mesh = get_mesh((WORLD,))
    x = DTensor.from_local(torch.ones(3, 8), mesh, [Shard(0)], run_check=False)
    bias = torch.ones(5)
    dcp.save({"x": x, "bias": bias}, checkpoint_id=folder)
    to = {"x": DTensor.from_local(torch.zeros(6, 8), mesh, [Replicate()], run_check=False), "bias": torch.zeros(5)}
    bars = {
        "load": _bars(checkpoints, lambda: sw.checkpoints.load_checkpoint(folder, to, progress=True)),
        "load without": _bars(checkpoints, lambda: sw.checkpoints.load_checkpoint(folder, to)),
        "transfer": _bars(progress, lambda: sw.transfer({"x": x}, {"x": to["x"]}, progress=True).start().wait()),
        "calibrate": _bars(job, lambda: sw.calibrate(quick=True, apply=False, progress=True)),
        "calibrate without": _bars(job, lambda: sw.calibrate(quick=True, apply=False, dtypes=[])),
    }
    assert to["x"].to_local().eq(1).all() and to["bias"].eq(1).all()
    return bars if dist.get_rank() == 0 else {key: made for key, made in bars.items() if made}


@pytest.mark.cpu_only("its tensors are on the CPU")
def test_bars_reach_their_totals_on_rank_0(pool: Pool, tmp_path: pathlib.Path) -> None:
    first, *others = pool.run(_work, WORLD, str(tmp_path / "checkpoint"))
    assert others == [{}] * (WORLD - 1)
    assert first["load"] == [("load_checkpoint", (6 * 8 + 5) * 4, True, True)]
    assert first["transfer"] == [("transfer", 6 * 8 * 4, True, True)]
    ((what, total, is_complete, is_closed),) = first["calibrate"]
    assert what == "calibrate" and total > 0 and is_complete and is_closed
    assert first["load without"] == first["calibrate without"] == []


# Takes the place of a compiler: makes one file, and another once the first has been counted.
_COMPILES = ["sh", "-c", "touch a.o; for i in $(seq 6000); do [ -e counted ] && break; sleep 0.01; done; touch b.o"]


def _record_counts(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the compilation in `folder` continue when a bar shows its first file."""

    class Counted(_Recorded):
        def show(self, done: int, note: str = "") -> None:
            super().show(done, note)
            if done == 1:
                (folder / "counted").touch()

    _Recorded.made.clear()
    monkeypatch.setattr(progress_bar, "Bar", Counted)


@pytest.mark.any_torch
def test_progress_of_a_build_without_a_terminal(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _record_counts(tmp_path, monkeypatch)
    monkeypatch.setattr(source_build, "_SECONDS_BETWEEN_LINES", 0.05)
    source_build._wait(subprocess.Popen(_COMPILES, cwd=tmp_path), tmp_path, 2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "shardwright: 2 of at most 2 files compiled"
    assert "shardwright: 1 of at most 2 files compiled" in lines


@pytest.mark.any_torch
def test_progress_of_a_build_on_a_terminal(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _record_counts(tmp_path, monkeypatch)
    monkeypatch.setattr(source_build, "_SECONDS_BETWEEN_UPDATES", 0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    source_build._wait(subprocess.Popen(_COMPILES, cwd=tmp_path), tmp_path, 2)
    (bar,) = _Recorded.made
    assert bar.facts() == ("shardwright: compiling", 2, True, True)
    assert 1 in bar.done
