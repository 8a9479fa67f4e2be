"""Failures of redistributes between two meshes raise on every rank, in time, and leave inputs unchanged."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oracle
import shardwright as sw
from meshes import NAMES
from pool import Pool, run_isolated
from test_rank_dies import COLLECTIVE_TIMEOUT_SECONDS, EXIT_CODE, SLACK_SECONDS, Found

WORLD = 5
SRC = ((2,), (0, 1))
APART = ((3,), (2, 3, 4))
IN_COMMON = ((2, 2), (4, 1, 2, 3))
NOTHING = "nothing was raised"


def _mesh(grid: Any) -> sw.Mesh:
    return sw.Mesh(dict(zip(NAMES, grid[0], strict=False)), grid[1])


def _layouts(dst: Any, shape: tuple[int, ...]) -> tuple[sw.Layout, sw.Layout]:
    wanted = ["S(1)"] if dst == APART else ["S(1)", "R"]
    return sw.Layout(_mesh(SRC), shape, ["S(0)"]), sw.Layout(_mesh(dst), shape, wanted)


def _local(shape: tuple[int, ...]) -> torch.Tensor:
    rank = dist.get_rank()
    if rank not in SRC[1]:
        return torch.empty(0)
    return oracle.local(torch.arange(float(shape[0] * shape[1])).reshape(shape), SRC[0], ["S(0)"], (rank,))


def _expected(dst: Any, shape: tuple[int, ...]) -> torch.Tensor:
    if dist.get_rank() not in dst[1]:
        return torch.empty(0)
    where = torch.unravel_index(torch.tensor(dst[1].index(dist.get_rank())), dst[0])
    full = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    return oracle.local(full, dst[0], ["S(1)", "R"][: len(dst[0])], [int(i) for i in where])


def _try(dst: Any, shape: tuple[int, ...]) -> Found:
    """Returns the move's error, its seconds, and whether the input is unchanged."""
    local = _local(shape)
    before, begin, said = local.clone(), time.monotonic(), ""
    try:
        result = sw.redistribute_local(local, *_layouts(dst, shape))
        said = NOTHING if torch.equal(result, _expected(dst, shape)) else "the result is wrong"
    except RuntimeError as error:
        said = str(error)
    return said, time.monotonic() - begin, torch.equal(local, before)


def _good_run(dst: Any) -> None:
    """Runs a move that works, so that groups and connections exist."""
    assert _try(dst, (4, 6))[0] == NOTHING
    dist.barrier()


def _dies_before(dst: Any, victim: int) -> Found:
    _good_run(dst)
    if dist.get_rank() == victim:
        os._exit(EXIT_CODE)
    return _try(dst, (64, 66))


def _dies_in_the_middle(dst: Any, victim: int) -> Found:
    """The victim starts the move, which is too large to end before the victim exits."""
    _good_run(dst)
    shape = (4096, 4098)
    if dist.get_rank() == victim:
        sw.redistribute_local(_local(shape), *_layouts(dst, shape), async_op=True)
        os._exit(EXIT_CODE)
    return _try(dst, shape)


# "before": one all-to-all, which fails on all ranks. "in the middle": messages; some ranks may have received all.
@pytest.mark.parametrize(
    ("function", "dst", "victim"),
    [
        (_dies_before, APART, 1),
        (_dies_before, IN_COMMON, 3),
        (_dies_in_the_middle, APART, 0),
        (_dies_in_the_middle, IN_COMMON, 1),
    ],
    ids=["source before", "destination before", "source in the middle", "both in the middle"],
)
def test_survivors_report_the_failed_step(function: Callable[..., Found], dst: Any, victim: int) -> None:
    outcomes = run_isolated(
        function,
        WORLD,
        dst,
        victim,
        timeout_seconds=60.0,
        collective_timeout_seconds=COLLECTIVE_TIMEOUT_SECONDS,
    )
    assert outcomes[victim].exit_code == EXIT_CODE, outcomes[victim].error
    survivors = [outcome for outcome in outcomes if outcome.rank != victim]
    assert any(outcome.ok and outcome.value[0] != NOTHING for outcome in survivors)
    for outcome in survivors:
        assert outcome.ok, f"rank {outcome.rank}: {outcome.error or outcome.exit_code}"
        error, seconds, is_untouched = outcome.value
        assert seconds < COLLECTIVE_TIMEOUT_SECONDS + SLACK_SECONDS
        assert is_untouched, f"rank {outcome.rank}: the input was written to"
        if function is _dies_in_the_middle and error == NOTHING:
            continue
        for fragment in (f"rank {outcome.rank}", "step", "cross", "S(0)", "S(1)"):
            assert fragment in error, f"rank {outcome.rank}: {error!r} does not name {fragment!r}"


def _differing_calls(dst: Any, change: str) -> list[str]:
    """Rank 3 makes a different call. Then all make the same call."""
    shape, rank, said = (4, 6), dist.get_rank(), []
    src, wanted = _layouts(dst, shape)
    if rank == 3:
        other = _mesh((dst[0], tuple(reversed(dst[1])))) if change == "ranks" else wanted.mesh
        wanted = sw.Layout(other, shape, ["S(0)", "R"][: other.ndim] if change == "placements" else wanted.placements)
    sw.debug.check_ranks(timeout_seconds=30)
    try:
        for layout in (wanted, _layouts(dst, shape)[1]):
            try:
                sw.redistribute_local(_local(shape), src, layout)
                said.append(NOTHING)
            except RuntimeError as error:
                said.append(str(error))
    finally:
        sw.debug.check_ranks(False)
    return said


@pytest.mark.parametrize("change", ["placements", "ranks"])
@pytest.mark.parametrize("dst", [APART, IN_COMMON], ids=["apart", "in common"])
def test_differing_calls_raise_on_every_rank(pool: Pool, dst: Any, change: str) -> None:
    for rank, (first, second) in enumerate(pool.run(_differing_calls, WORLD, dst, change)):
        assert "redistribute: the ranks differ, nothing was sent" in first and f"this is rank {rank}" in first
        assert re.search(r": .* on ranks \[0, 1, 2, 4\]; .* on ranks \[3\]", first), first
        assert second == NOTHING


def _limited(limit: int) -> tuple[str, int]:
    src, dst = _layouts(IN_COMMON, (64, 66))
    try:
        return "", sw.plan(src, dst, backend="gloo", memory_limit=limit).peak_bytes
    except ValueError as error:
        return str(error), 0


def test_errors_name_the_least_memory_limit(pool: Pool) -> None:
    (text,) = {text for text, _ in pool.run(_limited, WORLD, 1)}
    found = re.search(r"memory_limit must be at least (\d+) bytes .*, got 1$", text)
    assert found is not None, text
    limit = int(found.group(1))
    for text, peak in pool.run(_limited, WORLD, limit):
        assert text == "" and 0 < peak <= limit
    assert all(text for text, _ in pool.run(_limited, WORLD, limit - 1))
