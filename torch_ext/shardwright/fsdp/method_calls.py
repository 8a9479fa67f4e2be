"""Calls of methods that are forwards: those registered by torch's `register_fsdp_forward_method`.

Torch wraps such a method in a function that calls a hook before it and one after it, but none if it raises. So the hook
before it notes the frame of this function: once the frame has left the stack, the call has ended.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from .units import Unit, is_in_backward


class _Call(NamedTuple):
    frame: FrameType  # of torch's wrapper
    thread: int
    is_in_backward: bool  # of a checkpoint, which leaves it by an exception once it has what it needs
    unit: Unit
    depth: int  # number of forwards of the unit that were running before


class MethodCalls:
    """The calls that run in one model, innermost last."""

    def __init__(self) -> None:
        self._running: list[_Call] = []

    def begin(self, frame: FrameType, unit: Unit) -> None:
        self._running.append(_Call(frame, threading.get_ident(), is_in_backward(), unit, len(unit.forwards)))

    def end(self) -> None:
        if self._running:
            self._running.pop()

    def end_failed(self, end_forward: Callable[[Unit], None], backward_ends: bool = False) -> None:
        """Ends the forwards of calls that have raised, innermost first. A call on another thread may run still.

        Args:
            end_forward: ends a unit's forward.
            backward_ends: a backward ends, so that calls which it has made on other threads have ended too.
        """
        if not self._running:
            return
        stack = set()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            stack.add(frame)
            frame = frame.f_back
        thread = threading.get_ident()
        while self._running:
            last = self._running[-1]
            may_have_ended = last.thread == thread or (backward_ends and last.is_in_backward)
            if not may_have_ended or last.frame in stack:
                return
            self._running.pop()
            if len(last.unit.forwards) > last.depth:
                end_forward(last.unit)
