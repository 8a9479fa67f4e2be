"""Sends tokens to the ranks of their experts, and results back; docs/experts.md describes it."""

from __future__ import annotations

from .functions import combine, dispatch

__all__ = ["combine", "dispatch"]
