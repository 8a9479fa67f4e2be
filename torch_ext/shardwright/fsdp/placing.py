"""What the arguments of `sw.fully_shard` say about meshes and placements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..layouts import argument_values
from ..runtime import argument_checks
from .layouts import Choice, DataMesh, Layouts
from .options import Options, Placer

# Returns a Shard, None, or torch's ShardPlacementResult (torch 2.15).
ShardPlacer = Callable[[nn.Parameter], Any]


class Placing(NamedTuple):
    """How parameters are cut: the arguments of `sw.fully_shard` of these names, checked."""

    data: DataMesh
    shard_placement_fn: ShardPlacer | None
    options: Options
    reshard_after_forward: Any
    takes_host: bool = False  # parameters that are on the host although the mesh is not

    def layouts_of(self, name: str, parameter: nn.Parameter) -> Layouts:
        """Returns the layouts of a parameter. Raises ValueError if there are none."""
        shard, chosen = self._cut_of(name, parameter)
        takes_host = self.takes_host and parameter.device.type == "cpu"
        if parameter.device.type not in (chosen.mesh.device_type, "meta") and not takes_host:
            raise ValueError(
                f"{name}: is on {parameter.device}; allowed is the mesh's kind of device, {chosen.mesh.device_type}"
            )
        data = _own_data_of(chosen, name, parameter)
        count = len(data.data_dims)
        rest = self._chosen("placements", name, parameter, count)
        keep = self._chosen("kept_placements", name, parameter, count)
        store = self._chosen("store_placements", name, parameter, count)
        choice = Choice(_placed(shard, parameter, data) if rest is None else rest, store, keep)
        keep_ranks = kept_ranks_of(self.reshard_after_forward, data)
        if keep is None and keep_ranks is not None:
            if rest is not None:
                raise ValueError(
                    f"reshard_after_forward must be True, False or None with Options.placements, got {keep_ranks}; "
                    "Options.kept_placements says how the copy is sharded"
                )
            choice = choice._replace(keep_ranks=keep_ranks)
        return Layouts(parameter, data, choice)

    def _cut_of(self, name: str, parameter: nn.Parameter) -> tuple[Shard | None, DataMesh]:
        """What `shard_placement_fn` says: along which tensor dim a parameter is cut, and over which mesh."""
        function = self.shard_placement_fn
        result: Any = None if function is None else function(parameter)
        info = getattr(result, "mesh_info", None)
        data = self.data if info is None else self._data_of(name, info)
        shard = result if info is None else result.placement
        if shard is not None and not isinstance(shard, Shard):
            raise ValueError(
                f"shard_placement_fn: returned {result!r} for {name}; allowed is a Shard, None, or torch's "
                "ShardPlacementResult"
            )
        dim = 0 if shard is None else shard.dim
        if parameter.ndim > 0 and not -parameter.ndim <= dim < parameter.ndim:
            raise ValueError(f"shard_placement_fn: returned {shard!r} for {name} of shape {tuple(parameter.shape)}")
        return shard, data

    def _data_of(self, name: str, info: Any) -> DataMesh:
        """Reads torch's FSDPMeshInfo."""
        if self.data.same:
            raise ValueError(
                f"shard_placement_fn: returned a mesh of its own for {name} besides same_data_dims=, which names dims "
                "of `mesh`; allowed is one of the two. Give such parameters in a call of their own"
            )
        if getattr(info, "dp_mesh_dims", None) is not None:
            return _named_dims(info.spmd_mesh, info.dp_mesh_dims)
        if info.mesh.get_coordinate() is None:
            raise ValueError(
                f"shard_placement_fn: returned {info.mesh} for {name}, which does not hold rank {dist.get_rank()}; "
                "allowed are meshes that do"
            )
        return DataMesh(info.mesh, (None,) * info.mesh.ndim, info.shard_mesh_dim)

    def _chosen(self, argument: str, name: str, parameter: nn.Parameter, count: int) -> list[Placement] | None:
        function: Placer | None = getattr(self.options, argument)
        chosen = None if function is None else function(parameter)
        if chosen is None:
            return None
        placements = argument_checks.placements_of(chosen, count)
        if any(placement.is_partial() for placement in placements):
            raise ValueError(
                f"{argument} must return placements without pending reductions, got {placements} for {name}"
            )
        return placements


def _own_data_of(data: DataMesh, name: str, parameter: nn.Parameter) -> DataMesh:
    """With the mesh dims of a parameter that is a DTensor."""
    if isinstance(parameter, DTensor):
        if any(placement.is_partial() for placement in parameter.placements):
            raise ValueError(
                f"{name}: is placed as {tuple(parameter.placements)}; allowed are parameters without pending reductions"
            )
        if data.own_mesh is None:
            try:
                return data.with_own(parameter.device_mesh)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    if data.own_mesh is None:
        return data
    if not isinstance(parameter, DTensor) or parameter.device_mesh != data.own_mesh:
        raise ValueError(
            f"{name}: is a {type(parameter).__name__}; allowed with dp_mesh_dims are DTensors on {data.own_mesh}"
        )
    others = {index for index in data.own if index is not None}
    for dim, placement in enumerate(parameter.placements):
        if dim not in others and not placement.is_replicate():
            raise ValueError(
                f"{name}: is placed as {tuple(parameter.placements)}; allowed is Replicate() on mesh dim {dim}, "
                "which dp_mesh_dims names"
            )
    return data


def _placed(shard: Shard | None, parameter: nn.Parameter, data: DataMesh) -> list[Placement]:
    cuts = [parameter.ndim > 0 and mesh_dim == data.cut for mesh_dim in data.data_dims]
    dim = (0 if shard is None else shard.dim) % max(parameter.ndim, 1)
    return [Shard(dim) if cut else Replicate() for cut in cuts]


def data_mesh_of(mesh: Any, dp_mesh_dims: Any, same_data_dims: Any, device_type: str, has_placements: bool) -> DataMesh:
    """Returns the mesh dims over which parameters are cut. Raises ValueError for arguments that do not fit."""
    argument_checks.check_device_mesh("mesh", mesh)
    if mesh is None:
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh: {mesh} does not hold rank {dist.get_rank()}; all its ranks call, no others")
    if dp_mesh_dims is not None:
        data = _named_dims(mesh, dp_mesh_dims)
    else:
        if mesh.ndim > 2 and not has_placements:
            raise ValueError(f"mesh must have 1 or 2 dims without Options.placements, got {mesh.ndim}")
        data = DataMesh(mesh, (None,) * mesh.ndim, mesh.ndim - 1)
    if same_data_dims is None:
        return data
    names, _, _ = argument_values.device_mesh_parts(data.mesh)
    same = frozenset(argument_values.mesh_dim_indices(names, same_data_dims, "same_data_dims"))
    if not same <= set(data.data_dims):
        raise ValueError(
            f"same_data_dims: got {same_data_dims!r}; allowed are mesh dims over which parameters are cut, of "
            f"{[names[dim] for dim in data.data_dims]}"
        )
    return data._replace(same=same)


def _named_dims(mesh: DeviceMesh, dims: Any) -> DataMesh:
    """The mesh at rest for parameters that are DTensors on `mesh`: as FSDP2's, with several dims that cut as one."""
    if not hasattr(dims, "shard") or not hasattr(dims, "replicate"):
        raise ValueError(
            f"dp_mesh_dims: got a {type(dims).__name__}; allowed is torch's DataParallelMeshDims, or an object with "
            "its attributes shard and replicate: None, the name of a mesh dim, or several"
        )
    shard, replicate = _names(dims.shard), _names(dims.replicate)
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in (*shard, *replicate) if name not in names]
    if unknown or not (shard or replicate) or len({*shard, *replicate}) < len(shard) + len(replicate):
        raise ValueError(
            f"dp_mesh_dims: got shard={dims.shard!r} and replicate={dims.replicate!r}; allowed are names of the "
            f"mesh's dims, {names}, each once and at least one"
        )
    if len(shard) <= 1:
        own = tuple(None if name in (*shard, *replicate) else dim for dim, name in enumerate(names))
        return DataMesh(mesh, own, names.index(shard[0]) if shard else None, own_mesh=mesh)
    at = names.index(shard[0])
    if names[at : at + len(shard)] != shard:
        raise ValueError(
            f"dp_mesh_dims: got shard={dims.shard!r}; allowed are dims that are next to each other in {names}, in order"
        )
    parts: list[tuple[DeviceMesh, int | None]] = []
    cut = 0
    for dim, name in enumerate(names):
        if name == shard[0]:
            if replicate:
                parts.append((_as_one(mesh, replicate), None))
            cut = len(parts)
            parts.append((_as_one(mesh, shard), None))
        elif name not in shard and name not in replicate:
            parts.append((mesh[name], dim))
    at_rest = DeviceMesh._concatenate([part for part, _ in parts])
    return DataMesh(at_rest, tuple(dim for _, dim in parts), cut, own_mesh=mesh)


def _names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def _as_one(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def kept_ranks_of(reshard_after_forward: Any, data: DataMesh) -> int | None:
    """How many ranks share a copy that is kept; None for what is not such a number. Raises ValueError for others."""
    given = reshard_after_forward
    if given is None or isinstance(given, bool):
        return None
    size = 1 if data.cut is None else data.mesh.size(data.cut)
    if not isinstance(given, int) or given < 1 or size % given != 0:
        raise ValueError(
            f"reshard_after_forward: got {given!r}; allowed are True, False, None, and numbers of ranks that divide "
            f"{size}, over which parameters are cut"
        )
    return given
