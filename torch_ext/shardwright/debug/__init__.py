"""Checks, traces and explanations of running programs."""

from __future__ import annotations

from ..runtime.checking import check_ranks
from ..runtime.wire import wire_meter
from .explaining import explain
from .tracing import trace

__all__ = ["check_ranks", "explain", "trace", "wire_meter"]
