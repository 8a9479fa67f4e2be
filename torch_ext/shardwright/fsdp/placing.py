"""What the arguments of `sw.fully_shard` say about meshes and placements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .. import argument_checks, argument_values
from .layouts import Choice, DataMesh, Layouts

Placer = Callable[[nn.Parameter], Sequence[Placement] | None]


class Placing(NamedTuple):
    """How parameters are cut: the arguments of `sw.fully_shard` of these names, checked."""

    data: DataMesh
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None
    rest: Placer | None
    store: Placer | None
    keep: Placer | None
    keep_ranks: int | None  # from reshard_after_forward
    takes_host: bool = False  # parameters that are on the host although the mesh is not

    def layouts_of(self, name: str, parameter: nn.Parameter) -> Layouts:
        """The layouts of a parameter. Raises ValueError if there are none."""
        takes_host = self.takes_host and parameter.device.type == "cpu"
        if parameter.device.type != self.data.mesh.device_type and not takes_host:
            raise ValueError(
                f"{name}: is on {parameter.device}; allowed is the mesh's kind of device, {self.data.mesh.device_type}"
            )
        data = self._data_of(name, parameter)
        count = len(data.data_dims)
        rest = self._chosen("rest", name, parameter, count)
        keep = self._chosen("keep", name, parameter, count)
        store = self._chosen("store", name, parameter, count)
        choice = Choice(self._default_of(name, parameter, data) if rest is None else rest, store, keep)
        if keep is None and self.keep_ranks is not None:
            if rest is not None:
                raise ValueError(
                    f"reshard_after_forward: got {self.keep_ranks} besides rest=; allowed is keep=, which says how the "
                    "copy is cut"
                )
            choice = choice._replace(keep_ranks=self.keep_ranks)
        return Layouts(parameter, data, choice)

    def _data_of(self, name: str, parameter: nn.Parameter) -> DataMesh:
        if isinstance(parameter, DTensor):
            if any(placement.is_partial() for placement in parameter.placements):
                raise ValueError(
                    f"{name}: is placed as {tuple(parameter.placements)}; allowed are parameters without pending "
                    "reductions"
                )
            if self.data.own_mesh is None:
                try:
                    return self.data.with_own(parameter.device_mesh)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
        if self.data.own_mesh is None:
            return self.data
        if not isinstance(parameter, DTensor) or parameter.device_mesh != self.data.own_mesh:
            raise ValueError(
                f"{name}: is a {type(parameter).__name__}; allowed with dp_mesh_dims are DTensors on "
                f"{self.data.own_mesh}"
            )
        others = {index for index in self.data.own if index is not None}
        for dim, placement in enumerate(parameter.placements):
            if dim not in others and not placement.is_replicate():
                raise ValueError(
                    f"{name}: is placed as {tuple(parameter.placements)}; allowed is Replicate() on mesh dim {dim}, "
                    "which dp_mesh_dims names"
                )
        return self.data

    def _chosen(self, argument: str, name: str, parameter: nn.Parameter, count: int) -> list[Placement] | None:
        function: Placer | None = getattr(self, argument)
        chosen = None if function is None else function(parameter)
        if chosen is None:
            return None
        placements = argument_checks.placements_of(chosen, count)
        if any(placement.is_partial() for placement in placements):
            raise ValueError(
                f"{argument}: got {placements} for {name}; allowed are placements without pending reductions"
            )
        return placements

    def _default_of(self, name: str, parameter: nn.Parameter, data: DataMesh) -> list[Placement]:
        function = self.shard_placement_fn
        shard = function(parameter) if function is not None else None
        if shard is not None and not isinstance(shard, Shard):
            raise ValueError(f"shard_placement_fn: returned {shard!r} for {name}; allowed is a Shard, or None")
        dim = 0 if shard is None else shard.dim
        if parameter.ndim > 0 and not -parameter.ndim <= dim < parameter.ndim:
            raise ValueError(f"shard_placement_fn: returned {shard!r} for {name} of shape {tuple(parameter.shape)}")
        cuts = [parameter.ndim > 0 and mesh_dim == data.cut for mesh_dim in data.data_dims]
        return [Shard(dim % parameter.ndim) if cut else Replicate() for cut in cuts]


def data_mesh_of(mesh: Any, dp_mesh_dims: Any, same_data_dims: Any, device_type: str, has_rest: bool) -> DataMesh:
    """Returns the mesh dims over which parameters are cut. Raises ValueError for arguments that do not fit."""
    argument_checks.check_device_mesh("mesh", mesh)
    if mesh is None:
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh: {mesh} does not hold rank {dist.get_rank()}; all its ranks call, no others")
    if dp_mesh_dims is not None:
        data = _named_dims(mesh, dp_mesh_dims)
    else:
        if mesh.ndim > 2 and not has_rest:
            raise ValueError(f"mesh: has {mesh.ndim} dims; allowed are 1 and 2, or any number with rest=")
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
