"""Plans attention from the arguments of `scaled_dot_product_attention`, and binds it to process groups.

A position is an index into the full sequence. A method is an order of transfers and products, such as ``"ring"``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Shard

from .._native import _planner
from ..dtensor import guards
from ..dtensor.specs import has_default_order, layout_of
from ..graph.fakes import meta_of, on_fakes, uncompiled
from ..layouts import argument_values
from ..layouts.errors import argument_error
from ..layouts.layout import Layout, Mesh
from ..layouts.topology import default_topology, tables_now
from ..placements import Pieces
from ..runtime import argument_checks, checking, executables, groups
from ..runtime.agreement import GroupWords, Statement

SEQUENCE_DIM = 2  # of tensors [batch, heads, sequence, depth]

Parts = list[list[tuple[int, int]]]  # by rank: the intervals [begin, end) of positions that it holds


class Mask(NamedTuple):
    """The keys that queries see, beyond `is_causal`.

    Args:
        window: a query sees the positions less than this far from its own: itself and the `window` - 1 before it, and,
            if not causal, as many after it.
        documents: the lengths of consecutive documents; a query sees only its own document. They sum to the length of
            the sequence.
    """

    window: int | None = None
    documents: Sequence[int] | None = None


class Options(NamedTuple):
    """The arguments of attention except its tensors, hashable."""

    is_causal: bool
    window: int | None
    documents: tuple[int, ...]  # (): not given
    scale: float | None
    enable_gqa: bool
    method: str
    chunks: int  # 0: not given
    size: int | None
    layout: Any
    kv_size: int | None
    kv_layout: Any


# The arguments of the operator `attend` after its tensors: forward and backward as text, the group names of each, rank.
Call = tuple[str, str, tuple[str, ...], tuple[str, ...], int]

_MaskSpec = tuple[str, tuple[int, ...]]  # dtype and shape of a mask tensor


class Planned(NamedTuple):
    """A planned attention and the arguments of its operators."""

    attention: _planner.Attention
    call: Call  # without a mask tensor
    by_mask: dict[_MaskSpec, Call]  # with a mask tensor of this dtype and shape


class _Keys(NamedTuple):
    """The positions of keys that each rank holds. `parts` is None if they equal the positions of its queries."""

    parts: Parts | None = None
    are_whole: bool = False  # True if every one of several ranks holds all keys


class _Shards(NamedTuple):
    """The ranks that share a sequence: their mesh, their group, and the positions of queries and keys on each rank.

    Ranks are global ranks, because topologies derive nodes from them; in a group of separate jobs, the group's ranks.
    """

    mesh: _planner.Mesh
    parts: Parts
    keys: _Keys
    group: dist.ProcessGroup | None


# Plans by the mesh or group that shares the sequence, then by call. Planning is collective, so all ranks of a mesh or
# group must add and drop the same plans; hence each has a dict of its own.
_planned: executables.PlanningCache[dict[Hashable, Planned]] = executables.PlanningCache()
MAX_PLANNED = 1024  # plans of one mesh or group


def call_for(options: Options, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> Call:
    """Returns the arguments of the operator for a call, planned by `plan`. Also works while Dynamo traces a graph."""
    if not torch.compiler.is_compiling():
        return uncompiled(plan, _disabled_plan)(options, tensors, group).call
    _check_are_tensors(tensors)
    # Dynamo can pass tuples and strings to `_planned_call` as constants, but not objects of our classes.
    if hasattr(options.layout, "text"):
        options = options._replace(layout=options.layout.text(options.size))
    if hasattr(options.kv_layout, "text"):
        options = options._replace(
            kv_layout=options.kv_layout.text(options.size if options.kv_size is None else options.kv_size)
        )
    error, call = _planned_call(tuple(options), tuple(meta_of(tensor) for tensor in tensors), {"group": group})
    if error is not None:
        raise ValueError(error)
    return call


@torch._dynamo.assume_constant_result
def _planned_call(
    options: tuple[Any, ...], metas: tuple[tuple[Any, ...], ...], more: dict[str, Any]
) -> tuple[str | None, Any]:
    """Returns an error message or None, and the operator's arguments. Dynamo stores the result as a constant.

    `metas` describe the tensors (`meta_of`). `more` has the group: Dynamo passes a fake in place of a bare one.
    """
    guards.mark_graph()
    try:
        return None, on_fakes(metas, lambda *fakes: plan(Options(*options), fakes, more["group"])).call
    except ValueError as error:
        return str(error), ()


def _check_are_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Raises ValueError unless q, k and v are tensors."""
    for name, tensor in zip("qkv", tensors[:3], strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise argument_error(name, "a tensor", f"a {type(tensor).__name__}")


def plan(options: Options, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> Planned:
    """Returns the plan of a call from a cache. Making it is collective among the ranks that share the sequence.

    `tensors` are q, k and v, then the mask if that is a tensor, of four dims.
    """
    _check_are_tensors(tensors)
    argument_checks.check_group_of_this_rank(group)
    tensor_keys = tuple(
        (t._spec, t._local_tensor.shape) if isinstance(t, DTensor) else (t.shape, t.dtype, t.device)
        for t in tensors[:3]
    )
    masks = tensors[3:]
    needs_grad = options.method == "auto" and torch.is_grad_enabled() and any(t.requires_grad for t in tensors[:3])
    mesh = tensors[0].device_mesh if isinstance(tensors[0], DTensor) else None
    key = (options, tensor_keys, len(masks), needs_grad)  # ranks may differ in the shapes of masks
    mesh_key = None if mesh is None else groups.key_of_mesh(mesh)
    cache = _planned.get_or_make((mesh, mesh_key, None if group is None else groups.weakly(group)), dict)
    planned = cache.get(key)
    if planned is None:
        planned = _plan_and_bind(options, tensors, group, needs_grad)
        executables.put_bounded(cache, key, planned, MAX_PLANNED)
    return planned._replace(call=_call_with(planned, tensors)) if masks else planned


def _call_with(planned: Planned, tensors: Sequence[torch.Tensor]) -> Call:
    """Returns the operator's arguments with the mask tensor in `tensors`. All masks need the same groups."""
    q, mask = tensors[0], tensors[3]
    check_mask(q, mask)
    spec = _mask_spec(mask)
    if spec not in planned.by_mask:
        attention = planned.attention.with_mask(spec)
        planned.by_mask[spec] = (attention.to_text(False), attention.to_text(True), *planned.call[2:])
    return planned.by_mask[spec]


def _mask_spec(mask: torch.Tensor) -> Any:
    """Returns the dtype and the shape of a mask tensor."""
    return argument_values.dtype_text(mask.dtype), tuple(mask.shape)


_disabled_plan = torch._dynamo.disable(plan)


def _plan_and_bind(
    options: Options, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None, needs_grad: bool
) -> Planned:
    """Plans and binds a call, without the cache. Collective among the ranks that share the sequence."""
    q = tensors[0]
    attention = error = None
    if isinstance(q, DTensor):  # errors found here are the same on all ranks
        if group is not None:
            raise argument_error("group", "None with DTensors, whose mesh has groups", "a group")
        check_tensors(options, tensors)
        shards = _dtensor_shards(options, q, tensors[1])
    else:
        groups.check_initialized()
    shared_group = shards.group if isinstance(q, DTensor) else groups.default_if_none(group)
    rank = 0 if shared_group is None else groups.rank_in_meshes(shared_group)
    try:
        if not isinstance(q, DTensor):
            check_tensors(options, tensors)
            shards = _group_shards(options, q, tensors[1], group)
        attention = _with_method(_problem(options, tensors, shards, rank), options.method, q.device.type, needs_grad)
    except ValueError as caught:
        error = caught
    if shared_group is not None and dist.get_world_size(shared_group) > 1 and not checking.is_on():
        _compare(options, attention, error, shared_group, q.device.type)
    if attention is None:
        assert error is not None
        raise error
    return bind(attention, rank, shards.group)


def _problem(options: Options, tensors: Sequence[torch.Tensor], shards: _Shards, rank: int) -> _planner.Attention:
    """Returns the attention without a method. `rank` is this rank, as in the mesh of `shards`."""
    local_q, local_k, local_v = (t._local_tensor if isinstance(t, DTensor) else t for t in tensors[:3])
    batch, heads, rows, depth = local_q.shape
    kind = local_q.device.type
    is_shared = len(shards.parts) > 1
    attention = _planner.Attention(
        shards.mesh,
        argument_values.dtype_text(local_q.dtype),
        (batch, heads, local_k.shape[1], depth, local_v.shape[3]),
        shards.parts,
        key_parts=shards.keys.parts,
        keys_are_whole=shards.keys.are_whole,
        is_causal=options.is_causal,
        window=options.window,
        documents=list(options.documents),
        mask=_mask_spec(tensors[3]) if tensors[3:] else None,
        scale=1 / math.sqrt(max(depth, 1)) if options.scale is None else options.scale,
        chunks=options.chunks,
        lowering=executables.lowering(kind, shards.group) if is_shared else _planner.Lowering.of_device(kind),
    )
    if not checking.is_on():  # the debug mode reports errors on all ranks
        _check_rows("q", rows, attention.rows(rank), shards.parts, rank)
        _check_rows("k", local_k.shape[2], attention.key_rows(rank), shards.keys.parts or shards.parts, rank)
    return attention


def _check_rows(name: str, rows: int, expected: int, parts: Parts, rank: int) -> None:
    """Raises ValueError unless this rank's q or k has as many rows as its part of the sequence."""
    if rows != expected:
        size = max(end for part in parts for _, end in [*part, (0, 0)])
        raise argument_error(name, f"of {expected} rows on rank {rank}, for a sequence of {size}", rows)


def _compare(
    options: Options,
    attention: _planner.Attention | None,
    error: ValueError | None,
    shared_group: dist.ProcessGroup,
    device_type: str,
) -> None:
    """Raises on all ranks if any rank has an error, or if arguments differ. All ranks that share the sequence must
    call.

    `attention` is None on ranks with an error, which is `error`.
    """
    text = "" if attention is None else attention.with_default_mask().to_text(False)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
    words = GroupWords(shared_group)
    digests = words.compare(Statement("attention"), error, torch.tensor([digest]))
    if attention is not None and bool((digests != digest).any()):
        description = attention.describe(*tables_for(attention, device_type)).splitlines()[0]
        arguments = (
            f"{description}, with scale={options.scale}, chunks={options.chunks}, layout={options.layout}, "
            f"kv_layout={options.kv_layout} (digest {digest & 0xFFFFFFFF:08x})"
        )
        words.compare(Statement("attention", {"arguments": arguments}))


def _with_method(attention: _planner.Attention, method: str, device_type: str, needs_grad: bool) -> _planner.Attention:
    """Returns the attention with this method; for "auto", with the one predicted to be fastest."""
    if method not in ("auto", "two_level"):
        return attention.with_method(method, None)
    topology, model = tables_for(attention, device_type)
    if method == "auto":
        method = attention.choose(topology, model, needs_grad)
    return attention.with_method(method, topology)


def tables_for(attention: _planner.Attention, device_type: str) -> tuple[_planner.Topology, _planner.GemmModel]:
    """Returns the topology and the GEMM model with which to plan an attention."""
    model = tables_now().gemm_model(device_type, attention.dtype)
    executables.log_default_model(model, device_type)
    return default_topology(attention.lowering), model


def bind(attention: _planner.Attention, rank: int, group: dist.ProcessGroup | None) -> Planned:
    """Returns the planned attention, bound to groups of both directions. Collective where a group must be made."""
    texts = attention.to_text(False), attention.to_text(True)
    names = [executables.operator_group_names(text, rank, group=group, are_global=True) for text in texts]
    return Planned(attention, (*texts, tuple(names[0]), tuple(names[1]), rank), {})


def check_tensors(options: Options, tensors: Sequence[torch.Tensor]) -> None:
    """Raises ValueError, naming the argument, if q, k, v and mask do not match."""
    q, k, v, *masks = tensors
    for name, tensor in zip("qkv", tensors[:3], strict=True):
        if isinstance(tensor, DTensor) != isinstance(q, DTensor):
            kind = "a DTensor" if isinstance(q, DTensor) else "a plain tensor"
            raise argument_error(name, f"{kind}, as q", f"a {type(tensor).__name__}")
        if not isinstance(tensor, (DTensor, FakeTensor)):
            argument_checks.check_tensor(name, tensor)
        if tensor.ndim != 4:
            raise argument_error(name, "of shape [batch, heads, sequence, depth]", tuple(tensor.shape))
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise argument_error(name, f"{q.dtype} on {q.device}, as q", f"{tensor.dtype} on {tensor.device}")
        if isinstance(tensor, DTensor) and tensor.device_mesh != q.device_mesh:
            raise argument_error(name, f"on {q.device_mesh}, as q", tensor.device_mesh)
        if isinstance(tensor, DTensor) and _placements_except_sequence(tensor) != _placements_except_sequence(q):
            raise argument_error(name, f"placed like q except for the sequence, {q.placements}", tensor.placements)
        if isinstance(tensor, DTensor) and not has_default_order(tensor._spec):
            raise argument_error(name, "in the default shard order; redistribute it", tensor._spec.shard_order)
    if q.device.type == "cuda" and q.dtype == torch.float64:
        raise argument_error("q", "float32, bfloat16 or float16 on CUDA", q.dtype)
    if isinstance(k, DTensor) and k.placements != v.placements:
        raise argument_error("v", f"placed like k, {k.placements}", v.placements)
    if k.shape[:3] != v.shape[:3]:
        raise argument_error("v", f"of the shape of k except for the depth, {tuple(k.shape)}", tuple(v.shape))
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise argument_error("k", f"of q's batch size and depth, as in {tuple(q.shape)}", f"shape {tuple(k.shape)}")
    for mask in masks:
        check_mask(q, mask)
    if q.shape[1] != k.shape[1] and not options.enable_gqa:
        raise argument_error("k", f"of {q.shape[1]} heads, as q, without enable_gqa=True", k.shape[1])
    if isinstance(q, DTensor) and isinstance(k, DTensor):
        _check_heads(q, k)


def check_mask(q: torch.Tensor, mask: torch.Tensor) -> None:
    """Raises ValueError for an invalid mask tensor of four dims. `_planner.Attention` checks the rest."""
    if mask.requires_grad:
        raise argument_error("mask", "a tensor without a gradient", "one that requires a gradient")
    if mask.device != q.device:
        raise argument_error("mask", f"on {q.device}, as q", mask.device)
    rows = (q._local_tensor if isinstance(q, DTensor) else q).shape[SEQUENCE_DIM]
    if mask.shape[SEQUENCE_DIM] not in (1, rows):
        raise argument_error("mask", f"of 1 or {rows} rows, one for each of this rank's q", mask.shape[2])


def _placements_except_sequence(tensor: DTensor) -> list[Any]:
    """Returns the placements, with None for those that shard the sequence or replicate."""
    dims = sequence_dims(tensor)
    return [None if p.is_replicate() or d in dims else p for d, p in enumerate(tensor.placements)]


def _check_heads(q: DTensor, k: DTensor) -> None:
    """Raises ValueError unless each rank has heads of q, and of k exactly the heads that these share.

    Example: 8 heads of q and 2 of k, so 4 heads of q share one of k. A rank with head 0 of k must have heads 0 to 3 of
    q.
    """
    if all(p.is_replicate() or p.is_partial() or p.dim % 4 != 1 for p in q.placements):
        return
    factor, rest = divmod(q.shape[1], max(k.shape[1], 1))
    q_layout, k_layout = layout_of(q._spec), layout_of(k._spec)
    for rank in q.device_mesh.mesh.flatten().tolist():
        held, shared = q_layout.region(rank)[1], k_layout.region(rank)[1]
        if rest or not held or [(a * factor, b * factor) for a, b in shared] != [(a, b) for a, b in held]:
            raise ValueError(
                "k must have on each rank the heads that the rank's heads of q share, got heads "
                f"{shared} of {k.shape[1]} of k and heads {held} of {q.shape[1]} of q on rank {rank}. k has placements "
                f"{k.placements} on {k.device_mesh}"
            )


def _group_shards(options: Options, q: torch.Tensor, k: torch.Tensor, group: dist.ProcessGroup | None) -> _Shards:
    """Returns the ranks and positions of the sequence for plain tensors in a process group."""
    count = dist.get_world_size(group)
    if options.size is None and count > 1:
        raise argument_error("size", f"the length of the full sequence on {count} ranks", None)
    size = q.shape[SEQUENCE_DIM] if options.size is None else options.size
    # In a group of separate jobs, a mesh has the group's ranks (see `_Shards`).
    members = groups.ranks_in_meshes(group)
    parts = parts_of(options.layout, size, count)
    kv_size = options.kv_size
    if kv_size is None:
        kv_size = k.shape[SEQUENCE_DIM] if count == 1 else size
    return _Shards(Mesh({"sequence": count}, members), parts, _key_parts(options, parts, size, kv_size, None), group)


def _key_parts(options: Options, parts: Parts, size: int, kv_size: int, placed: Parts | None) -> _Keys:
    """Returns the positions of keys on each rank.

    The option `kv_layout` decides, else the placements of k (`placed`), else the positions of queries if sizes are
    equal.
    """
    if options.kv_layout == "whole":
        return _Keys([[(0, kv_size)] if kv_size else []] * len(parts), len(parts) > 1)
    found = placed
    if options.kv_layout is not None or (placed is None and kv_size != size):
        found = parts_of(options.kv_layout, kv_size, len(parts), "kv_layout")
    return _Keys(None if found == parts else found)


def parts_of(layout: Any, size: int, count: int, argument: str = "layout") -> Parts:
    """Returns the positions of a sequence of `size` that each of `count` ranks holds, in the order of its local tensor.

    `layout` is as in `sequence_layout`.
    """
    described = sequence_layout(layout, size, count, argument)
    return [described.region(rank)[SEQUENCE_DIM] for rank in range(count)]


def sequence_layout(layout: Any, size: int, count: int, argument: str) -> Layout:
    """Returns the layout of a sequence of `size` positions on `count` ranks, as a tensor whose other dims have size 1.

    `layout` is None or "contiguous" (parts as `torch.chunk` cuts them), "zigzag" (`Pieces.zigzag`), or a placement of
    dim 2 that cuts, such as `Pieces`, or its text. Raises ValueError, naming `argument`, for others.
    """
    given = layout
    if layout == "zigzag":
        layout = Pieces.zigzag(SEQUENCE_DIM, size, count)
    elif layout is None or layout == "contiguous":
        layout = Shard(SEQUENCE_DIM)
    if not isinstance(layout, str) or "(" in layout:
        described = Layout(Mesh({"sequence": count}), (1, 1, size, 1), [layout])
        if f"({SEQUENCE_DIM}" in described.placements[0]:
            return described
    raise argument_error(argument, f"'contiguous', 'zigzag' or a placement of dim {SEQUENCE_DIM}", repr(given))


def sequence_dims(q: DTensor) -> list[int]:
    """Returns the mesh dims that shard the sequence."""
    return [
        mesh_dim
        for mesh_dim, placement in enumerate(q.placements)
        if not placement.is_replicate() and not placement.is_partial() and placement.dim % 4 == SEQUENCE_DIM
    ]


def _dtensor_shards(options: Options, q: DTensor, k: DTensor) -> _Shards:
    """Returns the ranks and positions of the sequence for DTensors. Raises ValueError for unsupported placements."""
    for placement in q.placements:
        if placement.is_partial():
            raise argument_error("q", "placed without pending reductions", q.placements)
        if not placement.is_replicate() and placement.dim % 4 == 3:
            raise argument_error("q", "unsharded along dim 3, the depth of heads", f"{q.placements}; redistribute it")
    over = sequence_dims(q)  # the mesh dims that shard the sequence
    if len(over) > 1:
        raise ValueError(
            f"q must have its sequence sharded over at most one mesh dim, got {q.placements}, which shards it over "
            f"{len(over)}. Flatten these mesh dims into one, which keeps the shards"
        )
    size = q.shape[SEQUENCE_DIM]
    if options.size is not None and options.size != size:
        raise argument_error("size", f"None with DTensors, or the length of q, {size}", options.size)
    kv_size = k.shape[SEQUENCE_DIM]
    if options.kv_size is not None and options.kv_size != kv_size:
        raise argument_error("kv_size", f"None with DTensors, or the length of k, {kv_size}", options.kv_size)
    if any(k.device_mesh.size(mesh_dim) > 1 and mesh_dim not in over for mesh_dim in sequence_dims(k)):
        raise ValueError(
            f"k must have its sequence sharded over the same mesh dim as q, or not at all, got {k.placements} where q "
            f"has {q.placements}"
        )
    if not over or q.device_mesh.size(over[0]) == 1:
        parts: Parts = [[(0, size)]] if size else [[]]
        return _Shards(
            Mesh({"sequence": 1}), parts, _key_parts(options._replace(kv_layout=None), parts, size, kv_size, None), None
        )
    mesh_dim = over[0]
    group = q.device_mesh.get_group(mesh_dim)
    coordinate = q.device_mesh.get_coordinate()
    assert coordinate is not None
    along = q.device_mesh.mesh[tuple(slice(None) if d == mesh_dim else c for d, c in enumerate(coordinate))]
    members = [int(rank) for rank in along]
    parts = _placed_parts(q, members) if options.layout is None else parts_of(options.layout, size, len(members))
    if k.placements[mesh_dim].is_replicate():
        if options.kv_layout not in (None, "whole"):
            raise ValueError(
                f"kv_layout must be 'whole' or None where k is placed as {k.placements}, got {options.kv_layout!r}"
            )
        options = options._replace(kv_layout="whole")
    elif options.kv_layout == "whole":
        raise argument_error("kv_layout", f"a layout that shards k, which is placed as {k.placements}", "'whole'")
    is_like_q = options.layout is not None and kv_size == size and k.placements == q.placements
    keys = _key_parts(options, parts, size, kv_size, parts if is_like_q else _placed_parts(k, members))
    names = q.device_mesh.mesh_dim_names
    name = names[mesh_dim] if names else "sequence"
    return _Shards(Mesh({name: len(members)}, members), parts, keys, group)


def _placed_parts(tensor: DTensor, ranks: Sequence[int]) -> Parts:
    """Returns the positions of the sequence that each of the ranks holds, according to the tensor's placements."""
    described = layout_of(tensor._spec)
    return [described.region(rank)[SEQUENCE_DIM] for rank in ranks]
