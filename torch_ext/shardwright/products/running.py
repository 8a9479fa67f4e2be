"""Binds product plans to process groups and runs them node by node."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _planner, _runtime, checking, counters, executables, groups, tables, watching
from .. import operators as operators  # registers the operators that calls use
from .._planner import GemmModel
from ..topology import tables_now


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a user may say about how products are carried out, and where."""

    device_type: str
    weak_group: groups.WeakGroup = groups.DEFAULT
    device_mesh: DeviceMesh | None = None
    method: str | None = None
    chunks: int | tuple[tuple[int, ...], ...] | None = None
    depth: int | None = None
    gemm_model: GemmModel | None = None
    keeps_gathered: bool = False

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.weak_group.get()

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def model(self, dtype: str) -> GemmModel:
        """Returns the model for operands of this dtype: the user's, else the measured one, else a default."""
        found = self.gemm_model or tables.measured_gemm_model(self.device_type, dtype)
        return found or tables.default_gemm_model(self.device_type)


def make_plan(
    setting: Setting,
    axes: Sequence[str],
    operand: _planner.Layout,
    weights: Sequence[_planner.Layout],
    biases: Sequence[_planner.Layout | None],
    results: Sequence[_planner.Layout],
    cuts: str | None,
    scaled_by: str = "",
    scales: Sequence[_planner.Layout | None] = (),
) -> _planner.ProductPlan:
    """The plan by what is pinned, measured and said now. `cuts`: None for those that are predicted fastest."""
    backend = executables.lowering_on(operand.mesh, setting.device_type, setting.group)
    counters.counts.plans += 1
    dtypes = {layout.dtype for layout in (operand, *weights, *results)}
    return _planner.ProductPlan(
        axes,
        operand,
        weights,
        biases,
        results,
        cuts=cuts,
        scaled_by=scaled_by,
        scales=scales,
        keeps_gathered=setting.keeps_gathered,
        method=setting.method,
        chunks=setting.chunks,
        depth=setting.depth,
        backend=backend,
        tables=tables_now(),
        gemm_models={dtype: setting.model(dtype) for dtype in dtypes},
    )


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

    def __init__(self, flow: _planner.ProductDataflow, plan: _planner.ProductPlan, setting: Setting) -> None:
        self._setting = setting
        self._plan = plan
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
        if node.matmul is not None:
            return self._call(node.matmul, node.schedule)
        if node.plan is not None:
            executables.note_default_topology(node.plan)
            where = self._setting
            moved = executables.bind(node.plan, device_mesh=where.device_mesh, group=where.group)
            return lambda inputs: [executables.run(moved, inputs[0], async_op=False)]
        if node.kind == "sum":
            return lambda inputs: [
                inputs[0].sum(dim=tuple(range(inputs[0].ndim - 1))) if inputs[0].ndim > 1 else inputs[0]
            ]
        coordinate = self._plan.operand.mesh.coordinate(self._setting.rank) or []
        if any(coordinate[d] for d in node.pending):
            return lambda inputs: inputs[:1]  # one rank adds the bias to sums that stay due
        return lambda inputs: [inputs[0] + inputs[1]]

    def _call(self, matmul: _planner.Matmul, schedule: _planner.Schedule) -> Call:
        where = self._setting
        model = self._plan.gemm_model(matmul.plan.src.dtype)
        executables.note_default_topology(matmul.plan)
        is_free = where.method is None or where.chunks is None
        if is_free and matmul.communicates and model == tables.default_gemm_model(where.device_type):
            tables.note_default(model.name, executables.is_first_rank)
        names = executables.names_of(
            matmul.groups(schedule, where.rank), device_mesh=where.device_mesh, group=where.group
        )
        program = matmul.to_text(schedule)
        executable = _runtime.executable(program, names, where.rank)
        return Call(program, tuple(names), where.rank, model, executable)


# The number of backwards kept per product; they differ in the gradients requested and in their layouts.
_MAX_BACKWARDS = 64


class Product:
    """A product plan whose forward and backwards are bound to process groups on first use."""

    def __init__(self, plan: _planner.ProductPlan, setting: Setting) -> None:
        self.plan = plan
        self.setting = setting
        self.rank = setting.rank
        self.keeps_gathered = plan.keeps_gathered
        self.has_bias = [bias is not None for bias in plan.biases]
        self.num_weights = len(plan.axes)
        self.scale_layouts = plan.forward.layouts[1 + self.num_weights + sum(self.has_bias) : plan.forward.num_inputs]
        self.result_gradients = plan.result_gradients
        self._forward: Flow | None = None
        self._backwards: dict[Hashable, Flow] = {}

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Operand, weights, biases and scales in, this rank's parts; results out, and the operand as moved if kept."""
        if self._forward is None:
            self._forward = Flow(self.plan.forward, self.plan, self.setting)
        outputs: list[torch.Tensor] = self._forward(inputs)  # type: ignore[assignment]
        return (outputs[:-1], outputs[-1]) if self.keeps_gathered else (outputs, None)

    def backward(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        dys: Sequence[torch.Tensor],
        layouts: Sequence[_planner.Layout],
        needs: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of operand, weights and biases (one per weight) that are needed.

        `x` is as moved if that was kept. `dys` lie as `layouts`; behind those of the results one more may be part of
        the operand's gradient from elsewhere.
        """
        key = (*layouts, *needs)
        flow = self._backwards.get(key)
        if flow is None:
            count = self.num_weights
            given, added = layouts[:count], layouts[count] if len(layouts) > count else None
            planned = self.plan.backward(given, needs[0], needs[1 : 1 + count], needs[1 + count :], added)
            flow = Flow(planned, self.plan, self.setting)
            if len(self._backwards) >= _MAX_BACKWARDS:
                del self._backwards[next(iter(self._backwards))]
            self._backwards[key] = flow
        return flow([x, *weights, *dys])

    def empty(self, like: torch.Tensor, layout: _planner.Layout) -> torch.Tensor:
        """Returns an uninitialised tensor for this rank's part in a layout."""
        return like.new_empty(tuple(layout.local_shape(self.rank)), dtype=getattr(torch, layout.dtype))
