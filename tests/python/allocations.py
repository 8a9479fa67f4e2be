"""Measures allocated memory with the profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def profiled() -> torch.profiler.profile:
    """Returns a profiler of allocations, for `peak_bytes`."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def peak_bytes(profile: torch.profiler.profile) -> int:
    """Returns the peak of the bytes that PyTorch's allocator held above those at the start of a profile."""
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def allocated_peak(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """Runs `function`. Returns its result and the peak of the bytes allocated during the call."""
    with profiled() as profile:
        result = function(*args, **kwargs)
    return result, peak_bytes(profile)
