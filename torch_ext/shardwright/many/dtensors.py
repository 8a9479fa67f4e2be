"""`redistribute_many` of DTensors, with autograd. Items on the same ranks move together, and so do their gradients."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ..dtensor import crossing, masks
from ..dtensor.specs import layout_of, layout_of_spec
from ..layouts.errors import argument_error
from ..layouts.layout import Layout, Mesh
from ..runtime import argument_checks, dynamo, executables, groups
from ..runtime.many import redistribute_parts
from ..runtime.plain_tensors import redistribute_part

_ITEMS = "a list of (DTensor, placements) or (DTensor, placements, mesh)"


class _Item(NamedTuple):
    """A DTensor to redistribute."""

    x: DTensor
    source: DTensorSpec  # of x, as all ranks know it
    target: DTensorSpec  # of the result


# The specs of results, by spec of x, mesh and placements. Making a spec takes longer than moving a small tensor.
_targets: executables.PlanningCache[DTensorSpec] = executables.PlanningCache()


def redistribute(entries: Sequence[Any], options: Mapping[str, Any]) -> list[DTensor]:
    """Runs `redistribute_many` for DTensors. `options`: further arguments of `redistribute_parts`."""
    groups.check_initialized()
    return _move([_item(i, entry) for i, entry in enumerate(entries)], options)


def _item(i: int, entry: Any) -> _Item:
    """Reads entry `i` of the list. Raises ValueError if it is not allowed."""
    if not isinstance(entry, list | tuple) or len(entry) not in (2, 3) or not isinstance(entry[0], DTensor):
        raise argument_error("items", f"{_ITEMS}, or have no DTensors", f"{entry!r:.80} as item {i}")
    x, placements, mesh = (*entry, None)[:3]
    argument_checks.check_device_mesh(f"items[{i}]: mesh", mesh)
    mesh = x.device_mesh if mesh is None or not crossing.is_other_mesh(x, mesh) else mesh
    placements = argument_checks.placements_of(placements, mesh.ndim)
    if mesh is x.device_mesh and tuple(placements) == x.placements:
        return _Item(x, x._spec, x._spec)
    key = (x._spec, mesh, groups.key_of_mesh(mesh), tuple(placements))
    allowed = "in a list, or x's own placements"
    make = functools.partial(crossing.target_spec, x, mesh, placements, x.dtype, allowed)
    return _Item(x, x._spec, _targets.get_or_make(key, make))


def _move(items: Sequence[_Item], options: Mapping[str, Any], in_backward: bool = False) -> list[DTensor]:
    """Moves items in batches, one for all items whose two meshes together have the same ranks.

    Returns the results in order; they are differentiable. Ranks compare the items that require gradients. In a
    backward all count, because some ranks may have gradients to differentiate that others have not.
    """
    batches: dict[tuple[int, ...], list[int]] = {}
    for i, item in enumerate(items):
        batches.setdefault(_ranks(item.source.mesh, item.target.mesh), []).append(i)
    results: dict[int, DTensor] = {}
    for ranks, indices in batches.items():
        batch = [items[i] for i in indices]
        is_recorded = torch.is_grad_enabled()
        tracked = [i for i, (x, _, _) in enumerate(batch) if is_recorded and (in_backward or x.requires_grad)]
        moved: list[DTensor] = []
        if tracked:
            xs = [batch[i].x for i in tracked]
            outputs = _RedistributeMany.apply(batch, ranks, tracked, options, moved, *xs)  # type: ignore[no-untyped-call]
            for i, output in zip(tracked, outputs, strict=True):
                moved[i] = output
        else:
            with torch.no_grad():  # the local tensor of a DTensor may require gradients that the DTensor does not
                moved = _results_of(batch, ranks, tracked, options)
        results.update(zip(indices, moved, strict=True))
    return [results[i] for i in range(len(items))]


@executables.cached
def _ranks(source: DeviceMesh, target: DeviceMesh) -> tuple[int, ...]:
    """Returns the ranks of two meshes, ascending."""
    return tuple(sorted({*Mesh(source).ranks, *Mesh(target).ranks}))


class _RedistributeMany(torch.autograd.Function):
    """Moves `batch`, whose meshes have `ranks`, and adds the results to `moved`. Returns those of `tracked`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        batch: Sequence[_Item],
        ranks: tuple[int, ...],
        tracked: Sequence[int],
        options: Mapping[str, Any],
        moved: list[DTensor],
        *xs: DTensor,
    ) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.specs, ctx.options = [batch[i][1:] for i in tracked], options
        moved += _results_of(batch, ranks, tracked, options)
        return tuple(moved[i] for i in tracked)

    @staticmethod
    @dynamo.skipped
    def backward(ctx: Any, *gradients: DTensor | None) -> tuple[DTensor | None, ...]:
        items = [_gradient_item(g, source, target) for g, (source, target) in zip(gradients, ctx.specs, strict=True)]
        return None, None, None, None, None, *_move(items, ctx.options, in_backward=True)


def _gradient_item(gradient: DTensor | None, source: DTensorSpec, target: DTensorSpec) -> _Item:
    """Returns the move of a gradient; of zeros if this rank has none.

    As in PyTorch's own backward, a placement that is the same pending reduction in gradient and x stays pending.
    """
    assert source.tensor_meta is not None
    dtype = source.tensor_meta.dtype
    gradient, source_spec, target_spec = crossing.gradient_move(gradient, source, target, dtype, False, None, True)
    if source_spec.mesh == target_spec.mesh:
        pairs = zip(source.placements, source_spec.placements, target_spec.placements, strict=True)
        placements = tuple(old if old.is_partial() and old == now else new for old, now, new in pairs)
        target_spec = crossing.with_dtype(target_spec, dtype, placements)
    return _Item(gradient, source_spec, target_spec)


def _results_of(
    batch: Sequence[_Item], ranks: tuple[int, ...], tracked: Sequence[int], options: Mapping[str, Any]
) -> list[DTensor]:
    """Moves a batch whose meshes have `ranks`. Returns the results, without gradients."""
    locals_ = [x._local_tensor for x, _, _ in batch]
    if dist.get_rank() in ranks:
        locals_ = _move_parts(batch, ranks, tracked, options)
    return [DTensor(local, to, requires_grad=False) for local, (_, _, to) in zip(locals_, batch, strict=True)]  # type: ignore[call-arg]


def _move_parts(
    batch: Sequence[_Item], ranks: tuple[int, ...], tracked: Sequence[int], options: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Moves this rank's parts of a batch. Returns its local tensors of the results."""
    mesh = batch[0].source.mesh
    results: dict[int, torch.Tensor] = {}
    parts: dict[int, tuple[torch.Tensor | None, Layout, Layout]] = {}
    for i, (x, source, target) in enumerate(batch):
        local = x._local_tensor if source.mesh.get_coordinate() is not None else None
        src, dst = _layout(source, ranks), _layout(target, ranks)
        if source is not target and local is not None:
            masks.apply_masks(local, filter(masks.is_masked, source.placements))
        if dst.has_pending and src != dst:  # a batch has no pending results
            assert local is not None
            layouts = layout_of(masks.without_masks(source)), layout_of(target)
            results[i] = redistribute_part(local, *layouts, source.mesh, False, True)
        else:
            parts[i] = (local, src, dst)
    group = None if len(ranks) == dist.get_world_size() else groups.find_or_make(ranks, groups.owner_of(mesh))
    where: dict[str, Any] = {"group": group, "device": mesh.device_type}
    moved = redistribute_parts(list(parts.values()), tracked=tracked, **where, **options)
    assert isinstance(moved, list)
    results.update(zip(parts, moved, strict=True))
    return [results[i] for i in range(len(batch))]


def _layout(spec: DTensorSpec, ranks: tuple[int, ...]) -> Layout:
    """Returns the layout of a spec without masks. Its mesh has the indices of its ranks in `ranks`."""
    return _cached_layout(masks.without_masks(spec) if any(map(masks.is_masked, spec.placements)) else spec, ranks)


@executables.cached
def _cached_layout(spec: DTensorSpec, ranks: tuple[int, ...]) -> Layout:
    """Does the work of `_layout` for a spec without masks, from a cache."""
    assert spec.tensor_meta is not None
    mesh = Mesh(spec.mesh)
    inner = Mesh(dict(zip(mesh.dim_names, mesh.shape, strict=True)), [bisect_left(ranks, rank) for rank in mesh.ranks])
    return layout_of_spec(spec, spec.shape, spec.tensor_meta.dtype, inner)
