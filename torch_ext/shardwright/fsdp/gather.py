"""Gathers weights from their shards, in the format of their messages (formats.py).

Some formats need a scale, which is computed from the *amax* of the weight: the largest magnitude of all its elements,
or of each row. `set_scales` reduces the amax over ranks and sets the scale. A *source* is a value that changes with
each write to the parameter (`Weight.source`), so a scale is valid for one source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from .._native import _planner
from ..layouts.layout import Layout
from .formats import Format
from .packing import DeferredWork, Pair

# A function of (source layout, target layout, tensor, output) that starts a move. It returns a Work, or None if done.
Move: TypeAlias = Callable[
    [_planner.Layout, _planner.Layout, torch.Tensor, torch.Tensor], "dist.Work | DeferredWork | None"
]


class _PendingGather(NamedTuple):
    """A gather in progress. It keeps the sent tensors alive until it ends."""

    in_place: bool  # the weight is received in its own memory, and not decoded
    scale: torch.Tensor | None  # scale that `sent` was encoded with
    sent: list[torch.Tensor]
    received: list[torch.Tensor]
    works: list[dist.Work | DeferredWork | None]


class WeightGather:
    """The gathers of one weight. `start` and `finish` make a gather.

    If the message format is the dtype of the use, the weight is gathered into its own memory. Otherwise messages are
    received in buffers, and decoded into the weight's memory.
    """

    def __init__(
        self, format: Format, use_dtype: torch.dtype, shards: _planner.Layout, move: Move, device: torch.device
    ) -> None:
        self.format = format
        self.shards = shards
        self.move = move
        self._device = device
        self.scale: torch.Tensor | None = None  # from `set_scales`; None if the format has no scale
        self._is_direct = type(format) is Format and format.dtype == use_dtype
        self.scale_source: object = None  # source for which `scale` was set
        self._pending: _PendingGather | None = None  # the gather in progress
        # The received messages of the last gather, and their scale, if a matmul uses them without decoding.
        self.undecoded: tuple[list[torch.Tensor], torch.Tensor | None] | None = None
        self._layouts: dict[int, tuple[_planner.Layout, list[Layout]]] = {}  # `format.layouts`, by id of a layout
        self._rank = dist.get_rank()

    def buffers(self, use: _planner.Layout) -> list[Layout]:
        """Returns the layouts of the receive buffers that a gather needs besides the weight's own memory."""
        return [] if self._is_direct else self._layouts_of(use)

    def _layouts_of(self, layout: _planner.Layout) -> list[Layout]:
        """Returns the layouts of the messages for a weight with this layout. Cached."""
        found = self._layouts.get(id(layout))
        if found is None or found[0] is not layout:
            found = self._layouts[id(layout)] = (layout, self.format.layouts(layout))
        return found[1]

    def needs_scale(self, source: object) -> bool:
        """Returns true if the scale must be computed again, because it was set for another `source` (by ``==``)."""
        return self.format.needs_amax and self.scale_source != source

    def amax(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the amax of a shard, on the device. The shard may be on the host."""
        return self.format.amax(part).to(self._device)

    def set_scale(self, amax: torch.Tensor, source: object) -> None:
        """Sets the scale from the maximum over ranks of `amax`."""
        self.scale = self.format.scale_of(amax)
        self.scale_source = source

    def pairs(self, use: _planner.Layout) -> list[Pair]:
        """Returns the layouts of the moves of a gather."""
        return list(zip(self._layouts_of(self.shards), self._layouts_of(use), strict=True))

    def start(
        self, pairs: Sequence[Pair], part: torch.Tensor, full: torch.Tensor, buffers: Sequence[torch.Tensor], move: Move
    ) -> None:
        """Starts to gather from this rank's shard.

        Args:
            pairs: `pairs(use)`.
            buffers: one tensor of bytes for each layout of `buffers(use)`.
            move: starts the moves.
        """
        if self._is_direct:
            part = part.to(self.format.dtype)
            self._pending = _PendingGather(True, None, [part], [full], [move(*pairs[0], part, full)])
            return
        sent = self.format.encode(part, self.scale)
        received = [self._as(layout, buffer) for buffer, (_, layout) in zip(buffers, pairs, strict=True)]
        works = [move(*pair, *each) for pair, *each in zip(pairs, sent, received, strict=True)]
        self._pending = _PendingGather(False, self.scale, sent, received, works)

    def start_from_copy(self, pair: Pair, part: torch.Tensor, full: torch.Tensor, move: Move) -> None:
        """Starts to gather from a kept copy, which has the dtype of the use."""
        self._pending = _PendingGather(True, None, [part], [full], [move(*pair, part, full)])

    def _as(self, layout: _planner.Layout, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the beginning of a buffer (bytes) as this rank's tensor of a layout."""
        shape = torch.Size(layout.local_shape(self._rank))
        dtype: torch.dtype = getattr(torch, layout.dtype)
        return buffer[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def finish(self, full: torch.Tensor | None) -> None:
        """Waits for the gather, and decodes it into `full`. With None, keeps the received messages in `undecoded`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        for work in pending.works:
            if work is not None:
                work.wait()
        if full is None:
            self.undecoded = pending.received, pending.scale
        elif not pending.in_place:
            self.format.decode(pending.received, pending.scale, full)


class ScaleRequest(NamedTuple):
    """A weight whose scale is to be set by `set_scales`."""

    gather: WeightGather
    part: torch.Tensor  # this rank's shard
    source: object


def set_scales(requests: Iterable[ScaleRequest]) -> None:
    """Sets the scales of weights whose format needs them, from their amax over all ranks.

    Collective among the ranks of the weights' meshes. Weights with a single scale share a collective for each mesh.
    """
    single: dict[_planner.Mesh, list[ScaleRequest]] = {}  # weights with a single scale
    for item in requests:
        if not item.gather.format.needs_amax:
            continue
        layout = item.gather.format.amax_layout(item.gather.shards)
        if layout is None:
            single.setdefault(item.gather.shards.mesh, []).append(item)
        else:
            item.gather.set_scale(_reduced(item.gather.move, layout, item.gather.amax(item.part)), item.source)
    for mesh, items in single.items():
        sharded = {dim for item in items for dim, text in enumerate(item.gather.shards.placements) if text != "R"}
        placements = ["P(max)" if dim in sharded else "R" for dim in range(mesh.ndim)]
        layout = Layout(mesh, [len(items)], placements, torch.float32)
        each = torch.stack([item.gather.amax(item.part) for item in items])
        for item, amax in zip(items, _reduced(items[0].gather.move, layout, each).unbind()):
            item.gather.set_scale(amax, item.source)


def _reduced(move: Move, layout: Layout, amax: torch.Tensor) -> torch.Tensor:
    """Returns the maximum over the mesh dims on which `layout` is pending (P(max))."""
    placements = ["R" if text == "P(max)" else text for text in layout.placements]
    if list(layout.placements) == placements:
        return amax
    reduced = Layout(layout.mesh, layout.shape, placements, torch.float32, layout.shard_order, "literal")
    out = torch.empty_like(amax)
    work = move(layout, reduced, amax, out)
    if work is not None:
        work.wait()
    return out
