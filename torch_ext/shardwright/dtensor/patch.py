"""Replaces PyTorch's functions and restores them. If replacing one fails, none is replaced."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Any

import torch.compiler.config as config
import torch.distributed as dist
import torch.distributed.tensor._redistribute as torch_redistribute
from torch.distributed.tensor import DTensor

from . import mode, redistribute, shortcut

_undo: contextlib.ExitStack | None = None  # restores the replaced functions; None if none is replaced
_OUR_TAG = re.compile(r" ?shardwright rank (of process )?\S+( with views)?$")


def install() -> None:
    """Replaces PyTorch's functions by ours. Does nothing if they are replaced already."""
    global _undo
    if _undo is not None:
        return
    with contextlib.ExitStack() as undo:
        _take_method(undo)
        _take_forwards(undo)
        _take_function(undo)
        _undo = undo.pop_all()


def uninstall() -> None:
    """Restores PyTorch's functions. Does nothing if none is replaced."""
    global _undo
    if _undo is not None:
        undo, _undo = _undo, None
        undo.close()


def _take_method(undo: contextlib.ExitStack) -> None:
    """Replaces `DTensor.redistribute` by the fast path of shortcut.py. `undo` restores it."""
    original = DTensor.redistribute
    undo.callback(shortcut.forget)
    DTensor.redistribute = shortcut.method(original)  # type: ignore[method-assign]
    undo.callback(setattr, DTensor, "redistribute", original)


def _take_forwards(undo: contextlib.ExitStack) -> None:
    """Makes the nodes of PyTorch's autograd functions remember the mode (mode.py)."""
    nested = getattr(torch_redistribute, "NestedRedistribute", None)  # came with torch 2.12
    for function in filter(None, (torch_redistribute.Redistribute, nested, shortcut.Redistribute)):
        original = function.forward
        function.forward = staticmethod(mode.keeping_mode(original))
        undo.callback(setattr, function, "forward", staticmethod(original))


def _take_function(undo: contextlib.ExitStack) -> None:
    """Replaces `redistribute_local_tensor` under all of its names in loaded modules."""
    original, ours = torch_redistribute.redistribute_local_tensor, redistribute.redistribute_local_tensor
    undo.callback(redistribute.stand_in_for, None)
    redistribute.stand_in_for(original)
    undo.callback(_references.replace, original, ours, by_ours=False)
    _references.replace(original, ours, by_ours=True)


class _FunctionReferences:
    """The names in all loaded modules that refer to either of two functions: the original or its replacement.

    Searching the names of all modules takes tens of milliseconds, so each module is searched once. It is searched again
    if its number of names changes, as it does for a module that was still being imported. If a module assigns the
    function to a name that it already had, it is found only under the function's own name.
    """

    def __init__(self) -> None:
        self._pair: tuple[object, object] | None = None
        self._sizes: dict[int, int] = {}  # number of names searched, by id of a module's namespace
        self._bindings: list[tuple[dict[str, Any], str]] = []  # (namespace of a module, name in it)

    def replace(self, original: Any, ours: Any, *, by_ours: bool) -> None:
        """Replaces `original` by `ours`, or the reverse, under any name, except in the module that defines `ours`."""
        old, new = (original, ours) if by_ours else (ours, original)
        self._add_references(original, ours)
        for names, name in self._bindings:
            if names.get(name) is old:
                names[name] = new

    def _add_references(self, original: Any, ours: Any) -> None:
        """Adds the names that refer to either function in modules that were not searched yet."""
        if self._pair is None or self._pair[0] is not original or self._pair[1] is not ours:
            self._pair = (original, ours)
            self._sizes.clear()
            self._bindings.clear()
        known = {(id(names), name) for names, name in self._bindings}
        sizes, own_name = self._sizes, original.__name__
        for module in list(sys.modules.values()):
            try:
                names = module.__dict__
                size, own = len(names), names.get(own_name)
            except (AttributeError, TypeError):
                continue  # an object in sys.modules that is not a module
            if sizes.get(id(names)) == size and own is not original and own is not ours:
                continue
            if not isinstance(names, dict) or names is vars(redistribute):
                continue
            sizes[id(names)] = size
            found = [name for name, value in list(names.items()) if value is original or value is ours]
            self._bindings += [(names, name) for name in found if (id(names), name) not in known]


_references = _FunctionReferences()


def separate_compile_caches(on: bool, views: bool) -> None:
    """Adds this rank to the tag of PyTorch's on-disk cache of compiled code, or removes it again.

    The cache's key comes from Dynamo's graph, in which a redistribute is a method call of a DTensor. The key contains
    neither that the call becomes an operator of ours, nor the rank. All ranks of a machine share the cache's folder.
    """
    tag = _OUR_TAG.sub("", config.cache_key_tag)  # in torch 2.15 each thread has its own tag, which may contain ours
    if on:
        is_rank = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if is_rank else os.environ.get("RANK", f"of process {os.getpid()}")
        tag = f"{tag} shardwright rank {rank}{' with views' if views else ''}".lstrip()
    config.cache_key_tag = tag
