"""The arguments of `sw.fully_shard`: `Options`, meshes, placements, modules and parameters, checked.

Data-parallel mesh dims are those that `sw.fully_shard` shards or replicates over. Parameters that are DTensors already
may have further mesh dims of their own (layouts.py: DataMesh).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..layouts import argument_values
from ..layouts.errors import argument_error
from ..runtime import argument_checks
from ..spmd.parameters import as_dtensor
from .extensions import has_extension, is_subclass
from .formats import MessageFormat, check_message_format
from .layouts import ChosenPlacements, DataMesh, Layouts
from .methods import ATTRIBUTE, ShardedModule, original_class

# A function of a parameter that returns its placements on all data-parallel mesh dims, or None for the default.
PlacementFn = Callable[[nn.Parameter], Sequence[Placement] | None]


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of one call of `fully_shard` that FSDP2 does not have. All ranks pass equal options.

    ``memory_limit``, ``prefetch`` and ``chunked`` describe a whole model, so only the outermost call may set them.

    Args:
        placements: function that returns the placements of a sharded parameter on all data-parallel mesh dims, such as
            ``[Shard(0), Shard(1)]``, or None for the default. It replaces `shard_placement_fn`.
        store_placements: function that returns the placements of the module's parameters, which optimizers and state
            dicts see. None: those of `placements`. With ``placements=lambda p: [Replicate()]`` and
            ``store_placements=lambda p: [Shard(0)]``, gradients are reduced to shards, the optimizer updates shards,
            and the next step gathers them once (ZeRO-1).
        kept_placements: function that returns the placements of a copy that is kept when the unit is released between
            two uses. None: no copy, unless `reshard_after_forward` is a number.
        same_data_dims: mesh dims, by name or index, along which all ranks have the same data, and so the same
            gradients. Gradients are not reduced along them. Use it to shard weights also over tensor-parallel ranks.
        message_format: format of weights and gradients in messages. ``torch.bfloat16`` and ``torch.float16``: both in
            that dtype. ``"float8"``, ``"float8_rowwise"`` and ``"mxfp8"``: weights of at least two dims in eight bits
            with scales, gradients in bfloat16. ``"nvfp4"``: such weights in four bits, which requires torchao.
            Gradients are then summed in reduce_dtype, by default float32. A function from a parameter to one of these
            or None chooses for each parameter.
        matmul_format: ``"float8"``: `nn.Linear` modules multiply by the received float8, MXFP8 or NVFP4 weights
            (`message_format`) without converting them, by `torch._scaled_mm`, and quantize their inputs. Other weights
            are converted to param_dtype.
        memory_limit: bytes on this rank for gathered weights, unreduced gradients and gathered activations of
            `checkpoint_cut`. Default: enough to gather one unit ahead and to reduce gradients during the next backward.
        prefetch: number of uses by which gathers start ahead. Only uses that need a unit count if the use before them
            did not need it. ``"auto"`` begins with 1; after a timed step it is the least number that is predicted to be
            as fast as any in the same memory.
        chunked: True gathers row-sharded weights of `nn.Linear` in chunks during their matmuls, and reduces their
            gradients in chunks during the matmuls that compute them, where this is predicted to save waiting or
            memory. Matmuls of some of the rows may round differently.

    Raises:
        ValueError: a value is not allowed.
    """

    placements: PlacementFn | None = None
    store_placements: PlacementFn | None = None
    kept_placements: PlacementFn | None = None
    same_data_dims: Sequence[str | int] | None = None
    message_format: MessageFormat | Callable[[nn.Parameter], MessageFormat] = None
    matmul_format: str | None = None
    memory_limit: int | None = None
    prefetch: int | str = "auto"
    chunked: bool = False

    def __post_init__(self) -> None:
        if not callable(self.message_format):
            check_message_format(self.message_format)
        _check(self, "matmul_format", "'float8' or None", self.matmul_format in (None, "float8"))
        has_limit = self.memory_limit is not None
        _check(self, "memory_limit", "a number of bytes >= 0 or None", not has_limit or _is_count(self.memory_limit))
        _check(self, "prefetch", '"auto" or an integer >= 0', self.prefetch == "auto" or _is_count(self.prefetch))
        _check(self, "chunked", "True or False", isinstance(self.chunked, bool))
        for name in ("placements", "store_placements", "kept_placements"):
            value = getattr(self, name)
            _check(self, name, "a function of a parameter or None", value is None or callable(value))

    @property
    def of_model(self) -> dict[str, object]:
        """The settings that only the outermost call may set."""
        return {"memory_limit": self.memory_limit, "prefetch": self.prefetch, "chunked": self.chunked}


def checked_options(options: Any) -> Options:
    """Returns the options, by default `Options()`. Raises ValueError for another type."""
    if options is not None and not isinstance(options, Options):
        raise argument_error("options", "a sw.fsdp.Options or None", f"a {type(options).__name__}")
    return options or Options()


def _check(options: Options, name: str, allowed: str, is_allowed: bool) -> None:
    """Raises ValueError unless the option `name` is allowed; the message has its value."""
    if not is_allowed:
        raise argument_error(name, allowed, repr(getattr(options, name)))


def _is_count(value: Any) -> bool:
    """Returns true for integers of at least 0, except bools."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# ---- meshes and placements

# A function that returns a Shard, None, or torch's ShardPlacementResult (torch 2.15).
ShardPlacementFn = Callable[[nn.Parameter], Any]


class ShardingArguments(NamedTuple):
    """The checked arguments of `sw.fully_shard` that decide how parameters are sharded."""

    data: DataMesh
    shard_placement_fn: ShardPlacementFn | None
    options: Options
    reshard_after_forward: Any
    allows_host: bool = False  # parameters may be in host memory although the mesh has another device type

    def layouts_of(self, name: str, parameter: nn.Parameter) -> Layouts:
        """Returns the layouts of a parameter. Raises ValueError if the arguments do not fit it."""
        shard, chosen = self._shard_of(name, parameter)
        allows_host = self.allows_host and parameter.device.type == "cpu"
        if parameter.device.type not in (chosen.mesh.device_type, "meta") and not allows_host:
            raise argument_error(name, f"on the device type of mesh ({chosen.mesh.device_type})", parameter.device)
        parameter = as_dtensor(name, parameter, chosen.own_mesh, chosen.own)
        data = _own_data_of(chosen, name, parameter)
        count = len(data.data_dims)
        shards = self._chosen("placements", name, parameter, count)
        keep = self._chosen("kept_placements", name, parameter, count)
        store = self._chosen("store_placements", name, parameter, count)
        placements = _default_placements(shard, parameter, data) if shards is None else shards
        choice = ChosenPlacements(placements, store, keep)
        keep_ranks = kept_ranks_of(self.reshard_after_forward, data)
        if keep is None and keep_ranks is not None:
            if shards is not None:
                raise ValueError(
                    f"reshard_after_forward must be True, False or None with Options.placements, got {keep_ranks}. "
                    "Set the placements of the copy with Options.kept_placements"
                )
            choice = choice._replace(keep_ranks=keep_ranks)
        return Layouts(parameter, data, choice)

    def _shard_of(self, name: str, parameter: nn.Parameter) -> tuple[Shard | None, DataMesh]:
        """Returns the Shard that `shard_placement_fn` chose (None: dim 0), and the mesh to shard over."""
        function = self.shard_placement_fn
        result: Any = None if function is None else function(parameter)
        info = getattr(result, "mesh_info", None)
        data = self.data if info is None else self._data_of(name, info)
        shard = result if info is None else result.placement
        if shard is not None and not isinstance(shard, Shard):
            raise ValueError(
                f"shard_placement_fn must return a Shard, None or torch's ShardPlacementResult for {name}, got "
                f"{result!r}"
            )
        dim = 0 if shard is None else shard.dim
        if parameter.ndim > 0 and not -parameter.ndim <= dim < parameter.ndim:
            dims = f"[{-parameter.ndim}, {parameter.ndim - 1}]"
            raise ValueError(f"shard_placement_fn must return a Shard with dim in {dims} for {name}, got {shard!r}")
        return shard, data

    def _data_of(self, name: str, info: Any) -> DataMesh:
        """Returns the mesh of an FSDPMeshInfo that `shard_placement_fn` chose. Raises ValueError if it is invalid."""
        if self.data.same:
            raise ValueError(
                "shard_placement_fn must not return a mesh if same_data_dims names dims of `mesh`, got one for "
                f"{name}. Shard such parameters in a separate call"
            )
        if getattr(info, "dp_mesh_dims", None) is not None:
            return _named_dims(info.spmd_mesh, info.dp_mesh_dims)
        if info.mesh.get_coordinate() is None:
            here = f"this rank ({dist.get_rank()}), for {name}"
            raise ValueError(f"shard_placement_fn must return a mesh that contains {here}, got {info.mesh}")
        return DataMesh(info.mesh, (None,) * info.mesh.ndim, info.shard_mesh_dim)

    def _chosen(self, argument: str, name: str, parameter: nn.Parameter, count: int) -> list[Placement] | None:
        """Returns the placements that the function `argument` of the options chooses; None if it chooses none.

        Args:
            count: number of data-parallel mesh dims.
        """
        function: PlacementFn | None = getattr(self.options, argument)
        chosen = None if function is None else function(parameter)
        if chosen is None:
            return None
        placements = argument_checks.placements_of(chosen, count)
        if any(placement.is_partial() for placement in placements):
            raise ValueError(f"the function Options.{argument} must not return Partial, got {placements} for {name}")
        return placements


def _own_data_of(data: DataMesh, name: str, parameter: nn.Parameter) -> DataMesh:
    """Returns `data` with the mesh dims of a parameter that is a DTensor. Raises ValueError if they conflict."""
    if isinstance(parameter, DTensor):
        if any(placement.is_partial() for placement in parameter.placements):
            raise argument_error(name, "a DTensor without pending reductions", tuple(parameter.placements))
        if data.own_mesh is None:
            try:
                return data.with_own(parameter.device_mesh)
            except ValueError as error:
                raise ValueError(f"{name} {error}") from error
    if data.own_mesh is None:
        return data
    if not isinstance(parameter, DTensor) or parameter.device_mesh != data.own_mesh:
        given = f"a {type(parameter).__name__} on {getattr(parameter, 'device_mesh', parameter.device)}"
        raise argument_error(name, f"a DTensor on {data.own_mesh} with dp_mesh_dims", given)
    others = {index for index in data.own if index is not None}
    for dim, placement in enumerate(parameter.placements):
        if dim not in others and not placement.is_replicate():
            allowed = f"replicated over mesh dim {dim}, which is in dp_mesh_dims"
            raise argument_error(name, allowed, tuple(parameter.placements))
    return data


def _default_placements(shard: Shard | None, parameter: nn.Parameter, data: DataMesh) -> list[Placement]:
    """Returns the default placements: sharded over `data.shard_mesh_dim`, replicated over other data-parallel dims."""
    dim = (0 if shard is None else shard.dim) % max(parameter.ndim, 1)
    shard_mesh_dim = data.shard_mesh_dim if parameter.ndim > 0 else None
    return [Shard(dim) if mesh_dim == shard_mesh_dim else Replicate() for mesh_dim in data.data_dims]


def data_mesh_of(mesh: Any, dp_mesh_dims: Any, same_data_dims: Any, device_type: str, has_placements: bool) -> DataMesh:
    """Returns the mesh and the mesh dims over which to shard parameters. Raises ValueError if arguments conflict."""
    argument_checks.check_device_mesh("mesh", mesh)
    if mesh is None:
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    if mesh.get_coordinate() is None:
        allowed = f"a mesh that contains this rank ({dist.get_rank()})"
        raise argument_error("mesh", allowed, f"{mesh}; only ranks of the mesh call sw.fully_shard")
    if dp_mesh_dims is not None:
        data = _named_dims(mesh, dp_mesh_dims)
    else:
        if mesh.ndim > 2 and not has_placements:
            raise ValueError(f"mesh must have 1 or 2 dims if Options.placements is None, got {mesh.ndim}")
        data = DataMesh(mesh, (None,) * mesh.ndim, mesh.ndim - 1)
    if same_data_dims is None:
        return data
    names, _, _ = argument_values.device_mesh_parts(data.mesh)
    same = frozenset(argument_values.mesh_dim_indices(names, same_data_dims, "same_data_dims"))
    if not same <= set(data.data_dims):
        allowed = f"some of the data-parallel mesh dims {[names[dim] for dim in data.data_dims]}"
        raise argument_error("same_data_dims", allowed, repr(same_data_dims))
    return data._replace(same=same)


def _named_dims(mesh: DeviceMesh, dims: Any) -> DataMesh:
    """Returns the mesh for DTensors on `mesh` with dp_mesh_dims. As in FSDP2, several `shard` dims become one dim."""
    if not hasattr(dims, "shard") or not hasattr(dims, "replicate"):
        raise ValueError(
            "dp_mesh_dims must be torch's DataParallelMeshDims, or an object with its attributes shard and replicate, "
            f"got a {type(dims).__name__}. Each attribute is None or names of mesh dims"
        )
    shard, replicate = _names(dims.shard), _names(dims.replicate)
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in (*shard, *replicate) if name not in names]
    if unknown or not (shard or replicate) or len({*shard, *replicate}) < len(shard) + len(replicate):
        given = f"shard={dims.shard!r} and replicate={dims.replicate!r}"
        raise argument_error("dp_mesh_dims", f"at least one of the mesh dims {names}, each at most once", given)
    if len(shard) <= 1:
        own = tuple(None if name in (*shard, *replicate) else dim for dim, name in enumerate(names))
        return DataMesh(mesh, own, names.index(shard[0]) if shard else None, own_mesh=mesh)
    at = names.index(shard[0])
    if names[at : at + len(shard)] != shard:
        raise argument_error("shard of dp_mesh_dims", f"adjacent dims of {names}, in order", repr(dims.shard))
    parts: list[tuple[DeviceMesh, int | None]] = []  # submeshes of one dim, each with its item of `DataMesh.own`
    shard_mesh_dim = 0
    for dim, name in enumerate(names):
        if name == shard[0]:
            if replicate:
                parts.append((_flattened_submesh(mesh, replicate), None))
            shard_mesh_dim = len(parts)
            parts.append((_flattened_submesh(mesh, shard), None))
        elif name not in shard and name not in replicate:
            parts.append((mesh[name], dim))
    flattened = DeviceMesh._concatenate([part for part, _ in parts])
    return DataMesh(flattened, tuple(dim for _, dim in parts), shard_mesh_dim, own_mesh=mesh)


def _names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns an attribute of dp_mesh_dims (None, one name or several) as a tuple."""
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _flattened_submesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Returns the submesh of these mesh dims, flattened to one dim."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def kept_ranks_of(reshard_after_forward: Any, data: DataMesh) -> int | None:
    """Returns an integer reshard_after_forward, the number of ranks that share a kept copy; else None.

    Raises ValueError unless it is True, False, None or a divisor of the number of ranks that shard a parameter.
    """
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return None
    size = 1 if data.shard_mesh_dim is None else data.mesh.size(data.shard_mesh_dim)
    if not isinstance(reshard_after_forward, int) or reshard_after_forward < 1 or size % reshard_after_forward != 0:
        allowed = f"True, False, None or a divisor of {size}, the number of ranks that shard a parameter"
        raise argument_error("reshard_after_forward", allowed, repr(reshard_after_forward))
    return reshard_after_forward


# ---- modules and parameters

# Attributes that mark parameters of units. GIVEN marks the parameter that was passed in, which other modules may still
# have. SHARDED marks the DTensor that took its place; a replaced or converted parameter has no mark.
GIVEN, SHARDED = "_shardwright_given", "_shardwright_sharded"


def device_type_of(parameters: list[nn.Parameter]) -> str:
    """Returns the device type for the default mesh: that of the parameters; if all are on meta, the accelerator's."""
    found = next((each.device.type for each in parameters if not each.is_meta), None)
    if found is None and parameters:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        found = None if accelerator is None else accelerator.type
    return found or "cpu"


def checked_modules(value: Any) -> tuple[nn.Module, ...]:
    """Returns the modules. Raises ValueError if a module has no forward, is under FSDP2 or was passed before."""
    modules = tuple(value) if isinstance(value, list) else (value,)
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise argument_error("module", "a module or a list of at least one module", f"a {type(value).__name__}")
    for module in modules:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise argument_error("module", "a module with a forward", f"a {type(module).__name__}")
        if hasattr(module, ATTRIBUTE):
            value = f"a {original_class(type(module)).__name__} that was passed before"
            raise argument_error("module", "passed to sw.fully_shard once", value)
        for inner in module.modules():
            if isinstance(inner, FSDPModule) and not isinstance(inner, ShardedModule):
                raise ValueError(f"module must not be or contain a module under FSDP2, got a {type(inner).__name__}")
    return modules


Site = tuple[nn.Module, str, str]  # a place of a parameter: owning module, name in it, full name


def checked_ignored(value: Any) -> set[int]:
    """Returns the ids of the parameters to leave unsharded. Raises ValueError for other types."""
    parameters = list(value) if isinstance(value, (set, frozenset, list, tuple)) else None
    if value is None:
        return set()
    if parameters is None or not all(isinstance(parameter, nn.Parameter) for parameter in parameters):
        raise argument_error("ignored_params", "a set of nn.Parameter only", f"a {type(value).__name__}")
    return {id(parameter) for parameter in parameters}


def parameters_of(modules: tuple[nn.Module, ...], ignored: set[int]) -> list[tuple[nn.Parameter, list[Site]]]:
    """Returns the parameters that belong to no unit yet, each with its sites. `ignored`: ids of parameters."""
    found: dict[int, tuple[nn.Parameter, list[Site]]] = {}
    visited: set[int] = set()
    states = (getattr(each, ATTRIBUTE, None) for root in modules for each in root.modules())
    units = {id(state): state.unit for state in states if state is not None}
    # Modules under torch's `replicate` are skipped, as in FSDP2.
    others = (each for root in modules for each in root.modules() if "replicate" in (_get_registry(each) or {}))
    visited |= {id(inner) for other in others for inner in other.modules()}
    taken = {(owner, name) for unit in units.values() for weight in unit.weights for owner, name in weight.owners}
    for index, root in enumerate(modules):
        for prefix, owner in root.named_modules():
            if id(owner) in visited:
                continue
            visited.add(id(owner))
            for name, parameter in owner._parameters.items():
                if parameter is None or hasattr(parameter, SHARDED) or id(parameter) in ignored:
                    continue
                if (owner, name) in taken:
                    continue
                full = ".".join(part for part in (str(index) if len(modules) > 1 else "", prefix, name) if part)
                _check_parameter(full, parameter)
                found.setdefault(id(parameter), (parameter, []))[1].append((owner, name, full))
    return list(found.values())


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    """Raises ValueError if a parameter is tied to a weight of another unit, or is not supported."""
    if hasattr(parameter, GIVEN):
        raise ValueError(
            f"{name} must belong to one unit, got a parameter that is tied to a weight of another unit. Pass the "
            "modules that share it in one call, as a list, or leave both to the call for the outermost module"
        )
    data = parameter.detach()
    local = data._local_tensor if isinstance(data, DTensor) else data
    if not has_extension(local):
        # The methods of FSDP2's extension protocol may be added later, so only the dtype of subclasses is checked now.
        like = torch.empty(0, dtype=local.dtype, device="cpu") if local.is_meta or is_subclass(local) else local
        argument_checks.check_tensor(name, like)
