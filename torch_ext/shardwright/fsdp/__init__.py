"""Weights that are sharded between steps and gathered when they are used.

Start with api.py (hooks of modules), units.py (terms), runner.py (execution of a schedule) and layouts.py.
"""

from __future__ import annotations

from .activations import checkpoint_cut
from .api import fully_shard, schedule, schedules
from .arguments import Options
from .collectives import AllGather, ReduceScatter
from .jit_weights import JitWeight, jit_weight
from .methods import ShardedModule, UnshardHandle
from .owner_layouts import Owners, owners

__all__ = [
    "AllGather",
    "JitWeight",
    "Options",
    "Owners",
    "ReduceScatter",
    "ShardedModule",
    "UnshardHandle",
    "checkpoint_cut",
    "fully_shard",
    "jit_weight",
    "owners",
    "schedule",
    "schedules",
]
