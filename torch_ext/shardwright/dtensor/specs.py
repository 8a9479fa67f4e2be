"""Conversions between the specs of DTensors (`DTensorSpec`) and layouts."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence

import torch
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from .._native import _planner
from ..layouts import argument_values
from ..layouts.layout import Layout, Mesh
from ..runtime import executables, groups


def layout_of_spec(spec: DTensorSpec, shape: Sequence[int], dtype: torch.dtype, mesh: Mesh | None = None) -> Layout:
    """Returns the layout that a DTensorSpec describes for this shape. Raises ValueError for unknown placements.

    `mesh`: the mesh of the layout, if its ranks are not global ranks.
    """
    mesh = Mesh(spec.mesh) if mesh is None else mesh
    if spec.use_strided_shard_as_shard_order:
        return Layout(mesh, shape, spec.placements, dtype)
    return Layout(
        mesh, shape, spec.placements, dtype, argument_values.order_dict(mesh.dim_names, spec.shard_order), "literal"
    )


@executables.cached
def layout_of(spec: DTensorSpec) -> _planner.Layout:
    """Returns the layout of a DTensor with this spec, from a cache."""
    assert spec.tensor_meta is not None
    return layout_of_spec(spec, spec.shape, spec.tensor_meta.dtype)


def row_major_spec(
    mesh: DeviceMesh, layout: _planner.Layout, placements: tuple[Placement, ...] | None = None
) -> DTensorSpec:
    """Returns the spec of a row-major tensor, from a cache.

    Layouts that differ only along dims of size 1 are equal. Pass `placements` if the placements there matter.
    """
    return _row_major_spec(mesh, groups.key_of_mesh(mesh), layout, placements)


def with_placements(
    spec: DTensorSpec, placements: tuple[Placement, ...], dtype: torch.dtype | None = None, is_row_major: bool = False
) -> DTensorSpec:
    """Returns the spec with other placements in the same shard order, and if given, another dtype or row-major."""
    assert spec.tensor_meta is not None
    meta = spec.tensor_meta
    stride = tuple(make_contiguous_strides_for(meta.shape)) if is_row_major else meta.stride
    meta = TensorMeta(meta.shape, stride, dtype or meta.dtype)
    encodes_order = spec.use_strided_shard_as_shard_order
    order = None if encodes_order else spec.shard_order
    return DTensorSpec(spec.mesh, placements, meta, order, use_strided_shard_as_shard_order=encodes_order)


@executables.cached
def _row_major_spec(
    mesh: DeviceMesh, _: Hashable, layout: _planner.Layout, placements: tuple[Placement, ...] | None
) -> DTensorSpec:
    """Does the work of `row_major_spec`. `_` is the key of the mesh's process groups, by which results are cached."""
    stride = make_contiguous_strides_for(layout.shape)
    meta = TensorMeta(torch.Size(layout.shape), tuple(stride), getattr(torch, layout.dtype))
    return DTensorSpec(mesh, placements or tuple(map(placement_of, layout.placements)), tensor_meta=meta)


_SHARD = re.compile(r"S\((\d+)\)|SS\((\d+),(\d+)\)")  # S(dim) or SS(dim,split factor)


def placement_of(text: str) -> Placement:
    """Returns torch's placement for the text of a Layout's placement. Any pending reduction becomes a sum."""
    cut = _SHARD.fullmatch(text)
    if cut is None:
        return Partial() if text.startswith("P") else Replicate()
    return _StridedShard(int(cut[2]), split_factor=int(cut[3])) if cut[1] is None else Shard(int(cut[1]))


def spec_of_layout(layout: _planner.Layout, like: DTensorSpec, meta: TensorMeta | None) -> DTensorSpec | None:
    """Returns the spec of a layout, with the mesh and the pending reductions of `like`. None if DTensor has no such
    spec.

    The spec encodes a shard order in split factors, and then has `use_strided_shard_as_shard_order`. Example: order
    [tp, dp] on a mesh (dp=2, tp=4): tp cuts before dp although dp is the earlier mesh dim, so dp gets split factor 4.
    """
    if not layout.mesh.has_same_ranks(Mesh(like.mesh)) or not _planner.is_known_to_dtensor(layout):
        return None
    pairs = zip(layout.placements, like.placements, strict=True)
    placements = [old if old.is_partial() else placement_of(text) for text, old in pairs]
    encodes_order = False
    for dim, order in layout.shard_order.items():
        for i, mesh_dim in enumerate(order):
            factor = math.prod(like.mesh.size(earlier) for earlier in order[:i] if earlier > mesh_dim)
            if factor > 1:
                placements[mesh_dim] = _StridedShard(dim, split_factor=factor)
                encodes_order = True
    return DTensorSpec(like.mesh, tuple(placements), meta, use_strided_shard_as_shard_order=encodes_order)


def has_default_order(spec: DTensorSpec) -> bool:
    """Returns True unless the spec has an explicit shard order in which a later mesh dim cuts before an earlier one."""
    return spec.use_strided_shard_as_shard_order or DTensorSpec.is_default_device_order(spec.shard_order)


def is_strided(spec: DTensorSpec) -> bool:
    """Returns True if some placement is a strided shard."""
    return any(isinstance(placement, _StridedShard) for placement in spec.placements)
