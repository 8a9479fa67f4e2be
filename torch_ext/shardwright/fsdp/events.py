"""Events of a step of `fully_shard` as operators, for graphs that compilers make of a model.

    fsdp_begin_forward(Tensor[] inputs, int unit, bool records) -> Tensor
    fsdp_end_forward(Tensor[] outputs, int unit) -> Tensor
    fsdp_begin_backward(Tensor[] gradients, Tensor forward, int unit) -> Tensor
    fsdp_end_backward(Tensor[] gradients, Tensor[] of_weights, int[] indices, Tensor forward, int unit) -> ()
    fsdp_after(Tensor(a) tensor, Tensor event) -> Tensor(a)

Each of the first four does what hooks do at that moment in eager code: it waits for the gathers that the next use
needs, and starts those that the schedule has there. They are ordered by effect tokens, in the order of the trace, so
all ranks start the same transfers in the same order, whatever a compiler makes of independent operators.

`fsdp_after` gives what may be read once an event has taken place, such as a weight: it is the same tensor, but what
reads it depends on the event. Its schema says that it is an alias, so compilers do not put anything else in its memory.

`unit` is a number in this process; `forward`, which `fsdp_end_forward` returns, holds the number of a forward.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch._library.effects import EffectType

from .steps import Runner
from .units import Unit, is_in_backward


class InGraphs(Protocol):
    """What there is of a unit: it and, once its model has run, the runner of the model."""

    unit: Unit

    def ready_runner(self, outermost: Any = None, converts: bool = True) -> Runner: ...


_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, InGraphs] = weakref.WeakValueDictionary()


def number_of(given: InGraphs) -> int:
    """A new number, by which operators find this as long as it lives."""
    number = next(_numbers)
    _known[number] = given
    return number


def _found(number: int) -> tuple[Runner, Unit]:
    given = _known.get(number)
    if given is None:
        raise RuntimeError(f"unit: {number} is none of a model that still exists in this process")
    return given.ready_runner(converts=False), given.unit


def _begin_forward(inputs: Sequence[torch.Tensor], unit: int, records: bool) -> torch.Tensor:
    runner, its = _found(unit)
    if runner.gathers_in_chunks:
        raise RuntimeError(
            f"chunked must be False for {runner.units[0].name}, which is in a graph, whose products take whole "
            "weights, got True; or compile only the insides of units"
        )
    if its is runner.units[0] and its.forwards and not is_in_backward():
        runner.abort()  # a graph has failed between its events
    with torch.set_grad_enabled(records), _undone_on_error(runner):
        forward = runner.begin_forward(its)
    its.is_in_graph = True
    return _as_tensor(forward)


def _end_forward(outputs: Sequence[torch.Tensor], unit: int) -> torch.Tensor:
    runner, its = _found(unit)
    forward = its.forwards[-1]
    with _undone_on_error(runner):
        runner.end_forward(its)
    its.is_in_graph = False
    return _as_tensor(forward)


def _begin_backward(gradients: Sequence[torch.Tensor], forward: torch.Tensor, unit: int) -> torch.Tensor:
    runner, its = _found(unit)
    with _undone_on_error(runner):
        runner.begin_backward(its, int(forward))
    return _as_tensor(int(forward))


def _end_backward(
    gradients: Sequence[torch.Tensor],
    of_weights: Sequence[torch.Tensor],
    indices: Sequence[int],
    forward: torch.Tensor,
    unit: int,
) -> None:
    runner, its = _found(unit)
    with _undone_on_error(runner):
        for index, gradient in zip(indices, of_weights, strict=True):
            its.weights[index].take_gradient(gradient)
        runner.note_gradient(its)
        runner.end_backward(its, int(forward))


@contextlib.contextmanager
def _undone_on_error(runner: Runner) -> Iterator[None]:
    try:
        yield
    except BaseException:
        runner.abort()
        raise


def _as_tensor(number: int) -> torch.Tensor:
    return torch.tensor([number], device="cpu")


def _after(tensor: torch.Tensor, event: torch.Tensor) -> torch.Tensor:
    alias: torch.Tensor = torch.ops.aten.alias(tensor)
    return alias


def _fake_event(*_: Any) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


_library = torch.library.Library("shardwright", "FRAGMENT")
_EVENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "fsdp_begin_forward(Tensor[] inputs, int unit, bool records) -> Tensor": (_begin_forward, _fake_event),
    "fsdp_end_forward(Tensor[] outputs, int unit) -> Tensor": (_end_forward, _fake_event),
    "fsdp_begin_backward(Tensor[] gradients, Tensor forward, int unit) -> Tensor": (_begin_backward, _fake_event),
    "fsdp_end_backward(Tensor[] gradients, Tensor[] of_weights, int[] indices, Tensor forward, int unit) -> ()": (
        _end_backward,
        lambda *_: None,
    ),
}
for _schema, (_run, _fake) in _EVENTS.items():
    _library.define(_schema)
    _name = _schema.partition("(")[0]
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardwright::{_name}", _fake)
    torch.library._register_effectful_op(f"shardwright::{_name}", EffectType.ORDERED)

_library.define("fsdp_after(Tensor(a) tensor, Tensor event) -> Tensor(a)")
_library.impl("fsdp_after", _after, "CompositeExplicitAutograd")
torch.library.register_fake("shardwright::fsdp_after", _after)


@torch.ops.shardwright.fsdp_after.default.py_functionalize_impl
def _(ctx: Any, tensor: torch.Tensor, event: torch.Tensor) -> torch.Tensor:
    """Neither is ever written in a graph, so nothing is lost if functionalization knows nothing of the alias."""
    given = ctx.unwrap_tensors((tensor, event))
    with ctx.redispatch_to_next():
        found: torch.Tensor = ctx.wrap_tensors(torch.ops.shardwright.fsdp_after.default(*given))
    return found
