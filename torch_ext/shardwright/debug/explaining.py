"""Shows predicted and measured times of products and their transfers, and of steps under `fully_shard`: `explain`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .._planner import Matmul, StepSchedule
from ..layouts.errors import argument_error
from ..matmul import running
from .tracing import Trace, TraceEvent, trace

_WIDTH = 72  # characters of a lane
_LANES = ("communication", "compute")
_COPIES = ("from the host", "to the host")
_NOTHING = "no products with anything to move, and no step of a sharded model"


class Explained(NamedTuple):
    """One program of products: the choice of its schedule, and its timelines.

    ``predictions``: (method, chunks, depth, sms_left, microseconds) of each schedule that was compared: every method
    and number of chunks, with the depth and the multiprocessors left to transfers that are predicted to be fastest.
    ``method``, ``chunks``, ``depth``, ``sms_left``: the schedule that ran.
    ``predicted``: events of the mesh's first rank, which has at least as much work as any other. ``measured``: events
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


class ExplainedStep(NamedTuple):
    """One step of a model under `fully_shard`: its schedule, and its timelines.

    ``predicted``: empty if the step was not timed yet. ``measured``: the uses on this rank, and all transfers between
    the first and the last, also of tensors other than weights. ``chunk`` is the index of a weight, -1 if it is
    unknown.
    """

    what: str
    schedule: StepSchedule
    predicted: Trace
    measured: Trace


class RecordedStep(NamedTuple):
    """A recorded step: its schedule, and (begin, end) of its uses in seconds since recording began."""

    schedule: StepSchedule
    names: list[str]  # names of the schedule's weights
    uses: list[tuple[float, float]]
    # Copies of offloaded weights between host and device: (weight, is to the host, begin, end).
    copies: list[tuple[str, bool, float, float]]


# Context managers that record steps. Packages that import this one add theirs.
step_listeners: list[Callable[[], contextlib.AbstractContextManager[list[RecordedStep]]]] = []


class Explanation(list[Explained | ExplainedStep]):
    """One entry per program, in the order in which they ran, then one per step. As text, each is a paragraph."""

    def __str__(self) -> str:
        return "\n\n".join(_paragraph(entry) for entry in self) or _NOTHING

    def to_chrome(self) -> str:
        """Returns JSON for chrome://tracing and Perfetto, with predicted and measured lanes of each program."""
        merged: list[dict[str, Any]] = []
        for index, entry in enumerate(self):
            for kind, events in (("predicted", entry.predicted), ("measured", entry.measured)):
                process = f"{index}: {kind}"
                merged += [{**event, "pid": process} for event in json.loads(events.to_chrome())["traceEvents"]]
        return json.dumps({"traceEvents": merged})


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Runs `function` twice, the second time traced, and shows how the products in it were carried out.

    For each program of products it shows the prediction for every method and number of chunks with its best depth, the
    method that ran, and both lanes, predicted and measured. For each step of a model under `fully_shard` it shows both
    lanes, predicted by the schedule and measured: uses, gathers and reductions with the number of their weight; ``+``
    is a measured transfer, whose weight is not recorded.

    All ranks that take part in the products or steps must call this.

    Args:
        function: `shardwright.linear`, for example, or anything that calls it; or a step of a model under
            `fully_shard`, its backward included: ``sw.explain(lambda: loss(model(x)).backward())``.
        args, kwargs: its arguments.

    Returns:
        A list with one entry per program, then one per step. Entries have the attributes ``what``, ``predicted`` and
        ``measured``. ``str()`` is text; ``to_chrome()`` returns JSON for Perfetto.

    Raises:
        ValueError: `function` cannot be called.
    """
    if not callable(function):
        raise argument_error("function", "a function, such as shardwright.linear", f"a {type(function).__name__}")
    function(*args, **kwargs)
    with contextlib.ExitStack() as stack:
        calls = stack.enter_context(running.listening())
        events = stack.enter_context(trace())
        recorded = [stack.enter_context(listen()) for listen in step_listeners]
        function(*args, **kwargs)
    runs = sorted({event.run for event in events})
    by_run = {run: Trace(event for event in events if event.run == run) for run in runs}
    # Redistributes are programs too; keep the programs that have products.
    of_products = iter([by_run[run] for run in runs if any(_is_product(event) for event in by_run[run])])
    explained = Explanation(_explained(call, of_products) for call in calls)
    explained.extend(_explained_step(step, events) for steps in recorded for step in steps)
    return explained


def _is_product(event: TraceEvent) -> bool:
    """Returns True if the event is a matrix product."""
    return event.instruction.startswith("gemm")


def _explained(call: running.Call, runs: Iterator[Trace]) -> Explained:
    """Returns the schedule and the timelines of a program of products. `runs`: events of later runs with products."""
    matmul, schedule = Matmul.parse(call.program)
    # The run of a program has no product if this rank's part of the result is empty.
    measured = next(runs, Trace()) if ". gemm" in matmul.program(schedule, call.rank) else Trace()
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


def _explained_step(step: RecordedStep, events: Trace) -> ExplainedStep:
    """Returns the timelines of a step. `events` are all events of the trace."""
    schedule = step.schedule
    # A chunked weight is shown under the name of its original (`StepSchedule.original_of`).
    unit_of = [index if original < 0 else original for index, original in enumerate(schedule.original_of)]
    named = [(kind, [unit_of[weight] for weight in weights]) for weights, kind, *_ in schedule.uses]
    uses = [(f"{kind} {', '.join(step.names[unit] for unit in units)}", units) for kind, units in named]
    measured = Trace(
        TraceEvent("compute", text, max(weights), 0, *span) for (text, weights), span in zip(uses, step.uses)
    )
    begin, end = (step.uses[0][0], step.uses[-1][1]) if step.uses else (0.0, 0.0)
    # Chunk -1: the trace does not record which weight a transfer moves.
    measured += [
        e._replace(chunk=-1) for e in events if e.lane == "communication" and begin <= e.end and e.start <= end
    ]
    measured += [
        TraceEvent(_COPIES[to_host], f"copy {name}", step.names.index(name), 0, *span)
        for name, to_host, *span in step.copies
    ]
    predicted = Trace()
    lanes = schedule.lanes
    if lanes is not None:
        # (lane, text, weight, (begin, end) in picoseconds)
        spans = [("compute", text, max(weights), span) for (text, weights), span in zip(uses, lanes["uses"])]
        for what, key, transfers in (
            ("gather", "gathers", schedule.gathers),
            ("reduce", "reductions", schedule.reductions),
        ):
            spans += [
                ("communication", f"{what} {step.names[unit_of[weight]]}", unit_of[weight], span)
                for (weight, *_), span in zip(transfers, lanes[key])
            ]
        for lane, key, transfers in (
            (_COPIES[0], "fetches", schedule.gathers),
            (_COPIES[1], "sends", schedule.reductions),
        ):
            units = [unit_of[weight] for weight, *_ in transfers]
            copies = [(unit, span) for unit, span in zip(units, lanes[key]) if span[1] > span[0]]
            spans += [(lane, f"copy {step.names[unit]}", unit, span) for unit, span in copies]
        for index, ((name, *_), span) in enumerate(zip(schedule.activations, lanes["activations"])):
            spans.append(("communication", f"gather activation {index}, {name}", -1, span))
        for weight, _, is_reduction, span in lanes["chunks"]:
            text = f"{'reduce' if is_reduction else 'gather'} {step.names[unit_of[weight]]} in chunks"
            spans.append(("communication", text, unit_of[weight], span))
        predicted = Trace(
            TraceEvent(lane, text, weight, 0, begin_ps / 1e12, end_ps / 1e12)
            for lane, text, weight, (begin_ps, end_ps) in spans
        )
    what = (
        f"a step of {len(schedule.uses)} uses, {len(schedule.gathers)} gathers, {len(schedule.reductions)} reductions"
    )
    return ExplainedStep(what, schedule, predicted, measured)


def _paragraph(entry: Explained | ExplainedStep) -> str:
    """Returns the text of a program or step: its schedule, predictions and timelines."""
    if isinstance(entry, ExplainedStep):
        return "\n".join([entry.what, *_bars("predicted", entry.predicted), *_bars("measured", entry.measured)])
    chunks = f"{entry.chunks} chunk{'s' if entry.chunks != 1 else ''}"
    lines = [f"{entry.what}, with products: {entry.method} in {chunks}{_depth_text(entry.depth, entry.sms_left)}"]
    if entry.why_only_serial is not None:
        lines.append(f"  only serial: {entry.why_only_serial}")
    for method, count, depth, sms_left, us in entry.predictions:
        lines.append(f"  predicted {us:10.1f} us  {method} in {count}{_depth_text(depth, sms_left)}")
    for kind, events in (("predicted", entry.predicted), ("measured", entry.measured)):
        lines += _bars(kind, events)
    return "\n".join(lines)


def _depth_text(depth: int, sms_left: int) -> str:
    """Returns the text of a depth other than 1, and of the multiprocessors that products leave to transfers, if any."""
    text = f", depth {depth}" if depth != 1 else ""
    return f"{text}, {sms_left} SMs left to transfers" if sms_left else text


def _bars(kind: str, events: Trace) -> list[str]:
    """Draws a row per lane: each digit is the last digit of a chunk's number, and + belongs to no chunk."""
    if not events:
        return [f"  {kind}: nothing was recorded"]
    begin = min(event.start for event in events)
    length = max(event.end for event in events) - begin
    lines = [f"  {kind}, {length * 1e6:.1f} us in all"]
    for lane in (*_LANES, *(lane for lane in _COPIES if any(event.lane == lane for event in events))):
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
