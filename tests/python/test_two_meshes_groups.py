"""Tests of moves between two meshes: process groups, collectives in dispatch modes, and layouts of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
import parts
import shardwright as sw
from dtensors import to_placements
from pool import Pool
from shardwright.dtensor.specs import layout_of_spec
from shardwright.runtime import executables, groups
from two_meshes import Grid, device_mesh, dtensor, mesh, part

HERE: Grid = ((2,), (0, 1))
THERE: Grid = ((3,), (1, 2, 3))
ALL: Grid = ((3,), (2, 3, 4))
APART: Grid = ((2,), (1, 3))  # no other test makes a group for the ranks of HERE and APART together
SHAPE = (6, 5)


def _layout(grid: Grid, *placements: str) -> sw.Layout:
    return sw.Layout(mesh(grid), SHAPE, placements)


def _nothing_to_send() -> None:
    """Rank 1 does not call redistribute, and rank 0 does not wait for it."""
    src, dst = _layout(HERE, "R"), _layout(((2,), (1, 0)), "S(0)")
    assert sw.plan(src, dst, backend="gloo").steps[0].op == "cross"
    if dist.get_rank() == 0:
        made = set(groups._made)
        full = oracle.global_tensor(SHAPE, torch.float32, 1)
        result = sw.redistribute_local(full, src, dst)
        assert oracle.difference(result, full[3:]) is None
        assert not set(groups._made) - made, (set(groups._made), made)
        assert sw.plan(src, dst, backend="gloo").messages_max == 0


def test_move_without_messages_needs_no_group(pool: Pool) -> None:
    pool.run(_nothing_to_send, 3)


def _prepared() -> None:
    rank = dist.get_rank()
    full = oracle.global_tensor(SHAPE, torch.float32, 1, reducible=True)
    src, dst = _layout(HERE, "P(sum)"), _layout(THERE, "S(1)")
    with pytest.raises(ValueError, match="redistributes must be pairs with at least one layout on"):
        sw.prepare(mesh(ALL), redistributes=[(src, dst)])
    before = set(groups._made)
    sw.prepare(mesh(HERE), redistributes=[(src, dst)])
    made = set(groups._made)
    assert ((), (0, 1, 2, 3)) in made if rank < 4 else made == before
    local = part(full, HERE, ("P(sum)",), rank).requires_grad_()
    result = sw.redistribute_local(local, src, dst)
    assert oracle.difference(result.detach(), part(full, THERE, ("S(1)",), rank)) is None
    if rank < 4:
        result.sum().backward()
    assert set(groups._made) == made


def test_prepare_makes_the_groups_of_two_meshes(pool: Pool) -> None:
    pool.run(_prepared, 5)


def _without_new_groups() -> None:
    rank = dist.get_rank()
    full = oracle.global_tensor(SHAPE, torch.float32, 2, reducible=True)
    here, there, rest = device_mesh(HERE), device_mesh(APART), device_mesh(ALL)
    before = set(groups._made)
    for kind in ("S(1)", "P(sum)"):
        x = dtensor(full, here, HERE, (kind,)).requires_grad_()
        with sw.enabled(make_groups=False):
            y = x.redistribute(rest, to_placements(("S(0)",)))  # over all ranks: the default group
            with pytest.raises(RuntimeError, match=r"ranks \(0, 1, 3\) have no process group"):
                if rank in (0, 1, 3):
                    x.redistribute(there, to_placements(("S(0)",)))
                else:
                    raise RuntimeError("ranks (0, 1, 3) have no process group")
        assert oracle.difference(y.to_local().detach(), part(full, ALL, ("S(0)",), rank)) is None
        y.backward(dtensor(full, rest, ALL, ("S(0)",)))
        assert x.grad is not None and x.grad.device_mesh == here
        assert set(groups._made) <= before  # groups of an earlier default group may be gone
    sw.prepare(here, redistributes=[(_layout(HERE, "S(1)"), _layout(APART, "S(0)"))])
    with sw.enabled(make_groups=False):
        y = x.redistribute(there, to_placements(("S(0)",)))
    assert oracle.difference(y.to_local().detach(), part(full, APART, ("S(0)",), rank)) is None


def test_make_groups_false_applies_between_meshes(pool: Pool) -> None:
    pool.run(_without_new_groups, 5)


class _Seen(TorchDispatchMode):
    """Records the name and the group's ranks of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(args[-1]))
            self.ranks.append((func.__name__.split(".")[0], ranks))
        return func(*args, **(kwargs or {}))


def _watched() -> None:
    """Both meshes have a dim `a` and share rank 1."""
    rank, size = dist.get_rank(), 1 << 18
    here, there = sw.Mesh({"a": 2}), sw.Mesh({"a": 4}, [1, 2, 3, 4])
    src, dst = sw.Layout(here, (size,), ["P(sum)"]), sw.Layout(there, (size,), ["R"])
    ops = [step.op for step in sw.plan(src, dst, backend="gloo", topology="gloo-local").steps]
    assert ops == ["reduce_scatter", "cross", "all_gather"]
    with _Seen() as seen:
        result = sw.redistribute_local(torch.ones(size) if rank < 2 else None, src, dst)
    assert rank == 0 or torch.equal(result, torch.full((size,), 2.0))
    expected = [("all_to_all_single", [0, 1, 2, 3, 4])]
    expected = [("reduce_scatter_tensor", [0, 1])] * (rank < 2) + expected
    expected += [("all_gather_into_tensor", [1, 2, 3, 4])] * (rank > 0)
    assert seen.ranks == expected


def test_dispatch_modes_see_group_of_each_mesh(pool: Pool) -> None:
    pool.run(_watched, 5)


def test_none_as_local_needs_unique_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.runtime import plain_tensors

    where = {"cpu", "cuda"}
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(executables, "communicates_on", lambda device_type, group: device_type in where)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 3)
    with pytest.raises(ValueError, match=r"local must be .*, got None on rank 3.* for both cpu and cuda"):
        plain_tensors.device_of(None, None)
    where.discard("cuda")
    assert plain_tensors.device_of(None, None) == torch.device("cpu")
    where = {"cuda"}
    assert plain_tensors.device_of(None, None) == torch.device("cuda")


GRID: Grid = ((2, 2), (0, 1, 2, 3))
OTHER: Grid = ((3,), (1, 2, 4))


def _gradients_have_layout_of_source() -> None:
    """Covers shard orders, strided shards in both meanings, and dims counted from the end."""
    rank, shape = dist.get_rank(), (12, 7)
    full = oracle.global_tensor(shape, torch.float32, 3)
    gradient = oracle.global_tensor(shape, torch.float32, 4)
    here, there = device_mesh(GRID), device_mesh(OTHER)
    meta = TensorMeta(torch.Size(shape), (7, 1), torch.float32)
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    strided = (_StridedShard(0, split_factor=2), Shard(0))
    for spec in (
        DTensorSpec(here, (Shard(0), Shard(0)), meta, order),
        DTensorSpec(here, strided, meta, use_strided_shard_as_shard_order=True),
        DTensorSpec(here, strided, meta, use_strided_shard_as_shard_order=False),
        DTensorSpec(
            here, (_StridedShard(0, split_factor=3), Replicate()), meta, use_strided_shard_as_shard_order=False
        ),
    ):
        layout = layout_of_spec(spec, shape, torch.float32)
        local = parts.part_of(full, layout, rank) if rank < 4 else torch.empty(0)
        x = DTensor(local, spec, requires_grad=True)  # type: ignore[call-arg]
        y = sw.redistribute(x, [_StridedShard(-2, split_factor=2)], there)
        assert y.placements == (_StridedShard(0, split_factor=2),)
        target = layout_of_spec(y._spec, shape, torch.float32)
        expected = parts.part_of(full, target, rank) if rank in OTHER[1] else torch.empty(0)
        assert oracle.difference(y.to_local().detach(), expected) is None, f"{spec}"
        part_of_gradient = parts.part_of(gradient, target, rank) if rank in OTHER[1] else torch.empty(0)
        given = DTensor(part_of_gradient, y._spec, requires_grad=False)  # type: ignore[call-arg]
        (back,) = torch.autograd.grad(y, x, given)  # PyTorch's accumulation of gradients loses shard orders
        assert isinstance(back, DTensor)
        assert layout_of_spec(back._spec, shape, torch.float32) == layout, f"{back._spec} for {spec}"
        assert back._spec.use_strided_shard_as_shard_order == spec.use_strided_shard_as_shard_order
        expected = parts.part_of(gradient, layout, rank) if rank < 4 else torch.empty(0)
        assert oracle.difference(back.to_local(), expected) is None, f"{spec}"


def test_gradients_have_layout_of_source(pool: Pool) -> None:
    pool.run(_gradients_have_layout_of_source, 5)
