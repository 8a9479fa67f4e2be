"""Layouts of DTensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .. import argument_values
from ..layout import Layout, Mesh


def layout_of_spec(spec: DTensorSpec, shape: Sequence[int], dtype: torch.dtype) -> Layout:
    """Returns the layout that a DTensorSpec describes for this shape. Raises ValueError for unknown placements."""
    mesh = Mesh(spec.mesh)
    if spec.use_strided_shard_as_shard_order:
        return Layout(mesh, shape, spec.placements, dtype)
    return Layout(
        mesh, shape, spec.placements, dtype, argument_values.order_dict(mesh.dim_names, spec.shard_order), "literal"
    )
