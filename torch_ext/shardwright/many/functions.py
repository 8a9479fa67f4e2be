"""`redistribute_many`, for lists of plain tensors and for lists of DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from .._native import _planner
from ..layouts.errors import argument_error
from ..planning.batches import BUCKET_BYTES, BUCKETS
from ..runtime.many import ManyHandle, redistribute_parts
from . import dtensors, parts


@torch._disable_dynamo
def redistribute_many(
    items: Sequence[
        tuple[torch.Tensor | None, _planner.Layout, _planner.Layout]
        | tuple[DTensor, Sequence[Placement]]
        | tuple[DTensor, Sequence[Placement], DeviceMesh | None]
    ],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    buckets: int = BUCKETS,
    out: Sequence[torch.Tensor | None] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    async_op: bool = False,
) -> list[torch.Tensor] | ManyHandle:
    """Moves this rank's parts of many tensors from one layout to another, all together.

    All data from one rank to another in a round is one message. Rounds are packed, moved and unpacked through `buckets`
    buffers, so at most ``buckets * bucket_bytes`` of memory is used besides the results.

    All ranks of `group` must call, with the same layouts in the same order, including ranks on no mesh. The first call
    with given layouts compares them among the ranks; later calls do not.

    Results are differentiable any number of times, and the gradients move back together. The backward moves zeros for
    results without a gradient. It must run on all ranks that made the call.

    `out`, `group`, `device` and `async_op` are for plain tensors only. In code under `torch.compile` the call breaks
    the graph.

    Args:
        items: for each plain tensor its local part, source layout and destination layout, on any two meshes of ranks of
            `group`, with any placements; the destination may not be partial. Local parts may have any strides
            (conjugated and negated views are copied first); on a rank outside the source mesh they are None or empty,
            and require gradients if the parts of the other ranks do. Or for each DTensor the DTensor, the placements of
            the result and, for another mesh, its mesh, as in `redistribute`; placements that change may not be partial.
            DTensors with the same ranks on their two meshes move together, and only these ranks must call.
        bucket_bytes: the size of a buffer in bytes, by default 64 MiB. The data that a rank sends and receives in one
            round fits into it; larger tensors are split over rounds.
        buckets: the number of buffers, by default 3, which is the number of rounds in flight at once.
        out: the tensors to write the results to, with any strides. They must not share memory with each other or with
            local parts. On a rank outside the mesh of a destination its entry may be None. Not with gradients.
        group: the process group whose ranks the meshes use; default, the default group.
        device: the device of all tensors, for ranks that pass none; default, the only one for which the group has a
            backend. Such ranks must pass it if there are backends for the CPU and for an accelerator.
        async_op: return a `ManyHandle` at once. The local parts must not change before its ``wait_for_sources()``. Not
            with gradients.

    Returns:
        The list of new local parts, or of the tensors of `out`, or of DTensors. As in `redistribute_local`, an item
        whose layouts are equal returns its own local part. With async_op, a `ManyHandle`, whose ``wait()`` returns that
        list. Pending values are reduced first, each by a redistribute of its own, to the layout that leaves least to
        move; `plan_many` reports the additional memory.

    Raises:
        ValueError: an argument is not allowed, or ranks pass different arguments. When layouts are first used, all
            ranks raise, and nothing was sent.
        RuntimeError: the arguments of another rank are not allowed; torch.distributed is not initialized; a graph is
            being made by `torch.export` or ``make_fx``, or a transform of `torch.func` is active.
        torch.distributed.DistBackendError: a transfer failed or timed out.
    """
    if _are_we_tracing():
        raise RuntimeError("redistribute_many must be called outside of graphs of torch.export and make_fx")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "redistribute_many must be called outside of transforms of torch.func, such as functionalize"
        )
    buffers: dict[str, Any] = {"bucket_bytes": bucket_bytes, "buckets": buckets}
    where: dict[str, Any] = {"group": group, "device": device}
    tensors = [_first(item) for item in items] if isinstance(items, list | tuple) else []
    if any(isinstance(x, DTensor) for x in tensors):
        for name, value in {**where, "out": out, "async_op": async_op or None}.items():
            if value is not None:
                raise argument_error(name, "left out for DTensors", value)
        return dtensors.redistribute(items, buffers)
    if torch.is_grad_enabled() and out is None and not async_op:
        tracked = [i for i, x in enumerate(tensors) if isinstance(x, torch.Tensor) and x.requires_grad]
        if tracked:
            return parts.redistribute(items, tracked, {**buffers, **where})
    plain: Any = items
    return redistribute_parts(plain, **buffers, **where, out=out, async_op=async_op)


def _first(item: Any) -> Any:
    """Returns the first value of an item, or None for an invalid item, which a later check reports."""
    return item[0] if isinstance(item, list | tuple) and item else None
