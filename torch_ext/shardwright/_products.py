"""Products of placed tensors: which of them moves, what is multiplied behind it, and how the gradients go back.

Axes are letters, as in einsum. A product cuts at most one axis along each mesh dim while it computes (`cuts`): an axis
of the operand, of the weight, or the summed one, whose sums are then due. From the cuts follow the layouts that
operands and result have meanwhile, and from these what must be moved before and after. One of the moves is done in
chunks behind the product itself (csrc/overlap/matmul.h); the others are redistributes of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import _engine, _planner, _runtime, _stats, checking
from . import operators as operators  # registers what calls run by
from ._planner import GemmModel, Matmul
from .layout import Layout

Cuts = tuple["str | None", ...]
# How many, or of a ring the distances of each.
Chunks = int | Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a user may say about how products are carried out, and where."""

    device_type: str
    group: dist.ProcessGroup | None = None
    device_mesh: DeviceMesh | None = None
    method: str | None = None
    chunks: int | tuple[tuple[int, ...], ...] | None = None
    gemm_model: GemmModel | None = None
    keeps_gathered: bool = False

    @property
    def model(self) -> GemmModel:
        return self.gemm_model or GemmModel.named("cpu" if self.device_type == "cpu" else "h100")


_PLAIN = (torch.Tensor, torch.nn.Parameter)


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
            return self.executable.run_all([tensor.contiguous() for tensor in inputs])
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


# ---------------------------------------------------------------------------------------------- axes and layouts


def split_axes(axes: str) -> tuple[str, str, str]:
    """`("bsk", "nk", "bsn")` of "bsk,nk->bsn"."""
    operands, out = axes.split("->")
    lhs, rhs = operands.split(",")
    return lhs, rhs, out


def _order_of(axis: str, mesh_dims: list[int], known: Sequence[tuple[str, _planner.Layout]]) -> list[int]:
    """Which of several mesh dims cuts an axis first: as in the first tensor that they all cut it in."""
    for letters, layout in known:
        order = list(layout.shard_order.get(letters.index(axis), [])) if axis in letters else []
        if sorted(order) == sorted(mesh_dims):
            return order
    return mesh_dims


class Cutting:
    """Layouts while a product computes."""

    def __init__(self, mesh: _planner.Mesh, dtype: str, cuts: Cuts, known: Sequence[tuple[str, _planner.Layout]]):
        self.mesh = mesh
        self.dtype = dtype
        self.cuts = cuts
        self._orders = {}
        for axis in set(filter(None, cuts)):
            mesh_dims = [d for d, cut in enumerate(cuts) if cut == axis]
            if len(mesh_dims) > 1:
                self._orders[axis] = _order_of(axis, mesh_dims, known)

    def layout(self, letters: str, sizes: dict[str, int], operands: str = "") -> Layout:
        """Of a tensor with these axes; of a result, with what its operands have: sums are due over axes it lacks."""
        placements = []
        for cut in self.cuts:
            if cut is not None and cut in letters:
                placements.append(f"S({letters.index(cut)})")
            else:
                placements.append("P" if cut is not None and cut in operands else "R")
        orders = {letters.index(axis): order for axis, order in self._orders.items() if axis in letters}
        return Layout(self.mesh, [sizes[axis] for axis in letters], placements, self.dtype, orders)


def without_sums(layout: _planner.Layout) -> Layout:
    """The same with R where sums are due: of a gradient, what it stands for."""
    placements = ["R" if placement.startswith("P") else placement for placement in layout.placements]
    return Layout(layout.mesh, list(layout.shape), placements, layout.dtype, layout.shard_order, strided="literal")


# ------------------------------------------------------------------------------------------------- moves and calls


_calls: _engine.Kept[Call] = _engine.Kept()
_moves: _engine.Kept[_runtime.Executable] = _engine.Kept()


def plan_between(src: _planner.Layout, dst: _planner.Layout, setting: Setting) -> _planner.Plan:
    return _engine.make_plan(src, dst, setting.device_type, setting.group)


def move(local: torch.Tensor, src: _planner.Layout, dst: _planner.Layout, setting: Setting) -> torch.Tensor:
    """A redistribute that has no product to hide behind."""
    if src == dst:
        return local
    key = (src, dst, setting.device_type, setting.group, setting.device_mesh)
    executable = _moves.get(key)
    if executable is None:
        plan = plan_between(src, dst, setting)
        executable = _engine.bind(plan, device_mesh=setting.device_mesh, group=setting.group)
        _moves.put(key, executable)
    return _engine.run(executable, local, async_op=False)


def _bind(matmul: Matmul, setting: Setting, must: bool) -> Call:
    method, chunks = schedule_of(matmul, setting, must)
    rank = dist.get_rank(setting.group)
    names = _engine.names_of(matmul.groups(method, chunks, rank), device_mesh=setting.device_mesh, group=setting.group)
    program = matmul.to_text(method, chunks)
    return Call(program, tuple(names), rank, setting.model, _runtime.executable(program, names, rank))


def schedule_of(matmul: Matmul, setting: Setting, must: bool) -> tuple[str, Chunks]:
    """Method and chunks: what was asked for, else what is predicted fastest of it.

    With `must`, what was asked for and cannot be raises ValueError; else the choice is free, as it is where nothing is
    moved between ranks.
    """
    if (setting.method is None and setting.chunks is None) or not matmul.communicates:
        return matmul.choose(setting.model)
    if setting.chunks is not None and (setting.method is not None or not isinstance(setting.chunks, int)):
        method = setting.method or "ring"
        try:
            matmul.check(method, setting.chunks)
            return method, setting.chunks
        except ValueError:
            if must:
                raise
            return matmul.choose(setting.model)
    fitting = [
        (predicted, method, chunks)
        for method, chunks, predicted in matmul.predictions(setting.model)
        if setting.method in (None, method) and setting.chunks in (None, chunks)
    ]
    if fitting:
        _, method, chunks = min(fitting)
        return method, chunks
    if must:
        matmul.check(setting.method or "collective", setting.chunks or 1)
        return setting.method or "collective", setting.chunks or 1
    return matmul.choose(setting.model)


def gather(
    src: _planner.Layout,
    dst: _planner.Layout,
    products: tuple[tuple[str, _planner.Layout, bool], ...],
    setting: Setting,
    *,
    keeps: bool = False,
    must: bool = False,
) -> Call:
    """Inputs: the tensor that moves, others, biases; outputs: products, then the moved tensor if it is kept."""
    key = ("gather", src, dst, products, keeps, must, setting)
    call = _calls.get(key)
    if call is None:
        call = _bind(Matmul.gather(plan_between(src, dst, setting), products, keeps), setting, must)
        _calls.put(key, call)
    return call


def scatter(
    src: _planner.Layout,
    dst: _planner.Layout,
    terms: tuple[tuple[str, _planner.Layout, _planner.Layout], ...],
    setting: Setting,
    *,
    has_addend: bool = False,
    must: bool = False,
) -> Call:
    """Inputs: both operands of each term, then what is added to them; output: their sum, moved."""
    key = ("scatter", src, dst, terms, has_addend, must, setting)
    call = _calls.get(key)
    if call is None:
        call = _bind(Matmul.scatter(plan_between(src, dst, setting), terms, has_addend), setting, must)
        _calls.put(key, call)
    return call


def chunkable(matmul: Matmul) -> bool:
    return matmul.why_only_serial is None


# --------------------------------------------------------------------------------------------------- one product


@dataclasses.dataclass(frozen=True)
class Problem:
    """One operand and one or several weights that it is multiplied by; layouts as given and as asked for."""

    axes: tuple[str, ...]  # by weight: operand, weight -> result
    x: _planner.Layout
    weights: tuple[_planner.Layout, ...]
    biases: tuple[_planner.Layout | None, ...]
    results: tuple[_planner.Layout, ...]
    cuts: Cuts
    setting: Setting


class Product:
    """How a problem is carried out, forward and backward."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.setting = problem.setting
        letters = [split_axes(axes) for axes in problem.axes]
        self.x_letters = letters[0][0]
        self.letters = letters
        known = [(self.x_letters, problem.x), *((t[1], w) for t, w in zip(letters, problem.weights, strict=True))]
        self.sizes: dict[str, int] = {}
        for names, layout in known:
            for axis, size in zip(names, layout.shape, strict=True):
                self.sizes[axis] = size
        self.cutting = Cutting(problem.x.mesh, problem.x.dtype, problem.cuts, known)
        self.x = self._during(self.x_letters, problem.x)
        self.weights = [self._during(t[1], w) for t, w in zip(letters, problem.weights, strict=True)]
        self.results = [self.cutting.layout(t[2], self._sizes(j), t[0] + t[1]) for j, t in enumerate(letters)]
        self.dys = [without_sums(result) for result in self.results]
        # The gradient of the operand lacks the axes that only weights have, that of a weight those of the operand.
        self.dx = self.cutting.layout(self.x_letters, self.sizes, "".join(t[2] for t in letters))
        self.dws = [self.cutting.layout(t[1], self._sizes(j), t[2]) for j, t in enumerate(letters)]
        self.dx_result = self._operand_gradient_layout()
        self._lead = self._choose_lead()
        self._chunked_moves: dict[tuple[_planner.Layout, int], bool] = {}

    def _operand_gradient_layout(self) -> Layout:
        """As the operand, but where that is R, sums stay due: whoever it came from can reduce and cut at once."""
        given = without_sums(self.problem.x)
        placements = [
            "P" if was == "R" and now.startswith("P") else wanted
            for was, now, wanted in zip(self.problem.x.placements, self.dx.placements, given.placements, strict=True)
        ]
        return Layout(given.mesh, list(given.shape), placements, given.dtype, given.shard_order, strided="literal")

    def _sizes(self, j: int) -> dict[str, int]:
        """Of the axes of product j: weights may use one letter for different sizes of their own."""
        _, weight_letters, _ = self.letters[j]
        return self.sizes | dict(zip(weight_letters, self.problem.weights[j].shape, strict=True))

    def _during(self, letters: str, layout: _planner.Layout) -> _planner.Layout:
        made = self.cutting.layout(letters, dict(zip(letters, layout.shape, strict=True)))
        return layout if made == layout else made

    # -- forward

    def _choose_lead(self) -> str:
        """Which move goes behind the product: the one predicted to take longest, of those that can."""
        p = self.problem
        leads: list[tuple[float, str]] = []

        def offer(name: str, matmul: Matmul) -> None:
            if chunkable(matmul):
                leads.append((matmul.plan.predicted_us, name))

        products = [(axes, w, False) for axes, w in zip(p.axes, self.weights, strict=True)]
        offer("operand", Matmul.gather(plan_between(p.x, self.x, self.setting), products))
        if len(p.axes) == 1:
            swapped = [(_swapped(p.axes[0]), self.x, False)]
            offer("weight", Matmul.gather(plan_between(p.weights[0], self.weights[0], self.setting), swapped))
            terms = [(p.axes[0], self.x, self.weights[0])]
            offer("result", Matmul.scatter(plan_between(self.results[0], p.results[0], self.setting), terms))
        return max(leads)[1] if leads else "operand"

    @functools.cached_property
    def call(self) -> Call:
        """The program that holds the products of the forward."""
        p = self.problem
        must = self.setting.method is not None or self.setting.chunks is not None
        if self._lead == "result":
            return scatter(
                self.results[0], p.results[0], ((p.axes[0], self.x, self.weights[0]),), self.setting, must=must
            )
        if self._lead == "weight":
            swapped = ((_swapped(p.axes[0]), self.x, self._fuses_bias(0)),)
            return gather(p.weights[0], self.weights[0], swapped, self.setting, must=must)
        products = tuple(
            (axes, w, self._fuses_bias(j)) for j, (axes, w) in enumerate(zip(p.axes, self.weights, strict=True))
        )
        return gather(p.x, self.x, products, self.setting, keeps=self.keeps_gathered, must=must)

    def _fuses_bias(self, j: int) -> bool:
        """Not where sums are due, to which every rank would add it."""
        return (
            self.problem.biases[j] is not None
            and self._lead != "result"
            and not any(placement.startswith("P") for placement in self.results[j].placements)
        )

    @property
    def keeps_gathered(self) -> bool:
        """Whether the forward gives the operand as gathered, too."""
        return self.setting.keeps_gathered and self._lead == "operand" and self.problem.x != self.x

    def _bias_layout(self, j: int) -> Layout:
        """Cut as the last dim of what the bias is added to."""
        result = self.results[j] if self._fuses_bias(j) else self.problem.results[j]
        last = f"S({len(result.shape) - 1})"
        placements = ["S(0)" if placement == last else "R" for placement in result.placements]
        return Layout(result.mesh, [result.shape[-1]], placements, result.dtype, _order_of_last(result))

    def forward(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """This rank's parts in, its parts of the results out; and the operand as moved, where that is kept."""
        p = self.problem
        moved_biases = []
        for j, bias in enumerate(biases):
            layout = p.biases[j]
            moved_biases.append(
                None if bias is None or layout is None else move(bias, layout, self._bias_layout(j), self.setting)
            )
        fused = [b for j, b in enumerate(moved_biases) if b is not None and self._fuses_bias(j)]
        if self._lead != "operand":
            x = move(x, p.x, self.x, self.setting)
        if self._lead != "weight":
            weights = [
                move(w, given, during, self.setting)
                for w, given, during in zip(weights, p.weights, self.weights, strict=True)
            ]
        kept = None
        if self._lead == "weight":
            outputs = self.call(weights[0], x, *fused)
        elif self._lead == "result":
            outputs = self.call(x, weights[0])
        else:
            outputs = self.call(x, *weights, *fused)
            if self.keeps_gathered:
                kept = outputs.pop()
        if self._lead != "result":
            outputs = [
                move(y, during, asked, self.setting)
                for y, during, asked in zip(outputs, self.results, p.results, strict=True)
            ]
        for j, bias in enumerate(moved_biases):
            if bias is not None and not self._fuses_bias(j):
                outputs[j] = self._add_bias(outputs[j], bias, j)
        return outputs, kept

    def _add_bias(self, y: torch.Tensor, bias: torch.Tensor, j: int) -> torch.Tensor:
        pending = [d for d, placement in enumerate(self.problem.results[j].placements) if placement.startswith("P")]
        coordinate = self.problem.x.mesh.coordinate(dist.get_rank(self.setting.group)) or []
        if any(coordinate[d] for d in pending):
            return y  # one rank adds it to sums that stay due
        return y + bias

    # -- backward

    def gradient_layouts(self) -> list[Layout]:
        """How gradients of the results lie if they lie as the results do."""
        return [without_sums(result) for result in self.problem.results]

    def backward(
        self,
        x: torch.Tensor,
        kept: torch.Tensor | None,
        weights: Sequence[torch.Tensor],
        dys: Sequence[torch.Tensor],
        dy_layouts: Sequence[_planner.Layout],
        needs: tuple[bool, list[bool], list[bool]],
        dx_added: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Gradients of operand (as `dx_result`), weights and biases (as those, with R for sums that are due).

        `dys` lie as `dy_layouts` say. `dx_added`, which lies as `dx`, is part of the operand's gradient from elsewhere.
        """
        needs_x, needs_weights, needs_biases = needs
        p = self.problem
        dbs = [self._bias_gradient(dys[j], dy_layouts[j], j) if needs_biases[j] else None for j in range(len(dys))]
        x_stays = p.x == self.x or kept is not None
        x_at_hand = kept if kept is not None else x
        dx: torch.Tensor | None = None
        dws: list[torch.Tensor | None] = [None] * len(dys)
        weights_stay = [given == during for given, during in zip(p.weights, self.weights, strict=True)]

        if len(dys) == 1 and self._moves_in_chunks(dy_layouts[0], self.dys[0], 0) and (needs_x or needs_weights[0]):
            # One gather of the gradient serves all products that can have it.
            shares_dw = needs_weights[0] and x_stays
            weight = move(weights[0], p.weights[0], self.weights[0], self.setting) if needs_x else None
            products = []
            others = []
            if needs_x and weight is not None:
                products.append((self._dx_axes(0), self.weights[0], False))
                others.append(weight)
            if shares_dw:
                products.append((self._dw_axes(0), self.x, False))
                others.append(x_at_hand)
            keeps = needs_weights[0] and not x_stays
            if products:
                call = gather(dy_layouts[0], self.dys[0], tuple(products), self.setting, keeps=keeps)
                outputs = call(dys[0], *others)
                dys = [outputs.pop()] if keeps else dys
                if shares_dw:
                    dws[0] = move(outputs.pop(), self.dws[0], without_sums(p.weights[0]), self.setting)
                if needs_x:
                    here = outputs.pop()
                    here = here if dx_added is None else here + dx_added
                    dx = move(here, self.dx, self.dx_result, self.setting)
            else:
                dys = [move(dys[0], dy_layouts[0], self.dys[0], self.setting)]
        else:
            dys = [
                move(dy, given, during, self.setting)
                for dy, given, during in zip(dys, dy_layouts, self.dys, strict=True)
            ]
        if needs_x and dx is None:
            dx = self._operand_gradient(dys, weights, weights_stay, dx_added)
        missing = [j for j in range(len(dys)) if needs_weights[j] and dws[j] is None]
        if missing:
            for j, dw in zip(missing, self._weight_gradients(missing, x_at_hand, x_stays, dys), strict=True):
                dws[j] = dw
        return dx, dws, dbs

    def _dx_axes(self, j: int) -> str:
        x, w, y = self.letters[j]
        return f"{y},{w}->{x}"

    def _dw_axes(self, j: int) -> str:
        x, w, y = self.letters[j]
        return f"{y},{x}->{w}"

    def _moves_in_chunks(self, src: _planner.Layout, dst: _planner.Layout, j: int) -> bool:
        known = self._chunked_moves.get((src, j))
        if known is None:
            products = [(self._dx_axes(j), self.weights[j], False)]
            known = src != dst and chunkable(Matmul.gather(plan_between(src, dst, self.setting), products))
            self._chunked_moves[src, j] = known
        return known

    def _operand_gradient(
        self,
        dys: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        weights_stay: list[bool],
        dx_added: torch.Tensor | None,
    ) -> torch.Tensor:
        target = self.dx_result
        if len(dys) == 1 and not weights_stay[0] and self.dx == target and dx_added is None:
            _, w, y = self.letters[0]
            products = ((f"{w},{y}->{self.x_letters}", self.dys[0], False),)
            call = gather(self.problem.weights[0], self.weights[0], products, self.setting)
            return call(weights[0], dys[0])[0]
        inputs: list[torch.Tensor] = []
        for j, dy in enumerate(dys):
            inputs += [dy, move(weights[j], self.problem.weights[j], self.weights[j], self.setting)]
        terms = tuple((self._dx_axes(j), self.dys[j], self.weights[j]) for j in range(len(dys)))
        if dx_added is not None:
            inputs.append(dx_added)
        return scatter(self.dx, target, terms, self.setting, has_addend=dx_added is not None)(*inputs)[0]

    def _weight_gradients(
        self, which: list[int], x: torch.Tensor, x_stays: bool, dys: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        p = self.problem
        if x_stays:
            return [
                scatter(
                    self.dws[j], without_sums(p.weights[j]), ((self._dw_axes(j), self.dys[j], self.x),), self.setting
                )(dys[j], x)[0]
                for j in which
            ]
        products = tuple((_swapped(self._dw_axes(j)), self.dys[j], False) for j in which)
        found = gather(p.x, self.x, products, self.setting)(x, *(dys[j] for j in which))
        return [
            move(dw, self.dws[j], without_sums(p.weights[j]), self.setting) for j, dw in zip(which, found, strict=True)
        ]

    def _bias_gradient(self, dy: torch.Tensor, layout: _planner.Layout, j: int) -> torch.Tensor:
        bias = self.problem.biases[j]
        assert bias is not None
        last = f"S({len(layout.shape) - 1})"
        if any(placement.startswith(("P", "SS")) for placement in layout.placements):
            dy = move(dy, layout, self.dys[j], self.setting)
            layout = self.dys[j]
        placements = []
        for placement in layout.placements:
            placements.append("S(0)" if placement == last else "P" if placement.startswith("S") else "R")
        summed = dy.sum(dim=tuple(range(dy.ndim - 1))) if dy.ndim > 1 else dy
        here = Layout(layout.mesh, [layout.shape[-1]], placements, layout.dtype, _order_of_last(layout))
        return move(summed, here, without_sums(bias), self.setting)


def _order_of_last(layout: _planner.Layout) -> dict[int, list[int]]:
    """The order of cuts of the last dim, for a tensor of that dim alone."""
    order = layout.shard_order.get(len(layout.shape) - 1)
    return {} if order is None else {0: order}


def _swapped(axes: str) -> str:
    lhs, rhs, out = split_axes(axes)
    return f"{rhs},{lhs}->{out}"


_products: _engine.Kept[Product] = _engine.Kept()


def product_of(problem: Problem) -> Product:
    """Kept by its problem."""
    known = _products.get(problem)
    if known is None:
        known = Product(problem)
        _products.put(problem, known)
    return known


# ------------------------------------------------------------------------------------------------- what to cut


@functools.lru_cache(maxsize=4096)
def choose_cuts(
    axes: str, x: _planner.Layout, weight: _planner.Layout, result: _planner.Layout, setting: Setting
) -> Cuts:
    """The cuts with the least predicted time for all moves and the product itself.

    Tried along each mesh dim: the axes that operand, weight and result are cut along there, and none.
    """
    x_letters, w_letters, y_letters = split_axes(axes)
    options: list[list[str | None]] = []
    for d, size in enumerate(x.mesh.shape):
        found: list[str | None] = [None]
        for letters, layout in ((x_letters, x), (w_letters, weight), (y_letters, result)):
            tensor_dim = cut_dim(layout.placements[d])
            if size > 1 and tensor_dim is not None and letters[tensor_dim] not in found:
                found.append(letters[tensor_dim])
        options.append(found)
    sizes = dict(zip(x_letters + w_letters, (*x.shape, *weight.shape), strict=True))
    known = [(x_letters, x), (w_letters, weight)]
    best: tuple[float, int, Cuts] | None = None
    for number, cuts in enumerate(itertools.product(*options)):
        cutting = Cutting(x.mesh, x.dtype, cuts, known)
        during = cutting.layout(y_letters, sizes, x_letters + w_letters)
        cost = sum(
            plan_between(src, dst, setting).predicted_us
            for src, dst in (
                (x, cutting.layout(x_letters, sizes)),
                (weight, cutting.layout(w_letters, sizes)),
                (during, result),
            )
            if src != dst
        )
        cost += _product_us(x_letters, w_letters, sizes, cuts, x, setting)
        if best is None or (cost, number) < best[:2]:
            best = (cost, number, cuts)
    assert best is not None
    return best[2]


def _product_us(
    x_letters: str, w_letters: str, sizes: dict[str, int], cuts: Cuts, x: _planner.Layout, setting: Setting
) -> float:
    here = dict(sizes)
    for d, cut in enumerate(cuts):
        if cut is not None:
            here[cut] = -(-here[cut] // x.mesh.shape[d])
    m = n = k = 1
    for axis in x_letters:
        if axis in w_letters:
            k *= here[axis]
        else:
            m *= here[axis]
    for axis in w_letters:
        n *= here[axis] if axis not in x_letters else 1
    item = torch.empty(0, dtype=getattr(torch, x.dtype)).element_size()
    return setting.model.picoseconds(m, n, k, 1, item) / 1e6


def cut_dim(placement: str) -> int | None:
    """Of ``"S(1)"`` and ``"SS(1,2)"`` 1; None of what does not cut."""
    if not placement.startswith("S"):
        return None
    return int(placement[placement.index("(") + 1 :].split(",")[0].rstrip(")"))
