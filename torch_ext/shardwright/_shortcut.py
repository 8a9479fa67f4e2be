"""`DTensor.redistribute` without the way there.

PyTorch's method builds and hashes a target spec and enters an autograd function before it asks for data; on CPU that
takes several times what the rest of a small redistribute does. Once a call has gone that way, its target spec and
executable are kept under source spec and placements as given. Later calls that autograd, tracing and modes have no part
in are answered from there; all others take PyTorch's way, which comes back to the drop-in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from . import _engine, _runtime


class _Known(NamedTuple):
    target: DTensorSpec
    executable: _runtime.Executable
    dtype: torch.dtype
    device: torch.device


# What the drop-in would run for a local tensor and two specs, if it has done so before.
Find = Callable[[torch.Tensor, DTensorSpec, DTensorSpec], "_runtime.Executable | None"]

_known: dict[tuple[DTensorSpec, tuple[Placement, ...]], _Known] = {}
_valid_for: object | None = None


def method(original: Callable[..., DTensor], is_on: Callable[[], bool], find: Find) -> Callable[..., DTensor]:
    """What replaces `original`, DTensor's method, while the drop-in is on.

    Args:
        is_on: whether this call is the drop-in's, with nothing that it must go PyTorch's way for.
        find: the executable of the drop-in for a local tensor and its specs before and after.
    """

    @functools.wraps(original)
    def redistribute(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        key = _key(self, args, kwargs)
        if key is None or not is_on():
            return original(self, *args, **kwargs)
        known = _lookup(key)
        local = self._local_tensor
        if known is not None and _is_like(local, known):
            output = _engine.run_again(known.executable, local, kwargs.get("async_op", False))
            return DTensor(output, known.target, requires_grad=False)  # type: ignore[call-arg, arg-type]
        result = original(self, *args, **kwargs)
        executable = find(local, self._spec, result._spec)
        if executable is not None:
            _keep(key, _Known(result._spec, executable, local.dtype, local.device))
        return result

    return redistribute


def _key(x: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensorSpec, tuple[Placement, ...]] | None:
    """None where PyTorch's method must decide."""
    if type(x) is not DTensor:
        return None
    if x.requires_grad and (torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
        return None
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return None
    placements, mesh = kwargs.get("placements"), kwargs.get("device_mesh")
    if len(args) > 0:
        mesh = args[0]
    if len(args) > 1:
        placements = args[1]
    if len(args) > 2 or not isinstance(placements, list | tuple) or not (mesh is None or mesh is x.device_mesh):
        return None
    if kwargs.get("forward_dtype") is not None:
        return None
    return x._spec, tuple(placements)


def _is_like(local: torch.Tensor, known: _Known) -> bool:
    return (
        type(local) is torch.Tensor
        and local.dtype is known.dtype
        and local.device == known.device
        and not local.requires_grad
    )


def _lookup(key: tuple[DTensorSpec, tuple[Placement, ...]]) -> _Known | None:
    global _valid_for
    if _engine.validity() != _valid_for:
        _known.clear()
        _valid_for = _engine.validity()
    return _known.get(key)


def _keep(key: tuple[DTensorSpec, tuple[Placement, ...]], known: _Known) -> None:
    while len(_known) >= _engine.MAX_EXECUTABLES:
        del _known[next(iter(_known))]
    _known[key] = known
