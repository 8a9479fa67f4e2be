"""The environment variable SHARDWRIGHT_LOG, and the line that is logged for each plan."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwright as sw
from meshes import get_mesh
from pool import Pool

WORLD = 4


def _imported(level: str | None, rank: str | None = None) -> subprocess.CompletedProcess[str]:
    """Imports shardwright in a new process, which then logs a message at each of three levels."""
    variables = {"SHARDWRIGHT_LOG": level, "RANK": rank}
    kept = {name: value for name, value in os.environ.items() if name not in variables}
    code = (
        "import logging, shardwright\n"
        "log = logging.getLogger('shardwright')\n"
        "log.debug('one'); log.info('two'); log.warning('three')\n"
    )
    given = {name: value for name, value in variables.items() if value is not None}
    return subprocess.run([sys.executable, "-c", code], env=kept | given, capture_output=True, text=True, timeout=60)


@pytest.mark.any_torch
@pytest.mark.parametrize(
    ("level", "rank", "lines"),
    [
        ("debug", "3", ["rank 3: debug: one", "rank 3: info: two", "rank 3: warning: three"]),
        ("INFO", None, [": info: two", ": warning: three"]),
        ("warning", None, [": warning: three"]),
        ("error", None, []),
    ],
)
def test_level_of_the_environment(level: str, rank: str | None, lines: list[str]) -> None:
    ran = _imported(level, rank)
    expected = ["shardwright" + (line if line.startswith(":") else f" {line}") for line in lines]
    assert (ran.returncode, ran.stderr.splitlines()) == (0, expected)


@pytest.mark.any_torch
def test_log_is_left_alone_without_the_variable() -> None:
    for level in (None, ""):
        assert _imported(level).stderr == "three\n"  # as by Python's default handler


@pytest.mark.any_torch
def test_unknown_level_is_refused() -> None:
    ran = _imported("verbose")
    assert ran.returncode != 0
    assert "SHARDWRIGHT_LOG must be one of debug, info, warning, error in the environment, got 'verbose'" in ran.stderr


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.DEBUG:
            self.lines.append(record.getMessage())


def _logged(call: Callable[[], object], level: int = logging.DEBUG) -> list[str]:
    """Returns the lines that a call logs."""
    log, lines = logging.getLogger("shardwright"), _Lines()
    before = log.level
    log.addHandler(lines)
    log.setLevel(level)
    try:
        call()
    finally:
        log.removeHandler(lines)
        log.setLevel(before)
    return lines.lines


ROWS = 4099  # no other test has planned this size in the same processes


def _tensor(rows: int) -> DTensor:
    return DTensor.from_local(torch.ones(rows, 8), get_mesh((WORLD,)), [Shard(0)], run_check=False)


def _redistributes() -> tuple[list[str], list[str], list[str]]:
    """Returns the lines of a new pair of layouts, of the same pair again, and of a pinned plan."""
    x = _tensor(ROWS)

    def move() -> None:
        with sw.enabled(strict=True):
            x.redistribute(placements=[Replicate()])

    first, again = _logged(move), _logged(move)
    mesh = sw.Mesh(x.device_mesh)
    plan = sw.plan(*(sw.Layout(mesh, x.shape, placements) for placements in (["S(0)"], ["R"])), backend="gloo")
    sw.pin(plan)
    try:
        pinned = _logged(move)
    finally:
        sw.unpin(plan)
    return first, again, pinned


@pytest.mark.cpu_only("expects Gloo's plans")
def test_each_plan_is_logged_once(pool: Pool) -> None:
    for first, again, pinned in pool.run(_redistributes, WORLD):
        (line,) = first
        assert f"float32[{ROWS * WORLD}, 8] on a=4 as [S(0)] -> [R], gloo" in line
        assert "all_gather over a" in line
        assert f"receives at most {ROWS * 8 * 4 * 3} B in 3 messages" in line
        assert "chosen for the least predicted time with the " in line
        assert again == []
        assert len(pinned) == 1 and pinned[0].endswith("; pinned")


def _others() -> tuple[list[str], list[str], list[str]]:
    """Returns the lines of a batch, of a product, and of a batch at level INFO."""
    mesh = get_mesh((WORLD,))
    replicated = [Replicate()]

    def batch(rows: int) -> Callable[[], object]:
        return lambda: sw.redistribute_many([(_tensor(rows), replicated), (_tensor(rows + 1), replicated)])

    x = DTensor.from_local(torch.ones(3, 8), mesh, [Shard(0)], run_check=False)
    weight = DTensor.from_local(torch.ones(4, 8), mesh, [Shard(0)], run_check=False)
    product = _logged(lambda: sw.linear(x, weight))
    return _logged(batch(6)), product, _logged(batch(9), logging.INFO)


@pytest.mark.cpu_only("its tensors are on the CPU")
def test_plans_of_batches_and_products_are_logged(pool: Pool) -> None:
    for batch, product, at_info in pool.run(_others, WORLD):
        assert len(batch) == 1 and batch[0].startswith("plan: 2 tensors in ")
        assert any(line.startswith("plan: product ") for line in product), product
        assert at_info == []
