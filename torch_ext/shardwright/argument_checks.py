"""Checks of arguments that need torch. Each raises a ValueError that names the argument and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.tensor import Placement

from . import argument_values
from .placements import is_cut

DEVICE_TYPES = ["cpu", "cuda"]  # tests add other device types that have streams and process groups


def check_tensor(argument: str, given: Any) -> None:
    """Checks for a plain tensor: not a subclass, not nested, strided, and on CPU or CUDA."""
    if not isinstance(given, torch.Tensor) or torch._C._dispatch_keys(given).has("Python"):
        raise ValueError(f"{argument}: got a {type(given).__name__}; allowed is a plain torch.Tensor")
    if given.is_nested:
        raise ValueError(f"{argument}: is a nested tensor; allowed are plain ones, such as the parts of its unbind()")
    if given.layout is not torch.strided:
        raise ValueError(f"{argument}: has layout {given.layout}; allowed is torch.strided (.to_dense() makes it so)")
    if given.device.type not in DEVICE_TYPES:
        raise ValueError(f"{argument}: is on {given.device}; allowed are {' and '.join(DEVICE_TYPES)}")


def check_moved(argument: str, given: Any) -> None:
    """Checks for a plain tensor that can be moved. Moves have no forward-mode derivative, and would drop a tangent."""
    check_tensor(argument, given)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(given).tangent is not None:
        raise ValueError(f"{argument}: has a tangent of forward-mode AD; allowed are tensors without (.detach())")


def check_written(argument: str, given: torch.Tensor) -> None:
    """Checks that the memory of a tensor holds its elements, each in its own place, as what writes to it assumes."""
    if given.is_conj() or given.is_neg():
        kind = "conjugated" if given.is_conj() else "negated"
        raise ValueError(f"{argument}: is a {kind} view; allowed are tensors whose memory holds their elements")
    if shares_places(given):
        raise ValueError(
            f"{argument}: has shape {tuple(given.shape)} and strides {given.stride()}, so several elements are in one "
            "place; allowed are tensors with a place for each (.contiguous() makes one)"
        )


def shares_places(given: torch.Tensor) -> bool:
    """Returns whether several elements are in one place."""
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


class _Span(NamedTuple):
    """A tensor, the address of its first byte, and the address after its last one."""

    device: str
    begin: int
    end: int
    name: str
    tensor: torch.Tensor
    is_written: bool


def shared_memory(
    read: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor], among_written: bool = False
) -> list[tuple[str, str, torch.Tensor, torch.Tensor]]:
    """Returns the pairs of a tensor that is read and one that is written which have a byte in common.

    With `among_written`, also those of two that are written. Views that interleave, such as columns of one tensor, have
    none.
    """
    spans = [_span(name, tensor, False) for name, tensor in read.items()]
    spans += [_span(name, tensor, True) for name, tensor in written.items()]
    spans.sort(key=lambda span: span[:3])
    found = []
    before: list[_Span] = []
    for span in spans:
        before = [one for one in before if one.device == span.device and one.end > span.begin]
        for other in before:
            matters = other.is_written != span.is_written or (among_written and span.is_written)
            if matters and _share_bytes(other, span):
                first, second = (span, other) if other.is_written else (other, span)
                found.append((first.name, second.name, first.tensor, second.tensor))
        if span.end > span.begin:
            before.append(span)
    return found


def _span(name: str, tensor: torch.Tensor, is_written: bool) -> _Span:
    begin = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = begin + (last + 1) * tensor.itemsize if tensor.numel() else begin
    return _Span(str(tensor.device), begin, end, name, tensor, is_written)


def _share_bytes(a: _Span, b: _Span) -> bool:
    if all(one.tensor.numel() * one.tensor.itemsize == one.end - one.begin for one in (a, b)):
        return True  # neither has gaps
    unit = math.gcd(a.tensor.itemsize, b.tensor.itemsize, b.begin - a.begin)
    marks = torch.zeros((max(a.end, b.end) - a.begin) // unit, dtype=torch.bool)

    def marks_of(one: _Span) -> torch.Tensor:
        units = one.tensor.itemsize // unit
        strides = [stride * units for stride in one.tensor.stride()]
        return marks.as_strided((*one.tensor.shape, units), (*strides, 1), (one.begin - a.begin) // unit)

    marks_of(a).fill_(True)
    return bool(marks_of(b).any())


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
    """Checks for None, a process group, or torch's marker for a group that this rank is not in."""
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
