"""Small random modules for `hunt`: blocks of several kinds that pass tensors in containers of several kinds."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Injected(Exception):
    """An exception that a case raises on purpose."""


class Interrupt(BaseException):
    """A BaseException that is not an Exception, like KeyboardInterrupt."""


class NamedPair(NamedTuple):
    y: Any
    aux: Any


class DictSubclass(dict):  # type: ignore[type-arg]
    pass


class ListSubclass(list):  # type: ignore[type-arg]
    pass


class TupleSubclass(tuple):  # type: ignore[type-arg]
    pass


@dataclasses.dataclass
class Data:
    y: Any
    aux: Any


@dataclasses.dataclass(frozen=True)
class FrozenData:
    y: Any
    aux: Any


class AttributeDict(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):  # type: ignore[type-arg]
    """Like ModelOutput of transformers: fields are attributes and items."""

    y: Any = None
    aux: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            super().__setitem__(field.name, getattr(self, field.name))


class Registered:
    """A class that is registered with PyTorch's pytrees."""

    def __init__(self, y: Any, aux: Any) -> None:
        self.y, self.aux = y, aux


_pytree.register_pytree_node(Registered, lambda pair: ([pair.y, pair.aux], None), lambda values, _: Registered(*values))


class Plain:
    def __init__(self, y: Any, aux: Any) -> None:
        self.y, self.aux = y, aux


class Slots:
    __slots__ = ("aux", "y")

    def __init__(self, y: Any, aux: Any) -> None:
        self.y, self.aux = y, aux


def _attributes(pair: Any) -> tuple[Any, Any]:
    return pair.y, pair.aux


def _items(pair: Any) -> tuple[Any, Any]:
    return pair["y"], pair["aux"]


def _of_set(pair: Any) -> tuple[Any, Any]:
    y, aux = sorted(pair, key=lambda tensor: -tensor.ndim)
    return y, aux


Container = tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]

# By name of a container: a function that packs two tensors into it, and one that unpacks them.
CONTAINERS: dict[str, Container] = {
    "tensor": (lambda y, aux: torch.cat([y, aux[:, None]], 1), lambda out: (out[:, :-1], out[:, -1])),
    "tuple": (lambda y, aux: (y, aux), tuple),
    "list": (lambda y, aux: [y, aux], tuple),
    "dict": (lambda y, aux: {"y": y, "aux": aux}, _items),
    "named_tuple": (NamedPair, tuple),
    "ordered_dict": (lambda y, aux: collections.OrderedDict(y=y, aux=aux), _items),
    "dict_subclass": (lambda y, aux: DictSubclass(y=y, aux=aux), _items),
    "list_subclass": (lambda y, aux: ListSubclass([y, aux]), tuple),
    "tuple_subclass": (lambda y, aux: TupleSubclass([y, aux]), tuple),
    "dataclass": (Data, _attributes),
    "frozen_dataclass": (FrozenData, _attributes),
    "attribute_dict": (lambda y, aux: AttributeDict(y=y, aux=aux), _attributes),
    "model_output": (ModelOutput, _attributes),
    "registered": (Registered, _attributes),
    "nested": (
        lambda y, aux: (1, [{"a": Data(y, None)}, DictSubclass(b=[aux])]),
        lambda o: (o[1][0]["a"].y, o[1][1]["b"][0]),
    ),
    "set": (lambda y, aux: {y, aux}, _of_set),
    "user_dict": (lambda y, aux: collections.UserDict(y=y, aux=aux), _items),
    "namespace": (lambda y, aux: types.SimpleNamespace(y=y, aux=aux), _attributes),
    "object": (Plain, _attributes),
    "slots": (Slots, _attributes),
    "closure": (lambda y, aux: lambda: (y, aux), lambda out: out()),
}
# Containers in which FSDP2 of torch 2.15 casts inputs.
INPUTS = (
    "tensor",
    "tuple",
    "list",
    "dict",
    "named_tuple",
    "dict_subclass",
    "list_subclass",
    "dataclass",
    "attribute_dict",
)


class Remembers(torch.autograd.Function):
    """A product whose backward reads a weight that it did not pass to save_for_backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.t() @ x


class Core(nn.Module):
    """A layer of one kind. Maps (rows, WIDTH) to (rows, WIDTH)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        make: Callable[[], None] | None = getattr(self, f"_make_{kind}", None)
        if make is None:
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        else:
            make()

    def forward(self, x: torch.Tensor, expert: int | None) -> torch.Tensor:
        if self.kind == "experts":
            return x if expert is None else self.experts[expert](x)
        run: Callable[[torch.Tensor], torch.Tensor] = getattr(self, f"_run_{self.kind}")
        return run(x)

    def _run_linear(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)  # type: ignore[no-any-return]  # b is never used

    def _run_two(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]

    def _run_recurrent(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(torch.tanh(self.a(self.b(x))))  # type: ignore[no-any-return]

    def _run_in_place(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.relu_(self.a(x).mul_(2))).add_(x)  # type: ignore[no-any-return]

    def _run_views(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.a.weight.chunk(2)
        return torch.cat([x @ first.t(), x @ second.t()], 1) + x @ self.b.weight[:, ::2].repeat(1, 2) + self.a.bias[1]

    def _run_detached(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            size = self.b.weight.norm()
        return F.linear(x, self.b.weight.detach(), self.a.bias) / (1 + size)

    def _run_remembers(self, x: torch.Tensor) -> torch.Tensor:
        return Remembers.apply(torch.tanh(Remembers.apply(x, self.a.weight)), self.b.weight) + self.a.bias  # type: ignore[no-any-return, no-untyped-call]

    def _run_inner_checkpoint(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda value: self.b(torch.tanh(self.a(value))), x, use_reentrant=False)  # type: ignore[no-any-return]

    def _make_mlp(self) -> None:
        self.a, self.b = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)

    def _run_mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]

    def _make_norm(self) -> None:
        self.a, self.norm, self.scale = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(()))

    def _run_norm(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.a(x)) * self.scale)

    def _make_uneven(self) -> None:
        self.a, self.b, self.c = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
        self.one = nn.Parameter(torch.randn(1, 5))

    def _run_uneven(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(x)) * self.a(x) + self.one.sum()  # type: ignore[no-any-return]

    def _make_empty(self) -> None:
        self.a, self.none = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.empty(0, 4))

    def _run_empty(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.none.sum()  # type: ignore[no-any-return]

    def _make_embedding(self) -> None:
        self.a = nn.Embedding(5, WIDTH, padding_idx=1)

    def _run_embedding(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(torch.arange(x.shape[0]) % 5) * x  # type: ignore[no-any-return]

    def _make_experts(self) -> None:
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i > 0) for i in range(3))

    def _make_gru(self) -> None:
        self.a = nn.GRU(WIDTH, WIDTH)

    def _run_gru(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x[None])[0][0]  # type: ignore[no-any-return]

    def _make_weight_norm(self) -> None:
        self.a = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def _run_weight_norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)  # type: ignore[no-any-return]

    def _make_parameter_list(self) -> None:
        self.all = nn.ParameterList([torch.randn(WIDTH, WIDTH) / WIDTH, torch.randn(WIDTH)])
        self.named = nn.ParameterDict({"a": torch.randn(1, WIDTH)})

    def _run_parameter_list(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.all[0] * self.named["a"] + self.all[1]

    def _make_transposed(self) -> None:
        self.a = nn.Parameter((torch.randn(WIDTH, WIDTH) / WIDTH).t())

    def _run_transposed(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.a

    def _make_nothing(self) -> None:
        pass

    def _run_nothing(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def _make_complex(self) -> None:
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)

    def _run_complex(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.a.dtype) @ self.a).abs().to(x.dtype)

    def _make_mixed(self) -> None:
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def _run_mixed(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.b.to(x.dtype)  # type: ignore[no-any-return]

    def _make_attention(self) -> None:
        self.a = nn.MultiheadAttention(WIDTH, 2)

    def _run_attention(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


KINDS = (
    *("linear", "two", "recurrent", "in_place", "views", "detached", "remembers", "inner_checkpoint", "mlp", "norm"),
    *("uneven", "empty", "embedding", "experts", "gru", "weight_norm", "parameter_list", "transposed", "attention"),
    *("nothing", "complex", "mixed"),
)
TIEABLE = ("linear", "two", "recurrent", "in_place", "views", "remembers", "inner_checkpoint")


def _stop(*_: Any) -> None:
    raise Injected


class Block(nn.Module):
    """A core, and a gate that only the second output depends on."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec = spec
        self.core = Core(spec.kind)
        self.gate = nn.Parameter(torch.randn(WIDTH))
        self.aside = nn.Linear(WIDTH, 2) if spec.stores == "aside" else None
        self.hidden: Any = None
        self.fails = ""
        if spec.tied and spec.kind in TIEABLE:
            self.core.b.weight = self.core.a.weight

    def forward(self, given: Any, expert: int | None) -> Any:
        x, _ = CONTAINERS[self.spec.input][1](given)
        if self.spec.checkpoint == "inside":
            y = checkpoint(self.core, x, expert, use_reentrant=False)
        else:
            y = self.core(x, expert)
        if self.spec.hook == "inside" and y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        hidden = torch.tanh(y)
        self._store(x, hidden)
        if self.fails == "interrupt":
            raise Interrupt
        if self.fails in ("forward", "caught"):
            raise Injected
        if self.fails == "backward" and hidden.requires_grad:
            hidden.register_hook(_stop)
        return CONTAINERS[self.spec.output][0](hidden * 1.5, hidden @ self.gate)

    def _store(self, x: torch.Tensor, hidden: torch.Tensor) -> None:
        if self.spec.stores == "inside":
            self.hidden = hidden
        elif self.aside is not None:
            self.hidden = self.aside(x)
        elif self.spec.stores == "weight":
            self.hidden = self.gate
        elif self.spec.stores == "view":
            self.hidden = self.gate[1:]

    def encode(self, given: Any, expert: int | None) -> Any:
        return self.forward(given, expert)


class Model(nn.Module):
    """Blocks with residual connections, between two layers of the model."""

    def __init__(self, case: Any) -> None:
        super().__init__()
        self.case = case
        has_own = case.root
        self.enter = nn.Linear(WIDTH, WIDTH) if has_own else nn.Identity()
        self.blocks = nn.ModuleList(Block(spec) for spec in case.blocks)
        self.leave = nn.Linear(WIDTH, WIDTH, bias=False) if has_own else nn.Identity()
        if case.tied == "root" and has_own:
            self.leave.weight = self.enter.weight
        if case.tied == "blocks":
            for block in self.blocks[1:]:
                block.gate = self.blocks[0].gate
        self.catches = False
        self.differs = ""  # Step.differs, in a forward of a rank that differs

    def forward(self, given: Any, expert: int | None) -> Any:
        x, _ = CONTAINERS[self.case.input][1](given)
        x = self.enter(x)
        total = x.sum(-1) * 0.1
        blocks = list(self.blocks)
        orders = {"skip": blocks[1:], "repeat": [*blocks, blocks[0]], "reverse": blocks[::-1]}
        for block in orders.get(self.differs, blocks):
            for _ in range(block.spec.calls):
                try:
                    y, aux = CONTAINERS[block.spec.output][1](self._call(block, x, expert))
                except Injected:
                    if not self.catches:
                        raise
                    continue
                if block.spec.hook == "outside" and y.requires_grad:
                    y.register_hook(lambda gradient: gradient * 2)
                x = x + y
                total = total + aux
        return CONTAINERS[self.case.output][0](self.leave(x), total)

    def encode(self, given: Any, expert: int | None) -> Any:
        return self.forward(given, expert)

    def _call(self, block: Any, x: torch.Tensor, expert: int | None) -> Any:
        call = block.encode if block.spec.method else block
        given = CONTAINERS[block.spec.input][0](x, x.new_zeros(x.shape[0]))
        if block.spec.checkpoint in ("around", "reentrant"):
            return checkpoint(call, given, expert, use_reentrant=block.spec.checkpoint == "reentrant")
        return call(given, expert)

    def losses(self, y: torch.Tensor, aux: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the losses of a pass by name. Read losses of hidden tensors before the next pass."""
        found = {"main": y.square().sum() / 8, "aux": aux.square().sum() / 8}
        for i, block in enumerate(self.blocks):
            if block.spec.stores and block.hidden is not None and block.hidden.requires_grad:
                found[f"hidden{i}"] = block.hidden.square().sum() / 8
        return found
