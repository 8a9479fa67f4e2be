"""Weights of `nn.Linear` that move in chunks during their products, each of which is multiplied while the next moves.

A unit that is gathered in chunks gathers before its use what is not chunked, such as biases. During that use its Linear
modules have another class, whose forward multiplies by what arrives. Where such a weight is needed in another way, it
is gathered then, whole.

In backwards, an autograd function does the same: the gradient of the input is a product with the weight, whose rows
arrive in chunks, and the gradient of the weight is a product whose rows leave in chunks, to be reduced. So in steps
whose backward has chunks, the modules have that class in forwards too.

A unit whose modules contain other units is gathered whole: its weights are needed in many uses, with others in between.
Its gradients are reduced in chunks all the same, each in the use that makes it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._native import _planner
from ..layouts import tables
from ..layouts.layout import Layout
from ..matmul.running import Call, Where, bind
from ..runtime import checking, executables
from ..runtime.agreement import MeshWords, Statement
from .formats import with_dtype
from .units import Unit, is_in_backward
from .weights import Weight

# ---- modules that multiply as `nn.Linear` does


def is_linear(module: nn.Module) -> bool:
    """Returns true if a module multiplies as `nn.Linear` does, also if it is a unit itself."""
    return type(module).forward in (nn.Linear.forward, linear_forward) and "forward" not in vars(module)


OWN_PRODUCT = "_shardwright_product"  # of a module whose products are ours: the forward that makes them


def linear_forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward of a Linear module that is a unit: `nn.Module` looks it up before hooks change its class."""
    forward = self.__dict__.get(OWN_PRODUCT, nn.Linear.forward)
    y: torch.Tensor = forward(self, input)
    return y


# If few ranks would make fewer chunks, each rank's part is divided.
_LEAST_CHUNKS = 8
# Programs of a product, for different numbers of rows.
_MAX_CALLS = 64


class Product:
    """A product of which one operand, or the result, moves in chunks.

    Its program depends on the number of rows of an input, its transfers do not, so ranks may have different numbers.
    """

    def __init__(self, mesh: DeviceMesh, device_type: str, make: Callable[[int, bool], _planner.Matmul]) -> None:
        self._where = Where(device_type, device_mesh=mesh)
        self._make = make
        one = make(1, False)
        ranks = one.num_partners
        self.schedule = _planner.Schedule("ring", ranks * -(-_LEAST_CHUNKS // ranks))
        self._model = tables.current.gemm_model(device_type, one.plan.src.dtype)
        self.transfer_ps = int(one.timeline(self.schedule, self._model)["communication_ps"])  # of all chunks
        self.result_bytes = one.peak_bytes(self.schedule, one.plan.src.mesh.ranks[0])  # on the rank with most
        self._calls: dict[tuple[int, bool], Call] = {}

    @property
    def num_chunks(self) -> int:
        chunks = self.schedule.chunks
        assert isinstance(chunks, int)
        return chunks

    def __call__(self, inputs: Sequence[torch.Tensor], rows: int, has_bias: bool = False) -> torch.Tensor:
        key = rows, has_bias
        if key not in self._calls:
            call = bind(self._make(*key).to_text(self.schedule), self._model, self._where)
            call = dataclasses.replace(call, rows_are_own=True)
            executables.keep(self._calls, key, call, _MAX_CALLS)
        (result,) = self._calls[key](inputs)
        return result


class ChunkedWeight:
    """A weight that may be gathered in chunks, and whose gradient may be reduced in chunks."""

    def __init__(self, weight: Weight, plan: _planner.Plan) -> None:
        device_type = weight.memory.device.type
        self.weight = weight
        self.plan = plan
        self.gathered = Product(weight.mesh, device_type, functools.partial(_forward, plan))
        self.gathered_backwards = Product(weight.mesh, device_type, functools.partial(_backward, plan))
        reduced = _reduction_of(weight)
        self.reduced = (
            None if reduced is None else Product(weight.mesh, device_type, functools.partial(_gradient, reduced))
        )
        self.is_absent = False  # it is gathered in chunks now
        self.was_read = False  # in another way than by a product, since the step began
        self.num_products = 0  # in forwards, since the step began
        self.reduces = False  # in chunks, in the backward that runs
        self._is_whole = False  # although absent

    @property
    def module(self) -> Any:
        return self.weight.places[0][0]

    @property
    def chunk_bytes(self) -> int:
        """Of two chunks, on the rank whose are largest."""
        rows, columns = self.plan.src.local_shape(self.plan.src.mesh.ranks[0])
        shares = self.gathered.num_chunks * rows // self.plan.src.shape[0] if rows else 1
        return int(2 * -(-rows // max(shares, 1)) * columns * self.weight.whole.itemsize)

    def begin(self) -> None:
        """Makes the module multiply by this weight in chunks from now on."""
        if "_chunks" not in vars(self.module):
            original: Any = type(self.module)
            self.module.__class__ = _in_chunks(original)
            self.module.__dict__.update({"_chunks": self, OWN_PRODUCT: _LinearInChunks.forward})

    def end(self) -> None:
        self.module.__dict__.pop(OWN_PRODUCT, None)
        if self.module.__dict__.pop("_chunks", None) is not None:
            self.module.__class__ = type(self.module).__mro__[2]

    def set_absent(self, is_absent: bool) -> None:
        self.is_absent = is_absent
        self._is_whole = False

    @property
    def comes_in_chunks(self) -> bool:
        return self.is_absent and not self._is_whole

    def multiplies(self, x: Any, bias: Any) -> bool:
        """Returns whether this product can take the weight in chunks; the same on all ranks where modules are."""
        whole = self.weight.whole
        operands = [x] if bias is None else [x, bias]
        fit = all(type(t) in (torch.Tensor, nn.Parameter) and t.dtype == whole.dtype for t in operands)
        return fit and x.dim() > 0 and x.shape[-1] == whole.shape[1] and not torch.is_autocast_enabled(x.device.type)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if is_in_backward():  # a checkpoint within the unit: the gradient needs the weight again
            self.make_whole()
        else:
            self.num_products += 1
        if not self.comes_in_chunks:
            return F.linear(x, self.weight.whole, bias)
        rows = _rows(x.detach())
        inputs = [self._part(), rows] if bias is None else [self._part(), rows, bias.detach()]
        y = self.gathered(inputs, rows.shape[0], bias is not None)
        return y.view(*x.shape[:-1], y.shape[-1])

    def input_gradient(self, dy: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        if not self.comes_in_chunks:
            return dy.matmul(whole)
        rows = _rows(dy)
        dx = self.gathered_backwards([self._part(), rows], rows.shape[0])
        return dx.view(*dy.shape[:-1], dx.shape[-1])

    def gradient(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """That of the whole weight; None where it was reduced."""
        if not self.reduces or self.reduced is None:
            return _rows(dy).t().mm(_rows(x))
        rows = _rows(x)
        self.weight.gradients.add_reduced(self.reduced([_rows(dy), rows], rows.shape[0]))
        return None

    def read(self) -> nn.Parameter:
        """The weight where it is needed in another way: gathered until its unit is released, if it is absent."""
        self.was_read = True
        self.make_whole()
        return self.weight.whole

    def make_whole(self) -> None:
        if self.comes_in_chunks:
            self._is_whole = True
            weight = self.weight
            with torch.no_grad():
                memory = torch.empty(weight.gathered_bytes, dtype=torch.uint8, device=weight.memory.device)
                weight.start_gather(memory, 0, False)
                weight.carried.finish(weight.memory.data)

    def _part(self) -> torch.Tensor:
        self.weight.finish_refresh()
        return self.weight._at_rest.to(self.weight.whole.dtype)


class UnitInChunks:
    """The weights of a unit that may move in chunks."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        found = [_chunked(weight) for weight in unit.weights]
        self.weights = [each for each in found if each is not None]
        self._had: set[int] = set()  # those with a whole gradient, when that was looked for

    def form(self, in_backwards: bool, reduces: bool, made: Sequence[tuple[int, int]]) -> tuple[Any, ...] | None:
        """The figures that schedules need, as `StepSchedule` says; None if nothing may be in chunks.

        Args:
            in_backwards: whether weights may be gathered in chunks there.
            reduces: whether what a backward leaves, and nothing else, is reduced after it.
            made: where gradients are known to be made: which of `weights`, and the use.
        """
        wishes = self.unit.wishes
        if not self.weights or wishes.stays or wishes.stays_between_steps or self.unit.keep_bytes:
            return None
        others = [weight for weight in self.unit.weights if not self.has(weight)]
        return (
            sum(weight.gathered_bytes for weight in others),
            sum(weight.gather_ps for weight in others),
            max(each.chunk_bytes for each in self.weights),
            sum(each.gathered.transfer_ps for each in self.weights),
            min(each.gathered.num_chunks for each in self.weights),
            in_backwards,
            self._reduction(made) if reduces and self.may_reduce else ([], 0, 0),
        )

    def _reduction(self, made: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int, int]], int, int]:
        """Of each product, times of all chunks and of one, and its use; the time of what is reduced after; bytes."""
        reduced = {i: e.reduced for i, e in enumerate(self.weights) if e.weight.sharded.requires_grad and e.reduced}
        ours = [self.weights[i].weight for i in reduced]
        trained = [weight for weight in self.unit.weights if weight.sharded.requires_grad]
        others = [weight for weight in trained if not any(weight is each for each in ours)]
        uses = {i: [use for which, use in made if which == i] or [-1] for i in reduced}
        products = [(p.transfer_ps, p.transfer_ps // p.num_chunks, use) for i, p in reduced.items() for use in uses[i]]
        most = max((p.result_bytes for p in reduced.values()), default=0)
        return products, sum(w.reduce_ps for w in others), most + sum(w.gradient_bytes for w in others)

    def new_gradients(self) -> list[int]:
        """Returns those of `weights` that have got a whole gradient since the last call."""
        had, self._had = self._had, {i for i, e in enumerate(self.weights) if e.weight.whole.grad is not None}
        return sorted(self._had - had)

    @property
    def may_reduce(self) -> bool:
        """Returns whether what products reduce is what a reduction after them would be."""
        wishes = self.unit.wishes
        is_usual = wishes.reduces and wishes.reduces_over_replicas and wishes.divides_by is None
        return is_usual and not any(weight.gradients.wait for weight in self.unit.weights)

    def begin(self) -> None:
        for each in self.weights:
            each.begin()

    def end(self) -> None:
        for each in self.weights:
            each.end()

    def set_absent(self, is_absent: bool) -> None:
        """They are gathered in chunks from now on, or not any more."""
        for each in self.weights:
            each.set_absent(is_absent)

    def make_whole(self, which_were_read: bool = False) -> None:
        """Gathers those that are absent."""
        for each in self.weights:
            if each.was_read or not which_were_read:
                each.make_whole()

    def begin_step(self) -> None:
        for each in self.weights:
            each.was_read = each.reduces = False
            each.num_products = 0
        self._had = set()

    def begin_backward(self, reduces: bool) -> None:
        """A gradient that is a sum is reduced whole, once, instead of each of its terms.

        So ranks must agree on how often they call each module; `sw.debug.check_ranks` compares that.
        """
        if reduces and checking.is_on():
            self._check_calls()
        for each in self.weights:
            is_sum = each.num_products > 1 or each.was_read
            each.reduces = reduces and self.may_reduce and not is_sum

    def _check_calls(self) -> None:
        for mesh in dict.fromkeys(each.weight.mesh for each in self.weights):
            ours = [each for each in self.weights if each.weight.mesh == mesh]
            said = {e.weight.name: f"{e.num_products} calls{', read otherwise' if e.was_read else ''}" for e in ours}
            differ = "call modules whose gradients are reduced in chunks differently often in a step"
            words = MeshWords(mesh, ours[0].weight.memory.device)
            words.compare(Statement("chunked", said, differ=differ))

    def has(self, weight: Weight) -> bool:
        return any(each.weight is weight for each in self.weights)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


# Products whose weight, or its gradient, moves by a plan, for a number of rows.


def _forward(plan: _planner.Plan, rows: int, has_bias: bool) -> _planner.Matmul:
    return _planner.Matmul.gather(plan, [("nk,mk->mn", _uncut(plan, rows, 1), has_bias)])


def _backward(plan: _planner.Plan, rows: int, _: bool) -> _planner.Matmul:
    return _planner.Matmul.gather(plan, [("nk,mn->mk", _uncut(plan, rows, 0), False)])


def _gradient(plan: _planner.Plan, rows: int, _: bool) -> _planner.Matmul:
    return _planner.Matmul.scatter(plan, [("mn,mk->nk", _uncut(plan, rows, 0), _uncut(plan, rows, 1))])


def _uncut(plan: _planner.Plan, rows: int, dim: int) -> Layout:
    """Rows of as many elements as the weight has along a dim, on each rank its own."""
    mesh = plan.src.mesh
    return Layout(mesh, [rows, plan.src.shape[dim]], ["R"] * mesh.ndim, plan.src.dtype)


def _chunked(weight: Weight) -> ChunkedWeight | None:
    """Returns a weight in chunks, if only one `nn.Linear` has it, its rows are cut, and it is gathered in place."""
    module, name = weight.places[0]
    if len(weight.places) > 1 or name != "weight" or not is_linear(module):
        return None
    is_plain = not isinstance(weight.whole, DTensor) and not weight.is_held and weight.kept is None
    if not is_plain or weight.extension is not None or weight.carried.buffers(weight.use):
        return None
    if weight._at_rest.device != weight.memory.device or set(weight.rest.placements) - {"R", "S(0)"}:
        return None
    (src,), (dst,) = weight.carried.format.layouts(weight.rest), weight.carried.format.layouts(weight.use)
    plan = executables.make_plan(src, dst, weight.memory.device.type)
    return None if _forward(plan, 1, False).why_only_serial is not None else ChunkedWeight(weight, plan)


def _reduction_of(weight: Weight) -> _planner.Plan | None:
    """The plan of its gradient's reduction, if chunks of it can be multiplied just before they are sent."""
    dtypes = weight.gradients.dtypes
    if not dtypes.use == dtypes.reduce == dtypes.gradients:
        return None
    src, dst = with_dtype(weight.layouts.usual_gradient, dtypes.use), with_dtype(weight.store, dtypes.use)
    plan = executables.make_plan(src, dst, weight.memory.device.type)
    matmul = _gradient(plan, 1, False)
    return None if matmul.why_only_serial is not None or plan.steps[0].op != "reduce_scatter" else plan


class _LinearInChunks(nn.Linear):
    """The class of a Linear module while its products are ours."""

    _chunks: ChunkedWeight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        chunks = self._chunks
        if not chunks.multiplies(input, self.bias):
            return F.linear(input, self.weight, self.bias)
        y: torch.Tensor = _Multiply.apply(input, chunks.weight.whole, self.bias, chunks)  # type: ignore[no-untyped-call]
        return y

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        return self._chunks.read()


@functools.cache
def _in_chunks(original: type) -> type:
    return type(original.__name__, (_LinearInChunks, original), {})


class _Multiply(torch.autograd.Function):
    """`F.linear`, in chunks where a schedule says so."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, whole: torch.Tensor, bias: torch.Tensor | None, chunks: ChunkedWeight
    ) -> torch.Tensor:
        ctx.save_for_backward(x, whole)
        ctx.chunks = chunks
        return chunks.multiply(x, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, whole = ctx.saved_tensors
        (dy,) = gradients
        chunks: ChunkedWeight = ctx.chunks
        needs_x, needs_whole, needs_bias, _ = ctx.needs_input_grad
        dx = chunks.input_gradient(dy, whole) if needs_x else None
        dw = chunks.gradient(dy, x) if needs_whole else None
        return dx, dw, _rows(dy).sum(0) if needs_bias else None, None
