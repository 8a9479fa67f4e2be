"""Keeps split factors literal when compilers flatten and unflatten DTensors.

A literal split factor cuts a dim into pieces and shards each piece; any other only encodes the shard order (argument
`strided` of `Layout`). PyTorch's methods lose `DTensorSpec.use_strided_shard_as_shard_order`, which tells the two
apart. For literal factors, torch 2.15 then raises, and 2.11 takes them for a shard order.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..dtensor.specs import is_strided


class _LiteralContext(tuple[Any, ...]):
    """The context that PyTorch's `__tensor_flatten__` returns, with a type that marks literal split factors."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _LiteralContext) and tuple.__eq__(self, other)

    __hash__ = tuple.__hash__


_torch_flatten: Any = None  # PyTorch's methods, while they are replaced
_torch_unflatten: Any = None


def install() -> None:
    """Replaces the methods by which compilers flatten and unflatten DTensors."""
    global _torch_flatten, _torch_unflatten
    if _torch_flatten is None:
        _torch_flatten, _torch_unflatten = DTensor.__tensor_flatten__, DTensor.__tensor_unflatten__
        DTensor.__tensor_flatten__ = _flattened  # type: ignore[method-assign]
        DTensor.__tensor_unflatten__ = staticmethod(_unflattened)  # type: ignore[method-assign, assignment]


def uninstall() -> None:
    """Restores PyTorch's methods."""
    global _torch_flatten, _torch_unflatten
    if _torch_flatten is not None:
        DTensor.__tensor_flatten__ = _torch_flatten  # type: ignore[method-assign]
        DTensor.__tensor_unflatten__ = staticmethod(_torch_unflatten)  # type: ignore[method-assign, assignment]
        _torch_flatten = _torch_unflatten = None


def _flattened(x: DTensor) -> tuple[list[str], Any]:
    """Replaces `DTensor.__tensor_flatten__`: marks the context if split factors are literal."""
    names, context = (_torch_flatten or DTensor.__tensor_flatten__)(x)
    is_literal = is_strided(x._spec) and not x._spec.use_strided_shard_as_shard_order
    return names, _LiteralContext(context) if is_literal else context


def _unflattened(inner: dict[str, Any], context: Any, size: Any, stride: Any) -> DTensor:
    """Replaces `DTensor.__tensor_unflatten__`: a marked context gives a spec with literal split factors."""
    if not isinstance(context, _LiteralContext):
        tensor: DTensor = (_torch_unflatten or DTensor.__tensor_unflatten__)(inner, context, size, stride)
        return tensor
    first, *_, requires_grad = context
    if isinstance(first, DTensorSpec):  # torch 2.11
        assert first.tensor_meta is not None
        mesh, placements, dtype = first.mesh, first.placements, first.tensor_meta.dtype
    else:
        mesh, placements, dtype = inner["device_mesh"], first, context[1].dtype
    meta = TensorMeta(size, stride, dtype)
    spec = DTensorSpec(mesh, placements, meta, use_strided_shard_as_shard_order=False)
    return DTensor(inner["_local_tensor"], spec, requires_grad=requires_grad)  # type: ignore[call-arg]
