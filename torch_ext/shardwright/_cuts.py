"""Which axis of a product each mesh dim cuts while it computes, and the layouts that follow.

Axes are letters, as in einsum. A product cuts at most one axis along each mesh dim: one of the operand, of the weight,
or the summed one, whose sums are then due.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from . import _engine, _planner
from ._product_calls import Setting, plan_between
from .layout import Layout

Cuts = tuple["str | None", ...]


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

    def layout(self, letters: str, sizes: dict[str, int], operands: str = "", dtype: str | None = None) -> Layout:
        """Of a tensor with these axes; of a result, with what its operands have: sums are due over axes it lacks."""
        placements = []
        for cut in self.cuts:
            if cut is not None and cut in letters:
                placements.append(f"S({letters.index(cut)})")
            else:
                placements.append("P" if cut is not None and cut in operands else "R")
        orders = {letters.index(axis): order for axis, order in self._orders.items() if axis in letters}
        return Layout(self.mesh, [sizes[axis] for axis in letters], placements, dtype or self.dtype, orders)


@_engine.kept
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
        during = cutting.layout(y_letters, sizes, x_letters + w_letters, result.dtype)
        cost = sum(
            plan_between(src, dst, setting).predicted_us
            for src, dst in (
                (x, cutting.layout(x_letters, sizes)),
                (weight, cutting.layout(w_letters, sizes, dtype=weight.dtype)),
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
    item_bytes = getattr(torch, x.dtype).itemsize
    return setting.model(x.dtype).picoseconds(m, n, k, 1, item_bytes) / 1e6


def cut_dim(placement: str) -> int | None:
    """Of ``"S(1)"`` and ``"SS(1,2)"`` 1; None of what does not cut."""
    if not placement.startswith("S"):
        return None
    return int(placement[placement.index("(") + 1 :].split(",")[0].rstrip(")"))
