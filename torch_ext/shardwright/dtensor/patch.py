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
_OWN_TAG = re.compile(r" ?shardwright rank (of process )?\S+( with views)?$")  # `separate_compile_caches`


def install() -> None:
    """Replaces PyTorch's functions by shardwright's. Does nothing if they are replaced already."""
    global _undo
    if _undo is not None:
        return
    with contextlib.ExitStack() as undo:
        _replace_method(undo)
        _wrap_forwards(undo)
        _replace_function(undo)
        _undo = undo.pop_all()


def uninstall() -> None:
    """Restores PyTorch's functions. Does nothing if none is replaced."""
    global _undo
    if _undo is not None:
        undo, _undo = _undo, None
        undo.close()


def _replace_method(undo: contextlib.ExitStack) -> None:
    """Replaces `DTensor.redistribute` by the fast path of shortcut.py. `undo` restores it."""
    original = DTensor.redistribute
    undo.callback(shortcut.clear)
    DTensor.redistribute = shortcut.make_method(original)  # type: ignore[method-assign]
    undo.callback(setattr, DTensor, "redistribute", original)


def _wrap_forwards(undo: contextlib.ExitStack) -> None:
    """Makes PyTorch's autograd functions store the mode on their nodes (mode.py). `undo` restores them."""
    nested = getattr(torch_redistribute, "NestedRedistribute", None)  # exists since torch 2.12
    for function in filter(None, (torch_redistribute.Redistribute, nested, shortcut.Redistribute)):
        original = function.forward
        function.forward = staticmethod(mode.storing_mode(original))
        undo.callback(setattr, function, "forward", staticmethod(original))


def _replace_function(undo: contextlib.ExitStack) -> None:
    """Replaces `redistribute_local_tensor` under all of its names in loaded modules. `undo` restores it."""
    original, replacement = torch_redistribute.redistribute_local_tensor, redistribute.redistribute_local_tensor
    undo.callback(redistribute.set_original, None)
    redistribute.set_original(original)
    undo.callback(_references.replace, original, replacement, install_replacement=False)
    _references.replace(original, replacement, install_replacement=True)


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

    def replace(self, original: Any, replacement: Any, *, install_replacement: bool) -> None:
        """Makes all names refer to `replacement`, or to `original` if `install_replacement` is False.

        The module that defines `replacement` is left out.
        """
        old, new = (original, replacement) if install_replacement else (replacement, original)
        self._add_references(original, replacement)
        for namespace, name in self._bindings:
            if namespace.get(name) is old:
                namespace[name] = new

    def _add_references(self, original: Any, replacement: Any) -> None:
        """Adds the names that refer to either function, in modules that are new or have changed since the last call."""
        if self._pair is None or self._pair[0] is not original or self._pair[1] is not replacement:
            self._pair = (original, replacement)
            self._sizes.clear()
            self._bindings.clear()
        known = {(id(namespace), name) for namespace, name in self._bindings}
        sizes, own_name = self._sizes, original.__name__
        for module in list(sys.modules.values()):
            try:
                namespace = module.__dict__
                size, own = len(namespace), namespace.get(own_name)
            except (AttributeError, TypeError):
                continue  # an object in sys.modules that is not a module
            if sizes.get(id(namespace)) == size and own is not original and own is not replacement:
                continue
            if not isinstance(namespace, dict) or namespace is vars(redistribute):
                continue
            sizes[id(namespace)] = size
            found = [name for name, value in list(namespace.items()) if value is original or value is replacement]
            self._bindings += [(namespace, name) for name in found if (id(namespace), name) not in known]


_references = _FunctionReferences()


def separate_compile_caches(on: bool, views: bool) -> None:
    """Adds this rank to the key of PyTorch's on-disk cache of compiled code, or removes it if `on` is False.

    All ranks of a machine share the cache's folder. Its key comes from Dynamo's graph, in which a redistribute is a
    method call of a DTensor. So the key depends neither on the rank nor on the operators that replace the call.
    """
    tag = _OWN_TAG.sub("", config.cache_key_tag)  # torch 2.15: a tag of this thread, which may contain ours already
    if on:
        is_rank = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if is_rank else os.environ.get("RANK", f"of process {os.getpid()}")
        tag = f"{tag} shardwright rank {rank}{' with views' if views else ''}".lstrip()
    config.cache_key_tag = tag
