"""Products of placed tensors: which of them moves, what is multiplied behind it, and how the gradients go back.

From what is cut while a product computes (_cuts.py) follow the layouts that operands and result have meanwhile, and
from these what must be moved before and after. One of the moves is done in chunks behind the product itself
(csrc/products/matmul.h); the others are redistributes of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from . import _engine, _planner
from ._cuts import Cuts, Cutting, split_axes
from ._planner import Matmul
from ._product_calls import (
    Call,
    Scaling,
    Setting,
    chunkable,
    gather,
    gather_matmul,
    move,
    scatter,
    scatter_matmul,
)
from ._scales import layout_of_rows
from .layout import Layout, with_placements, without_sums


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
    scaling: str | None = None  # of operands of 8-bit floats: "tensor" or "row"


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
        self.results = [
            self.cutting.layout(t[2], self._sizes(j), t[0] + t[1], asked.dtype)
            for j, (t, asked) in enumerate(zip(letters, problem.results, strict=True))
        ]
        self._lead = self._choose_lead()
        if problem.scaling is None:
            self._lay_out_gradients()

    def _lay_out_gradients(self) -> None:
        letters = self.letters
        self.dys = [without_sums(result) for result in self.results]
        # The gradient of the operand lacks the axes that only weights have, that of a weight those of the operand.
        self.dx = self.cutting.layout(self.x_letters, self.sizes, "".join(t[2] for t in letters))
        self.dws = [self.cutting.layout(t[1], self._sizes(j), t[2]) for j, t in enumerate(letters)]
        self.dx_result = self._operand_gradient_layout()
        self._chunked_moves: dict[tuple[_planner.Layout, int], bool] = {}

    def _operand_gradient_layout(self) -> Layout:
        """As the operand, but where that is R, sums stay due: whoever it came from can reduce and cut at once."""
        given = without_sums(self.problem.x)
        placements = [
            "P" if was == "R" and now.startswith("P") else wanted
            for was, now, wanted in zip(self.problem.x.placements, self.dx.placements, given.placements, strict=True)
        ]
        return with_placements(given, placements)

    def _sizes(self, j: int) -> dict[str, int]:
        """Of the axes of product j: weights may use one letter for different sizes of their own."""
        _, weight_letters, _ = self.letters[j]
        return self.sizes | dict(zip(weight_letters, self.problem.weights[j].shape, strict=True))

    def _during(self, letters: str, layout: _planner.Layout) -> _planner.Layout:
        made = self.cutting.layout(letters, dict(zip(letters, layout.shape, strict=True)), dtype=layout.dtype)
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
        offer("operand", gather_matmul(p.x, self.x, products, self.setting, False, self._scaling("operand")))
        if len(p.axes) == 1:
            swapped = [(_swapped(p.axes[0]), self.x, False)]
            scaling = self._scaling("weight")
            offer("weight", gather_matmul(p.weights[0], self.weights[0], swapped, self.setting, False, scaling))
            terms = [(p.axes[0], self.x, self.weights[0])]
            scaling = self._scaling("result")
            offer("result", scatter_matmul(self.results[0], p.results[0], terms, self.setting, False, scaling))
        return max(leads)[1] if leads else "operand"

    def rows_of(self, operand: int, layout: _planner.Layout) -> Layout:
        """Of the scales of its rows, if an operand (0: `x`, then weights) lies so."""
        j = max(operand - 1, 0)
        letters = self.letters[j][1] if operand > 0 else self.x_letters
        return layout_of_rows(layout, letters, self.problem.axes[j])

    def given_rows(self, operand: int) -> Layout:
        return self.rows_of(operand, (self.problem.x, *self.problem.weights)[operand])

    def _rows_during(self, operand: int) -> Layout:
        return self.rows_of(operand, (self.x, *self.weights)[operand])

    def _scaling(self, lead: str) -> Scaling | None:
        p = self.problem
        if p.scaling is None:
            return None
        result = p.results[0].dtype
        if p.scaling == "row" and lead == "operand":
            return Scaling(True, result, self.given_rows(0), self._rows_during(0))
        if p.scaling == "row" and lead == "weight":
            return Scaling(True, result, self.given_rows(1), self._rows_during(1))
        return Scaling(p.scaling == "row", result)

    @functools.cached_property
    def call(self) -> Call:
        """The program that holds the products of the forward."""
        p = self.problem
        scaling = self._scaling(self._lead)
        must = self.setting.method is not None or self.setting.chunks is not None
        if self._lead == "result":
            terms = ((p.axes[0], self.x, self.weights[0]),)
            return scatter(self.results[0], p.results[0], terms, self.setting, must=must, scaling=scaling)
        if self._lead == "weight":
            swapped = ((_swapped(p.axes[0]), self.x, self._fuses_bias(0)),)
            return gather(p.weights[0], self.weights[0], swapped, self.setting, must=must, scaling=scaling)
        products = tuple(
            (axes, w, self._fuses_bias(j)) for j, (axes, w) in enumerate(zip(p.axes, self.weights, strict=True))
        )
        return gather(p.x, self.x, products, self.setting, keeps=self.keeps_gathered, must=must, scaling=scaling)

    def _fuses_bias(self, j: int) -> bool:
        """Not where sums are due, to which every rank would add it, nor to what is scaled."""
        return (
            self.problem.biases[j] is not None
            and self.problem.scaling is None
            and self._lead != "result"
            and not any(placement.startswith("P") for placement in self.results[j].placements)
        )

    @property
    def keeps_gathered(self) -> bool:
        """Whether the forward gives the operand as gathered, too."""
        p = self.problem
        return self.setting.keeps_gathered and p.scaling is None and self._lead == "operand" and p.x != self.x

    def _bias_layout(self, j: int) -> Layout:
        """Cut as the last dim of what the bias is added to."""
        result = self.results[j] if self._fuses_bias(j) else self.problem.results[j]
        last = f"S({len(result.shape) - 1})"
        placements = ["S(0)" if placement == last else "R" for placement in result.placements]
        return Layout(result.mesh, [result.shape[-1]], placements, result.dtype, _order_of_last(result))

    def forward(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        scales: Sequence[torch.Tensor] = (),
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """This rank's parts in, its parts of the results out; and the operand as moved, where that is kept.

        `scales` are those of operand and weights, with rows as the given operands have.
        """
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
        scales = self._move_scales(scales)
        if self._lead == "weight":
            outputs = self.call(weights[0], x, *fused, *reversed(scales))
        elif self._lead == "result":
            outputs = self.call(x, weights[0], *scales)
        else:
            outputs = self.call(x, *weights, *fused, *scales)
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

    def _move_scales(self, scales: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """To where their operands are while the product computes, but for those that move with theirs."""
        if self.problem.scaling != "row":
            return scales
        moves_with_operand = {"operand": 0, "weight": 1}.get(self._lead)
        return [
            scale if i == moves_with_operand else move(scale, self.given_rows(i), self._rows_during(i), self.setting)
            for i, scale in enumerate(scales)
        ]

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
            known = src != dst and chunkable(gather_matmul(src, dst, products, self.setting))
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
    return _products.get_or_make(problem, lambda: Product(problem))
