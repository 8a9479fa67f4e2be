"""Weights of `nn.Linear` that are gathered in chunks: each chunk is multiplied while the next one is transferred.

A unit that is gathered in chunks gathers its other weights, such as biases, before the use. During the use its Linear
modules have another class, whose forward multiplies by each chunk when it is received. If such a weight is read in
another way, it is gathered in full at that moment.

Example: a weight [8, 4] is sharded by rows over two ranks, and transferred in eight chunks of one row. Each row gives
one column of ``y = x @ weight.T``. Rank 0 computes columns 0 to 3 from its own rows, and columns 4 to 7 from the rows
that it receives one by one from rank 1. It holds two chunks at a time instead of the weight.

In backwards, an autograd function does the same. The gradient of the input is a matmul with the weight, whose rows are
received in chunks. The gradient of the weight is a matmul whose result rows are sent in chunks, to be reduced. So in
steps whose backward has chunks, the modules have that class in forwards too.

An *absent* weight has no full tensor when the use begins, because its chunks are gathered during matmuls. A
*chunked weight* is an additional weight that represents a unit in chunks in a schedule (csrc/schedule/chunks.h).

A unit whose modules contain other units is not gathered in chunks, because its weights are needed in many uses with
other uses in between. Its gradients are still reduced in chunks, each in the use that computes it.
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
from ..matmul.running import Call, ProductRanks, bind
from ..runtime import checking, executables
from ..runtime.agreement import MeshWords, Statement
from .gradients import is_wanted
from .layouts import has_arithmetic
from .units import Unit, gather_cost, gradient_bytes, is_in_backward, reduce_cost, use_bytes
from .weights import Weight

# ---- modules that multiply as `nn.Linear` does


def is_linear(module: nn.Module) -> bool:
    """Returns true if a module multiplies as `nn.Linear` does, also if it is a unit itself."""
    return type(module).forward in (nn.Linear.forward, linear_forward) and "forward" not in vars(module)


# Attribute of a Linear module that is a unit: the function that its forward calls, if not `nn.Linear.forward`.
OWN_FORWARD = "_shardwright_product"


def linear_forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward of a Linear module that is a unit. It looks up OWN_FORWARD, because `nn.Module` looks up the forward
    of the class before hooks change the class."""
    forward = self.__dict__.get(OWN_FORWARD, nn.Linear.forward)
    return forward(self, input)


_MIN_CHUNKS = 8  # minimum number of chunks; if there are fewer ranks, each rank's shard is divided
_MAX_CALLS = 64  # maximum number of cached programs of a matmul, one for each number of rows


class ChunkedProduct:
    """A matmul that receives one operand in chunks, or sends its result in chunks.

    Its program depends on the number of rows of the input, but its transfers do not. So ranks may have different
    numbers of rows. `make(rows, has_bias)` returns the matmul for a number of rows.
    """

    def __init__(self, mesh: DeviceMesh, device_type: str, make: Callable[[int, bool], _planner.Matmul]) -> None:
        self._where = ProductRanks(device_type, device_mesh=mesh)  # the ranks that run it
        self._make = make
        matmul = make(1, False)  # for one row; transfers are the same for any number of rows
        ranks = matmul.num_partners  # number of ranks that exchange chunks
        self.schedule = _planner.Schedule("ring", ranks * -(-_MIN_CHUNKS // ranks))
        self._model = tables.current.gemm_model(device_type, matmul.plan.src.dtype)
        self.transfer_ps = int(matmul.timeline(self.schedule, self._model)["communication_ps"])  # of all chunks
        self.peak_bytes = matmul.peak_bytes(self.schedule, matmul.plan.src.mesh.ranks[0])  # the most of any rank
        self._calls: dict[tuple[int, bool], Call] = {}  # by number of rows and has_bias

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the transfer."""
        chunks = self.schedule.chunks
        assert isinstance(chunks, int)
        return chunks

    def __call__(self, inputs: Sequence[torch.Tensor], rows: int, has_bias: bool = False) -> torch.Tensor:
        """Runs the matmul on this rank's operands. Compiles it first, if it is new for this number of rows."""
        key = rows, has_bias
        if key not in self._calls:
            call = bind(self._make(*key).to_text(self.schedule), self._model, self._where)
            call = dataclasses.replace(call, rows_are_own=True)  # ranks may have different numbers of rows
            executables.put_bounded(self._calls, key, call, _MAX_CALLS)
        (result,) = self._calls[key](inputs)
        return result


class ChunkedWeight:
    """A weight that may be gathered in chunks, and whose gradient may be reduced in chunks.

    `weight_gradient_product` is None if the gradient can only be reduced in full.
    """

    def __init__(self, weight: Weight, plan: _planner.Plan) -> None:
        self.weight = weight
        self.plan = plan  # the gather of the weight
        where = weight.mesh, weight.memory.device.type
        self.forward_product = ChunkedProduct(*where, functools.partial(_forward_matmul, plan))
        self.input_gradient_product = ChunkedProduct(*where, functools.partial(_input_gradient_matmul, plan))
        reduction, self.weight_gradient_product = _reduction_of(weight), None
        if reduction is not None:
            self.weight_gradient_product = ChunkedProduct(*where, functools.partial(_weight_gradient_matmul, reduction))
        self.is_absent = False  # it is gathered in chunks during matmuls, not before the use
        self.was_read = False  # it was read other than by a matmul in this step
        self.num_products = 0  # number of matmuls in forwards since the step began
        self.reduces = False  # the running backward reduces its gradient in chunks
        self._is_full = False  # it was gathered in full although `is_absent`

    @property
    def module(self) -> Any:
        """The Linear module that has the weight."""
        return self.weight.owners[0][0]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of two chunks, as many as exist at a time, on the rank with the largest chunks."""
        rows, columns = self.plan.src.local_shape(self.plan.src.mesh.ranks[0])
        chunks_of_shard = self.forward_product.num_chunks * rows // self.plan.src.shape[0] if rows else 1
        return int(2 * -(-rows // max(chunks_of_shard, 1)) * columns * self.weight.unsharded.itemsize)

    def begin(self) -> None:
        """Makes the module multiply by this weight in chunks from now on."""
        if "_chunks" not in vars(self.module):
            original: Any = type(self.module)
            self.module.__class__ = _chunked_class(original)
            self.module.__dict__.update({"_chunks": self, OWN_FORWARD: _LinearInChunks.forward})

    def end(self) -> None:
        """Undoes `begin`."""
        self.module.__dict__.pop(OWN_FORWARD, None)
        if self.module.__dict__.pop("_chunks", None) is not None:
            self.module.__class__ = type(self.module).__mro__[2]

    def set_absent(self, is_absent: bool) -> None:
        """Sets whether the weight is gathered in chunks, and not before the use, from now on."""
        self.is_absent = is_absent
        self._is_full = False

    @property
    def is_received_in_chunks(self) -> bool:
        """True if matmuls receive the weight in chunks, because it was not gathered in full."""
        return self.is_absent and not self._is_full

    def can_multiply(self, x: Any, bias: Any) -> bool:
        """Returns true if ``x @ weight.T + bias`` can take the weight in chunks. Ranks with equal modules agree."""
        full = self.weight.unsharded
        operands = [x] if bias is None else [x, bias]
        fit = all(type(t) in (torch.Tensor, nn.Parameter) and t.dtype == full.dtype for t in operands)
        return fit and x.dim() > 0 and x.shape[-1] == full.shape[1] and not torch.is_autocast_enabled(x.device.type)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns x @ weight.T + bias."""
        if is_in_backward():  # recomputation of a checkpoint in the unit: the gradient needs the full weight later
            self.gather_full()
        else:
            self.num_products += 1
        if not self.is_received_in_chunks:
            return F.linear(x, self.weight.unsharded, bias)
        rows = _rows(x.detach())
        inputs = [self._part(), rows] if bias is None else [self._part(), rows, bias.detach()]
        y = self.forward_product(inputs, rows.shape[0], bias is not None)
        return y.view(*x.shape[:-1], y.shape[-1])

    def input_gradient(self, dy: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        """Returns dy @ weight. `full`: the unsharded parameter, which has memory if it was gathered in full."""
        if not self.is_received_in_chunks:
            return dy.matmul(full)
        rows = _rows(dy)
        dx = self.input_gradient_product([self._part(), rows], rows.shape[0])
        return dx.view(*dy.shape[:-1], dx.shape[-1])

    def gradient(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Returns dy.T @ x, the full gradient of the weight; None if it is reduced in chunks, or would be but the
        running backward does not compute it."""
        if not self.reduces or self.weight_gradient_product is None:
            return _rows(dy).t().mm(_rows(x))
        if is_wanted(self.weight.unsharded):
            rows = _rows(x)
            self.weight.gradients.add_reduced_in_chunks(self.weight_gradient_product([_rows(dy), rows], rows.shape[0]))
        return None

    def read(self) -> nn.Parameter:
        """Returns the full weight, for a read other than a matmul. An absent weight is gathered for the entire use."""
        self.was_read = True
        self.gather_full()
        return self.weight.unsharded

    def gather_full(self) -> None:
        """Gathers an absent weight in full, into newly allocated memory."""
        if self.is_received_in_chunks:
            self._is_full = True
            weight = self.weight
            with torch.no_grad():
                memory = torch.empty(weight.gathered_bytes, dtype=torch.uint8, device=weight.memory.device)
                weight.start_gather(memory, 0, False)
                weight.gather.finish(weight.memory.data)

    def _part(self) -> torch.Tensor:
        """Returns this rank's shard in the dtype of the use."""
        self.weight.finish_refresh()
        return self.weight._gather_source.to(self.weight.unsharded.dtype)


class ChunkedUnit:
    """The weights of a unit that may be transferred in chunks."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.weights = [each for weight in unit.weights if (each := _chunked_weight_of(weight)) is not None]
        self._had_gradient: set[int] = set()  # indices of the weights with a full gradient at the last `new_gradients`

    def schedule_entry(
        self, in_backwards: bool, reduces: bool, computed: Sequence[tuple[int, int]]
    ) -> tuple[Any, ...] | None:
        """Returns the unit's item of `chunked_weights` of `StepSchedule`, without the weight's index.

        Returns (use_bytes, gather_ps, chunk_bytes, transfer_ps, num_chunks, in_backwards, reduction), or None if the
        unit may have no chunks.

        Args:
            in_backwards: weights may be gathered in chunks in backwards.
            reduces: each backward reduces its gradients, and none are kept from earlier backwards.
            computed: pairs of an index into `weights` and a use that computes the gradient of that weight; none before
                a step was recorded.
        """
        unit_options = self.unit.unit_options
        if not self.weights or unit_options.keep_gathered or unit_options.keep_between_steps or self.unit.keep_bytes:
            return None
        others = [weight for weight in self.unit.weights if not self.has(weight)]
        return (
            use_bytes(others),
            gather_cost(others).ps,
            max(each.chunk_bytes for each in self.weights),
            sum(each.forward_product.transfer_ps for each in self.weights),
            min(each.forward_product.num_chunks for each in self.weights),
            in_backwards,
            self._reduction(computed) if reduces and self.may_reduce else ([], 0, 0),
        )

    def _reduction(self, computed: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int, int]], int, int]:
        """Returns the reduction of the unit's gradients in chunks, (products, rest_ps, gradient_bytes).

        A product is (transfer_ps, last_chunk_ps, use), with a use of -1 if it is unknown. `rest_ps` is the time to
        reduce the gradients that are not in chunks, and `gradient_bytes` the size of all gradients.
        """
        trained = [weight for weight in self.unit.weights if weight.sharded.requires_grad]
        items, most_bytes = [], 0
        for i, each in enumerate(self.weights):
            product = each.weight_gradient_product
            if product is not None and each.weight.sharded.requires_grad:
                trained.remove(each.weight)
                uses = [use for which, use in computed if which == i] or [-1]
                items += [(product.transfer_ps, product.transfer_ps // product.num_chunks, use) for use in uses]
                most_bytes = max(most_bytes, product.peak_bytes)
        return items, reduce_cost(trained).ps, most_bytes + gradient_bytes(trained)

    def new_gradients(self) -> list[int]:
        """Returns the indices of the weights that have got a full gradient since the last call."""
        had = self._had_gradient
        self._had_gradient = {i for i, e in enumerate(self.weights) if e.weight.unsharded.grad is not None}
        return sorted(self._had_gradient - had)

    @property
    def may_reduce(self) -> bool:
        """True if a reduction in chunks gives the same gradients as a reduction after the backward."""
        unit_options = self.unit.unit_options
        is_default = unit_options.reduces and unit_options.reduces_over_replicas and unit_options.divides_by is None
        are_kept = any(weight.gradients.has_partial_reduced for weight in self.unit.weights)
        return is_default and not are_kept and not self.unit.has_accumulated_gradients

    def begin(self) -> None:
        """Makes the Linear modules multiply in chunks from now on."""
        for each in self.weights:
            each.begin()

    def end(self) -> None:
        """Gives the Linear modules their former class back."""
        for each in self.weights:
            each.end()

    def set_absent(self, is_absent: bool) -> None:
        """Sets for all weights whether they are gathered in chunks, and not before the use, from now on."""
        for each in self.weights:
            each.set_absent(is_absent)

    def gather_full(self, only_read: bool = False) -> None:
        """Gathers the absent weights in full; with `only_read`, only those with `was_read`."""
        for each in self.weights:
            if each.was_read or not only_read:
                each.gather_full()

    def begin_step(self) -> None:
        """Resets the counts and flags of a step."""
        for each in self.weights:
            each.was_read = each.reduces = False
            each.num_products = 0
        self._had_gradient = set()

    def begin_backward(self, reduces: bool) -> None:
        """Decides which gradients are reduced in chunks, if `reduces`.

        A gradient that is the sum of several matmuls is reduced once, in full. So ranks must call each module equally
        often; `sw.debug.check_ranks` compares the numbers of calls.
        """
        if reduces and checking.is_on():
            self._check_calls()
        for each in self.weights:
            is_sum = each.num_products > 1 or each.was_read
            each.reduces = reduces and self.may_reduce and not is_sum

    def _check_calls(self) -> None:
        """Raises an error if ranks have called the modules a different number of times in this step."""
        for mesh in dict.fromkeys(each.weight.mesh for each in self.weights):
            ours = [each for each in self.weights if each.weight.mesh == mesh]
            calls = {e.weight.name: f"{e.num_products} calls{', read elsewhere' if e.was_read else ''}" for e in ours}
            mismatch = "have called modules whose gradients are reduced in chunks a different number of times in a step"
            words = MeshWords(mesh, ours[0].weight.memory.device)
            words.compare(Statement("chunked", calls, mismatch=mismatch))

    def has(self, weight: Weight) -> bool:
        """Returns true if the unit may transfer this weight in chunks."""
        return any(each.weight is weight for each in self.weights)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a matrix whose rows are the vectors along the last dim."""
    return tensor.reshape(-1, tensor.shape[-1])


# The three matmuls of a Linear with a weight [n, k], for an input of m = `rows` rows. `plan` is the gather of the
# weight, or the reduction of its gradient.


def _forward_matmul(plan: _planner.Plan, rows: int, has_bias: bool) -> _planner.Matmul:
    """y = x @ weight.T: chunks of the weight give columns of y."""
    return _planner.Matmul.gather(plan, [("nk,mk->mn", _rows_layout(plan, rows, 1), has_bias)])


def _input_gradient_matmul(plan: _planner.Plan, rows: int, _: bool) -> _planner.Matmul:
    """dx = dy @ weight: chunks of the weight give summands of dx."""
    return _planner.Matmul.gather(plan, [("nk,mn->mk", _rows_layout(plan, rows, 0), False)])


def _weight_gradient_matmul(plan: _planner.Plan, rows: int, _: bool) -> _planner.Matmul:
    """dw = dy.T @ x: each chunk of rows of dw is sent once it is computed."""
    return _planner.Matmul.scatter(plan, [("mn,mk->nk", _rows_layout(plan, rows, 0), _rows_layout(plan, rows, 1))])


def _rows_layout(plan: _planner.Plan, rows: int, dim: int) -> Layout:
    """Returns the layout of [rows, size of the weight along `dim`]: R, although each rank has its own rows."""
    mesh = plan.src.mesh
    return Layout(mesh, [rows, plan.src.shape[dim]], ["R"] * mesh.ndim, plan.src.dtype)


def _chunked_weight_of(weight: Weight) -> ChunkedWeight | None:
    """Returns the weight as a ChunkedWeight.

    Returns None unless one `nn.Linear` has it, it is sharded by rows, and it is gathered without a conversion.
    """
    module, name = weight.owners[0]
    if len(weight.owners) > 1 or name != "weight" or not is_linear(module) or not has_arithmetic(weight.memory.dtype):
        return None
    is_plain = not isinstance(weight.unsharded, DTensor) and not weight.is_replicated and weight.kept is None
    if not is_plain or weight.extension is not None or weight.gather.buffers(weight.use) or weight.memory.is_complex():
        return None
    if weight._gather_source.device != weight.memory.device or set(weight.shards.placements) - {"R", "S(0)"}:
        return None
    (src,), (dst,) = weight.gather.format.layouts(weight.shards), weight.gather.format.layouts(weight.use)
    plan = executables.make_plan(src, dst, weight.memory.device.type)
    return None if _forward_matmul(plan, 1, False).why_only_serial is not None else ChunkedWeight(weight, plan)


def _reduction_of(weight: Weight) -> _planner.Plan | None:
    """Returns the plan that reduces a weight's gradient in chunks; None if only a full gradient can be reduced."""
    dtypes = weight.gradients.dtypes
    if not weight.reductions or not dtypes.use == dtypes.reduce == dtypes.gradients:
        return None
    _, (src, dst) = weight.reductions[0]
    plan = executables.make_plan(src, dst, weight.memory.device.type)
    matmul = _weight_gradient_matmul(plan, 1, False)
    return None if matmul.why_only_serial is not None or plan.steps[0].op != "reduce_scatter" else plan


class _LinearInChunks(nn.Linear):
    """The class of a Linear module while its weight is multiplied in chunks."""

    _chunks: ChunkedWeight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the product of the input, in chunks if possible."""
        chunks = self._chunks
        if not chunks.can_multiply(input, self.bias):
            return F.linear(input, self.weight, self.bias)
        return _Multiply.apply(input, chunks.weight.unsharded, self.bias, chunks)  # type: ignore[no-untyped-call]

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        """The full weight, for code other than `forward`: gathers it if it is absent."""
        return self._chunks.read()


@functools.cache
def _chunked_class(original: type) -> type:
    """Returns the subclass of a Linear module's class that multiplies in chunks."""
    return type(original.__name__, (_LinearInChunks, original), {})


class _Multiply(torch.autograd.Function):
    """`F.linear`, in chunks in the uses for which the schedule has chunks.

    Autograd saves `full`, the unsharded parameter. This takes no memory if the weight is absent.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, full: torch.Tensor, bias: torch.Tensor | None, chunks: ChunkedWeight
    ) -> torch.Tensor:
        ctx.save_for_backward(x, full)
        ctx.chunks = chunks
        return chunks.multiply(x, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, full = ctx.saved_tensors
        (dy,) = gradients
        chunks: ChunkedWeight = ctx.chunks
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = chunks.input_gradient(dy, full) if needs_x else None
        dw = chunks.gradient(dy, x) if needs_weight else None
        return dx, dw, _rows(dy).sum(0) if needs_bias else None, None
