"""Records when each instruction of a program ran: `trace`."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import NamedTuple

from .._native import _runtime


class TraceEvent(NamedTuple):
    """One instruction of one program.

    A transfer begins when it is handed to the process group (on a GPU, when its stream reaches it), and ends when the
    program that waits for it sees that it is done (on a GPU, when its stream does).

    Attributes:
        lane: ``"compute"`` or ``"communication"``; for copies in steps that `explain` shows, ``"from the host"`` or
            ``"to the host"``.
        instruction: its text, as in listings of programs.
        chunk: the chunk of a product to which it belongs, or -1.
        run: the number of its program, in the order in which programs were started.
        start: seconds since the trace began.
        end: seconds since the trace began.
    """

    lane: str
    instruction: str
    chunk: int
    run: int
    start: float
    end: float


class Trace(list[TraceEvent]):
    """Events in the order of their start; filled when the block ends."""

    def to_chrome(self) -> str:
        """Returns JSON for chrome://tracing and Perfetto: one process per program, one thread per lane."""
        lanes = {"compute": 0, "communication": 1, "from the host": 2, "to the host": 3}
        events = [
            {
                "name": event.instruction,
                "cat": event.lane,
                "ph": "X",
                "pid": event.run,
                "tid": lanes[event.lane],
                "ts": event.start * 1e6,
                "dur": (event.end - event.start) * 1e6,
                "args": {"chunk": event.chunk},
            }
            for event in self
        ]
        return json.dumps({"traceEvents": events})


_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def trace() -> Iterator[Trace]:
    """Records the instructions that programs run in this process during the block.

    Yields:
        A list, filled with `TraceEvent` when the block ends. Transfers that nobody has waited for by then are left out.
        On a GPU the end of the block waits for everything that was recorded.

    Raises:
        RuntimeError: another trace is being taken.
    """
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("trace: another trace is running in this process; end it first")
    events = Trace()
    try:
        _runtime.begin_trace()
        try:
            yield events
        finally:
            events.extend(sorted((TraceEvent(*event) for event in _runtime.end_trace()), key=lambda e: e.start))
    finally:
        _one_at_a_time.release()
