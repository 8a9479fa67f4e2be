"""A fast path for repeated calls of `DTensor.redistribute`.

PyTorch's method builds and hashes a target spec and enters an autograd function before it moves data. On CPU this takes
several times as long as the rest of a small redistribute. The first call runs PyTorch's method. Then the target spec,
the executable and the attributes of the autograd node are cached by source spec and placements, and later calls use
them. Calls under a dispatch mode, a trace or a transform always run PyTorch's method, which calls the drop-in's
function (redistribute.py). So does a backward that is itself differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor._redistribute as torch_redistribute
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .._native import _runtime
from ..runtime import dynamo, executables, groups
from . import crossing, redistribute
from .mode import allows_shortcut, mode_in_effect

_SEQUENCE_TYPES = (list, tuple)
# Makes a DTensor without calling DTensor's __init__, which is slow and does nothing.
_new_dtensor = functools.partial(DTensor.__new__, DTensor)


class _CachedExecutable:
    """The executable of a call, and the properties that the local tensor of another call must have to use it."""

    __slots__ = ("device", "dtype", "executable", "node", "target")

    def __init__(
        self, target: DTensorSpec, executable: _runtime.Executable, local: torch.Tensor, node: dict[str, Any]
    ) -> None:
        self.target = target  # spec of the result
        self.executable = executable
        self.dtype = local.dtype
        self.device = local.device
        self.node = node  # with gradients: attributes that PyTorch's autograd function saved

    def accepts(self, local: torch.Tensor) -> bool:
        """Returns True if the executable may run on this local tensor."""
        return (
            type(local) is torch.Tensor
            and local.dtype is self.dtype
            and local.device == self.device
            and local.layout is torch.strided
            and not local.requires_grad
        )


_cached: executables.PlanningCache[_CachedExecutable] = executables.PlanningCache(is_local=True)


def make_method(original: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """Returns the method that replaces `original`, DTensor's method `redistribute`, while the drop-in is on."""

    @dynamo.skipped
    @functools.wraps(original)
    def with_shortcut(
        self: DTensor,
        device_mesh: DeviceMesh | None = None,
        placements: Any = None,
        *,
        async_op: bool = False,
        **options: Any,
    ) -> DTensor:
        if (
            options
            or type(self) is not DTensor
            or not isinstance(placements, _SEQUENCE_TYPES)
            or not allows_shortcut()
            or not _runtime.is_plain_eager(False)
            or forward_ad._current_level >= 0
            or not (device_mesh is None or device_mesh is self.device_mesh)
        ):
            if device_mesh is not None and mode_in_effect().on and crossing.is_other_mesh(self, device_mesh):
                make_groups = mode_in_effect().make_groups
                return crossing.redistribute(
                    self, device_mesh, placements, async_op=async_op, make_groups=make_groups, **options
                )
            return original(self, device_mesh, placements, async_op=async_op, **options)
        is_tracked = self.requires_grad
        if is_tracked:
            if torch.is_inference_mode_enabled():
                return original(self, device_mesh, placements, async_op=async_op)
            is_tracked = torch.is_grad_enabled()
        spec, local = self._spec, self._local_tensor
        key = (spec, tuple(placements), async_op if is_tracked else None, groups.key_of_mesh(spec.mesh))
        cached = _cached.get(key)
        if cached is not None and cached.accepts(local):
            if is_tracked:
                result: DTensor = Redistribute.apply(self, cached, async_op)  # type: ignore[no-untyped-call]
                return result
            return _new_dtensor(
                executables.run_cached(cached.executable, local, async_op), cached.target, requires_grad=False
            )
        result = original(self, device_mesh, placements, async_op=async_op)
        node = _saved_attributes(result) if is_tracked else {}
        executable = None if node is None else redistribute.find_cached(local, spec, result._spec)
        if executable is not None and node is not None:
            _cached.put(key, _CachedExecutable(result._spec, executable, local, node))
        return result

    return with_shortcut


def clear() -> None:
    """Empties the cache."""
    _cached.clear()


class Redistribute(torch_redistribute.Redistribute):
    """The autograd function of cached calls. A subclass of PyTorch's, whose backward it uses for uncached gradients."""

    @staticmethod
    @dynamo.skipped
    def forward(ctx: Any, x: DTensor, cached: _CachedExecutable, async_op: bool) -> DTensor:  # type: ignore[override]
        vars(ctx).update(cached.node)
        ctx._shardwright_dtype = cached.dtype
        output = executables.run_cached(cached.executable, x._local_tensor, async_op)
        return _new_dtensor(output, cached.target, requires_grad=x.requires_grad)

    @staticmethod
    @dynamo.skipped
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None, None]:  # type: ignore[override]
        if (
            not redistribute.is_installed()  # the drop-in was disabled, so PyTorch runs the backward
            or type(gradient) is not DTensor
            or torch.is_grad_enabled()  # the backward is itself differentiated
            or gradient.dtype is not ctx._shardwright_dtype
            or not _runtime.is_plain_eager(True)
        ):
            return torch_redistribute.Redistribute.backward(ctx, gradient)[0], None, None
        spec, local = gradient._spec, gradient._local_tensor
        key = (spec, ctx.current_spec, ctx.async_op, "backward", groups.key_of_mesh(spec.mesh))
        cached = _cached.get(key)
        if cached is not None and cached.accepts(local):
            output = executables.run_cached(cached.executable, local, ctx.async_op)
            return _new_dtensor(output, cached.target, requires_grad=gradient.requires_grad), None, None
        result = torch_redistribute.Redistribute.backward(ctx, gradient)[0]
        executable = redistribute.find_cached(local, spec, result._spec)
        if executable is not None:
            _cached.put(key, _CachedExecutable(result._spec, executable, local, {}))
        return result, None, None


def _saved_attributes(result: DTensor) -> dict[str, Any] | None:
    """Returns the attributes that PyTorch's autograd function saved on its node, or None for any other node."""
    node = result.grad_fn
    if node is None or node.name() != "RedistributeBackward":
        return None
    saved = {name: value for name, value in vars(node).items() if not name.startswith("_shardwright")}
    return saved if "current_spec" in saved and "async_op" in saved else None
