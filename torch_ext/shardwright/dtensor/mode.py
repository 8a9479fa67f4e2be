"""What is on: for the process as a whole, within the blocks of its threads, and for a backward.

Outside of autograd the mode at the time decides. A backward keeps the mode that was on in its forward. The node of an
explicit redistribute remembers it; for implicit ones, the node's sequence number tells when it was made. These numbers
count per thread, so where several threads changed the mode, a backward goes by the changes of its own.

Whoever changes something here holds a lock (drop_in.py).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _runtime

_MAX_CHANGES = 4096
_REMEMBERED = "_shardwright_mode"


class Mode(NamedTuple):
    on: bool
    strict: bool = False
    make_groups: bool = True
    overlap: bool = False


OFF = Mode(False)


@dataclasses.dataclass(eq=False)
class Block:
    """What one thread asked for until it takes it back; of the process itself, no thread's."""

    thread: int | None
    mode: Mode


# The process's own, then those that have not ended. They may overlap in any way, as those of several threads do: the
# one that began last decides, and when one ends, in whatever order, what is left decides.
_blocks = [Block(None, OFF)]


def begin(mode: Mode) -> Block:
    block = Block(threading.get_ident(), mode)
    _blocks.append(block)
    return block


def end(block: Block) -> None:
    _blocks.remove(block)


def mine() -> Block:
    """What this thread switches: its innermost block, else the process."""
    thread = threading.get_ident()
    return next(block for block in reversed(_blocks) if block.thread in (thread, None))


def is_wanted() -> bool:
    """Whether the process or a block has it on."""
    return any(block.mode.on for block in _blocks)


class _Changes:
    """Mode changes of one thread, with the sequence number that its next autograd node got."""

    def __init__(self) -> None:
        self.numbers = [-1]
        self.modes = [_current]

    def add(self, mode: Mode) -> None:
        number = torch.autograd._get_sequence_nr()
        if self.numbers[-1] >= number:
            self.modes[-1] = mode
            return
        self.numbers.append(number)
        self.modes.append(mode)
        if len(self.numbers) > _MAX_CHANGES:
            del self.numbers[: _MAX_CHANGES // 2]
            del self.modes[: _MAX_CHANGES // 2]

    def mode_at(self, number: int) -> Mode:
        return self.modes[max(bisect.bisect_right(self.numbers, number) - 1, 0)]


_current = OFF
_changes_by_thread: dict[int, _Changes] = {}  # by the number that autograd knows threads by


def current() -> Mode:
    """What decides outside of autograd."""
    return _current


def wanted() -> Mode:
    """What the blocks say, which holds once it is applied."""
    return _blocks[-1].mode


def apply(mode: Mode) -> None:
    """From now on this mode holds."""
    global _current
    changes = _changes_by_thread.setdefault(_runtime.thread_id(), _Changes())
    _current = mode
    changes.add(mode)


def takes_shortcut() -> bool:
    """Whether calls outside of autograd are ours, with nothing that they must go PyTorch's way for."""
    return _current.on and _current.make_groups


def deciding() -> Mode:
    """The mode of the redistribute that is being asked for."""
    node = torch._C._current_autograd_node()
    if node is None:
        return _current
    remembered: Mode | None = getattr(node, _REMEMBERED, None)
    if remembered is not None:
        return remembered
    changes = _changes_by_thread.get(_runtime.thread_of_current_node())
    return _current if changes is None else changes.mode_at(node._sequence_nr())


def remembering(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an autograd function whose node, which is its ctx, keeps the mode for its backward."""

    @functools.wraps(forward)
    def with_mode(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(ctx, _REMEMBERED, deciding())
        return forward(ctx, *args, **kwargs)

    return with_mode
