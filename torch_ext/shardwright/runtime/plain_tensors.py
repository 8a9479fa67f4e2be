"""Redistributes plain tensors between given layouts: `redistribute_local`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from .._native import _planner, _runtime
from .._planner import gradient_layout
from ..layouts.errors import argument_error
from ..planning import check_layout
from . import argument_checks, checking, dynamo, executables, groups


@dynamo.outside_graphs
def redistribute_local(
    local: torch.Tensor | None,
    src: _planner.Layout,
    dst: _planner.Layout,
    *,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    async_op: bool = False,
) -> torch.Tensor:
    """Moves this rank's part of a tensor from one layout to another, without DTensor.

    Args:
        local: this rank's part in `src`: shape ``src.local_shape(rank)``, any strides. It is not changed. A rank
            outside the mesh of `src` passes an empty tensor on the device type of the other ranks, or None. None means
            an empty tensor on the device of `device_mesh`, or without it, on the device of the group's backend.
        src, dst: layouts on one mesh or on two. The meshes' ranks are global ranks, or ranks of `group` if one is
            given. All ranks of both meshes must call.
        out: the tensor to write the result to: contiguous, of the result's shape and dtype. Not allowed with gradients
            or async_op.
        group: the process group that contains the mesh; default, the default group.
        device_mesh: a DeviceMesh over the same ranks whose process groups may be used.
        async_op: return once the first transfer has started; the result waits for the rest on first use.

    Returns:
        A new tensor of shape ``dst.local_shape(rank)``, or `local` itself if the layouts are equal; `out` if given.
        On a rank outside both meshes, `local` itself, and outside only the mesh of `dst` an empty tensor of shape
        ``(0,)``, as in DTensor. The result is differentiable if the pending reductions are sums or averages: the
        gradient moves back from `dst` to `src`, with R in place of P, as in DTensor. With gradients, ranks outside the
        mesh of `src` pass an empty tensor that requires them too, and all ranks of both meshes call backward.

    Raises:
        ValueError: `local` contradicts `src`, or `out` contradicts `dst`; `local` is None, without `device_mesh`, where
            the group has backends for CPU and for an accelerator; `local` is nested, sparse or on a device other than
            CPU and CUDA, or is inside a transform of `torch.func`; the layouts contradict each other; an argument has
            the wrong type.
        RuntimeError: torch.distributed is not initialized.
        torch.distributed.DistBackendError: a transfer failed or timed out; the message names rank, plan, step and
            group.
    """
    if local is None or out is not None:
        return _redistribute_unusual(local, src, dst, out, group, device_mesh, async_op)
    key: Any = None
    try:
        of_mesh = None if device_mesh is None else (device_mesh, groups.key_of_mesh(device_mesh))
        key = (src, dst, None if group is None else groups.weakly(group), of_mesh)
        known = _cached.get(key) if isinstance(src, _planner.Layout) and isinstance(dst, _planner.Layout) else None
    except (AttributeError, TypeError):  # an argument of the wrong type, which the checks below report
        known = None
    if known is not None and known.accepts(local):
        return executables.run_cached(known.executable, local, async_op)
    given, local = local, waited(local)  # autograd knows only the given tensor
    argument_checks.check_movable("local", local)
    rank = _checked_rank(src, dst, group, device_mesh)
    if src.mesh.coordinate(rank) is None and dst.mesh.coordinate(rank) is None:
        return given
    if not checking.is_on():  # the debug mode reports a wrong input on all ranks instead
        _check_input(local, src, rank)
    if given.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _RedistributeLocal.apply(given, src, dst, group, device_mesh, async_op)  # type: ignore[no-untyped-call]
        return result
    executable = _executable(local, src, dst, group, device_mesh)
    output = executables.run(executable, local, async_op)
    _cached.put(key, _CachedExecutable(executable, local))
    return output


def redistribute_part(
    local: torch.Tensor,
    src: _planner.Layout,
    dst: _planner.Layout,
    device_mesh: DeviceMesh,
    async_op: bool,
    make_groups: bool,
) -> torch.Tensor:
    """Redistributes this rank's part of a DTensor, without gradients.

    If `make_groups` is False, raises RuntimeError instead of making a missing group. A part whose shape is not the
    layout's is cut or padded (`executables.run`), because an error might be raised on one rank only.
    """
    local = waited(local)
    rank = dist.get_rank()
    if src.mesh.coordinate(rank) is None and dst.mesh.coordinate(rank) is None:
        return local
    return executables.run(_executable(local, src, dst, None, device_mesh, make_groups), local, async_op)


def waited(local: Any) -> Any:
    """Waits for an AsyncCollectiveTensor and returns its plain tensor, without history. Returns others unchanged."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def waited_with_history(x: Any) -> Any:
    """Like `waited`, but the result keeps the autograd history.

    A tensor that requires a gradient is cloned, because only the result of an operator has its history.
    """
    is_recorded = isinstance(x, AsyncCollectiveTensor) and x.requires_grad and torch.is_grad_enabled()
    return x.clone() if is_recorded else waited(x)


def _redistribute_unusual(
    local: torch.Tensor | None,
    src: _planner.Layout,
    dst: _planner.Layout,
    out: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    device_mesh: DeviceMesh | None,
    async_op: bool,
) -> torch.Tensor:
    """Does the work of `redistribute_local` if `local` is None or `out` is given. Results are not cached."""
    rank = _checked_rank(src, dst, group, device_mesh)
    if local is None:
        if src.mesh.coordinate(rank) is not None and not checking.is_on():
            on_rank = f"on rank {rank}, which is on the mesh of {src}"
            raise argument_error("local", f"a tensor of shape {tuple(src.local_shape(rank))} {on_rank}", None)
        local = torch.empty(0, dtype=getattr(torch, src.dtype), device=device_of(group, device_mesh))
    if out is None:
        return redistribute_local(local, src, dst, group=group, device_mesh=device_mesh, async_op=async_op)
    argument_checks.check_movable("local", local)
    argument_checks.check_movable("out", out)
    if async_op or ((local.requires_grad or out.requires_grad) and torch.is_grad_enabled()):
        raise argument_error("out", "None with gradients or async_op=True", "a tensor")
    if src.mesh.coordinate(rank) is None and dst.mesh.coordinate(rank) is None:
        return out
    if not checking.is_on():
        _check_input(local, src, rank)
    executables.run(_executable(local, src, dst, group, device_mesh), local, False, out)
    torch.autograd.graph.increment_version(out)  # tells autograd about the write
    return out


def _checked_rank(
    src: _planner.Layout, dst: _planner.Layout, group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None
) -> int:
    """Checks layouts, group and mesh. Returns this process's rank in the group."""
    check_layout("src", src)
    check_layout("dst", dst)
    argument_checks.check_group(group)
    argument_checks.check_device_mesh("device_mesh", device_mesh)
    groups.check_initialized()
    return dist.get_rank(group)


def device_of(group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> torch.device:
    """Returns the device for a rank that passes no local tensor: the mesh's, else the only one of the group.

    Raises ValueError if the group has two.
    """
    if device_mesh is not None:
        return torch.device(device_mesh.device_type)
    first, *others = _devices_of(group)
    if others:
        raise ValueError(
            f"local must be an empty tensor on the device that the other ranks use, or device_mesh must be given, "
            f"got None on rank {dist.get_rank(group)} of a group for both {first} and {others[0]}"
        )
    return first


def device_among_many(
    argument: Any, tensor_device: torch.device | None, group: dist.ProcessGroup | None
) -> torch.device:
    """Returns the device of this rank's tensors.

    Args:
        argument: the caller's argument `device`, or None.
        tensor_device: the device of the tensors that the rank passes, or None if it passes none.
        group: the process group, whose device is used if both are None.

    Raises:
        ValueError: the two devices differ, or both are None and the group has two. Only this rank may find the error,
            so the caller must report it to the other ranks.
    """
    device = None if argument is None else argument_checks.device_of("device", argument)
    if device is not None and tensor_device is not None and device.type != tensor_device.type:
        raise argument_error("device", f"{tensor_device.type}, where the tensors are", device)
    if (known := tensor_device or device) is not None:
        return known
    first, *others = _devices_of(group)
    if others:
        raise ValueError(
            f"device must be the device of the other ranks' tensors, got None on rank {dist.get_rank(group)}, which "
            f"passes no tensors. The group communicates on {first} and on {others[0]}"
        )
    return first


def _devices_of(group: dist.ProcessGroup | None) -> list[torch.device]:
    """Returns the devices for whose tensors the group has a backend: CPU, the accelerator or both."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    cpu = torch.device("cpu")
    if accelerator is None or not executables.communicates_on(accelerator.type, group):
        return [cpu]
    return [cpu, accelerator] if executables.communicates_on("cpu", group) else [accelerator]


def _check_input(local: torch.Tensor, src: _planner.Layout, rank: int) -> None:
    """Checks that this rank's part has the shape and dtype of its layout. Raises ValueError."""
    if tuple(local.shape) != tuple(src.local_shape(rank)):
        allowed = f"of shape {tuple(src.local_shape(rank))} on rank {rank}, as in {src}"
        raise argument_error("local", allowed, tuple(local.shape))
    if str(local.dtype) != f"torch.{src.dtype}":
        raise argument_error("local", f"of dtype {src.dtype}, as in {src}", local.dtype)


class _CachedExecutable:
    """An executable that a call has run successfully, and the properties that another input must have to use it."""

    __slots__ = ("device", "dtype", "executable", "shape")

    def __init__(self, executable: _runtime.Executable, local: torch.Tensor) -> None:
        self.executable = executable
        self.shape = local.shape
        self.dtype = local.dtype
        self.device = local.device

    def accepts(self, local: torch.Tensor) -> bool:
        """Returns True if the executable may run on this tensor without the checks of `redistribute_local`."""
        return (
            type(local) is torch.Tensor
            and local.dtype is self.dtype
            and local.layout is torch.strided
            and not local.is_nested  # nested tensors have no shape
            and local.shape == self.shape
            and local.device == self.device
            and not (local.requires_grad and torch.is_grad_enabled())
            and forward_ad._current_level < 0
            and not torch._C._functorch.is_functorch_wrapped_tensor(local)
        )


_cached: executables.PlanningCache[_CachedExecutable] = executables.PlanningCache(is_local=True)


def _executable(
    local: torch.Tensor,
    src: _planner.Layout,
    dst: _planner.Layout,
    group: dist.ProcessGroup | None,
    device_mesh: DeviceMesh | None,
    make_groups: bool = True,
) -> _runtime.Executable:
    """Returns the executable of a redistribute from the cache, or plans and binds it."""
    device_type = local.device.type

    def build() -> _runtime.Executable:
        existing = None if make_groups else device_mesh
        plan = executables.make_plan(src, dst, device_type, group, existing)
        return executables.bind(plan, device_mesh=device_mesh, group=group, make_groups=make_groups)

    of_mesh = None if device_mesh is None else groups.key_of_mesh(device_mesh)
    # Plans that use only existing groups depend on the list of groups.
    existing_groups = make_groups or groups.state(device_mesh)
    key = (src, dst, device_type, groups.weakly(group), device_mesh, of_mesh, existing_groups)
    executable = executables.lookup(key, build)
    assert isinstance(executable, _runtime.Executable)
    return executable


class _RedistributeLocal(torch.autograd.Function):
    """`redistribute_local` for autograd. The backward redistributes the gradient from `dst` to `src`."""

    @staticmethod
    @dynamo.skipped
    def forward(  # type: ignore[override]
        ctx: Any,
        local: torch.Tensor,
        src: _planner.Layout,
        dst: _planner.Layout,
        group: dist.ProcessGroup | None,
        device_mesh: DeviceMesh | None,
        async_op: bool,
    ) -> torch.Tensor:
        ctx.move = (gradient_layout(dst, "dst"), gradient_layout(src, "src"), groups.weakly(group), device_mesh)
        local = waited(local)
        output = executables.run(_executable(local, src, dst, group, device_mesh), local, async_op)
        return output.view_as(output) if output is local else output

    @staticmethod
    @dynamo.skipped
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        src, dst, group, device_mesh = ctx.move
        gradient = redistribute_local(gradients[0], src, dst, group=group.get(), device_mesh=device_mesh)
        return gradient, None, None, None, None, None
