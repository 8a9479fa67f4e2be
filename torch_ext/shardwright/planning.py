"""How a tensor gets from one layout to another: plans."""

from __future__ import annotations

from . import _planner
from ._planner import Plan, Step

__all__ = ["Plan", "Step", "plan"]


def plan(src: _planner.Layout, dst: _planner.Layout, *, backend: str = "nccl") -> Plan:
    """The moves from `src` to `dst`, with what they cost. The same on every rank, without communication.

    Args:
        src, dst: layouts of one tensor on one mesh.
        backend: ``"nccl"`` or ``"gloo"``: which lowering the plan is for. They move the same data; Gloo composes
            reductions and gathers from messages.

    Returns:
        A `Plan`. ``str(plan)`` is one line per move; bytes and messages are those received from other ranks;
        ``plan.simulate()`` runs every rank in this process and raises if any element is wrong.

    Raises:
        ValueError: the layouts differ in mesh, shape or dtype, or PyTorch defines no such redistribution.
    """
    for name, layout in (("src", src), ("dst", dst)):
        if not isinstance(layout, _planner.Layout):
            raise ValueError(f"{name}: got a {type(layout).__name__}; allowed is a Layout")
    return _planner.make_plan(src, dst, backend)
