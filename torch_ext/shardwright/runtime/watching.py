"""Shows dispatch modes one collective for each step of a plan, under PyTorch's own name for it.

Programs run a step in the fastest way; on Gloo a gather may be messages. Users who count collectives with
CommDebugMode, or record them with DebugMode, want to see the steps, not the transfers. So a program runs with all modes
disabled except `sw.debug.wire_meter`, which counts the bytes that are really sent. Then the PyTorch operator for each
step is called, and a mode of ours below all others returns the program's result in its place.

    all_gather        _c10d_functional.all_gather_into_tensor
    reduce_scatter    _c10d_functional.reduce_scatter_tensor
    all_reduce        _c10d_functional.all_reduce
    all_to_all        _dtensor.shard_dim_alltoall
    permute, exchange, cross, rearrange
                      _c10d_functional.all_to_all_single
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from .._native import _runtime
from . import wire

T = TypeVar("T")


# The number of dispatch modes that are active in this thread.
num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def run(executable: _runtime.Executable, inputs: Sequence[torch.Tensor], call: Callable[[], T]) -> T:
    """Returns the result of `call`, which runs the executable on `inputs`. Shows its steps to the active modes."""
    if any(getattr(mode, "_mode_key", None) is not None for mode in _get_current_dispatch_mode_stack()):
        return call()  # a compiler's own modes are left alone
    with _disable_current_modes() as modes:
        meters = [mode for mode in modes if isinstance(mode, wire.WireMeter)]
        with _on(meters):
            result = call()
        others = [mode for mode in modes if not isinstance(mode, wire.WireMeter)]
        if others:
            with _Answer(_plain(result)), _on(others):
                for operator, arguments in _meanings(executable):
                    torch.ops._c10d_functional.wait_tensor(operator(inputs[0], *arguments))
    return result


def _plain(result: Any) -> torch.Tensor:
    """Returns the first tensor of a result, without waiting for it."""
    first = result[0] if isinstance(result, (list, tuple)) else result
    tensor: torch.Tensor = getattr(first, "elem", first)
    return tensor


@contextlib.contextmanager
def _on(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Activates these modes, the first one on top, without calling their `__enter__` again."""
    for mode in reversed(modes):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


class _Answer(TorchDispatchMode):
    """Returns the program's result in place of every collective."""

    def __init__(self, result: torch.Tensor) -> None:
        super().__init__()
        self.result = result

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        return self.result


def _meanings(executable: _runtime.Executable) -> Iterator[tuple[Callable[..., torch.Tensor], tuple[Any, ...]]]:
    """Yields, for each step that communicates, its PyTorch operator and the arguments after the tensor."""
    named = list(zip(executable.groups, executable.group_names, strict=True))
    functional = torch.ops._c10d_functional
    for op, reduce_op, mesh_dims, ranks, size, gather_dim, shard_dim in executable.communications:
        if not ranks:  # the step is on the other mesh
            continue
        same_ranks = [name for (_, members), name in named if members == ranks]
        # A sparse exchange may use fewer ranks, and a rank with nothing to send or receive has no group.
        some = [name for (dims, members), name in named if dims == mesh_dims and set(members) <= set(ranks)]
        group = (same_ranks + some or [""])[0]
        if op == "all_gather":
            yield functional.all_gather_into_tensor, (size, group)
        elif op == "reduce_scatter":
            yield functional.reduce_scatter_tensor, (reduce_op, size, group)
        elif op == "all_reduce":
            yield functional.all_reduce, (reduce_op, group)
        elif op == "all_to_all":
            yield torch.ops._dtensor.shard_dim_alltoall, (gather_dim, shard_dim, group)
        else:
            yield functional.all_to_all_single, ([], [], group)
