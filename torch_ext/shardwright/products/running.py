"""Binds product plans to process groups and runs them node by node."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _planner, _runtime, checking, counters, executables, groups, tables, watching
from .. import operators as operators  # registers the operators that calls use
from .._planner import GemmModel


class Where(NamedTuple):
    """Where a product is carried out: on ranks of a process group, perhaps those of a DTensor's mesh."""

    device_type: str
    weak_group: groups.WeakGroup = groups.DEFAULT
    device_mesh: DeviceMesh | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.weak_group.get()

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclasses.dataclass(frozen=True)
class Call:
    """A program of products, bound to its process groups."""

    program: str
    groups: tuple[str, ...]
    rank: int
    model: GemmModel  # with which its schedule was chosen
    executable: _runtime.Executable

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if checking.is_on():
            checking.compare(self.executable, inputs[0], False)
        counters.counts.products += 1
        for heard in _listeners:
            heard.append(self)
        if all(type(tensor) in _PLAIN for tensor in inputs):
            # The operator is not used here, because dispatch modes would not see the collectives inside of it.
            dense = [tensor.contiguous() for tensor in inputs]
            if watching.num_modes():
                return watching.run(self.executable, dense, lambda: self.executable.run_all(dense))
            return self.executable.run_all(dense)
        outputs: list[torch.Tensor] = torch.ops.shardwright.matmul(
            list(inputs), self.program, list(self.groups), self.rank
        )
        return outputs


_listeners: list[list[Call]] = []


@contextlib.contextmanager
def listening() -> Iterator[list[Call]]:
    """Yields a list to which all calls made during the block are appended, in order."""
    heard: list[Call] = []
    _listeners.append(heard)
    try:
        yield heard
    finally:
        _listeners.remove(heard)


Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class Flow:
    """A list of nodes, bound to process groups. Making one is collective among the members of any missing group."""

    def __init__(self, flow: _planner.ProductDataflow, plan: _planner.ProductPlan, where: Where) -> None:
        self._plan, self._where = plan, where
        self._outputs = flow.outputs
        self._num_others = len(flow.layouts) - flow.num_inputs
        self._nodes = [(self._bound(node), node.inputs, node.outputs, node.released) for node in flow.nodes]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        values: list[torch.Tensor | None] = [*inputs, *[None] * self._num_others]
        for run, read, written, released in self._nodes:
            made = run([values[i] for i in read])  # type: ignore[misc]
            for i, value in zip(written, made, strict=True):
                values[i] = value
            for i in released:
                values[i] = None
        return [None if i < 0 else values[i] for i in self._outputs]

    def _bound(self, node: _planner.ProductNode) -> Run:
        where = self._where
        if node.matmul is not None:
            model = self._plan.gemm_model(node.matmul.plan.src.dtype)
            executables.note_default_topology(node.matmul.plan)
            is_chosen = self._plan.chooses_schedules and node.matmul.communicates
            if is_chosen and model == tables.default_gemm_model(where.device_type):
                tables.note_default(model.name, executables.is_first_rank)
            return bind(node.matmul.to_text(node.schedule), model, where)
        if node.plan is not None:
            executables.note_default_topology(node.plan)
            moved = executables.bind(node.plan, device_mesh=where.device_mesh, group=where.group)
            return lambda inputs: [executables.run(moved, inputs[0], async_op=False)]
        if node.kind == "sum":
            return lambda inputs: [inputs[0].sum_to_size(inputs[0].shape[-1:])]
        if node.kind == "add" or node.adds_bias(self._plan, where.rank):
            return lambda inputs: [inputs[0] + inputs[1]]
        return lambda inputs: inputs[:1]  # another rank adds the bias to pending sums


def bind(program: str, model: GemmModel, where: Where) -> Call:
    """Finds or makes the process groups of a program of products."""
    names = executables.names_for(program, where.rank, device_mesh=where.device_mesh, group=where.group)
    return Call(program, tuple(names), where.rank, model, _runtime.executable(program, names, where.rank))


# The number of backwards kept per product; they differ in the gradients requested and in their layouts.
_MAX_BACKWARDS = 64


class Product:
    """A product plan whose forward and backwards are bound to process groups on first use."""

    def __init__(self, plan: _planner.ProductPlan, where: Where) -> None:
        self.plan, self.where = plan, where
        self.rank = where.rank
        self.keeps_gathered = plan.keeps_gathered
        self.has_bias = [bias is not None for bias in plan.biases]
        self.num_weights = len(plan.axes)
        flow = plan.forward
        self._scale_layouts = flow.layouts[1 + self.num_weights + sum(self.has_bias) : flow.num_inputs]
        # Placements of the gradient that is returned for a DTensor operand, and layouts of the results' gradients.
        self.operand_gradient = () if plan.scaled_by else tuple(plan.operand_gradient.placements)
        self._result_gradients = plan.result_gradients
        self._forward: Flow | None = None
        self._backwards: dict[Hashable, Flow] = {}

    def forward(
        self, inputs: Sequence[torch.Tensor], scales: Sequence[torch.Tensor] = ()
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Takes this rank's parts of operand, weights and biases, and scales as given.

        Returns the results, and the moved operand if it is kept.
        """
        if self._forward is None:
            self._forward = Flow(self.plan.forward, self.plan, self.where)
        parts = [self._part(scale, layout) for scale, layout in zip(scales, self._scale_layouts, strict=True)]
        outputs: list[torch.Tensor] = self._forward([*inputs, *parts])  # type: ignore[assignment]
        return (outputs[:-1], outputs[-1]) if self.keeps_gathered else (outputs, None)

    def backward(
        self,
        x: torch.Tensor,
        *weights: torch.Tensor,
        dys: Sequence[torch.Tensor | None],
        layouts: Sequence[_planner.Layout | None],
        needs: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of operand, weights and biases (one per weight) that are needed.

        `x` is the moved operand if that was kept. `dys` have the given `layouts`; None among these means the usual
        layout of that result's gradient, and None among `dys` means zeros. After those of the results, one more may be
        a part of the operand's gradient.
        """
        count = self.num_weights
        known = [given or usual for given, usual in zip(layouts, self._result_gradients, strict=False)]
        dense = [self.empty(x, known[j]).zero_() if dy is None else dy for j, dy in enumerate(dys[:count])]
        added = layouts[count] if len(dys) > count and dys[count] is not None else None
        if added is not None:
            dense.append(dys[count])  # type: ignore[arg-type]
        key = (*known, added, *needs)
        flow = self._backwards.get(key)
        if flow is None:
            planned = self.plan.backward(known, needs[0], needs[1 : 1 + count], needs[1 + count :], added)
            flow = Flow(planned, self.plan, self.where)
            executables.keep(self._backwards, key, flow, _MAX_BACKWARDS)
        return flow([x, *weights, *dense])

    def empty(self, like: torch.Tensor, layout: _planner.Layout) -> torch.Tensor:
        """Returns an uninitialised tensor for this rank's part in a layout."""
        return like.new_empty(tuple(layout.local_shape(self.rank)), dtype=getattr(torch, layout.dtype))

    def _part(self, scale: torch.Tensor, layout: _planner.Layout) -> torch.Tensor:
        """Returns a scale as plans expect it: without dims, or one number for each row of this rank."""
        shape = tuple(layout.local_shape(self.rank))
        is_one = scale.numel() == 1 and math.prod(shape) != 1
        return scale.reshape(()).expand(shape).contiguous() if is_one else scale.reshape(shape)
