"""Checks of arguments that need torch. Each raises a ValueError that names the argument and the allowed values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.tensor import Placement

from ..layouts import argument_values
from ..layouts.errors import argument_error
from ..placements import is_cut

DEVICE_TYPES = ["cpu", "cuda"]  # tests add other device types that have streams and process groups


def check_tensor(argument: str, given: Any) -> None:
    """Checks that the argument is a plain tensor: not a subclass, not nested, strided, and on CPU or CUDA."""
    if not isinstance(given, torch.Tensor) or torch._C._dispatch_keys(given).has("Python"):
        raise argument_error(argument, "a plain torch.Tensor", f"a {type(given).__name__}")
    if given.is_nested:
        raise argument_error(argument, "a plain tensor, such as a part of unbind()", "a nested tensor")
    if given.layout is not torch.strided:
        raise ValueError(f"{argument} must have layout torch.strided, got {given.layout}; use .to_dense()")
    if given.device.type not in DEVICE_TYPES:
        raise argument_error(argument, f"on {' or '.join(DEVICE_TYPES)}", given.device)


def check_moved(argument: str, given: Any) -> None:
    """Checks that the argument is a plain tensor without a forward-mode tangent, which a move would drop."""
    check_tensor(argument, given)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(given).tangent is not None:
        raise argument_error(argument, "without a forward-mode tangent", "a tensor with one; use .detach()")


def check_written(argument: str, given: torch.Tensor) -> None:
    """Checks that a tensor can be written: its memory holds its elements, each at an address of its own."""
    if given.is_conj() or given.is_neg():
        kind = "conjugated" if given.is_conj() else "negated"
        raise argument_error(argument, "a tensor whose memory holds its elements", f"a {kind} view")
    if shares_places(given):
        raise ValueError(
            f"{argument} must have an address for each element, got shape {tuple(given.shape)} and strides "
            f"{given.stride()}; use .contiguous()"
        )


def shares_places(given: torch.Tensor) -> bool:
    """Returns True if several elements have the same address."""
    if given.is_contiguous() or given.numel() < 2:
        return False
    # If each stride is at least the extent of all smaller strides together, no two elements have the same address.
    end = 1
    for stride, size in sorted((s, n) for n, s in zip(given.shape, given.stride(), strict=True) if n > 1):
        if stride == 0:
            return True
        if stride < end:
            break
        end += (size - 1) * stride
    else:
        return False
    # Otherwise, compute the address of every element relative to the first one, and count the distinct ones.
    places = torch.zeros(1, dtype=torch.int64)
    for stride, size in zip(given.stride(), given.shape, strict=True):
        places = places.unsqueeze(-1) + stride * torch.arange(size)
    return places.unique().numel() < given.numel()


def resolved(given: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose memory holds its elements: a copy of a conjugated or negated view, else the tensor."""
    return given.resolve_conj().resolve_neg()


def placements_of(given: Any, ndim: int) -> list[Placement]:
    """Returns a list of torch's placements, one per mesh dim."""
    placements = argument_values.items(
        given, "placements", "a list of torch's placements, such as [Shard(0), Replicate()]"
    )
    for placement in placements:
        if is_cut(placement):
            raise ValueError(
                f"placements must be torch's placements, got {placement!r}, with which DTensor's operators would "
                "compute wrong numbers. redistribute_local, redistribute_many and transfer accept it, with the local "
                "tensor and a Layout"
            )
        if not isinstance(placement, Placement):
            allowed = "torch's placements, such as Shard(0) and Replicate()"
            raise argument_error("placements", allowed, f"{placement!r} (a {type(placement).__name__})")
    if len(placements) != ndim:
        raise argument_error("placements", f"a list of {ndim}, one per mesh dim", len(placements))
    return placements


def check_group(given: Any) -> None:
    """Checks that the argument is None, a process group, or torch's marker for a group without this rank."""
    is_one = isinstance(given, dist.ProcessGroup) or given is dist.GroupMember.NON_GROUP_MEMBER
    if given is not None and not is_one:
        raise argument_error("group", "a torch.distributed.ProcessGroup", f"a {type(given).__name__}")


def check_device_mesh(argument: str, given: Any) -> None:
    """Checks that the argument is None or a torch DeviceMesh."""
    if given is not None and not argument_values.is_device_mesh(given):
        raise argument_error(argument, "a torch DeviceMesh", f"a {type(given).__name__}")


def check_dtype(argument: str, given: Any) -> None:
    """Checks that the argument is None or a torch.dtype."""
    if given is not None and not isinstance(given, torch.dtype):
        raise argument_error(argument, "a torch.dtype", f"{given!r} (a {type(given).__name__})")


def device_of(argument: str, given: Any) -> torch.device:
    """Returns the CPU or CUDA device that a string or a torch.device names."""
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in DEVICE_TYPES:
        raise argument_error(argument, " or ".join(DEVICE_TYPES), repr(given))
    return device
