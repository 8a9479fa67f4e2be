"""Search for tensors in the inputs and outputs of modules, and records of running forward methods."""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import PackedSequence

from .units import Unit, is_in_backward

# ---- tensors in any containers

Function: TypeAlias = Callable[[torch.Tensor], Any]  # makes the value that replaces a tensor

_SEQUENCES = (list, tuple, set, frozenset, deque)
# Types that are not searched. They have no tensors, or tensors that are no output, such as a module's weights.
_OPAQUE = (str, bytes, int, float, complex, torch.dtype, torch.device, nn.Module, type, types.ModuleType, DeviceMesh)
_MAX_OBJECT_DEPTH = 3  # maximum nesting of plain objects; an output may refer to objects of the whole program


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value, each once.

    It searches mappings, lists, tuples, sets and their subclasses, dataclasses, and the attributes of plain objects. It
    does not search modules or classes, and calls no properties. Objects may refer to each other in cycles.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    seen: set[int] = set()
    stack = [(value, 0)]
    while stack:
        each, depth = stack.pop()
        if each is None or isinstance(each, _OPAQUE) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
            continue
        is_plain = not isinstance(each, (Mapping, *_SEQUENCES)) and not dataclasses.is_dataclass(each)
        if is_plain and depth == _MAX_OBJECT_DEPTH:
            continue
        inner = list(_parts_of(each))
        stack += [(part, depth + is_plain) for part in reversed(inner)]


def _parts_of(value: Any) -> Iterator[Any]:
    """Yields the items and attributes of a value, also those in `__slots__`."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, _SEQUENCES):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = cls.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType) and hasattr(value, name):
                yield getattr(value, name)


def mapped(function: Function, value: Any) -> Any:
    """Returns a value with `function` applied to its tensors.

    Like FSDP2 when it casts inputs and outputs, it searches dataclasses, dicts, lists, tuples, sets and their
    subclasses, and keeps their classes. It returns all other values, and containers without a replaced tensor, as they
    are.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        return value  # as FSDP2 does
    if dataclasses.is_dataclass(type(value)):
        return _mapped_dataclass(function, value)
    if isinstance(value, dict):
        items = {key: mapped(function, each) for key, each in value.items()}
        return _with_items(value, items) if _differ(value.values(), items.values()) else value
    if isinstance(value, (list, tuple, set)):
        parts = [mapped(function, each) for each in value]
        return _with_parts(value, parts) if _differ(value, parts) else value
    return value


def _differ(before: Iterable[Any], after: Iterable[Any]) -> bool:
    """Returns true if any item is another object."""
    return any(a is not b for a, b in zip(before, after))


def _with_parts(value: Any, parts: list[Any]) -> Any:
    """Returns a list, tuple or set of the class of `value`, with other items."""
    is_namedtuple = isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_asdict")
    return type(value)(*parts) if is_namedtuple else type(value)(parts)


def _with_items(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Returns a dict of the class of `value`. If the class cannot be copied, returns a plain dict, as FSDP2 does."""
    if type(value) is dict:
        return items
    try:
        if getattr(value, "__dict__", None) is value:  # attributes and items are one dict; a copy would separate them
            return type(value)(items)  # type: ignore[call-arg]
        copied = copy.copy(value)
        for key, each in items.items():
            copied[key] = each
    except Exception:  # constructors and methods of the class may raise anything
        return items
    return copied


def _mapped_dataclass(function: Function, value: Any) -> Any:
    """Returns a copy in which `function` was applied to the fields; the value itself if none changed."""
    changed: dict[str, Any] = {}
    is_all_given = True  # all changed fields are constructor arguments
    for field in dataclasses.fields(value):
        if not hasattr(value, field.name):
            continue
        before = getattr(value, field.name)
        after = mapped(function, before)
        if after is not before:
            changed[field.name] = after
            is_all_given = is_all_given and field.init
    if not changed:
        return value
    if is_all_given:
        return dataclasses.replace(value, **changed)
    copied = copy.copy(value)
    for name, each in changed.items():
        object.__setattr__(copied, name, each)
    return copied


# ---- running forward methods

# torch's `register_fsdp_forward_method` wraps a method in a function that calls the pre-forward and the post-forward
# hook, but not the latter if the method raises. So the pre-forward hook records the wrapper's frame. Once the frame has
# left the stack, the call has ended.


class _Call(NamedTuple):
    """A running call of a registered forward method."""

    frame: FrameType  # frame of torch's wrapper
    thread: int  # identifier of the thread that called the method
    is_in_backward: bool  # a checkpoint recomputes it, and may leave it early by an exception
    unit: Unit
    depth: int  # number of forwards of the unit that were running before this call


class MethodCalls:
    """The running calls of forward methods in one model, innermost last."""

    def __init__(self) -> None:
        self._running: list[_Call] = []

    def begin(self, frame: FrameType, unit: Unit) -> None:
        """Adds a call that begins. `frame`: see `_Call`."""
        self._running.append(_Call(frame, threading.get_ident(), is_in_backward(), unit, len(unit.forwards)))

    def end(self) -> None:
        """Removes the innermost call, which has returned."""
        if self._running:
            self._running.pop()

    def end_failed(self, end_forward: Callable[[Unit], None], backward_ends: bool = False) -> None:
        """Ends the forwards of calls that have raised, innermost first. Stops at a call that may still run.

        Args:
            end_forward: a function that ends a unit's forward.
            backward_ends: True at the end of a backward: calls that it made on other threads have ended too.
        """
        if not self._running:
            return
        stack = set()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            stack.add(frame)
            frame = frame.f_back
        thread = threading.get_ident()
        while self._running:
            last = self._running[-1]
            may_have_ended = last.thread == thread or (backward_ends and last.is_in_backward)
            if not may_have_ended or last.frame in stack:
                return
            self._running.pop()
            if len(last.unit.forwards) > last.depth:
                end_forward(last.unit)
