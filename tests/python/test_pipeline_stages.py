"""Ranks may do different things: pipeline stages redistribute different tensors at different times, without a hang."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import dtensors
import meshes
import oracle
import shardwright as sw
from meshes import get_mesh
from pool import Pool

Placements = Sequence[str]


def _move(mesh: DeviceMesh, shape: Sequence[int], src: Placements, dst: Placements, seed: int) -> None:
    """Redistributes, forward and backward, and checks both."""
    tensor = oracle.global_tensor(shape, torch.float32, seed, reducible=True)
    gradient = oracle.global_tensor(shape, torch.float32, seed + 1)
    local = dtensors.my_local(tensor, mesh, src).requires_grad_()
    result = dtensors.wrap(local, mesh, shape, src).redistribute(mesh, dtensors.to_placements(dst))
    dtensors.check(result, tensor, dst)
    result.to_local().backward(dtensors.my_local(gradient, mesh, dst))
    back = ["R" if oracle.reduce_op(p) else p for p in src]
    wrong = oracle.difference(local.grad, dtensors.my_local(gradient, mesh, back))
    assert wrong is None, f"gradient of {src} -> {dst}: {wrong}"


def _two_stages() -> None:
    """Runs two stages of two ranks. Each has its own mesh and work, and stage 0 sends results to stage 1."""
    mesh = get_mesh((2, 2))
    stage, inside = mesh.get_local_rank("a"), get_mesh((2, 2), keep=("b",))
    peer = (dist.get_rank() + 2) % 4
    with sw.enabled(strict=True):
        for round_ in range(3):
            if stage == 0:
                _move(inside, (6, 5), ["S(0)"], ["S(1)"], seed=round_)
                _move(inside, (7, 4), ["P(sum)"], ["R"], seed=round_ + 10)
                dist.send(torch.full((3,), float(round_)), dst=peer)
                _move(inside, (5,), ["S(0)"], ["R"], seed=round_ + 20)
            else:
                received = torch.empty(3)
                dist.recv(received, src=peer)
                assert received.tolist() == [round_] * 3
                time.sleep(0.05)
                _move(inside, (3, 9), ["P(sum)"], ["S(1)"], seed=round_ + 30)
        # All ranks together again, over mesh dims that are used for the first time.
        _move(mesh, (9, 5), ["S(0)", "S(0)"], ["R", "R"], seed=50)


def test_two_stages_move_different_tensors(pool: Pool) -> None:
    pool.run(_two_stages, 4)


def _groups_made_at_different_times(slow_stage: int) -> None:
    """Merging both mesh dims of a stage needs a new group. The stages reach that step at different times."""
    full_mesh = get_mesh((2, 2, 2))
    inside = get_mesh((2, 2, 2), keep=("b", "c"))
    with sw.enabled(strict=True):
        if full_mesh.get_local_rank("a") == slow_stage:
            time.sleep(0.3)
            _move(inside, (4, 6), ["S(0)", "R"], ["S(1)", "R"], seed=1)
            _move(inside, (5, 7), ["P(sum)", "P(sum)"], ["R", "S(0)"], seed=2)
        _move(inside, (5, 3), ["S(0)", "S(0)"], ["R", "R"], seed=3)
        _move(inside, (8, 8), ["S(0)", "S(1)"], ["S(1)", "S(0)"], seed=4)
        # Mesh dims that cross the stages, adjacent and not adjacent.
        _move(full_mesh, (9, 4), ["P(sum)", "S(0)", "P(sum)"], ["R", "S(0)", "R"], seed=5)
        _move(full_mesh, (9, 4), ["S(0)", "R", "S(0)"], ["R", "R", "R"], seed=6)


def test_stages_make_groups_at_different_times(pool: Pool) -> None:
    for slow_stage in (0, 1):
        pool.run(_groups_made_at_different_times, 8, slow_stage)


def _rows_then_columns() -> None:
    """Uses overlapping groups one after the other: ranks 0 and 1 move over rows before columns, the others after."""
    rows, columns = get_mesh((2, 2), keep=("b",)), get_mesh((2, 2), keep=("a",))
    with sw.enabled(strict=True):
        for seed in range(4):
            if dist.get_rank() < 2:
                _move(rows, (7, 3), ["S(0)"], ["S(1)"], seed)
            _move(columns, (6, 5), ["S(1)"], ["S(0)"], seed)
            if dist.get_rank() >= 2:
                _move(rows, (2, 2), ["P(sum)"], ["S(0)"], seed)


def test_overlapping_groups_do_not_hang(pool: Pool) -> None:
    pool.run(_rows_then_columns, 4)


def _only_some_ranks_branch() -> None:
    """Only one submesh takes a branch, in the forward and in the backward."""
    mesh, inside = get_mesh((2, 2)), get_mesh((2, 2), keep=("b",))
    full, gradient = (oracle.global_tensor((4, 6), torch.float32, seed) for seed in (1, 2))
    with sw.enabled(strict=True):
        local = dtensors.my_local(full, inside, ["S(0)"]).requires_grad_()
        moved = dtensors.wrap(local, inside, (4, 6), ["S(0)"])
        if mesh.get_local_rank("a") == 1:
            moved = moved.redistribute(inside, dtensors.to_placements(["S(1)"]))
        result = moved.redistribute(inside, dtensors.to_placements(["R"]))
        dtensors.check(result, full, ["R"])
        result.to_local().backward(gradient.to(meshes.device))
    wrong = oracle.difference(local.grad, dtensors.my_local(gradient, inside, ["S(0)"]))
    assert wrong is None, wrong


def test_one_submesh_takes_branch(pool: Pool) -> None:
    pool.run(_only_some_ranks_branch, 4)
