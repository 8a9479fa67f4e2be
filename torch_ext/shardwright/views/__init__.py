"""Views of sharded tensors that need no communication; see docs/views.md."""

from __future__ import annotations

from .functions import flatten, permute, squeeze, transpose, unflatten, unsqueeze, view

__all__ = ["flatten", "permute", "squeeze", "transpose", "unflatten", "unsqueeze", "view"]
