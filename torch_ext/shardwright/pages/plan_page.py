"""The page of a plan: `plan_page`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from .._planner import Plan
from . import markup
from .markup import bytes_text, escape, time_text
from .step_costs import StepCosts, classes_of, costs_of, ranks_of

_MAX_ROWS = 16  # maximum number of rows in the timeline
_MAX_RANGES = 3  # maximum number of ranges of ranks in a label

_COSTS = {
    "wire_bytes_max": "bytes received, worst rank",
    "wire_bytes_sum": "bytes received, all ranks",
    "send_bytes_max": "bytes sent, worst rank",
    "messages_max": "messages received, worst rank",
    "steps": "communicating steps",
    "peak_bytes": "peak memory, worst rank",
    "predicted_ps": "predicted time",
}


def plan_page(plan: Plan) -> str:
    """Returns an HTML page about a plan: time of each step, timeline, links, certificate, picture and text.

    The page is one well-formed XML file that loads no other files and runs no code. It fits the width of a phone.
    """
    ends = f"{_placements(plan.src.placements)} → {_placements(plan.dst.placements)}"
    step_costs = costs_of(plan)
    return markup.document(
        f"{plan.src.dtype}{list(plan.src.shape)}: {ends}",
        [
            *_headline(plan, ends),
            *_steps(plan, step_costs),
            *_timeline(plan, step_costs),
            *_step_table(step_costs),
            *_links(plan, step_costs),
            *_certificate(plan),
            '<h2>Picture</h2>\n<p class="soft">Box: full tensor. Details of parts and messages: on hover.</p>',
            f'<div class="wide picture" tabindex="0" role="region" aria-label="picture">{plan.to_svg()}</div>',
            f'<h2>Text</h2>\n<pre tabindex="0">{escape(plan)}</pre>',
        ],
    )


def _placements(placements: Sequence[str]) -> str:
    return f"[{', '.join(placements)}]"


def _headline(plan: Plan, ends: str) -> Iterator[str]:
    """Yields the title, and a tile for each of the main costs."""
    where = str(plan).splitlines()[0].partition(" on ")[2]
    yield f"<header><h1>{escape(ends)}</h1>"
    yield f'<p class="mono soft">{escape(plan.src.dtype)}{list(plan.src.shape)} on {escape(where)}</p></header>'
    costs = plan.certificate
    yield '<dl class="tiles">'
    for name, label in (
        ("predicted_ps", "predicted time"),
        ("wire_bytes_max", "bytes received, worst rank"),
        ("messages_max", "messages, worst rank"),
        ("peak_bytes", "peak memory, worst rank"),
    ):
        value, bound = costs[name]
        reached = "at the lower bound" if value <= bound else f"lower bound {_cost(name, bound)}"
        yield (f'<div><dt>{label}</dt><dd class="value">{_cost(name, value)}</dd><dd class="soft">{reached}</dd></div>')
    yield "</dl>"


def _cost(name: str, value: int) -> str:
    """Returns a cost of the certificate with its unit."""
    if name == "predicted_ps":
        return time_text(value / 1e6)
    return bytes_text(value) if "bytes" in name else f"{value:,}"


def _steps(plan: Plan, step_costs: Sequence[StepCosts]) -> Iterator[str]:
    """Yields a bar with a segment for each step, proportional to its predicted time, and the list of steps."""
    yield "<h2>Steps</h2>"
    if not step_costs:
        yield "<p>No steps: the parts of all ranks are unchanged.</p>"
        return
    total = sum(entry.predicted_us for entry in step_costs)
    shares = [entry.predicted_us / total if total else 1 / len(step_costs) for entry in step_costs]
    if plan.segments > 1:
        yield (
            f"<p>Pipeline of {plan.segments} segments of the tensor, with overlapping steps. "
            f"Time without overlap: {time_text(total)}.</p>"
        )
    yield '<div class="bar" role="img" aria-label="predicted time of each step; numbers: list below">'
    for index, (entry, share) in enumerate(zip(step_costs, shares, strict=True)):
        number = str(index + 1) if share > 0.04 else ""
        yield (
            f'<div style="flex: {share:.5f} 1 0; background: {markup.color(index)}" '
            f'title="{index + 1}. {escape(entry.name)}: {time_text(entry.predicted_us)}">{number}</div>'
        )
    yield '</div>\n<ol class="steps">'
    for index, (entry, share) in enumerate(zip(step_costs, shares, strict=True)):
        yield (
            f'<li><span class="key" style="background: {markup.color(index)}">{index + 1}</span>'
            f"<span>{escape(entry.name)}</span><span>{time_text(entry.predicted_us)}, {share:.0%}</span>"
            f'<span class="mono">{escape(entry.layouts)}</span></li>'
        )
    yield "</ol>"


def _timeline(plan: Plan, step_costs: Sequence[StepCosts]) -> Iterator[str]:
    """Yields a row for each class of ranks with equal received bytes or, for overlapping steps, a row for each step."""
    if not step_costs:
        return
    yield "<h2>Timeline</h2>"
    if plan.segments > 1:
        stages = plan.segments + len(step_costs) - 1
        yield f'<p class="soft">{stages} pipeline stages, drawn with equal widths.</p>'
        spans = [(index / stages, plan.segments / stages) for index in range(len(step_costs))]
        rows = [(f"step {i + 1}", [(i, *span, 1.0)]) for i, span in enumerate(spans)]
    else:
        yield (
            '<p class="soft">Frame: time of a step. Fill: received bytes, relative to the rank with the most received '
            "bytes; 100% for local steps.</p>"
        )
        rows = _rows_of_classes(plan, step_costs)
    yield '<div class="lanes" role="img" aria-label="timeline; numbers: tables below">'
    for label, lane in rows[:_MAX_ROWS]:
        yield f'<span class="soft">{label}</span><div class="lane">'
        for index, begin, width, filled in lane:
            yield (
                f'<div class="span" style="left: {begin:.3%}; width: {width:.3%}; color: {markup.color(index)}" '
                f'title="{index + 1}. {escape(step_costs[index].name)}">'
                f'<div class="fill" style="width: {filled:.1%}"></div></div>'
            )
        yield "</div>"
    yield f'<span></span><div class="axis"><span>0</span><span>{time_text(plan.predicted_us)}</span></div></div>'
    if len(rows) > _MAX_ROWS:
        yield f'<p class="soft">Not drawn: {len(rows) - _MAX_ROWS} more classes of ranks.</p>'


def _rows_of_classes(
    plan: Plan, step_costs: Sequence[StepCosts]
) -> list[tuple[str, list[tuple[int, float, float, float]]]]:
    """Returns a label, and (step, begin, width, filled share) of each step, all as fractions, for each class."""
    total = sum(entry.predicted_us for entry in step_costs) or 1.0
    worst = [entry.step.wire_bytes_max for entry in step_costs]
    classes = classes_of(ranks_of(plan), step_costs)
    labels = {received: _ranks_text(ranks) for received, ranks in classes.items()} or {tuple(worst): "worst rank"}
    rows = []
    for received, label in labels.items():
        lane, begin = [], 0.0
        for index, entry in enumerate(step_costs):
            filled = 1.0 if entry.is_local else min(received[index] / max(worst[index], 1), 1.0)
            lane.append((index, begin / total, entry.predicted_us / total, filled))
            begin += entry.predicted_us
        rows.append((label, lane))
    return rows


def _ranks_text(ranks: Sequence[int]) -> str:
    """Returns text such as "ranks 0–3, 8"."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    shown = ", ".join(f"{a}–{b}" if a < b else str(a) for a, b in ranges[:_MAX_RANGES])
    more = f", … ({len(ranks)} ranks)" if len(ranges) > _MAX_RANGES else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _step_table(step_costs: Sequence[StepCosts]) -> Iterator[str]:
    """Yields the table of steps. Bytes and messages are those of the worst rank."""
    if not step_costs:
        return
    yield '<h2>Costs of the steps</h2>\n<p class="soft">Each column: maximum over ranks.</p>'
    heads = ["step", "time", "received", "sent", "messages", "sent messages", "rounds", "memory"]
    rows = []
    for number, entry in enumerate(step_costs, 1):
        step = entry.step
        amounts = [bytes_text(step.wire_bytes_max), bytes_text(step.send_bytes_max)]
        counts = [f"{count:,}" for count in (step.messages_max, step.sent_messages_max, step.rounds)]
        name = f"{number}. {escape(entry.name)}"
        rows.append([name, time_text(entry.predicted_us), *amounts, *counts, bytes_text(entry.peak_bytes)])
    yield markup.table("costs of the steps", heads, rows)
    yield '<p class="soft">Memory: result and temporaries of the step, without its input.</p>'


def _links(plan: Plan, step_costs: Sequence[StepCosts]) -> Iterator[str]:
    """Yields the bytes of each step over links within nodes and between nodes, and the rates of these links."""
    topology = json.loads(plan.to_json())["topology"]
    size = topology["ranks_per_node"]
    nodes = f"nodes of {size} ranks" if size else "one node"
    yield f'<h2>Links within and between nodes</h2>\n<p class="soft">Topology {escape(topology["name"])}, {nodes}.</p>'
    rows = []
    for number, entry in enumerate(step_costs, 1):
        if not entry.is_local:
            amounts = entry.bytes_inside, entry.bytes_between
            rows.append([f"{number}. {escape(entry.name)}", *(bytes_text(n) if n else "–" for n in amounts)])
    sums = (sum(e.bytes_inside for e in step_costs), sum(e.bytes_between for e in step_costs))
    rows.append(["all steps", *map(bytes_text, sums)])
    rows.append(["rate", *(_rate(topology[name]["ps_per_kib"]) for name in ("inside", "between"))])
    latencies = [time_text(topology[name]["message_ps"] / 1e6) for name in ("inside", "between")]
    rows.append(["message latency", *latencies])
    yield markup.table("links within and between nodes", ["", "within nodes", "between nodes"], rows)
    yield (
        '<p class="soft">Bytes: received or sent bytes of the worst rank, the larger number. All bytes of a collective '
        "whose group spans nodes count as bytes between nodes, as in predicted times.</p>"
    )
    for name, link in topology["mesh_dims"].items():
        own = f"rate {_rate(link['ps_per_kib'])}, message latency {time_text(link['message_ps'] / 1e6)}"
        yield f'<p class="soft">Link of steps over mesh dim {escape(name)} alone: {own}.</p>'


def _rate(ps_per_kib: int) -> str:
    return f"{1024e3 / ps_per_kib:,.4g} GB/s" if ps_per_kib else "unlimited"


def _certificate(plan: Plan) -> Iterator[str]:
    """Yields a table of costs and lower bounds, and a remark for each bound that is not reached."""
    yield ('<h2>Certificate</h2>\n<p class="soft">Lower bound: for every plan between these layouts.</p>')
    rows = []
    for name, (value, bound) in plan.certificate.items():
        ratio = "reached" if value <= bound else f"{value / bound:.2f}x" if bound else "above 0"
        rows.append([_COSTS[name], _cost(name, value), _cost(name, bound), ratio])
    yield markup.table("costs and lower bounds", ["cost", "plan", "lower bound", "plan / bound"], rows)
    if plan.remarks:
        yield '<ul class="remarks">' + "".join(f"<li>{escape(remark)}</li>" for remark in plan.remarks) + "</ul>"
