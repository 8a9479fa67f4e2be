"""Shows dispatch modes one collective for each step of a plan, under PyTorch's own name for it.

The transfers of a program are not its plan's steps; on Gloo, for example, a gather may be messages. Users who count
collectives with CommDebugMode, or record them with DebugMode, want to see the steps. So a program runs with all modes
disabled except `sw.debug.wire_meter`, which counts the bytes that are really sent. Then the PyTorch operator for each
step is called under the other modes. Below them, `_ReturnResult` returns the program's result instead of communicating.

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
        return call()  # a compiler's own modes must stay active
    with _disable_current_modes() as modes:
        meters = [mode for mode in modes if isinstance(mode, wire.WireMeter)]
        with _active(meters):
            result = call()
        others = [mode for mode in modes if not isinstance(mode, wire.WireMeter)]
        if others:
            with _ReturnResult(_first_tensor(result)), _active(others):
                for operator, arguments in _torch_operators(executable):
                    torch.ops._c10d_functional.wait_tensor(operator(inputs[0], *arguments))
    return result


def _first_tensor(result: Any) -> torch.Tensor:
    """Returns a result's first tensor, without a wait if it is asynchronous."""
    first = result[0] if isinstance(result, (list, tuple)) else result
    tensor: torch.Tensor = getattr(first, "elem", first)
    return tensor


@contextlib.contextmanager
def _active(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Activates these modes inside the block, the first one on top, without calling their `__enter__` again."""
    for mode in reversed(modes):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


class _ReturnResult(TorchDispatchMode):
    """A dispatch mode in which every operator returns the given result and does nothing."""

    def __init__(self, result: torch.Tensor) -> None:
        super().__init__()
        self.result = result

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        return self.result


def _torch_operators(executable: _runtime.Executable) -> Iterator[tuple[Callable[..., torch.Tensor], tuple[Any, ...]]]:
    """Yields, for each step that communicates, the PyTorch operator and its arguments after the tensor."""
    named = list(zip(executable.groups, executable.group_names, strict=True))
    functional = torch.ops._c10d_functional
    for op, reduce_op, mesh_dims, ranks, size, gather_dim, shard_dim in executable.communications:
        if not ranks:  # the step is on a mesh without this rank
            continue
        # The group of a sparse exchange may lack some ranks. A rank that neither sends nor receives has no group.
        same_ranks = [name for (_, members), name in named if members == ranks]
        fewer_ranks = [name for (dims, members), name in named if dims == mesh_dims and set(members) <= set(ranks)]
        group = (same_ranks + fewer_ranks or [""])[0]
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
