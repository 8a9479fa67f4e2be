"""Checks of arguments that need torch. Each raises a ValueError that names the argument and the allowed values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.tensor import Placement

from ..layouts import argument_values
from ..placements import is_cut

DEVICE_TYPES = ["cpu", "cuda"]  # tests add other device types that have streams and process groups


def check_tensor(argument: str, given: Any) -> None:
    """Checks that the argument is a plain tensor: not a subclass, not nested, strided, and on CPU or CUDA."""
    if not isinstance(given, torch.Tensor) or torch._C._dispatch_keys(given).has("Python"):
        raise ValueError(f"{argument}: got a {type(given).__name__}; allowed is a plain torch.Tensor")
    if given.is_nested:
        raise ValueError(f"{argument}: is a nested tensor; allowed are plain ones, such as the parts of its unbind()")
    if given.layout is not torch.strided:
        raise ValueError(f"{argument}: has layout {given.layout}; allowed is torch.strided (.to_dense() makes it so)")
    if given.device.type not in DEVICE_TYPES:
        raise ValueError(f"{argument}: is on {given.device}; allowed are {' and '.join(DEVICE_TYPES)}")


def check_moved(argument: str, given: Any) -> None:
    """Checks that the argument is a plain tensor without a forward-mode tangent, which a move would drop."""
    check_tensor(argument, given)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(given).tangent is not None:
        raise ValueError(f"{argument}: has a tangent of forward-mode AD; allowed are tensors without (.detach())")


def check_written(argument: str, given: torch.Tensor) -> None:
    """Checks that a tensor can be written: its memory holds its elements, each at an address of its own."""
    if given.is_conj() or given.is_neg():
        kind = "conjugated" if given.is_conj() else "negated"
        raise ValueError(f"{argument}: is a {kind} view; allowed are tensors whose memory holds their elements")
    if shares_places(given):
        raise ValueError(
            f"{argument}: has shape {tuple(given.shape)} and strides {given.stride()}, so several elements are in one "
            "place; allowed are tensors with a place for each (.contiguous() makes one)"
        )


def shares_places(given: torch.Tensor) -> bool:
    """Returns True if several elements have the same address."""
    if given.is_contiguous() or given.numel() < 2:
        return False
    end = 1
    for stride, size in sorted((s, n) for n, s in zip(given.shape, given.stride(), strict=True) if n > 1):
        if stride == 0:
            return True
        if stride < end:
            break
        end += (size - 1) * stride
    else:
        return False
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
                f"placements: {placement!r} is none that DTensor's operators know, and they would compute wrong "
                "numbers with it; allowed are torch's placements here. redistribute_local, redistribute_many and "
                "transfer take it, with the local tensor and a Layout"
            )
        if not isinstance(placement, Placement):
            raise ValueError(
                f"placements: {placement!r} is a {type(placement).__name__}; allowed are torch's placements, such as "
                "Shard(0) and Replicate()"
            )
    if len(placements) != ndim:
        raise ValueError(f"placements: got {len(placements)} for a mesh of {ndim} dims; allowed is one per mesh dim")
    return placements


def check_group(given: Any) -> None:
    """Checks that the argument is None, a process group, or torch's marker for a group without this rank."""
    is_one = isinstance(given, dist.ProcessGroup) or given is dist.GroupMember.NON_GROUP_MEMBER
    if given is not None and not is_one:
        raise ValueError(f"group: got a {type(given).__name__}; allowed is a torch.distributed.ProcessGroup")


def check_device_mesh(argument: str, given: Any) -> None:
    if given is not None and not argument_values.is_device_mesh(given):
        raise ValueError(f"{argument}: got a {type(given).__name__}; allowed is a torch DeviceMesh")


def check_dtype(argument: str, given: Any) -> None:
    if given is not None and not isinstance(given, torch.dtype):
        raise ValueError(f"{argument}: got {given!r} (a {type(given).__name__}); allowed is a torch.dtype")


def device_of(argument: str, given: Any) -> torch.device:
    """Returns the CPU or CUDA device that a string or a torch.device names."""
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in DEVICE_TYPES:
        raise ValueError(f"{argument}: got {given!r}; allowed are {' and '.join(DEVICE_TYPES)}")
    return device
