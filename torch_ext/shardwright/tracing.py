"""When each instruction of our programs ran: `trace`."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import NamedTuple

from . import _runtime


class TraceEvent(NamedTuple):
    """One instruction of one program.

    ``lane``: ``"compute"`` or ``"communication"``. ``instruction``: as listings of programs show it. ``chunk``: of a
    product in chunks, else -1. ``run``: programs, numbered as they were started. ``start`` and ``end``: seconds since
    the trace began. A transfer begins when it is handed to the process group, on a GPU when its stream comes to it, and
    ends when it was seen to be done: by the program that waits for it, on a GPU by its stream.
    """

    lane: str
    instruction: str
    chunk: int
    run: int
    start: float
    end: float


class Trace(list[TraceEvent]):
    """Events by their start; filled when the block ends."""

    def to_chrome(self) -> str:
        """As JSON that chrome://tracing and Perfetto show: one process per program, one thread per lane."""
        lanes = {"compute": 0, "communication": 1}
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
    """Records what programs do in this process while the block runs.

    Yields:
        A list, filled with `TraceEvent` when the block ends. Transfers that nobody has waited for by then are left out.
        On a GPU the end of the block waits for what was recorded.

    Raises:
        RuntimeError: another trace is being taken.
    """
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("trace: another trace is being taken in this process; allowed is one at a time")
    events = Trace()
    try:
        _runtime.begin_trace()
        try:
            yield events
        finally:
            events.extend(sorted((TraceEvent(*event) for event in _runtime.end_trace()), key=lambda e: e.start))
    finally:
        _one_at_a_time.release()
