"""Shows how long products and their moves were predicted to take, and how long they took: `explain`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ._planner import Matmul
from .products import running
from .tracing import Trace, TraceEvent, trace

_WIDTH = 72
_LANES = ("communication", "compute")


class Explained(NamedTuple):
    """One program of products: how its schedule was chosen, and its lanes.

    ``predictions``: (method, chunks, depth, sms_left, microseconds) of each schedule that was compared: every method
    and number of chunks, with the depth and the multiprocessors left to transfers that are predicted to be fastest.
    ``method``, ``chunks``, ``depth``, ``sms_left``: the schedule that ran.
    ``predicted``: events of the mesh's first rank, which has at least as much to do as any other. ``measured``: events
    of this rank.
    """

    what: str
    method: str
    chunks: int | list[list[int]]
    depth: int
    sms_left: int
    why_only_serial: str | None
    predictions: list[tuple[str, int | list[list[int]], int, int, float]]
    predicted: Trace
    measured: Trace


class Explanation(list[Explained]):
    """One entry per program, in the order in which they ran. As text, each is a paragraph."""

    def __str__(self) -> str:
        return "\n\n".join(_paragraph(one) for one in self) or "no products with anything to move"

    def to_chrome(self) -> str:
        """Returns JSON for chrome://tracing and Perfetto, with predicted and measured lanes of each program."""
        merged: list[dict[str, Any]] = []
        for number, one in enumerate(self):
            for kind, events in (("predicted", one.predicted), ("measured", one.measured)):
                process = f"{number}: {kind}"
                merged += [{**event, "pid": process} for event in json.loads(events.to_chrome())["traceEvents"]]
        return json.dumps({"traceEvents": merged})


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Runs `function` twice, the second time traced, and shows how the products in it were carried out.

    All ranks that take part in the products must call this.

    Args:
        function: `shardwright.linear`, for example, or anything that calls it.
        args, kwargs: its arguments.
    """
    if not callable(function):
        raise ValueError(
            f"function: got a {type(function).__name__}; allowed is a function, such as shardwright.linear"
        )
    function(*args, **kwargs)
    with running.listening() as calls, trace() as events:
        function(*args, **kwargs)
    runs = sorted({event.run for event in events})
    by_run = {run: Trace(event for event in events if event.run == run) for run in runs}
    # Redistributes are programs too; keep the programs that have products.
    of_products = [by_run[run] for run in runs if any(_is_product(event) for event in by_run[run])]
    return Explanation(
        _explained(call, measured)
        for call, measured in zip(calls, [*of_products, *[Trace()] * len(calls)], strict=False)
    )


def _is_product(event: TraceEvent) -> bool:
    return event.instruction.startswith("gemm")


def _explained(call: running.Call, measured: Trace) -> Explained:
    matmul, schedule = Matmul.parse(call.program)
    lanes = matmul.timeline(schedule, call.model)
    predicted = Trace(
        TraceEvent(lane, text, chunk, 0, start / 1e12, end / 1e12) for lane, text, chunk, start, end in lanes["spans"]
    )
    return Explained(
        str(matmul.plan).splitlines()[0],
        schedule.method,
        schedule.chunks,
        schedule.depth,
        schedule.sms_left,
        matmul.why_only_serial,
        [(s.method, s.chunks, s.depth, s.sms_left, ps / 1e6) for s, ps in matmul.predictions(call.model)],
        predicted,
        measured,
    )


def _paragraph(one: Explained) -> str:
    chunks = f"{one.chunks} chunk{'s' if one.chunks != 1 else ''}"
    lines = [f"{one.what}, with products: {one.method} in {chunks}{_depth_text(one.depth, one.sms_left)}"]
    if one.why_only_serial is not None:
        lines.append(f"  only serial: {one.why_only_serial}")
    for method, count, depth, sms_left, us in one.predictions:
        lines.append(f"  predicted {us:10.1f} us  {method} in {count}{_depth_text(depth, sms_left)}")
    for kind, events in (("predicted", one.predicted), ("measured", one.measured)):
        lines += _bars(kind, events)
    return "\n".join(lines)


def _depth_text(depth: int, sms_left: int) -> str:
    text = f", {depth} under way" if depth != 1 else ""
    return f"{text}, {sms_left} SMs left to them" if sms_left else text


def _bars(kind: str, events: Trace) -> list[str]:
    """Draws a row per lane: each digit is the last digit of a chunk's number, and + belongs to no chunk."""
    if not events:
        return [f"  {kind}: nothing was recorded"]
    begin = min(event.start for event in events)
    length = max(event.end for event in events) - begin
    lines = [f"  {kind}, {length * 1e6:.1f} us in all"]
    for lane in _LANES:
        row = [" "] * _WIDTH
        for event in events:
            if event.lane != lane or length == 0:
                continue
            first = int((event.start - begin) / length * _WIDTH)
            last = max(first + 1, round((event.end - begin) / length * _WIDTH))
            for column in range(first, min(last, _WIDTH)):
                row[column] = "+" if event.chunk < 0 else str(event.chunk % 10)
        lines.append(f"    {lane:13} |{''.join(row)}|")
    return lines
