"""Checks, traces and explanations of running programs."""

from __future__ import annotations

from ..runtime.checking import check_ranks
from ..runtime.layout_stats import record_layouts
from ..runtime.wire import wire_meter
from .explaining import explain
from .tracing import trace

__all__ = ["check_ranks", "explain", "record_layouts", "trace", "wire_meter"]
