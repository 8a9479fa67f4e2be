"""Rules that map tensors of one state dict to those of another: only index arithmetic. Nothing here imports torch."""

from __future__ import annotations

from .functions import cast, fuse, rename, split, stack, transpose, unstack

__all__ = ["cast", "fuse", "rename", "split", "stack", "transpose", "unstack"]
