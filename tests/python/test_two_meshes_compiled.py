"""Moves between two meshes in compiled code: our operators in the graph, values and gradients as in eager code."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

import oracle
import shardwright as sw
from compilers import fresh_compilers, recording
from pool import Pool
from two_meshes import Grid, device_mesh, dtensor, part

HERE: Grid = ((3,), (0, 1, 2))
THERE: Grid = ((2,), (2, 1))
FURTHER: Grid = ((2,), (1, 3))


def _compiled() -> None:
    """Rank 0 is only on the source's mesh."""
    rank = dist.get_rank()
    here, there = device_mesh(HERE), device_mesh(THERE)
    graphs: list[str] = []

    def move(x: DTensor) -> DTensor:
        return (x * 2).redistribute(there, [Shard(1)]) * 3

    with sw.enabled(), fresh_compilers():
        compiled = torch.compile(move, backend=recording(graphs), fullgraph=True)
        for rows in (6, 9, 7):  # sizes are symbolic from the second call on
            full = oracle.global_tensor((rows, 5), torch.float32, rows)
            gradient = oracle.global_tensor((rows, 5), torch.float32, rows + 1)
            x = dtensor(full, here, HERE, ("S(0)",)).requires_grad_()
            y = compiled(x)
            assert y.device_mesh == there and y.placements == (Shard(1),)
            assert oracle.difference(y.to_local().detach(), part(full * 6, THERE, ("S(1)",), rank)) is None
            y.backward(dtensor(gradient, there, THERE, ("S(1)",)))
            assert x.grad is not None and x.grad.device_mesh == here
            assert oracle.difference(x.grad.to_local(), part(gradient * 6, HERE, ("S(0)",), rank)) is None
    assert any("redistribute_start" in graph for graph in graphs), graphs


def test_compiled_move_between_meshes(pool: Pool) -> None:
    pool.run(_compiled, 3)


def _move_to_other_ranks() -> None:
    """Rank 3 has no part of the source, so PyTorch could not detect changed sizes there."""
    here, there = device_mesh(HERE), device_mesh(FURTHER)
    x = dtensor(torch.ones(6, 5), here, HERE, ("S(0)",))
    with sw.enabled(), fresh_compilers():
        compiled = torch.compile(lambda x: x.redistribute(there, [Shard(1)]), backend="aot_eager", fullgraph=True)
        with pytest.raises(RuntimeError, match=r"mesh must have only ranks of the mesh of x .*, got ranks \[3\]"):
            compiled(x)


def test_compiled_move_to_other_ranks_raises(pool: Pool) -> None:
    pool.run(_move_to_other_ranks, 4)


def _traced_by_make_fx() -> None:
    rank = dist.get_rank()
    here, there = device_mesh(HERE), device_mesh(FURTHER)
    full = oracle.global_tensor((6, 5), torch.float32, 1)
    x = dtensor(full, here, HERE, ("S(0)",))

    def move(local: torch.Tensor) -> torch.Tensor:
        moved = DTensor.from_local(local, here, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
        return sw.redistribute(moved, [Replicate()], there).to_local()

    graph = make_fx(move)(x.to_local())
    assert "redistribute_start" in str(graph.graph)
    assert oracle.difference(graph(x.to_local()), part(full, FURTHER, ("R",), rank)) is None


def test_make_fx_traces_move_between_meshes(pool: Pool) -> None:
    pool.run(_traced_by_make_fx, 4)
