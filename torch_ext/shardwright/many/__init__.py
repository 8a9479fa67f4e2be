"""Moves lists of tensors together, with gradients."""

from __future__ import annotations

from .functions import redistribute_many

__all__ = ["redistribute_many"]
