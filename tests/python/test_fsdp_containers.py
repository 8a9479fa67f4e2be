"""Finding and replacing tensors in containers."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from shardwright.fsdp.calls import mapped, tensors_in


class Batch(dict):
    pass


class Attributes(dict):
    """A dict whose attributes are its items."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class ByItem(dict):
    """A dict that looks up attributes as items, so that a missing one raises KeyError."""

    __getattr__ = dict.__getitem__


class Row(list):
    pass


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Box:
    x: Any
    note: str = "none"


@dataclasses.dataclass(frozen=True)
class Derived:
    x: Any
    twice: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", self.x * 2)


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):
    """A dataclass whose fields are its items, as in transformers."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Plain:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


WRAPPERS = {
    "dict": lambda x: {"a": x},
    "subclass of dict": lambda x: Batch(a=x),
    "attributes that are items": lambda x: Attributes(a=x),
    "attributes looked up as items": lambda x: ByItem(a=x),
    "OrderedDict": lambda x: collections.OrderedDict(a=x),
    "defaultdict": lambda x: collections.defaultdict(list, a=x),
    "ModelOutput": lambda x: ModelOutput(logits=x),
    "list": lambda x: [1, x],
    "subclass of list": lambda x: Row([x]),
    "tuple": lambda x: (x, None),
    "namedtuple": lambda x: Point(0, x),
    "set": lambda x: {x},
    "dataclass": lambda x: Box(x),
    "frozen dataclass": lambda x: Derived(x),
    "nested": lambda x: [Box({"a": (x, Point([x], 1))})],
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_cast_reaches_tensors_and_keeps_classes(wrap: Any) -> None:
    x = torch.randn(3)
    value = wrap(x)
    found = mapped(lambda tensor: tensor.bfloat16(), value)
    assert type(found) is type(value)
    leaves, before = list(tensors_in(found)), list(tensors_in(value))
    assert {leaf.dtype for leaf in leaves} == {torch.bfloat16} and {leaf.dtype for leaf in before} == {torch.float32}
    assert any(torch.equal(leaf, x.bfloat16()) for leaf in leaves)
    assert mapped(lambda tensor: tensor, value) is value


def test_replaced_values_are_seen_as_items_and_as_attributes() -> None:
    x = torch.randn(3)
    attributes = mapped(torch.Tensor.bfloat16, Attributes(a=x))
    assert attributes.a is attributes["a"] and attributes.a.dtype == torch.bfloat16
    output = mapped(torch.Tensor.bfloat16, ModelOutput(logits=x))
    assert output.logits is output["logits"] and list(output) == ["logits"]


def test_objects_that_fsdp2_does_not_open_are_unchanged() -> None:
    x = torch.randn(3)
    for cls in (collections.UserDict, types.SimpleNamespace, Plain):
        value = cls(a=x)
        assert mapped(torch.Tensor.bfloat16, [value])[0] is value
    assert mapped(torch.Tensor.bfloat16, Box) is Box


def test_tensors_are_found_once_in_every_kind_of_object() -> None:
    x, y = torch.randn(2), torch.randn(2)
    assert list(tensors_in(x)) == [x]
    cyclic = Plain(x=x)
    cyclic.again = [cyclic, x]
    values = [collections.UserDict(a=x), types.SimpleNamespace(a=[x]), Slotted(x), Slotted(Box(x)), cyclic]
    values += [collections.deque([x]), frozenset([x]), {"a": {x}}, types.MappingProxyType({"a": x})]
    for value in values:
        assert [id(tensor) for tensor in tensors_in(value)] == [id(x)], value
    assert [id(tensor) for tensor in tensors_in((y, [x, y]))] == [id(y), id(x)]


def test_modules_classes_and_deep_objects_are_not_opened() -> None:
    x = torch.randn(2)
    deep = x
    for _ in range(6):
        deep = Plain(inner=deep)
    unset = Slotted.__new__(Slotted)
    assert list(tensors_in([Box(nn.Linear(2, 2)), Plain(cls=Plain), deep, unset, torch, "text", 1, None])) == []
