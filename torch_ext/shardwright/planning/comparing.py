"""Compares two plans."""

from __future__ import annotations

import difflib

from .._planner import Plan


def difference(a: Plan, b: Plan) -> str:
    """Compares two plans as text: the moves as a diff, then each cost of both and the ratio of b to a.

    Args:
        a, b: plans for the same layouts or for different ones; if they differ, the first lines show it.
    """
    lines = [f"- {_heading(a)}", f"+ {_heading(b)}"] if _heading(a) != _heading(b) else [f"  {_heading(a)}"]
    moves = difflib.ndiff(_moves(a), _moves(b))
    lines += [line.rstrip() for line in moves if not line.startswith("?")]
    bounds = b.certificate
    for name, (first, bound) in a.certificate.items():
        second = bounds[name][0]
        ratio = f"{second / first:.2f} times" if first else "-"
        lines.append(f"  {name:15} {first:>16,} -> {second:>16,}  {ratio:>12}  bound {bound:,}")
    return "\n".join(lines)


def _heading(plan: Plan) -> str:
    """Returns the first line of the plan's text, which has both layouts."""
    return str(plan).splitlines()[0]


def _moves(plan: Plan) -> list[str]:
    """Returns the lines of the plan's text after the first, one per move."""
    return [line.strip() for line in str(plan).splitlines()[1:]]
