"""Programs of products, and moves beside them, bound to process groups and kept."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import _engine, _planner, _runtime, _stats, checking, groups, tables, watching
from . import operators as operators  # registers what calls run by
from ._planner import GemmModel, Matmul, Schedule


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

    def model(self, dtype: str) -> GemmModel:
        """How long products of such operands take: what is said, else what was measured, else a default."""
        found = self.gemm_model or tables.measured_gemm_model(self.device_type, dtype)
        return found or tables.default_gemm_model(self.device_type)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Of operands of 8-bit floats: one scale each, or one by row, and the dtype of the result."""

    by_row: bool
    result: str
    # By row: where the moved operand's scales come from and go, if it moves.
    src: _planner.Layout | None = None
    dst: _planner.Layout | None = None

    def parts(self, setting: Setting) -> tuple[bool, str, _planner.Plan | None]:
        """As Matmul takes it."""
        if self.src is None or self.dst is None:
            return self.by_row, self.result, None
        return self.by_row, self.result, plan_between(self.src, self.dst, setting)


@dataclasses.dataclass(frozen=True)
class Call:
    """A program of products, bound to its process groups."""

    program: str
    groups: tuple[str, ...]
    rank: int
    model: GemmModel  # that it was chosen by
    executable: _runtime.Executable

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        if checking.is_on():
            checking.compare(self.executable, inputs[0], False)
        _stats.counts.products += 1
        for heard in _listeners:
            heard.append(self)
        if all(type(tensor) in _PLAIN for tensor in inputs):
            # Not by the operator, inside of which dispatch modes would not see the collectives.
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
    """The calls that are made while the block runs, in their order."""
    heard: list[Call] = []
    _listeners.append(heard)
    try:
        yield heard
    finally:
        _listeners.remove(heard)


_calls: _engine.Kept[Call] = _engine.Kept()
_moves: _engine.Kept[_runtime.Executable] = _engine.Kept()


def plan_between(src: _planner.Layout, dst: _planner.Layout, setting: Setting) -> _planner.Plan:
    return _engine.make_plan(src, dst, setting.device_type, setting.group)


def move(local: torch.Tensor, src: _planner.Layout, dst: _planner.Layout, setting: Setting) -> torch.Tensor:
    """A redistribute that has no product to hide behind."""
    if src == dst:
        return local
    key = (src, dst, setting.device_type, setting.weak_group, setting.device_mesh)
    executable = _moves.get_or_make(
        key,
        lambda: _engine.bind(plan_between(src, dst, setting), device_mesh=setting.device_mesh, group=setting.group),
    )
    return _engine.run(executable, local, async_op=False)


def _bind(matmul: Matmul, setting: Setting, must: bool) -> Call:
    schedule = schedule_of(matmul, setting, must)
    rank = dist.get_rank(setting.group)
    names = _engine.names_of(matmul.groups(schedule, rank), device_mesh=setting.device_mesh, group=setting.group)
    program = matmul.to_text(schedule)
    model = setting.model(matmul.plan.src.dtype)
    return Call(program, tuple(names), rank, model, _runtime.executable(program, names, rank))


def schedule_of(matmul: Matmul, setting: Setting, must: bool) -> Schedule:
    """What was asked for, and what is predicted fastest of it.

    With `must`, what was asked for and cannot be raises ValueError; else the choice is free, as it is where nothing is
    moved between ranks.
    """
    model, depth = setting.model(matmul.plan.src.dtype), setting.depth
    is_free = setting.method is None or setting.chunks is None
    if is_free and matmul.communicates and model == tables.default_gemm_model(setting.device_type):
        tables.note_default(model.name, _engine.is_first_rank)
    if (setting.method is None and setting.chunks is None) or not matmul.communicates:
        return matmul.choose(model, depth)
    if setting.chunks is not None and (setting.method is not None or not isinstance(setting.chunks, int)):
        wanted = Schedule(setting.method or "ring", setting.chunks, depth=depth or 1)
        try:
            matmul.check(wanted)
        except ValueError:
            if must:
                raise
            return matmul.choose(model, depth)
        return matmul.tuned(wanted, model, depth)
    fitting = [
        (predicted, schedule)
        for schedule, predicted in matmul.predictions(model, depth)
        if setting.method in (None, schedule.method) and setting.chunks in (None, schedule.chunks)
    ]
    if fitting:
        return min(fitting, key=lambda one: one[0])[1]
    if must:
        wanted = Schedule(setting.method or "collective", setting.chunks or 1, depth=depth or 1)
        matmul.check(wanted)
        return matmul.tuned(wanted, model, depth)
    return matmul.choose(model, depth)


def gather(
    src: _planner.Layout,
    dst: _planner.Layout,
    products: tuple[tuple[str, _planner.Layout, bool], ...],
    setting: Setting,
    *,
    keeps: bool = False,
    must: bool = False,
    scaling: Scaling | None = None,
) -> Call:
    """Inputs: the tensor that moves, others, biases, scales; outputs: products, then the moved tensor if it is kept."""
    key = ("gather", src, dst, products, keeps, must, setting, scaling)
    return _calls.get_or_make(
        key, lambda: _bind(gather_matmul(src, dst, products, setting, keeps, scaling), setting, must)
    )


def gather_matmul(
    src: _planner.Layout,
    dst: _planner.Layout,
    products: Sequence[tuple[str, _planner.Layout, bool]],
    setting: Setting,
    keeps: bool = False,
    scaling: Scaling | None = None,
) -> Matmul:
    parts = None if scaling is None else scaling.parts(setting)
    return Matmul.gather(plan_between(src, dst, setting), products, keeps, parts)


def scatter(
    src: _planner.Layout,
    dst: _planner.Layout,
    terms: tuple[tuple[str, _planner.Layout, _planner.Layout], ...],
    setting: Setting,
    *,
    has_addend: bool = False,
    must: bool = False,
    scaling: Scaling | None = None,
) -> Call:
    """Inputs: both operands of each term, then what is added to them, then scales; output: their sum, moved."""
    key = ("scatter", src, dst, terms, has_addend, must, setting, scaling)
    return _calls.get_or_make(
        key, lambda: _bind(scatter_matmul(src, dst, terms, setting, has_addend, scaling), setting, must)
    )


def scatter_matmul(
    src: _planner.Layout,
    dst: _planner.Layout,
    terms: Sequence[tuple[str, _planner.Layout, _planner.Layout]],
    setting: Setting,
    has_addend: bool = False,
    scaling: Scaling | None = None,
) -> Matmul:
    parts = None if scaling is None else scaling.parts(setting)
    return Matmul.scatter(plan_between(src, dst, setting), terms, has_addend, parts)


def chunkable(matmul: Matmul) -> bool:
    return matmul.why_only_serial is None
