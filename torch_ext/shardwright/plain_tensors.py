"""Redistributes plain tensors between given layouts: `redistribute_local`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from . import _planner, _runtime, argument_checks, checking, executables, groups
from .layout import gradient_layout
from .planning import check_layout


def redistribute_local(
    local: torch.Tensor,
    src: _planner.Layout,
    dst: _planner.Layout,
    *,
    group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    async_op: bool = False,
) -> torch.Tensor:
    """Moves this rank's part of a tensor from one layout to another, without DTensor.

    Args:
        local: this rank's part in `src`: shape ``src.local_shape(rank)``, any strides. It is not changed.
        src, dst: layouts on one mesh. The mesh's ranks are global ranks, or ranks of `group` if one is given.
        group: the process group that contains the mesh; default, the default group.
        device_mesh: a DeviceMesh over the same ranks whose process groups may be used.
        async_op: return once the first transfer has started; the result waits for the rest on first use.

    Returns:
        A new tensor of shape ``dst.local_shape(rank)``, or `local` itself if the layouts agree. On a rank outside
        the mesh, `local` itself. The result is differentiable if the pending reductions are sums or averages: the
        gradient moves back from `dst` to `src`, with R in place of P, as in DTensor.

    Raises:
        ValueError: `local` contradicts `src`, is nested, sparse or on a device other than CPU and CUDA; the layouts
            contradict each other; an argument has the wrong type.
        RuntimeError: torch.distributed is not initialised.
        torch.distributed.DistBackendError: a transfer failed or timed out; the message names rank, plan, step and
            group.
    """
    key: Any = None
    try:
        key = (src, dst, None if group is None else groups.weakly(group), device_mesh)
        known = _known.get(key) if isinstance(src, _planner.Layout) and isinstance(dst, _planner.Layout) else None
    except TypeError:  # an argument of the wrong type, which the checks below report
        known = None
    if known is not None and known.answers(local):
        return executables.run_again(known.executable, local, async_op)
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    argument_checks.check_tensor("local", local)
    check_layout("src", src)
    check_layout("dst", dst)
    argument_checks.check_group(group)
    argument_checks.check_device_mesh("device_mesh", device_mesh)
    groups.check_initialised()
    rank = dist.get_rank(group)
    if src.mesh.coordinate(rank) is None:
        return local
    if not checking.is_on():  # the debug mode reports a wrong input on all ranks instead
        _check_input(local, src, rank)
    if local.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _RedistributeLocal.apply(local, src, dst, group, device_mesh, async_op)  # type: ignore[no-untyped-call]
        return result
    executable = _executable(local, src, dst, group, device_mesh)
    output = executables.run(executable, local, async_op)
    _known.put(key, _Known(executable, local))
    return output


def _check_input(local: torch.Tensor, src: _planner.Layout, rank: int) -> None:
    if tuple(local.shape) != tuple(src.local_shape(rank)):
        raise ValueError(
            f"local: has shape {tuple(local.shape)} on rank {rank}, where {src} has {tuple(src.local_shape(rank))}"
        )
    if str(local.dtype) != f"torch.{src.dtype}":
        raise ValueError(f"local: has dtype {local.dtype}, where {src} has {src.dtype}")


class _Known:
    """An executable that a call has used successfully, and the inputs for which later calls may use it."""

    __slots__ = ("device", "dtype", "executable", "shape")

    def __init__(self, executable: _runtime.Executable, local: torch.Tensor) -> None:
        self.executable = executable
        self.shape = local.shape
        self.dtype = local.dtype
        self.device = local.device

    def answers(self, local: torch.Tensor) -> bool:
        return (
            type(local) is torch.Tensor
            and local.dtype is self.dtype
            and local.layout is torch.strided
            and not local.is_nested  # nested tensors have no shape
            and local.shape == self.shape
            and local.device == self.device
            and not (local.requires_grad and torch.is_grad_enabled())
        )


_known: executables.Kept[_Known] = executables.Kept()


def _executable(
    local: torch.Tensor,
    src: _planner.Layout,
    dst: _planner.Layout,
    group: dist.ProcessGroup | None,
    device_mesh: DeviceMesh | None,
) -> _runtime.Executable:
    device_type = local.device.type

    def build() -> _runtime.Executable:
        return executables.bind(
            executables.make_plan(src, dst, device_type, group), device_mesh=device_mesh, group=group
        )

    executable = executables.lookup((src, dst, device_type, groups.weakly(group), device_mesh), build)
    assert isinstance(executable, _runtime.Executable)
    return executable


class _RedistributeLocal(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        local: torch.Tensor,
        src: _planner.Layout,
        dst: _planner.Layout,
        group: dist.ProcessGroup | None,
        device_mesh: DeviceMesh | None,
        async_op: bool,
    ) -> torch.Tensor:
        ctx.way_back = (gradient_layout(dst, "dst"), gradient_layout(src, "src"), groups.weakly(group), device_mesh)
        output = executables.run(_executable(local, src, dst, group, device_mesh), local, async_op)
        return output.view_as(output) if output is local else output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        src, dst, group, device_mesh = ctx.way_back
        gradient = redistribute_local(gradients[0], src, dst, group=group.get(), device_mesh=device_mesh)
        return gradient, None, None, None, None, None
