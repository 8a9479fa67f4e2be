"""The drop-in for DTensor: shardwright runs the redistributes that DTensor starts, explicitly or implicitly.

All of them pass through PyTorch's function `redistribute_local_tensor`. Enabling replaces it in every loaded module
that holds it (dtensor/patch.py). What shardwright does not handle (some traces, fake and subclassed tensors, unknown
placements) is left to PyTorch's function and counted with its reason.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from .dtensor import crossing, patch
from .dtensor import mode as modes
from .dtensor import redistribute as dtensor_redistribute
from .dtensor.mode import Mode
from .layouts.errors import argument_error
from .runtime import argument_checks, dynamo
from .views import rules as view_rules

_lock = threading.RLock()  # held while the mode or the patches change


def enable(strict: bool = False, make_groups: bool = True, overlap: bool = False, views: bool = False) -> None:
    """Routes DTensor's redistributes through shardwright until `disable`.

    This is one switch for all threads of the process, and the last call counts, whichever thread makes it. Within an
    `enabled` block of the calling thread it changes that block only. Blocks of other threads keep their settings.

    Args:
        strict: raise RuntimeError where a redistribute would be left to PyTorch.
        make_groups: make missing process groups at first use, by their members. If false, plans use only the groups of
            the mesh's dims, of its flattened dims, and those of the `mesh_dims` of `prepare`. Between two meshes,
            pending sums are then reduced over one mesh dim at a time, and the group of the ranks of both must exist.
        overlap: gather the operand of ``torch.nn.functional.linear``, ``torch.matmul``, ``torch.mm`` and ``@`` of a
            DTensor and a two-dim DTensor weight during the product, if a mesh dim cuts the operand in a dim other than
            the last and the weight in its columns. The result is then sharded in its last dim along that mesh dim.
            Compiled code is not affected.
        views: run DTensor's views (`view`, `reshape`, `flatten`, `unflatten`, ...) without communication wherever
            DTensor can describe the result (docs/views.md). The backward must run while this is on.
    """
    with _lock:
        patch.install()
        modes.block_of_this_thread().mode = Mode(True, strict, make_groups, overlap, views)
        _apply()


def disable() -> None:
    """Restores PyTorch's function, unless a block of another thread still needs shardwright's.

    Raises RuntimeError if shardwright is not enabled, by `enable` or by the block that this thread is in.
    """
    with _lock:
        block = modes.block_of_this_thread()
        if not block.mode.on:
            raise RuntimeError("disable: shardwright is not enabled (disabled twice?)")
        block.mode = modes.OFF
        _apply()
        if not modes.is_on_anywhere():
            patch.uninstall()


@contextlib.contextmanager
def enabled(
    strict: bool = False, make_groups: bool = True, overlap: bool = False, views: bool = False
) -> Iterator[None]:
    """Enables shardwright for a block, and for the backward of the operations in it, whenever that runs.

    Like `enable`, whose arguments it has, this applies to all threads. Blocks may be nested. Blocks of several threads
    may overlap: the block that began last has precedence, and the end of a block undoes only that block. The forward
    should run on the thread that enters the block.
    """
    with _lock:
        patch.install()
        block = modes.begin(Mode(True, strict, make_groups, overlap, views))
        try:
            _apply()
        except BaseException:
            modes.end(block)
            raise
    try:
        yield
    finally:
        with _lock:
            modes.end(block)
            _apply()


def _apply() -> None:
    """Applies the mode that the open blocks require."""
    mode = modes.latest_mode()
    if mode.overlap or modes.current().overlap:
        from .matmul import overlapping

        overlapping.install() if mode.overlap else overlapping.uninstall()
        dtensor_redistribute.explicit_gather_hook = overlapping.note_explicit_gather
    if mode.views or modes.current().views:
        view_rules.install() if mode.views else view_rules.uninstall()
    patch.separate_compile_caches(mode.on, mode.views)
    modes.apply(mode)


@dynamo.outside_graphs
def redistribute(
    x: DTensor,
    placements: Sequence[Placement],
    mesh: DeviceMesh | None = None,
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """Runs `x.redistribute(...)` with shardwright, whether or not it is enabled. Raises instead of falling back.

    Changes no other redistributes, also not those of other threads at the same time. While shardwright is enabled with
    ``make_groups=False``, missing process groups are an error. In compiled code the call breaks the graph.

    Args:
        x: the DTensor; it is not changed.
        placements: one per mesh dim of the result.
        mesh: the mesh of the result; default: the mesh of `x`. On another mesh the result must be sharded or
            replicated, and all ranks of both meshes call; ranks outside a mesh hold an empty part, as in DTensor. At
            the first use of a pair of layouts, ranks check that they agree on the layout of `x`.
        async_op, forward_dtype, backward_dtype: as in ``DTensor.redistribute``.

    Returns:
        A DTensor with these placements; differentiable, and twice if the installed torch supports it.

    Raises:
        ValueError: the number of placements is wrong, placements on another mesh are partial, a mesh is a slice such as
            ``mesh["tp"]`` that differs between ranks, or an argument has the wrong type.
        RuntimeError: shardwright does not support this redistribute, or ranks disagree on the layout of `x`; the
            message has the reason.
    """
    if not isinstance(x, DTensor):
        raise argument_error("x", "a DTensor (redistribute_local takes plain tensors)", f"a {type(x).__name__}")
    argument_checks.check_device_mesh("mesh", mesh)
    placements = argument_checks.placements_of(placements, (x.device_mesh if mesh is None else mesh).ndim)
    argument_checks.check_dtype("forward_dtype", forward_dtype)
    argument_checks.check_dtype("backward_dtype", backward_dtype)
    if mesh is not None and crossing.is_other_mesh(x, mesh):
        return crossing.redistribute(
            x,
            mesh,
            placements,
            async_op=async_op,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
            make_groups=modes.current().make_groups,
        )
    with _lock:
        patch.install()
        before = modes.begin_call()
    try:
        return x.redistribute(
            placements=placements, async_op=async_op, forward_dtype=forward_dtype, backward_dtype=backward_dtype
        )
    finally:
        with _lock:
            modes.end_call(before)
