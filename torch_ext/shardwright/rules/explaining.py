"""The data that a planned transfer moves, and its predicted time, by tensor and by link, as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .._native import _planner
from ..layouts.topology import Topology

LIMIT = 20  # default number of tensors and of links shown


def with_names(error: ValueError, names: Sequence[str]) -> ValueError:
    """Returns the error of a batch with each "item 3" replaced by "destination <names[3]>"."""
    return ValueError(re.sub(r"\bitem (\d+)", lambda match: f"destination {names[int(match[1])]}", str(error)))


def explain(batch: _planner.Batch, names: Sequence[str], topology: Topology, limit: int = LIMIT) -> str:
    """Returns the certificate, and tables of the tensors and links that move most bytes, `limit` of each."""
    if limit < 0:
        raise ValueError(f"limit must be at least 0, got {limit}")
    destinations, links, total_ps, reducing_ps = _planner.forecast_batch(batch.to_bytes(), topology)
    lines = [f"transfer of {len(names)} tensors", str(_planner.BatchPlan(batch))]
    reducing = f", {_time(reducing_ps)} of it to reduce sources before," if reducing_ps else ""
    lines.append(f"  predicted: {_time(total_ps)}{reducing} with topology {topology.name!r}, if packing keeps up")
    lines += _table(
        ["tensor", "received", "worst rank", "stays", "rounds", "predicted"],
        (
            (received, [name, _bytes(received), _bytes(worst), _bytes(kept), _rounds(first, last), _time(ps)])
            for name, (received, worst, kept, first, last, ps) in zip(names, destinations)
        ),
        limit,
    )
    lines += _table(
        ["link", "bytes", "messages", "predicted"],
        (
            (count, [f"{sender} -> {receiver}", _bytes(count), str(messages), _time(ps)])
            for sender, receiver, count, messages, ps in links
        ),
        limit,
    )
    return "\n".join(lines)


def _table(header: list[str], rows: Iterable[tuple[int, list[str]]], limit: int) -> list[str]:
    """Returns the lines of a table. `rows` are (bytes, cells); the `limit` rows with most bytes are shown."""
    found = sorted(rows, key=lambda row: -row[0])
    cells = [header, *(row for _, row in found[:limit])]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [""]
    for row in cells:
        aligned = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join([row[0].ljust(widths[0]), *aligned]).rstrip())
    if left := found[limit:]:
        lines.append(f"and {len(left)} more with {_bytes(sum(count for count, _ in left))}")
    return lines


def _rounds(first: int, last: int) -> str:
    """Returns a range of rounds as text; -1 means none."""
    return "-" if first < 0 else str(first) if first == last else f"{first} to {last}"


def _bytes(count: int) -> str:
    """Returns a number of bytes as text, with a unit."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 10240:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:,.0f} {unit}"


def _time(ps: int) -> str:
    """Returns picoseconds as text in us or ms."""
    if ps < 1e8:
        return f"{ps / 1e6:.1f} us"
    return f"{ps / 1e6:,.0f} us" if ps < 1e10 else f"{ps / 1e9:,.1f} ms"
