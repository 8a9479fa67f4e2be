"""Weights that are cut between steps and gathered when they are used."""

from __future__ import annotations

from .collectives import AllGather, ReduceScatter
from .methods import ShardedModule, UnshardHandle
from .sharding import fully_shard, schedules

__all__ = ["AllGather", "ReduceScatter", "ShardedModule", "UnshardHandle", "fully_shard", "schedules"]
