"""Locations of tensors in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

# Location of a tensor in memory: storage, offset, sizes and strides.
Location = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def locations_of(tensors: Sequence[torch.Tensor]) -> list[Location]:
    """Returns the locations of all tensors that have elements."""
    return [location_of(tensor) for tensor in tensors if tensor.numel()]


def location_of(tensor: torch.Tensor) -> Location:
    """Returns the location of the local tensor."""
    local = local_of(tensor)
    return storage_of(local), local.storage_offset(), tuple(local.shape), local.stride()


def storage_of(tensor: torch.Tensor) -> int:
    """Returns the identity of the tensor's storage."""
    return tensor.untyped_storage()._cdata


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor; a plain tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
