"""Memory allocations and frees as the profiler sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def allocated_peak(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """Runs a function and returns its result, and the most bytes that were allocated at once meanwhile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = function(*args, **kwargs)
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return result, peak
