"""Plain parameters with types of spmd_types. They are stored as DTensors, as by FSDP2 of torch 2.15."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..layouts.errors import argument_error

# Attribute of a parameter from `as_dtensor`: the placements of its gradients, which are plain tensors as in use.
GRADIENT = "_shardwright_gradient"


def as_dtensor(
    name: str, parameter: nn.Parameter, mesh: DeviceMesh | None, model_dims: Collection[int | None]
) -> nn.Parameter:
    """Returns a parameter as a DTensor on `mesh` if it is a plain tensor with types of spmd_types, else unchanged.

    The type of a gradient follows from the parameter's: R becomes P (a pending sum), P becomes R, I and S stay.

    Args:
        name: the parameter's name, for messages.
        mesh: the mesh that is given with dp_mesh_dims; None without dp_mesh_dims.
        model_dims: the dims of `mesh` that are not data-parallel.

    Raises:
        ValueError: there are types but no mesh, a type is missing for a dim in `model_dims`, or a type on another axis
            is not R.
    """
    spmd: Any = sys.modules.get("spmd_types")  # without the library there are no types
    types = {} if spmd is None or isinstance(parameter, DTensor) else dict(spmd.get_local_type(parameter))
    if not types:
        return parameter
    if mesh is None:
        raise argument_error("dp_mesh_dims", f"given, because {name} has types of spmd_types", None)
    spec = spmd.get_partition_spec(parameter)
    if spec is not None:
        types.update(spmd.types.partition_spec_to_shard_types(spec))
    placements, gradient = [], []
    for dim in range(mesh.ndim):
        axis = spmd.MeshAxis.of(mesh.get_group(dim))
        if dim in model_dims and axis not in types:
            raise argument_error(name, f"typed on mesh dim {dim} of {mesh}", f"types on {sorted(map(str, types))}")
        of_dim = types.pop(axis) if dim in model_dims else spmd.R
        placements.append(spmd.spmd_type_to_dtensor_placement(of_dim))
        gradient.append(spmd.spmd_type_to_dtensor_placement(of_dim.backward_type()))
    if wrong := {axis: each for axis, each in types.items() if each is not spmd.R}:
        raise argument_error(name, "of type R on data-parallel axes", wrong)
    with torch.no_grad():
        local = DTensor.from_local(parameter.data, mesh, placements, run_check=False)
    result = nn.Parameter(local, parameter.requires_grad)
    setattr(result, GRADIENT, tuple(gradient))
    return result
