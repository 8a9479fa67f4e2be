"""Redistributes in compiled code: plans as arguments of operators, and one order of them on all ranks."""

from __future__ import annotations

from .operators import operator

__all__ = ["operator"]
