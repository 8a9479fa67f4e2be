"""A trainer's DTensors as parts with layouts on the ranks of a connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .._native import _planner
from ..dtensor.specs import layout_of_spec
from ..layouts.layout import Layout, Mesh


def in_connection(
    state_dict: Mapping[str, torch.Tensor], ranks: Sequence[int]
) -> dict[str, torch.Tensor | tuple[torch.Tensor, _planner.Layout]]:
    """Returns a state dict for `transfer` in the group of a `connect`, in which DTensors are not allowed.

    Each DTensor becomes a pair of its local tensor and its layout on the ranks of the group; nothing is copied. Pass a
    function to `transfer`, such as ``lambda: in_connection(model.state_dict(), ranks)``, if parameters may be replaced.

    Args:
        state_dict: tensors by name: DTensors, or plain tensors that are equal on all ranks of the job.
        ranks: the ranks of this job in the group, as `Connection.ranks` returns them.
    """
    result: dict[str, torch.Tensor | tuple[torch.Tensor, _planner.Layout]] = {}
    for name, value in state_dict.items():
        if isinstance(value, DTensor):
            layout = layout_of_spec(value._spec, value.shape, value.dtype)
            result[name] = value._local_tensor, _moved(layout, ranks)
        else:
            result[name] = value
    return result


def _moved(layout: _planner.Layout, ranks: Sequence[int]) -> _planner.Layout:
    """Returns the layout on other ranks: rank i becomes ``ranks[i]``."""
    mesh = layout.mesh
    moved = Mesh(dict(zip(mesh.dim_names, mesh.shape)), [ranks[rank] for rank in mesh.ranks])
    properties: Any = layout.shape, layout.placements, layout.dtype, layout.shard_order, "literal", layout.flattened
    return Layout(moved, *properties)
