"""Weights that are cut between steps and gathered when they are used."""

from __future__ import annotations

from .collectives import AllGather, ReduceScatter

__all__ = ["AllGather", "ReduceScatter"]
