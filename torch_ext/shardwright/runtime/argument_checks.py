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


def check_tensor(argument: str, value: Any) -> None:
    """Checks that the argument is a plain tensor: not a subclass, not nested, strided, and on CPU or CUDA."""
    if not isinstance(value, torch.Tensor) or torch._C._dispatch_keys(value).has("Python"):
        raise argument_error(argument, "a plain torch.Tensor", f"a {type(value).__name__}")
    if torch._is_functional_tensor(value):
        raise argument_error(argument, "a plain torch.Tensor", "a tensor under torch.func.functionalize")
    if value.is_nested:
        raise argument_error(argument, "a plain tensor, such as a part of unbind()", "a nested tensor")
    if value.layout is not torch.strided:
        raise ValueError(f"{argument} must have layout torch.strided, got {value.layout}; use .to_dense()")
    if value.device.type not in DEVICE_TYPES:
        raise argument_error(argument, f"on {' or '.join(DEVICE_TYPES)}", value.device)


def check_movable(argument: str, value: Any) -> None:
    """Checks that the argument is a plain tensor, outside of transforms such as `torch.func.vmap`, without a
    forward-mode tangent, which a move would drop.
    """
    check_tensor(argument, value)
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise argument_error(argument, "a plain torch.Tensor", "a tensor under a transform of torch.func")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None:
        raise argument_error(argument, "without a forward-mode tangent", "a tensor with one; use .detach()")


def check_writable(argument: str, tensor: torch.Tensor) -> None:
    """Checks that the elements of a tensor can be written in place: its memory has each of them at its own address."""
    if tensor.is_conj() or tensor.is_neg():
        kind = "conjugated" if tensor.is_conj() else "negated"
        raise argument_error(argument, "a tensor whose memory holds its elements", f"a {kind} view")
    if overlaps_itself(tensor):
        raise ValueError(
            f"{argument} must have an address for each element, got shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}. Use .contiguous()"
        )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Returns True if several elements have the same address."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return False
    # If each stride exceeds the largest offset that all smaller strides can reach, all addresses are different.
    end = 1  # the largest offset of the dims so far, plus 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride == 0:
            return True
        if stride < end:
            break
        end += (size - 1) * stride
    else:
        return False
    # Otherwise, compute the address of every element relative to the first one, and count the distinct ones.
    offsets = torch.zeros(1, dtype=torch.int64)
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        offsets = offsets.unsqueeze(-1) + stride * torch.arange(size)
    return offsets.unique().numel() < tensor.numel()


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a conjugated or negated view, whose memory does not hold its elements; else the tensor."""
    return tensor.resolve_conj().resolve_neg()


def placements_of(value: Any, ndim: int) -> list[Placement]:
    """Returns the argument `placements` as a list of torch's placements, one per mesh dim. Raises ValueError."""
    placements = argument_values.items(
        value, "placements", "a list of torch's placements, such as [Shard(0), Replicate()]"
    )
    for placement in placements:
        if is_cut(placement):
            raise ValueError(
                f"placements must be torch's placements, got {placement!r}. DTensor's operators would compute wrong "
                "numbers with it. Use redistribute_local, redistribute_many or transfer, with the local tensor and a "
                "Layout"
            )
        if not isinstance(placement, Placement):
            allowed = "torch's placements, such as Shard(0) and Replicate()"
            raise argument_error("placements", allowed, f"{placement!r} (a {type(placement).__name__})")
    if len(placements) != ndim:
        raise argument_error("placements", f"a list of {ndim}, one per mesh dim", len(placements))
    return placements


def check_group(value: Any) -> None:
    """Checks that the argument is None, a process group, or the marker that torch returns to ranks outside a group."""
    is_group = isinstance(value, dist.ProcessGroup) or value is dist.GroupMember.NON_GROUP_MEMBER
    if value is not None and not is_group:
        raise argument_error("group", "a torch.distributed.ProcessGroup", f"a {type(value).__name__}")


def check_group_of_this_rank(value: Any) -> None:
    """Checks that the argument is None or a process group that has this rank."""
    check_group(value)
    if value is dist.GroupMember.NON_GROUP_MEMBER:
        raise argument_error("group", "a group with this rank", f"one without rank {dist.get_rank()}")


def check_device_mesh(argument: str, value: Any) -> None:
    """Checks that the argument is None or a torch DeviceMesh."""
    if value is not None and not argument_values.is_device_mesh(value):
        raise argument_error(argument, "a torch DeviceMesh", f"a {type(value).__name__}")


def check_dtype(argument: str, value: Any) -> None:
    """Checks that the argument is None or a torch.dtype."""
    if value is not None and not isinstance(value, torch.dtype):
        raise argument_error(argument, "a torch.dtype", f"{value!r} (a {type(value).__name__})")


def device_of(argument: str, value: Any) -> torch.device:
    """Returns the argument, a string or a torch.device, as a CPU or CUDA device. Raises ValueError."""
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in DEVICE_TYPES:
        raise argument_error(argument, " or ".join(DEVICE_TYPES), repr(value))
    return device
