"""The mode of the drop-in: for the process, within the blocks of its threads, for one call, and for a backward.

The drop-in is the replacement of PyTorch's functions by `sw.enable` (drop_in.py). A block is the body of a
``with sw.enabled(...)`` statement, or the rest of the process.

A call of `sw.redistribute` turns the drop-in on for its own thread. Elsewhere, the current mode decides outside of
autograd. A backward uses the mode of its forward. The node of an explicit redistribute stores the mode; for an implicit
one, the node's sequence number tells when it was made. Sequence numbers are counted per thread, so if several threads
changed the mode, a backward uses the changes of its own thread.

Callers that change anything here must hold the lock of drop_in.py.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .._native import _runtime
from ..runtime import dynamo

_MAX_CHANGES = 4096  # mode changes stored per thread; the older half is dropped
_MODE_ATTRIBUTE = "_shardwright_mode"  # attribute of autograd nodes that holds their mode


class Mode(NamedTuple):
    """The options of `sw.enable`, which documents them."""

    on: bool  # False: all redistributes are left to PyTorch
    strict: bool = False
    make_groups: bool = True
    overlap: bool = False
    views: bool = False


OFF = Mode(False)


@dataclasses.dataclass(eq=False)
class Block:
    """A mode that one thread has set until its block ends. The process's own block has no thread."""

    thread: int | None
    mode: Mode


# The process's own block, then the blocks that have not ended, in the order of their beginning. The last one decides.
# Blocks of several threads may end in any order.
_blocks = [Block(None, OFF)]


def begin(mode: Mode) -> Block:
    """Opens a block of this thread and returns it. Takes effect at the next `apply(latest_mode())`."""
    block = Block(threading.get_ident(), mode)
    _blocks.append(block)
    return block


def end(block: Block) -> None:
    """Closes a block. Takes effect at the next `apply(latest_mode())`."""
    _blocks.remove(block)


def block_of_this_thread() -> Block:
    """Returns this thread's innermost block, else the process's own. `enable` and `disable` change its mode."""
    thread = threading.get_ident()
    return next(block for block in reversed(_blocks) if block.thread in (thread, None))


def is_on_anywhere() -> bool:
    """Returns True if the drop-in is on in any block or call."""
    return _num_calls > 0 or any(block.mode.on for block in _blocks)


class _OfCall(threading.local):
    """The mode of the call that runs on this thread; None outside of calls."""

    mode: Mode | None = None


_of_call = _OfCall()
_num_calls = 0  # calls that run, on all threads


def begin_call() -> Mode | None:
    """Begins a call, which turns the drop-in on for this thread, in strict mode. Returns the argument of `end_call`."""
    global _num_calls
    _num_calls += 1
    before = _of_call.mode
    _of_call.mode = _current._replace(on=True, strict=True)
    return before


def end_call(before: Mode | None) -> None:
    """Ends a call."""
    global _num_calls
    _num_calls -= 1
    _of_call.mode = before


class _ModeHistory:
    """The modes of one thread over time, by the sequence numbers of its autograd nodes.

    Example: the mode changed to A before the node with number 5, and to B before the node with number 9. Then
    `sequence_numbers` is [-1, 5, 9] and `modes` is [initial mode, A, B], and ``mode_at(7)`` is A.
    """

    def __init__(self) -> None:
        self.sequence_numbers = [-1]  # sequence numbers, ascending
        self.modes = [_current]  # modes[i] applies to nodes from sequence_numbers[i] on

    def add(self, mode: Mode) -> None:
        """Records that the mode applies to all nodes that this thread makes from now on."""
        sequence_number = torch.autograd._get_sequence_nr()
        if self.sequence_numbers[-1] >= sequence_number:
            self.modes[-1] = mode
            return
        self.sequence_numbers.append(sequence_number)
        self.modes.append(mode)
        if len(self.sequence_numbers) > _MAX_CHANGES:
            del self.sequence_numbers[: _MAX_CHANGES // 2]
            del self.modes[: _MAX_CHANGES // 2]

    def mode_at(self, sequence_number: int) -> Mode:
        """Returns the mode in which the thread made the autograd node with this sequence number."""
        return self.modes[max(bisect.bisect_right(self.sequence_numbers, sequence_number) - 1, 0)]


_current = OFF  # the mode outside of autograd
_history_by_thread: dict[int, _ModeHistory] = {}  # by autograd's number of the thread


def current() -> Mode:
    """Returns the mode that decides outside of autograd."""
    return _current


def graph_options() -> tuple[bool, bool, bool]:
    """Returns the options of the current mode on which compiled code depends: on, make_groups, views."""
    return (_current.on, _current.on and _current.make_groups, _current.on and _current.views)


def latest_mode() -> Mode:
    """Returns the mode of the block that began last, of those that have not ended. `apply` puts it into effect."""
    return _blocks[-1].mode


def apply(mode: Mode) -> None:
    """Puts a mode into effect."""
    global _current
    changes = _history_by_thread.setdefault(_runtime.thread_id(), _ModeHistory())
    _current = mode
    changes.add(mode)


def allows_shortcut() -> bool:
    """Returns True if calls outside of autograd may skip PyTorch's method: the drop-in is on and may make groups."""
    mode = _of_call.mode or _current
    return mode.on and mode.make_groups


def mode_in_effect() -> Mode:
    """Returns the mode that applies to a redistribute now: in a backward, the mode of its forward."""
    if (of_call := _of_call.mode) is not None:
        return of_call
    node = torch._C._current_autograd_node()
    if node is None:
        return _current
    stored: Mode | None = getattr(node, _MODE_ATTRIBUTE, None)
    if stored is not None:
        return stored
    changes = _history_by_thread.get(_runtime.thread_of_current_node())
    return _current if changes is None else changes.mode_at(node._sequence_nr())


def storing_mode(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a wrapper of an autograd function's forward. It stores the mode on the node (ctx) for the backward."""

    @dynamo.skipped
    @functools.wraps(forward)
    def with_mode(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(ctx, _MODE_ATTRIBUTE, mode_in_effect())
        return forward(ctx, *args, **kwargs)

    return with_mode
