"""If a rank dies or stops responding, the others raise in time and name the plan and the step."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import dtensors
import oracle
import shardwright as sw
from meshes import get_mesh
from pool import Outcome, run_isolated

WORLD = 4
VICTIM = 2
EXIT_CODE = 17
COLLECTIVE_TIMEOUT_SECONDS = 4.0
# Time beyond the timeout of one collective to detect the failure and to unwind, on a busy machine.
SLACK_SECONDS = 8.0

Found = tuple[str, float, bool]


def _try(src: list[str], dst: list[str], mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> Found:
    """Returns the error of the move, its duration in seconds, and true if the input is unchanged."""
    mesh = get_mesh(mesh_shape)
    tensor = oracle.global_tensor(shape, torch.float32, seed=1, reducible=True)
    local = dtensors.my_local(tensor, mesh, src)
    before = local.clone()
    begin = time.monotonic()
    try:
        dtensors.wrap(local, mesh, shape, src).redistribute(mesh, dtensors.to_placements(dst)).to_local()
    except RuntimeError as error:
        return str(error), time.monotonic() - begin, torch.equal(local, before)
    return "nothing was raised", time.monotonic() - begin, torch.equal(local, before)


def _prepare(src: list[str], dst: list[str], mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Runs the move once so that groups and connections exist."""
    with sw.enabled(strict=True):
        error = _try(src, dst, mesh_shape, shape)[0]
    assert error == "nothing was raised", error
    dist.barrier()


def _dies_before(src: list[str], dst: list[str], mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> Found:
    _prepare(src, dst, mesh_shape, shape)
    if dist.get_rank() == VICTIM:
        os._exit(EXIT_CODE)
    with sw.enabled(strict=True):
        return _try(src, dst, mesh_shape, shape)


def _dies_during(src: list[str], dst: list[str], mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> Found:
    """The victim starts the collective, which is too large to be complete when the victim exits."""
    _prepare(src, dst, mesh_shape, (4, 4))
    mesh = get_mesh(mesh_shape)
    with sw.enabled(strict=True):
        if dist.get_rank() == VICTIM:
            local = torch.ones(oracle.local(torch.empty(shape), mesh_shape, src, mesh.get_coordinate()).shape)
            source = dtensors.wrap(local, mesh, shape, src)
            source.redistribute(mesh, dtensors.to_placements(dst), async_op=True)
            os._exit(EXIT_CODE)
        return _try(src, dst, mesh_shape, shape)


def _stops_responding(src: list[str], dst: list[str], mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> Found:
    """The victim leaves the collective to the others until all of them have raised."""
    _prepare(src, dst, mesh_shape, shape)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == VICTIM:
        survivors = [f"survivor {rank}" for rank in range(WORLD) if rank != VICTIM]
        store.wait(survivors, datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS + SLACK_SECONDS))
        os._exit(EXIT_CODE)
    with sw.enabled(strict=True):
        found = _try(src, dst, mesh_shape, shape)
    store.set(f"survivor {dist.get_rank()}", "")
    return found


def _run(
    function: Callable[..., Found], src: list[str], dst: list[str], mesh: tuple[int, ...], shape: tuple[int, ...]
) -> list[Outcome]:
    outcomes = run_isolated(
        function,
        WORLD,
        src,
        dst,
        mesh,
        shape,
        timeout_seconds=60.0,
        collective_timeout_seconds=COLLECTIVE_TIMEOUT_SECONDS,
    )
    assert outcomes[VICTIM].exit_code == EXIT_CODE, outcomes[VICTIM].error
    return [outcome for outcome in outcomes if outcome.rank != VICTIM]


def _check(survivors: list[Outcome], src: list[str], dst: list[str]) -> None:
    for outcome in survivors:
        assert outcome.ok, f"rank {outcome.rank}: {outcome.error or outcome.exit_code}"
        error, seconds, untouched = outcome.value
        assert seconds < COLLECTIVE_TIMEOUT_SECONDS + SLACK_SECONDS
        assert untouched, f"rank {outcome.rank}: the input was written to"
        for fragment in (f"rank {outcome.rank}", "step", *src, *dst):
            assert fragment in error, f"rank {outcome.rank}: {error!r} does not name {fragment!r}"


@pytest.mark.parametrize(
    ("src", "dst", "mesh_shape"),
    [(["S(0)"], ["S(1)"], (4,)), (["S(0)"], ["R"], (4,)), (["P(sum)", "P(sum)"], ["R", "S(0)"], (2, 2))],
    ids=str,
)
def test_survivors_raise_if_rank_dies_before_move(src: list[str], dst: list[str], mesh_shape: tuple[int, ...]) -> None:
    _check(_run(_dies_before, src, dst, mesh_shape, (64, 64)), src, dst)


def test_survivors_raise_if_rank_dies_during_move() -> None:
    src, dst = ["S(0)"], ["S(1)"]
    _check(_run(_dies_during, src, dst, (4,), (4096, 4096)), src, dst)


@pytest.mark.long
def test_survivors_raise_if_rank_stops_responding() -> None:
    src, dst = ["S(0)"], ["S(1)"]
    _check(_run(_stops_responding, src, dst, (4,), (8, 8)), src, dst)
