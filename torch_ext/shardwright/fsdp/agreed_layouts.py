"""The layout in which all ranks reduce the gradients of a weight.

Autograd chooses a gradient's placements on the weight's own mesh dims. The gradient of a weight that is replicated over
tensor-parallel ranks can be replicated, or a pending sum. A rank that has no gradient contributes zeros, and must start
the same transfers as the ranks that have one. So ranks agree on a layout at the end of each backward, and the next one
reduces gradients in this layout. A gradient in another layout, such as the first one, is redistributed before.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Placement, Shard

from .._native import _planner
from ..layouts.layout import Layout, Mesh
from .gather import Move
from .layouts import Layouts

NUM_CODES = 64  # number of values of `AgreedLayout.code`

# Placements that a gradient may have instead of its weight's, by text. Other gradients can be redistributed to them.
_CODED: dict[str, Placement] = {"P(sum)": Partial("sum"), **{f"S({dim})": Shard(dim) for dim in range(3)}}


class AgreedLayout:
    """The layout in which all ranks reduce the gradients of one weight."""

    def __init__(self, layouts: Layouts, move: Move) -> None:
        self._layouts, self._move = layouts, move
        self.own_dims = [dim for dim, index in enumerate(layouts.data.own) if index is not None]
        self._layout: _planner.Layout | None = None  # None before the first agreement
        self.latest: _planner.Layout | None = None  # layout of this rank's latest gradient

    @property
    def layout(self) -> _planner.Layout:
        """The layout, which is equal on all ranks. Weights of integer dtypes have none."""
        if self._layout is None:
            self._layout = self._layouts.usual_gradient
        return self._layout

    @property
    def code(self) -> int:
        """A number of layout `latest`: a digit for each own mesh dim, which is 0 for the placement of the weight.

        0, the layout with the weight's placements, if `latest` has no number.
        """
        if not self.own_dims or self.latest is None:
            return 0
        code, usual = 0, self._layouts.usual_gradient
        for dim in self.own_dims:
            placement = self.latest.placements[dim]
            if placement != usual.placements[dim] and placement not in _CODED:
                return 0
            digit = 0 if placement == usual.placements[dim] else 1 + list(_CODED).index(placement)
            code = code * (1 + len(_CODED)) + digit
        return code if code < NUM_CODES else 0

    def adopt(self, code: int) -> None:
        """Sets the layout by its number, which must be equal on all ranks."""
        if not self.own_dims:
            return
        own = list(self._layouts.usual_gradient_placements)
        for dim in reversed(self.own_dims):
            code, digit = divmod(code, 1 + len(_CODED))
            index = self._layouts.data.own[dim]
            if digit > 0 and index is not None:
                own[index] = list(_CODED.values())[digit - 1]
        self._layout = self._layouts.gradient_layout(tuple(own))

    def conform(self, gradient: torch.Tensor, layout: _planner.Layout, dtype: torch.dtype) -> torch.Tensor:
        """Returns a gradient in the agreed layout. If it has another layout, redistributes it in `dtype`."""
        if layout is self.layout or layout == self.layout:
            return gradient
        gradient = gradient.to(dtype)
        src, dst = (self._on_own_dims(each, dtype) for each in (layout, self.layout))
        out = gradient.new_empty(dst.local_shape(dist.get_rank()))
        work = self._move(src, dst, gradient, out)
        if work is not None:
            work.wait()
        return out

    def _on_own_dims(self, layout: _planner.Layout, dtype: torch.dtype) -> Layout:
        """Returns a layout on the ranks that differ from this one in own mesh dims only: others may not take part."""
        mesh = self._layouts.mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        at = tuple(slice(None) if dim in self.own_dims else each for dim, each in enumerate(coordinate))
        sizes = {f"dim{dim}": mesh.mesh.shape[dim] for dim in self.own_dims}
        grid = Mesh(sizes, mesh.mesh[at].flatten().tolist())
        order = {dim: [self.own_dims.index(each) for each in cuts] for dim, cuts in layout.shard_order.items()}
        placements = [layout.placements[dim] for dim in self.own_dims]
        return Layout(grid, layout.shape, placements, dtype, order, "literal", layout.flattened)
