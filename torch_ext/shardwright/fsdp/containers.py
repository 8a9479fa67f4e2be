"""Finds and replaces tensors in the inputs and outputs of modules, whatever containers hold them."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import PackedSequence

Function: TypeAlias = Callable[[torch.Tensor], Any]

_SEQUENCES = (list, tuple, set, frozenset, deque)
# Values without tensors of their own, or with tensors that are no part of an output, such as the weights of a module.
_CLOSED = (str, bytes, int, float, complex, torch.dtype, torch.device, nn.Module, type, types.ModuleType, DeviceMesh)
# Plain objects are opened to this depth, so that an output which refers to a whole program is not searched as a whole.
_MAX_OBJECT_DEPTH = 3


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value, each once.

    It opens mappings, lists, tuples, sets and their subclasses, dataclasses, and the attributes of plain objects. It
    does not open modules or classes, and calls no properties. Objects may refer to each other in cycles.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    seen: set[int] = set()
    stack = [(value, 0)]
    while stack:
        each, depth = stack.pop()
        if each is None or isinstance(each, _CLOSED) or id(each) in seen:
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

    It opens what FSDP2 opens when it casts inputs and outputs: dataclasses, dicts, lists, tuples, sets and their
    subclasses, which keep their class. An object that holds no tensor that `function` has replaced is returned as it
    is, and so is everything else.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        return value  # as FSDP2 does
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return _mapped_dataclass(function, value)
    if isinstance(value, dict):
        items = {key: mapped(function, each) for key, each in value.items()}
        return _with_items(value, items) if _differ(value.values(), items.values()) else value
    if isinstance(value, (list, tuple, set)):
        parts = [mapped(function, each) for each in value]
        return _with_parts(value, parts) if _differ(value, parts) else value
    return value


def _differ(before: Iterable[Any], after: Iterable[Any]) -> bool:
    return any(a is not b for a, b in zip(before, after))


def _with_parts(value: Any, parts: list[Any]) -> Any:
    is_namedtuple = isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_asdict")
    return type(value)(*parts) if is_namedtuple else type(value)(parts)


def _with_items(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Returns a dict of the class of `value`; a plain one, as FSDP2 does, if the class cannot be copied."""
    if type(value) is dict:
        return items
    try:
        if getattr(value, "__dict__", None) is value:  # attributes are the items, which a copy would part
            made: dict[Any, Any] = type(value)(items)  # type: ignore[call-arg]
            return made
        made = copy.copy(value)
        for key, each in items.items():
            made[key] = each
    except Exception:  # of any constructor or method of the class
        return items
    return made


def _mapped_dataclass(function: Function, value: Any) -> Any:
    changed: dict[str, Any] = {}
    is_all_given = True  # to the constructor
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
    made = copy.copy(value)
    for name, each in changed.items():
        object.__setattr__(made, name, each)
    return made
