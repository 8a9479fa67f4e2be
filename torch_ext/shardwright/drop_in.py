"""The drop-in for DTensor: redistributes that PyTorch starts, explicit and implicit, run by shardwright.

PyTorch's own function `redistribute_local_tensor` is where all of them pass. Enabling binds ours in its place, in every
loaded module that holds it (dtensor/patch.py). What we do not take (tracing, fake and subclassed tensors, placements we
do not know) goes on to PyTorch's function and is counted with its reason.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from . import argument_checks
from .dtensor import mode as modes
from .dtensor import patch
from .dtensor import redistribute as dtensor_redistribute
from .dtensor.mode import Mode

_lock = threading.RLock()  # around all that changes what is on


def enable(strict: bool = False, make_groups: bool = True, overlap: bool = False) -> None:
    """Routes DTensor's redistributes through shardwright until `disable`.

    A switch for all threads of the process: the last call counts, whichever thread it comes from. Within an `enabled`
    block of its own thread it changes that block only. Blocks of other threads keep what they asked for.

    Args:
        strict: raise RuntimeError where a redistribute would go to PyTorch's own path.
        make_groups: whether process groups that are missing may be made, at first use and by their members. If not,
            plans keep to the groups of the mesh's dims, its flattened ones and those of `prepare`.
        overlap: whether `linear`, `matmul` and ``@`` of DTensors gather their operand behind the product where PyTorch
            would gather first (overlapping.py says which). The result is then cut in its last dim along those mesh
            dims. Not in code that is compiled.
    """
    with _lock:
        patch.install()
        modes.mine().mode = Mode(True, strict, make_groups, overlap)
        _apply()


def disable() -> None:
    """Gives PyTorch its own function back, once no block of another thread needs ours.

    Raises RuntimeError if shardwright is not enabled, by `enable` or by the block that this thread is in.
    """
    with _lock:
        mine = modes.mine()
        if not mine.mode.on:
            raise RuntimeError("disable: shardwright is not enabled (disabled twice?)")
        mine.mode = modes.OFF
        _apply()
        if not modes.is_wanted():
            patch.uninstall()


@contextlib.contextmanager
def enabled(strict: bool = False, make_groups: bool = True, overlap: bool = False) -> Iterator[None]:
    """`enable` for a block. The backward of what ran inside goes through shardwright too, whenever it runs.

    For all threads, as `enable` is. Blocks of several threads may overlap: the one that began last decides, and each
    takes back only what it asked for.
    """
    with _lock:
        patch.install()
        block = modes.begin(Mode(True, strict, make_groups, overlap))
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
    """What the blocks say holds from now on."""
    mode = modes.wanted()
    if mode.overlap or modes.current().overlap:
        from .products import overlapping  # imports compilers

        overlapping.install() if mode.overlap else overlapping.uninstall()
        dtensor_redistribute.note_explicit_gather = overlapping.note_explicit_gather
    patch.tell_compile_caches_apart(mode.on)
    modes.apply(mode)


def redistribute(
    x: DTensor,
    placements: Sequence[Placement],
    mesh: DeviceMesh | None = None,
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """`x.redistribute(...)` by shardwright, whether or not it is enabled; falling back raises.

    Args:
        x: the DTensor; stays as it is.
        placements: one per mesh dim.
        mesh: must be `x`'s own, if given.
        async_op, forward_dtype, backward_dtype: as in ``DTensor.redistribute``.

    Returns:
        A DTensor with these placements; differentiable, twice.

    Raises:
        ValueError: another mesh, placements of the wrong number, arguments of another type.
        RuntimeError: what shardwright cannot do, with the reason.
    """
    if not isinstance(x, DTensor):
        raise ValueError(f"x: got a {type(x).__name__}; allowed is a DTensor (redistribute_local takes plain tensors)")
    argument_checks.check_device_mesh("mesh", mesh)
    if mesh is not None and mesh != x.device_mesh:
        raise ValueError(f"mesh: {mesh} is not the mesh of x ({x.device_mesh}); allowed is redistributing on one mesh")
    placements = argument_checks.placements_of(placements, x.device_mesh.ndim)
    argument_checks.check_dtype("forward_dtype", forward_dtype)
    argument_checks.check_dtype("backward_dtype", backward_dtype)
    with enabled(strict=True):
        return x.redistribute(
            placements=placements, async_op=async_op, forward_dtype=forward_dtype, backward_dtype=backward_dtype
        )
