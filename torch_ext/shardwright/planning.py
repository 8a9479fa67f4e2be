"""How a tensor gets from one layout to another: plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import _convert, _planner
from ._planner import Plan, Step

__all__ = ["Plan", "Step", "plan"]


def plan(
    src: _planner.Layout,
    dst: _planner.Layout,
    *,
    objective: str = "time",
    backend: str = "nccl",
    topology: str | None = None,
    groups: Iterable[Sequence[int | str]] | None = None,
    through: Sequence[_planner.Layout] | None = None,
) -> Plan:
    """The cheapest moves from `src` to `dst`, with what they cost. The same on every rank, without communication.

    Args:
        src, dst: layouts of one tensor on one mesh.
        objective: ``"time"``, the least predicted time; or ``"bytes"``, the fewest bytes received by the worst rank,
            then steps, then messages. They differ: a small message costs more than its bytes.
        backend: ``"nccl"`` or ``"gloo"``: which lowering the plan is for. They move the same data; Gloo composes
            reductions and gathers from messages.
        topology: latencies and bandwidths by name: ``"8xNVLink"``, one node; ``"64x8"``, nodes of eight ranks, the
            default for nccl; ``"gloo-local"``, one machine over loopback, the default for gloo.
        groups: the sets of mesh dims, by name or index, whose process groups the moves may use. Default: any.
        through: layouts to take in between, one move each, instead of a search: to cost or force a plan of one's own.
            Data moves and reductions only; ``[]`` asks for a single move.

    Returns:
        A `Plan`. ``str(plan)`` is one line per move; bytes and messages are those received from other ranks;
        ``plan.simulate()`` runs every rank in this process and raises if any element is wrong.

    Raises:
        ValueError: the layouts differ in mesh, shape or dtype, PyTorch defines no such redistribution, an argument is
            not known, or the groups do not suffice.
    """
    for name, layout in (("src", src), ("dst", dst)):
        if not isinstance(layout, _planner.Layout):
            raise ValueError(f"{name}: got a {type(layout).__name__}; allowed is a Layout")
    names = src.mesh.dim_names
    allowed = [[_convert.mesh_dim_index(names, d, "groups") for d in dims] for dims in groups or ()]
    if groups is not None and not allowed:
        allowed = [[]]  # none at all, which is not the same as any
    return _planner.make_plan(src, dst, backend, objective, topology, allowed, through)
