"""From the arguments of `attention` to a planned problem, bound to process groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from .. import _planner, argument_checks, argument_values, checking, executables, groups, tables
from ..dtensor.specs import layout_of_spec
from ..layout import Layout, Mesh
from ..placements import Pieces
from ..topology import tables_now

SEQUENCE_DIM = 2

Parts = list[list[tuple[int, int]]]


class AttentionMask(NamedTuple):
    """What queries see beyond `is_causal`.

    Args:
        window: a query sees the places less than this far from its own: itself and the `window` - 1 before it, and, if
            not causal, as many after it.
        documents: the lengths of documents that lie in the sequence one after the other; a query sees its own one. They
            sum to the length of the sequence.
    """

    window: int | None = None
    documents: Sequence[int] | None = None


class Asked(NamedTuple):
    """Everything that is asked of an attention but its tensors, hashable."""

    is_causal: bool
    window: int | None
    documents: tuple[int, ...]
    scale: float | None
    enable_gqa: bool
    method: str
    chunks: int
    size: int | None
    layout: Any


class Planned(NamedTuple):
    """A problem with its method, and what the operators take."""

    attention: _planner.Attention
    forward: str
    backward: str
    forward_groups: tuple[str, ...]
    backward_groups: tuple[str, ...]
    rank: int


class _Where(NamedTuple):
    """The ranks that share a sequence: a mesh of their ranks in `group`, and what each of them holds."""

    mesh: _planner.Mesh
    parts: Parts
    group: dist.ProcessGroup | None


_planned: executables.Kept[Planned] = executables.Kept()


def plan(asked: Asked, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> Planned:
    """Returns the plan for this kind of call. Collective among ranks whose process group must be made."""
    described = tuple(
        (t._spec, t._local_tensor.shape) if isinstance(t, DTensor) else (t.shape, t.dtype, t.device) for t in tensors
    )
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    key = (asked, described, needs_grad, None if group is None else groups.weakly(group))
    return _planned.get_or_make(key, lambda: _make(asked, tensors, group, needs_grad))


def _make(asked: Asked, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None, needs_grad: bool) -> Planned:
    check_tensors(asked, tensors)
    q, k = tensors[0], tensors[1]
    where = _of_dtensor(asked, q) if isinstance(q, DTensor) else _of_group(asked, q, group)
    local_q, local_k = (t._local_tensor if isinstance(t, DTensor) else t for t in (q, k))
    mine = dist.get_rank(where.group) if len(where.parts) > 1 else 0
    batch, heads, rows, depth = local_q.shape
    kind = local_q.device.type
    backend = (
        executables.lowering(kind, where.group)
        if len(where.parts) > 1
        else _planner.lowering_of_backend("gloo" if kind == "cpu" else "nccl", kind)
    )
    attention = _planner.Attention(
        where.mesh,
        argument_values.dtype_text(local_q.dtype),
        (batch, heads, local_k.shape[1], depth),
        where.parts,
        is_causal=asked.is_causal,
        window=asked.window,
        documents=list(asked.documents),
        scale=1 / math.sqrt(depth) if asked.scale is None else asked.scale,
        chunks=asked.chunks,
        backend=backend,
    )
    expected = attention.rows(mine)
    if rows != expected and not checking.is_on():  # which tells all ranks
        raise ValueError(
            f"q: has {rows} rows of the sequence on rank {mine}, where the layout has {expected} of "
            f"{sum(end - begin for part in where.parts for begin, end in part)}"
        )
    return bind(_with_method(attention, asked.method, needs_grad), mine, where.group)


def _with_method(attention: _planner.Attention, method: str, needs_grad: bool) -> _planner.Attention:
    if method != "auto":
        return attention.with_method(method)
    topology, model = tables_of(attention)
    return attention.with_method(attention.choose(topology, model, needs_grad))


def tables_of(attention: _planner.Attention) -> tuple[_planner.Topology | None, _planner.GemmModel]:
    """Returns the topology (None: the lowering's default) and the times of products with which it is planned."""
    now = tables_now()
    kind = "cpu" if attention.backend == "gloo" else "cuda"
    topology = now.environment or tables.measured_topology(attention.backend)
    model = tables.measured_gemm_model(kind, attention.dtype)
    if model is None:
        model = tables.default_gemm_model(kind)
        tables.note_default(model.name, lambda: not dist.is_initialized() or dist.get_rank() == 0)
    return topology, model


def bind(attention: _planner.Attention, rank: int, group: dist.ProcessGroup | None) -> Planned:
    """Finds or makes the process groups that both directions need."""
    names = [tuple(executables.names_of(attention.groups(rank, backward), group=group)) for backward in (False, True)]
    forward, backward = names
    return Planned(attention, attention.to_text(False), attention.to_text(True), forward, backward, rank)


def check_tensors(asked: Asked, tensors: Sequence[torch.Tensor]) -> None:
    """Raises ValueError, naming the argument, for tensors that have no attention together."""
    q, k, v = tensors
    for name, tensor in zip("qkv", tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: got a {type(tensor).__name__}; allowed is a tensor")
        if isinstance(tensor, DTensor) != isinstance(q, DTensor):
            raise ValueError(f"{name}: q is {'a DTensor' if isinstance(q, DTensor) else 'plain'}, this is not")
        if not isinstance(tensor, DTensor):
            argument_checks.check_tensor(name, tensor)
        if tensor.ndim != 4:
            raise ValueError(f"{name}: has shape {tuple(tensor.shape)}; allowed is [batch, heads, sequence, depth]")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(f"{name}: is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}")
        if isinstance(tensor, DTensor) and tensor.device_mesh != q.device_mesh:
            raise ValueError(f"{name}: is on {tensor.device_mesh}, q on {q.device_mesh}")
        if isinstance(tensor, DTensor) and tensor.placements != q.placements:
            raise ValueError(
                f"{name}: is placed as {tensor.placements}, q as {q.placements}; they must be placed alike"
            )
    if k.shape != v.shape:
        raise ValueError(f"v: has shape {tuple(v.shape)}, k has {tuple(k.shape)}; they must be equal")
    if (q.shape[0], q.shape[2], q.shape[3]) != (k.shape[0], k.shape[2], k.shape[3]):
        raise ValueError(
            f"k: has shape {tuple(k.shape)}, q has {tuple(q.shape)}; batch, sequence and depth must be equal"
        )
    if q.shape[1] != k.shape[1] and not asked.enable_gqa:
        raise ValueError(f"k: has {k.shape[1]} heads, q has {q.shape[1]}; with enable_gqa=True they may differ")


def _of_group(asked: Asked, q: torch.Tensor, group: dist.ProcessGroup | None) -> _Where:
    argument_checks.check_group(group)
    groups.check_initialised()
    count = dist.get_world_size(group)
    if asked.size is None and count > 1:
        raise ValueError(
            f"size: it is required on {count} ranks, because a rank cannot know what others hold; pass the length of "
            "the whole sequence"
        )
    size = q.shape[SEQUENCE_DIM] if asked.size is None else argument_values.integer(asked.size, "size")
    return _Where(Mesh({"sequence": count}), parts_of(asked.layout, size, count), group)


def parts_of(layout: Any, size: int, count: int) -> Parts:
    """Returns the places of a sequence of `size` that each of `count` ranks holds, in the order of its local tensors.

    `layout` is None or "contiguous" (parts as `torch.chunk` cuts them), "zigzag" (`Pieces.zigzag`), or a placement of
    dim 2 that cuts, such as `Pieces`. Raises ValueError for others.
    """
    if layout == "zigzag":
        layout = Pieces.zigzag(SEQUENCE_DIM, size, count)
    elif layout is None or layout == "contiguous":
        layout = Shard(SEQUENCE_DIM)
    elif isinstance(layout, str):
        raise ValueError(f"layout: {layout!r}; allowed are 'contiguous', 'zigzag' and placements of dim {SEQUENCE_DIM}")
    described = Layout(Mesh({"sequence": count}), (1, 1, size, 1), [layout])
    return [described.region(rank)[SEQUENCE_DIM] for rank in range(count)]


def _of_dtensor(asked: Asked, q: DTensor) -> _Where:
    for placement in q.placements:
        if placement.is_partial():
            raise ValueError(f"q: is placed as {q.placements}; allowed are placements without pending reductions")
        if not placement.is_replicate() and placement.dim % 4 == 3:
            raise ValueError(f"q: is placed as {q.placements}, which cuts the depth of heads; redistribute it first")
    cut = [d for d, p in enumerate(q.placements) if not p.is_replicate() and p.dim % 4 == SEQUENCE_DIM]
    if len(cut) > 1:
        raise ValueError(
            f"q: is placed as {q.placements}, which cuts the sequence along {len(cut)} mesh dims; allowed is one. A "
            "mesh with these dims flattened into one has the same parts"
        )
    size = q.shape[SEQUENCE_DIM]
    if asked.size is not None and asked.size != size:
        raise ValueError(f"size: {asked.size}, the sequence of q has {size}; a DTensor brings it, so leave it out")
    if not cut or q.device_mesh.size(cut[0]) == 1:
        return _Where(Mesh({"sequence": 1}), [[(0, size)]] if size else [[]], None)
    mesh_dim = cut[0]
    group = q.device_mesh.get_group(mesh_dim)
    coordinate = q.device_mesh.get_coordinate()
    assert coordinate is not None
    along = q.device_mesh.mesh[tuple(slice(None) if d == mesh_dim else c for d, c in enumerate(coordinate))]
    members = [int(rank) for rank in along]
    if asked.layout is None:
        described = layout_of_spec(q._spec, q.shape, q.dtype)
        parts = [described.region(rank)[SEQUENCE_DIM] for rank in members]
    else:
        parts = parts_of(asked.layout, size, len(members))
    names = q.device_mesh.mesh_dim_names
    name = names[mesh_dim] if names else "sequence"
    return _Where(Mesh({name: len(members)}, [dist.get_group_rank(group, rank) for rank in members]), parts, group)
