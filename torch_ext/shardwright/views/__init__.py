"""Views of sharded tensors that move nothing; docs/views.md describes them."""

from __future__ import annotations

from .functions import flatten, permute, squeeze, transpose, unflatten, unsqueeze, view

__all__ = ["flatten", "permute", "squeeze", "transpose", "unflatten", "unsqueeze", "view"]
