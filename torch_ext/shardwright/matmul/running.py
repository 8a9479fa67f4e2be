"""Binds product plans to process groups and runs them node by node.

A node is one operation of a product plan: a move, a product that overlaps with its transfers, or a sum
(csrc/products/dataflow.h).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._native import _planner, _runtime
from .._planner import GemmModel
from ..graph import operators as operators
from ..runtime import checking, counters, executables, groups, watching


class ProductRanks(NamedTuple):
    """The ranks that compute a product, and their device type: the ranks of a process group or of a DTensor's mesh."""

    device_type: str
    weak_group: groups.WeakGroup = groups.DEFAULT
    device_mesh: DeviceMesh | groups.Owner | None = None  # an Owner in a process without the mesh
    mesh_groups: Hashable = None  # `groups.key_of_mesh`, for cache keys

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None for the default group. Raises RuntimeError if it was destroyed."""
        return self.weak_group.get()

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group)


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


@dataclasses.dataclass(frozen=True)
class Call:
    """A program of products, bound to its process groups."""

    program: str  # product and schedule as text, the argument of the operator `matmul`
    groups: tuple[str, ...]  # names of the process groups
    rank: int  # in the group
    model: GemmModel  # the model by which the schedule was chosen
    executable: _runtime.Executable
    rows_are_own: bool = False  # True if ranks may have different numbers of rows of the other operand

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if checking.is_on():
            checking.compare(self.executable, inputs[0], False, rows_are_own=self.rows_are_own)
        counters.counts.products += 1
        for calls in _listeners:
            calls.append(self)
        if all(type(tensor) in _PLAIN_TYPES for tensor in inputs):
            # Dispatch modes would not see the collectives inside of an operator, so none is used.
            dense = [tensor.contiguous() for tensor in inputs]
            if watching.num_modes():
                return watching.run(self.executable, dense, lambda: self.executable.run_all(dense))
            return self.executable.run_all(dense)
        outputs: list[torch.Tensor] = torch.ops.shardwright.matmul(
            list(inputs), self.program, list(self.groups), self.rank
        )
        return outputs


_listeners: list[list[Call]] = []  # the lists of `listening`


@contextlib.contextmanager
def listening() -> Iterator[list[Call]]:
    """Yields a list to which all calls made during the block are appended, in order."""
    calls: list[Call] = []
    _listeners.append(calls)
    try:
        yield calls
    finally:
        _listeners.remove(calls)


Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]  # runs a node on its inputs, returns its outputs


class Flow:
    """The nodes of one direction of a product, bound to process groups. Calling it runs them in order.

    Example: the nodes (move, inputs [0], outputs [2]) and (product, inputs [2, 1], outputs [3], released [2]) gather
    value 0, multiply it by value 1, and drop the gathered value 2. The constructor is collective where a group must be
    made.
    """

    def __init__(self, flow: _planner.ProductDataflow, plan: _planner.ProductPlan, ranks: ProductRanks) -> None:
        self._plan, self._ranks = plan, ranks
        self.inputs, self._outputs = flow.layouts[: flow.num_inputs], flow.outputs
        self._nodes = [(self._bind_node(node), node.inputs, node.outputs, node.released) for node in flow.nodes]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        values = dict(enumerate(inputs))
        for run, read, written, released in self._nodes:
            values.update(zip(written, run([values[i] for i in read]), strict=True))
            for i in released:
                del values[i]
        return [values.get(i) for i in self._outputs]

    def _bind_node(self, node: _planner.ProductNode) -> Run:
        """Returns a function that runs a node. Makes missing process groups."""
        ranks = self._ranks
        if node.matmul is not None and node.schedule is not None:
            model = self._plan.gemm_model(node.matmul.plan.src.dtype)
            if self._plan.chooses_schedules and node.matmul.communicates:
                executables.log_default_model(model, ranks.device_type)
            return bind(node.matmul.to_text(node.schedule), model, ranks)
        if node.plan is not None:
            executables.log_default_topology(node.plan)
            executable = executables.bind(node.plan, device_mesh=ranks.device_mesh, group=ranks.group)
            return lambda inputs: [executables.run(executable, inputs[0], async_op=False)]
        if node.kind == "sum":
            return lambda inputs: [_sum_of_rows(inputs[0])]
        if node.kind == "add" or node.adds_bias(self._plan, ranks.rank):
            return lambda inputs: [inputs[0] + inputs[1]]
        return lambda inputs: inputs[:1]  # another rank adds the bias to pending sums


def _sum_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns the sum over all dims but the last, in new memory."""
    return x.clone() if x.ndim == 1 else x.sum_to_size(x.shape[-1:])


def bind(program: str, model: GemmModel, ranks: ProductRanks) -> Call:
    """Returns a program of products, bound to its process groups. Collective where a group must be made."""
    names = executables.operator_group_names(program, ranks.rank, device_mesh=ranks.device_mesh, group=ranks.group)
    executable = _runtime.executable(program, names, ranks.rank)
    checking.note_group(executable, ranks.group)
    return Call(program, tuple(names), ranks.rank, model, executable)


# Maximum number of cached backwards per product. They differ in the requested gradients and in layouts.
_MAX_BACKWARDS = 64


class Product:
    """A product plan whose forward and backwards are bound to process groups on first use."""

    def __init__(self, plan: _planner.ProductPlan, ranks: ProductRanks) -> None:
        self.plan, self.ranks, self.rank = plan, ranks, ranks.rank
        self.keeps_gathered = plan.keeps_gathered
        self.has_bias = [bias is not None for bias in plan.biases]
        self.num_weights = len(plan.axes)
        # Placements of the gradient that is returned for a DTensor operand; () with scales.
        self.operand_gradient = () if plan.scaled_by else tuple(plan.operand_gradient.placements)
        self._forward: Flow | None = None
        self._backwards: dict[Hashable, Flow] = {}

    def forward(self, inputs: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the results, then the moved operand if the product keeps it.

        `inputs` are this rank's parts of operand, weights and biases; `scales` are this rank's parts, of any shape.
        """
        if self._forward is None:
            self._forward = Flow(self.plan.forward, self.plan, self.ranks)
        layouts = self._forward.inputs[len(inputs) :]
        parts = [self._scale_part(scale, layout) for scale, layout in zip(scales, layouts, strict=True)]
        return self._forward([*inputs, *parts])  # type: ignore[return-value]

    def backward(
        self,
        x: torch.Tensor,
        *weights: torch.Tensor,
        dys: Sequence[torch.Tensor | None],
        layouts: Sequence[_planner.Layout | None],
        needs: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of operand, weights and biases (one per weight) that are needed.

        `x` is the moved operand if the forward kept it. `dys` are gradients with the given `layouts`. A layout of None
        means the default layout of that gradient; a gradient of None means zeros. After the gradients of the results,
        one more may follow: part of the operand's gradient, or None.
        """
        key = (*layouts, *needs)
        flow = self._backwards.get(key)
        if flow is None:
            flow = Flow(self.plan.backward(layouts, needs), self.plan, self.ranks)
            executables.put_bounded(self._backwards, key, flow, _MAX_BACKWARDS)
        pairs = zip(dys, flow.inputs[1 + self.num_weights :])
        return flow([x, *weights, *(self.empty(x, layout).zero_() if dy is None else dy for dy, layout in pairs)])

    def empty(self, like: torch.Tensor, layout: _planner.Layout) -> torch.Tensor:
        """Returns an uninitialized tensor for this rank's part in a layout."""
        return like.new_empty(tuple(layout.local_shape(self.rank)), dtype=getattr(torch, layout.dtype))

    def _scale_part(self, scale: torch.Tensor, layout: _planner.Layout) -> torch.Tensor:
        """Returns a scale in the shape of its layout on this rank: (), or one number for each row."""
        shape = tuple(layout.local_shape(self.rank))
        has_all_rows = scale.numel() == math.prod(shape)
        return scale.reshape(shape) if has_all_rows else scale.reshape(()).expand(shape).contiguous()
