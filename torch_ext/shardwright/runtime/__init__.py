"""Runs plans on process groups: one tensor, many tensors, and the memory and kernels that they use."""

from __future__ import annotations

from .._native import _runtime
from .many import ManyHandle

release_staging = _runtime.release_staging
set_fast_accumulation = _runtime.set_fast_accumulation
set_sm_carveout = _runtime.set_sm_carveout

__all__ = ["ManyHandle", "release_staging", "set_fast_accumulation", "set_sm_carveout"]
