"""Registers layouts as constants of compiled code: a graph is reused only for equal layouts.

This must happen before the first layout is traced, so the package imports this module as soon as torch is loaded.
"""

from __future__ import annotations

from torch.utils import _pytree

from .._native import _planner
from ..layouts.layout import Layout

for _kind in (_planner.Layout, Layout):
    _pytree.register_constant(_kind)
