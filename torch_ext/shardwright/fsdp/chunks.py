"""Weights of `nn.Linear` that are gathered in chunks, each of which is multiplied while the next is under way.

A unit in chunks gathers before its use what is not chunked, such as biases. During that use its Linear modules have
another class, whose forward multiplies by what arrives. Where such a weight is needed in another way, it is gathered
then, whole.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from .. import _planner, _runtime, executables
from ..layout import Layout
from ..products.running import Call, Setting
from .units import Unit
from .weights import Weight

# Where few ranks would make fewer chunks, each rank's part is divided.
_LEAST_CHUNKS = 8
# Programs of a weight, for different numbers of rows of its other operand.
_MAX_CALLS = 64


class ChunkedWeight:
    """A weight that may be gathered in chunks."""

    def __init__(self, weight: Weight, plan: _planner.Plan, schedule: _planner.Schedule, transfer_ps: int) -> None:
        self.weight = weight
        self.plan = plan
        self.schedule = schedule
        self.transfer_ps = transfer_ps  # of all chunks
        self._calls: dict[tuple[int, bool], Call] = {}
        self._is_whole = False

    @property
    def module(self) -> Any:
        return self.weight.places[0][0]

    @property
    def num_chunks(self) -> int:
        chunks = self.schedule.chunks
        assert isinstance(chunks, int)
        return chunks

    @property
    def chunk_bytes(self) -> int:
        """Of two chunks, on the rank whose are largest."""
        rows, columns = self.plan.src.local_shape(self.plan.src.mesh.ranks[0])
        shares = self.num_chunks * rows // self.plan.src.shape[0] if rows else 1
        return int(2 * -(-rows // max(shares, 1)) * columns * self.weight.whole.itemsize)

    def begin(self) -> None:
        """The module multiplies in chunks from now on."""
        if "_chunks" not in vars(self.module):
            self._is_whole = False
            original: Any = type(self.module)
            self.module.__class__ = _in_chunks(original)
            self.module.__dict__["_chunks"] = self

    def end(self) -> None:
        if self.module.__dict__.pop("_chunks", None) is not None:
            self.module.__class__ = type(self.module).__mro__[2]

    def multiplies(self, x: Any, bias: Any) -> bool:
        """Whether this product can take the weight in chunks; the same on all ranks where modules are."""
        whole = self.weight.whole
        operands = [x] if bias is None else [x, bias]
        fit = all(type(t) in (torch.Tensor, nn.Parameter) and t.dtype == whole.dtype for t in operands)
        return fit and x.dim() > 0 and x.shape[-1] == whole.shape[1] and not torch.is_autocast_enabled(x.device.type)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.detach().reshape(-1, x.shape[-1])
        key = rows.shape[0], bias is not None
        if key not in self._calls:
            if len(self._calls) >= _MAX_CALLS:
                self._calls.clear()
            self._calls[key] = self._call(*key)
        part = self.weight._at_rest.to(rows.dtype)
        (y,) = self._calls[key]([part, rows] if bias is None else [part, rows, bias.detach()])
        return y.view(*x.shape[:-1], y.shape[-1])

    def whole(self) -> nn.Parameter:
        """Gathers the weight until its unit is released."""
        if not self._is_whole:
            self._is_whole = True
            weight = self.weight
            with torch.no_grad():
                memory = torch.empty(weight.gathered_bytes, dtype=torch.uint8, device=weight.memory.device)
                weight.start_gather(memory, 0, False)
                weight.carried.finish(weight.memory.data)
        return self.weight.whole

    def _call(self, rows: int, has_bias: bool) -> Call:
        """The program for so many rows. Its transfers do not depend on them, so ranks may have different numbers."""
        matmul = _matmul(self.plan, rows, has_bias)
        rank, where = dist.get_rank(), Setting(self.weight.memory.device.type)
        text = matmul.to_text(self.schedule)
        compiled = _runtime.compiled(text, rank)
        names = executables.names_of(compiled.groups, device_mesh=self.weight.mesh)
        return Call(text, tuple(names), rank, where.model(self.plan.src.dtype), compiled.bind(names))


class UnitInChunks:
    """The weights of a unit that may be gathered in chunks."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        found = [_chunked(weight) for weight in unit.weights]
        self.weights = [each for each in found if each is not None]

    @property
    def form(self) -> tuple[int, int, int, int, int] | None:
        """What schedules have to know, as `StepSchedule` says; None where nothing may be in chunks."""
        wishes = self.unit.wishes
        if not self.weights or wishes.stays or wishes.stays_between_steps or self.unit.keep_bytes:
            return None
        others = [weight for weight in self.unit.weights if not self.has(weight)]
        return (
            sum(weight.gathered_bytes for weight in others),
            sum(weight.gather_ps for weight in others),
            max(each.chunk_bytes for each in self.weights),
            sum(each.transfer_ps for each in self.weights),
            min(each.num_chunks for each in self.weights),
        )

    def begin(self) -> None:
        for each in self.weights:
            each.begin()

    def end(self) -> None:
        for each in self.weights:
            each.end()

    def has(self, weight: Weight) -> bool:
        return any(each.weight is weight for each in self.weights)


def _matmul(plan: _planner.Plan, rows: int, has_bias: bool) -> _planner.Matmul:
    mesh = plan.src.mesh
    other = Layout(mesh, [rows, plan.src.shape[1]], ["R"] * mesh.ndim, plan.src.dtype)
    return _planner.Matmul.gather(plan, [("nk,mk->mn", other, has_bias)])


def _chunked(weight: Weight) -> ChunkedWeight | None:
    """Of a weight that only one `nn.Linear` has, whose rows are cut, and which is gathered into its place."""
    module, name = weight.places[0]
    if len(weight.places) > 1 or name != "weight" or type(module).forward is not nn.Linear.forward:
        return None
    is_plain = not isinstance(weight.whole, DTensor) and not weight.is_held and weight.kept is None
    if "forward" in vars(module) or not is_plain or weight.carried.buffers(weight.use):
        return None
    if weight._at_rest.device != weight.memory.device or set(weight.rest.placements) - {"R", "S(0)"}:
        return None
    (src,), (dst,) = weight.carried.format.layouts(weight.rest), weight.carried.format.layouts(weight.use)
    plan = executables.make_plan(src, dst, weight.memory.device.type)
    matmul = _matmul(plan, 1, False)
    if matmul.why_only_serial is not None:
        return None
    ranks = matmul.num_partners
    schedule = _planner.Schedule("ring", ranks * -(-_LEAST_CHUNKS // ranks))
    model = Setting(weight.memory.device.type).model(src.dtype)
    return ChunkedWeight(weight, plan, schedule, matmul.timeline(schedule, model)["communication_ps"])


class _LinearInChunks(nn.Linear):
    """What a Linear module is while its weight is gathered in chunks."""

    _chunks: ChunkedWeight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        chunks = self._chunks
        if not chunks.multiplies(input, self.bias):
            return F.linear(input, self.weight, self.bias)
        y: torch.Tensor = _Multiply.apply(input, chunks.weight.whole, self.bias, chunks)  # type: ignore[no-untyped-call]
        return y

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        return self._chunks.whole()


@functools.cache
def _in_chunks(original: type) -> type:
    return type(original.__name__, (_LinearInChunks, original), {})


class _Multiply(torch.autograd.Function):
    """`F.linear`. In the backward the weight is whole, as a schedule says."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, whole: torch.Tensor, bias: torch.Tensor | None, chunks: ChunkedWeight
    ) -> torch.Tensor:
        ctx.save_for_backward(x, whole)
        return chunks.multiply(x, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, whole = ctx.saved_tensors
        (dy,) = gradients
        needs_x, needs_whole, needs_bias, _ = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dy.matmul(whole) if needs_x else None
        dw = rows.t().mm(x.reshape(-1, x.shape[-1])) if needs_whole else None
        return dx, dw, rows.sum(0) if needs_bias else None, None
