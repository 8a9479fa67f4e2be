"""Replacement of PyTorch's tensor-parallel styles in a model that is parallelized already.

A style of PyTorch is nothing but hooks on a module with sharded weights. The closures of the hooks hold the style's
layouts: ``ColwiseParallel`` and ``RowwiseParallel`` register partial functions, ``PrepareModuleInput`` its own methods.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from ..layouts.errors import argument_error
from .styles import annotate, as_output, install_forward

_STYLES = (torch_parallel.ColwiseParallel, torch_parallel.RowwiseParallel)


def replace_styles(module: nn.Module) -> int:
    """Replaces PyTorch's styles in a model by those of `shardwright.parallel`, in place.

    The model must have been parallelized by ``parallelize_module``. Linear layers under ``ColwiseParallel`` and
    ``RowwiseParallel`` overlap their communication with their products. Where ``PrepareModuleInput`` gathers a sequence
    shard as a DTensor, the module gets the shard, and the first layer that uses it gathers it for all others. Other
    operators on it run on the shard, as DTensor operators. Parameters, results and state dicts do not change.

    Returns:
        The number of linear layers with a replaced style.

    Raises:
        ValueError: there are none.
    """
    replaced = sum(_replace(layer) for layer in module.modules() if type(layer) is nn.Linear)
    if not replaced:
        raise argument_error("module", "a model with linear layers under PyTorch's parallel styles", "one without")
    for inner in module.modules():
        _keep_shards(inner)
    return replaced


def _replace(layer: nn.Linear) -> bool:
    """Replaces the hooks and the forward of a layer. Returns False if it has no style of PyTorch."""
    prepares = [style._prepare_input_fn for style in _STYLES]
    finishes = [style._prepare_output_fn for style in _STYLES]
    before = _hook_of(layer._forward_pre_hooks, "input_fn", prepares)
    after = _hook_of(layer._forward_hooks, "output_fn", finishes)
    if before is None or after is None:
        return False
    (key, prepare, mesh), (last_key, finish, _) = before, after
    input_layouts, (output_layouts, use_local_output) = prepare.args[0], finish.args
    layer._forward_pre_hooks[key] = _pre_hook(input_layouts, mesh)
    layer._forward_hooks[last_key] = _post_hook(use_local_output, mesh)
    is_colwise = prepare.func is prepares[0]
    install_forward(layer, {"placements": output_layouts}, shares_gather=is_colwise)
    return True


def _hook_of(hooks: Mapping[int, Any], name: str, functions: list[Any]) -> tuple[int, Any, DeviceMesh] | None:
    """Returns the hook whose variable `name` is a partial of one of the functions: key, partial and mesh."""
    for key, hook in hooks.items():
        variables = _variables(hook)
        found = variables.get(name)
        if isinstance(found, partial) and found.func in functions:
            return key, found, variables["device_mesh"]
    return None


def _variables(hook: Any) -> Mapping[str, Any]:
    """Returns the variables of a hook's closure, by name."""
    return inspect.getclosurevars(hook).nonlocals if inspect.isfunction(hook) else {}


def _pre_hook(input_layouts: tuple[Placement, ...], mesh: DeviceMesh) -> Callable[..., Any]:
    """Returns a forward pre-hook that makes the input of a layer a DTensor with these placements."""
    return lambda layer, inputs: annotate(input_layouts, layer, inputs, mesh)


def _post_hook(use_local_output: bool, mesh: DeviceMesh) -> Callable[..., Any]:
    """Returns a forward hook that returns the output of a layer, as this rank's part if `use_local_output`."""
    return lambda layer, inputs, output: as_output(use_local_output, layer, output, mesh)


def _keep_shards(module: nn.Module) -> None:
    """Replaces the hooks of ``PrepareModuleInput`` that gather a sequence shard by hooks that only annotate it."""
    for key, hook in module._forward_pre_hooks.items():
        variables = _variables(hook)
        style: Any = variables.get("self")
        if type(style) is not torch_parallel.PrepareModuleInput or style.use_local_output:
            continue
        kept = copy.copy(style)
        if style.input_layouts is not None:
            pairs = zip(style.input_layouts, style.desired_input_layouts, strict=True)
            kept.desired_input_layouts = tuple(_kept(layout, desired) for layout, desired in pairs)
        kept.desired_input_kwarg_layouts = {
            name: _kept(style.input_kwarg_layouts.get(name), desired)
            for name, desired in style.desired_input_kwarg_layouts.items()
        }
        module._forward_pre_hooks[key] = _input_hook(kept, variables["device_mesh"])


def _kept(layout: Placement | None, desired: Placement | None) -> Placement | None:
    """Returns `layout` if `desired` would gather a shard, else `desired`."""
    return layout if isinstance(layout, Shard) and isinstance(desired, Replicate) else desired


def _input_hook(style: Any, mesh: DeviceMesh) -> Callable[..., Any]:
    """Returns the forward pre-hook that a ``PrepareModuleInput`` registers."""
    if style.with_kwargs:
        return lambda module, inputs, kwargs: style._prepare_input_kwarg_fn(inputs, kwargs, mesh)
    return lambda module, inputs: style._prepare_input_fn(inputs, mesh)
