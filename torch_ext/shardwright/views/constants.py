"""Layouts are constants in code that is compiled: a graph is made for layouts that are equal to those it was made with.

Compilers must know this before they see the first layout, so the package imports this module as soon as torch is there.
"""

from __future__ import annotations

from torch.utils import _pytree

from .._native import _planner
from ..layouts.layout import Layout

for _kind in (_planner.Layout, Layout):
    _pytree.register_constant(_kind)
