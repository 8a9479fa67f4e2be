"""Plans calls while a graph is traced, on fake tensors that are made from constant descriptions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F, disabled: F) -> F:
    """Returns the function for code that is not compiled: `function`, or `disabled` while a compiler runs.

    Compilers that gave up on a caller try to compile each function that it calls.
    """
    return function if get_eval_frame_callback() is None else disabled


def _shard_order(tensor: DTensor) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """Returns the shard order of a DTensor as pairs of tensor dim and mesh dims; None if placements encode it."""
    spec = tensor._spec
    if spec.use_strided_shard_as_shard_order:
        return None
    return tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in spec.shard_order)


# Dynamo reads properties of DTensors that a graph computes, but not their `_spec`.
DTensor._shardwright_order = property(_shard_order)  # type: ignore[attr-defined]


def meta_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns constants that describe a tensor without its elements, and for a DTensor its mesh, shard order (None if
    placements encode it) and placements.
    """
    index = operator.index
    plain = (tuple(map(index, tensor.shape)), tuple(map(index, tensor.stride())), tensor.dtype, tensor.device)
    if not isinstance(tensor, DTensor):
        return (*plain, tensor.requires_grad)
    local_shape = tuple(map(index, tensor.to_local().shape))
    order = tensor._shardwright_order  # type: ignore[attr-defined]
    return (*plain, tensor.requires_grad, local_shape, tensor.device_mesh, order, tuple(tensor.placements))


def constant(value: Any) -> Any:
    """Returns the value with symbolic sizes replaced by their values."""
    if isinstance(value, int):
        return operator.index(value)
    return [constant(item) for item in value] if isinstance(value, (list, tuple)) else value


@torch._disable_dynamo  # it may run in eager code that compiled code calls, whose frames Dynamo would compile
def on_fakes(metas: Sequence[tuple[Any, ...] | None], plan: Callable[..., T]) -> T:
    """Returns the result of `plan`, called with fake tensors of these descriptions. None stays None.

    Only these tensors are fake; everything else that `plan` reads, such as meshes, has real values.
    """
    with unset_fake_temporarily():
        with FakeTensorMode():
            fakes = [None if meta is None else _fake(meta) for meta in metas]
        return plan(*fakes)


def _fake(meta: tuple[Any, ...]) -> torch.Tensor:
    """Returns an uninitialized tensor or DTensor that fits a description of `meta_of`."""
    shape, stride, dtype, device, requires_grad, *placed = meta
    if not placed:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device, requires_grad=requires_grad)
    local_shape, mesh, pairs, placements = placed
    order = None if pairs is None else tuple(ShardOrderEntry(*pair) for pair in pairs)
    tensor_meta = TensorMeta(torch.Size(shape), stride, dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta, order, use_strided_shard_as_shard_order=order is None)
    return DTensor(torch.empty(local_shape, dtype=dtype, device=device), spec, requires_grad=requires_grad)
