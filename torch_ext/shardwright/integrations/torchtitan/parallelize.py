"""torchtitan's functions that parallelize a model, with functions of shardwright in place of those that they call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import spmd_types
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import fsdp
from torchtitan.distributed.parallel_dims import MeshAxisName, ParallelDims, SpmdLayout
from torchtitan.models.common import dist_gemm
from torchtitan.protocols import module
from torchtitan.protocols.sharding import ShardingConfig

from ... import drop_in
from ...fsdp import fully_shard
from ...layouts.errors import argument_error
from ...spmd.redistributes import redistribute
from ..linears import REPLACEMENTS
from .attention import replace_attention

Types = Mapping[MeshAxisName, Any]

MESH_ORDER = (MeshAxisName.DP, MeshAxisName.CP, MeshAxisName.TP)  # axes of activations, outermost first


def with_our_functions(parallelize_fn: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Wraps `parallelize_fn`. The wrapper first replaces functions of torchtitan, for the rest of the process."""

    @functools.wraps(parallelize_fn)
    def parallelize(*args: Any, **kwargs: Any) -> nn.Module:
        _check_options(**kwargs)
        drop_in.enable()
        fsdp.fully_shard = fully_shard
        module.spmd_redistribute_per_axis = redistribute_per_axis
        module.spmd_validate_redistributions = check_redistributes
        for name, function in REPLACEMENTS.items():
            setattr(dist_gemm, name, SimpleNamespace(apply=function))
        if kwargs["parallel_dims"].cp_enabled:
            replace_attention(*args, **kwargs)
        return parallelize_fn(*args, **kwargs)

    return parallelize


def _check_options(*, training: Any, compile_config: Any, parallel_dims: ParallelDims, **_: Any) -> None:
    """Raises ValueError if an option is not supported."""
    if not training.disable_cuda_graphs:
        allowed = "True with shardwright, because torchtitan captures the second step and sw.fully_shard times it"
        raise argument_error("training.disable_cuda_graphs", allowed, False)
    is_parallel = parallel_dims.tp_enabled or parallel_dims.ep_enabled
    if is_parallel and compile_config.enable and "model" in compile_config.components:
        allowed = "without 'model' with tensor or expert parallelism, whose communication cannot be compiled"
        raise argument_error("compile.components", allowed, compile_config.components)


def redistribute_per_axis(x: torch.Tensor, mesh: DeviceMesh | None, src_types: Types, dst_types: Types) -> torch.Tensor:
    """Moves a local tensor between types. Replaces torchtitan's function, which moves over one mesh axis only.

    Raises:
        RuntimeError: type checking is on. The weights of `sw.fully_shard` have no types.
    """
    if spmd_types.is_type_checking():
        raise RuntimeError("debug.spmd_typechecking must be False with shardwright, got True; check types without it")
    if mesh is None:
        return x
    names = mesh.mesh_dim_names or ()  # without the axes that are off
    src, dst = (
        {axis.value: of_axis for axis, of_axis in types.items() if axis.value in names}
        for types in (src_types, dst_types)
    )
    return redistribute(x, mesh, src, dst)


def check_redistributes(config: ShardingConfig) -> None:
    """Checks the redistributes of a module. Replaces torchtitan's function, which refuses moves over several mesh axes.

    Raises:
        ValueError: the axes of source and destination differ, an axis with type V changes, or the axes that change are
            not the innermost ones of a tensor dim.
    """
    src, dst = config.in_src_shardings or {}, config.in_dst_shardings or {}
    for name in src.keys() & dst.keys():
        _check_redistribute(f"input {name}", src[name], dst[name])
    if config.out_src_shardings is not None and config.out_dst_shardings is not None:
        _check_redistribute("output", config.out_src_shardings, config.out_dst_shardings)


def _check_redistribute(name: str, src: SpmdLayout, dst: SpmdLayout) -> None:
    """Checks one redistribute. Raises ValueError."""
    before, after = src.per_axis_spmd_types(), dst.per_axis_spmd_types()
    if before.keys() != after.keys():
        raise argument_error(f"axes of {name}", f"those of its source, {list(before)}", list(after))
    changed = [axis for axis in before if before[axis] != after[axis]]
    for types in (before, after):
        if any(types[axis] is spmd_types.V for axis in changed):
            raise argument_error(f"types of {name}", "R, I, P or S(dim) on axes that change", types)
    if _unchanged(name, src, before, changed) != _unchanged(name, dst, after, changed):
        raise argument_error(f"axes of {name} that do not change", "the same for each tensor dim", f"{src} and {dst}")


def _unchanged(name: str, layout: SpmdLayout, types: Types, changed: list[MeshAxisName]) -> dict[int, list[Any]]:
    """Returns the unchanged axes of each tensor dim. Raises ValueError unless the others follow, in mesh order."""
    if layout.partition_spec is None:  # each dim is sharded by one axis
        by_dim = {each.dim: [axis] for axis, each in types.items() if isinstance(each, spmd_types.Shard)}
    else:
        entries = dict(enumerate(layout.partition_spec))
        by_dim = {dim: list(axes) if isinstance(axes, tuple) else [axes] for dim, axes in entries.items() if axes}
    unchanged = {dim: [axis for axis in axes if axis not in changed] for dim, axes in by_dim.items()}
    for dim, axes in by_dim.items():
        if axes != unchanged[dim] + [axis for axis in MESH_ORDER if axis in axes and axis in changed]:
            raise argument_error(f"axes of {name} that change", f"innermost, in the order {MESH_ORDER}", axes)
    return {dim: axes for dim, axes in unchanged.items() if axes}
