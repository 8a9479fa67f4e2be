"""What the arguments of `sw.fully_shard` say about modules and parameters, checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..runtime import argument_checks
from .extensions import has_extension, is_subclass
from .methods import ATTRIBUTE, ShardedModule, original_class

# Attributes of parameters: that they belong to a unit, both as they were given, which other modules may still have, and
# as they are now, unless they were replaced or converted.
GIVEN, SHARDED = "_shardwright_given", "_shardwright_sharded"


def device_type_of(parameters: list[nn.Parameter]) -> str:
    """Returns the kind of device of the default mesh: that of parameters, or where all are on meta, the machine's."""
    found = next((each.device.type for each in parameters if not each.is_meta), None)
    if found is None and parameters:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        found = None if accelerator is None else accelerator.type
    return found or "cpu"


def checked_modules(given: Any) -> tuple[nn.Module, ...]:
    modules = tuple(given) if isinstance(given, list) else (given,)
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise ValueError(f"module: got {type(given).__name__}; allowed is a module, or a list of modules")
    for module in modules:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"module: got a {type(module).__name__}, which has no forward; allowed are modules that do"
            )
        if hasattr(module, ATTRIBUTE):
            raise ValueError(
                f"module: a {original_class(type(module)).__name__} was given to sw.fully_shard before; allowed is once"
            )
        for inner in module.modules():
            if isinstance(inner, FSDPModule) and not isinstance(inner, ShardedModule):
                raise ValueError(
                    f"module: a {type(inner).__name__} is under FSDP2's fully_shard; allowed is one of the two"
                )
    return modules


Place = tuple[nn.Module, str, str]  # module, name in it, name in all


def checked_ignored(given: Any) -> set[int]:
    parameters = list(given) if isinstance(given, (set, frozenset, list, tuple)) else None
    if given is None:
        return set()
    if parameters is None or not all(isinstance(parameter, nn.Parameter) for parameter in parameters):
        raise ValueError(f"ignored_params: got {type(given).__name__}; allowed is a set of parameters")
    return {id(parameter) for parameter in parameters}


def parameters_of(modules: tuple[nn.Module, ...], ignored: set[int]) -> list[tuple[nn.Parameter, list[Place]]]:
    """Returns the parameters that no unit has, each with its places."""
    found: dict[int, tuple[nn.Parameter, list[Place]]] = {}
    visited: set[int] = set()
    inner = (getattr(each, ATTRIBUTE, None) for root in modules for each in root.modules())
    units = {id(state): state.unit for state in inner if state is not None}
    # As FSDP2 does, leaves out what torch's `replicate` has.
    others = (each for root in modules for each in root.modules() if "replicate" in (_get_registry(each) or {}))
    visited |= {id(inner) for other in others for inner in other.modules()}
    taken = {(owner, name) for unit in units.values() for weight in unit.weights for owner, name in weight.places}
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
    if hasattr(parameter, GIVEN):
        raise ValueError(
            f"{name}: is tied to a weight of another unit; allowed is to give the modules that share it in one call, "
            "as a list, or to leave both to the outermost one"
        )
    data = parameter.detach()
    local = data._local_tensor if isinstance(data, DTensor) else data
    if not has_extension(local):
        # Methods that say what is gathered may come after this.
        like = torch.empty(0, dtype=local.dtype, device="cpu") if local.is_meta or is_subclass(local) else local
        argument_checks.check_tensor(name, like)
