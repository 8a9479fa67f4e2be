"""Plans, the topologies and product models that they are chosen with, and their files. Nothing here imports torch."""

from __future__ import annotations

from .._planner import GemmModel
from ..layouts.topology import Link, Topology, load_topology
from .batches import plan_many
from .plans import Plan, Step, pin, plan, unpin
from .plans import check_layout as check_layout
from .plans import pinned as pinned
from .reading import plan_from_json

__all__ = [
    "GemmModel",
    "Link",
    "Plan",
    "Step",
    "Topology",
    "load_topology",
    "pin",
    "plan",
    "plan_from_json",
    "plan_many",
    "unpin",
]
