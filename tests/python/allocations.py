"""Measures allocated memory with the profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def allocated_peak(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """Runs `function`. Returns its result and the peak of the bytes allocated during the call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = function(*args, **kwargs)
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return result, peak
