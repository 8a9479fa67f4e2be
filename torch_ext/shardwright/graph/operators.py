"""Redistributes as operators, `torch.ops.shardwright.*`, for compiled code.

Importing this module registers their fake kernels.

    redistribute(Tensor input, str plan, str[] groups, int rank, str backward_plan, str[] backward_groups) -> Tensor
    redistribute_out(Tensor input, str plan, str[] groups, int rank, Tensor(a!) out) -> ()
    redistribute_start(Tensor input, str plan, str[] groups, int rank, SymInt[]? sizes, Tensor? after,
                       bool make_groups) -> Tensor
    redistribute_wait(Tensor handle, Tensor input, str plan, int rank, SymInt[]? sizes) -> Tensor

A handle is the result of `redistribute_start`, for one `redistribute_wait`. `operator` makes the operators' arguments.
With the drop-in enabled, `torch.compile` records start and wait in place of each redistribute of a DTensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import planning
from .._native import _planner
from ..layouts.errors import argument_error
from ..runtime import argument_checks, checking, executables, groups
from . import order, plans
from .plans import plan_of

__all__ = ["operator"]


def operator(
    src: _planner.Layout,
    dst: _planner.Layout,
    *,
    device_type: str = "cpu",
    group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that moves this rank's part from `src` to `dst` with `torch.ops.shardwright.redistribute`.

    All ranks of both layouts must call this at the same point, outside of compiled code, because missing process groups
    are made here. The function that it returns holds only strings and ints, so it can be called in code that is
    compiled or captured.

    Args:
        src, dst: layouts on one mesh or on two. The meshes' ranks are global ranks, or ranks of `group` if one is
            given.
        device_type: the device type of the tensors, ``"cpu"`` or ``"cuda"``.
        group: the process group that contains the mesh; default, the default group.
        device_mesh: a DeviceMesh over the same ranks whose process groups may be used.

    Returns:
        A function from a tensor of shape ``src.local_shape(rank)`` to a new, row-major one of shape
        ``dst.local_shape(rank)``. It is differentiable if pending reductions are sums or averages, and twice
        differentiable if there are none. Its attribute ``keywords`` holds the operator's arguments, for the operator's
        other forms.

    Raises:
        ValueError: the layouts contradict each other, this rank is on neither mesh, or an argument has a wrong type.
        RuntimeError: torch.distributed is not initialized.
    """
    planning.check_layout("src", src)
    planning.check_layout("dst", dst)
    device_type = argument_checks.device_of("device_type", device_type).type
    argument_checks.check_group(group)
    argument_checks.check_device_mesh("device_mesh", device_mesh)
    groups.check_initialized()
    plan = executables.make_plan(src, dst, device_type, group)
    arguments = arguments_of(plan, group=group, device_mesh=device_mesh)
    backward = {"plan": "", "groups": []}
    try:
        gradient_layouts = _planner.gradient_layout(dst, "dst"), _planner.gradient_layout(src, "src")
    except ValueError:  # the reductions have no gradient
        gradient_layouts = None
    if gradient_layouts is not None:
        plan_back = executables.make_plan(*gradient_layouts, device_type, group)
        backward = arguments_of(plan_back, group=group, device_mesh=device_mesh)
    return functools.partial(
        torch.ops.shardwright.redistribute,
        **arguments,
        backward_plan=backward["plan"],
        backward_groups=backward["groups"],
    )


def arguments_of(
    plan: _planner.Plan,
    *,
    group: dist.ProcessGroup | None = None,
    device_mesh: Any | None = None,
    make_groups: bool = True,
) -> dict[str, Any]:
    """Returns the operators' arguments except tensors. Collective among the ranks of any group that must be made."""
    rank = dist.get_rank(group)
    if plan.src.mesh.coordinate(rank) is None and plan.dst.mesh.coordinate(rank) is None:
        raise argument_error("rank", f"on {plan.src.mesh} or on {plan.dst.mesh}", rank)
    text = _planner.plan_text(plan)
    names = executables.operator_group_names(text, rank, device_mesh=device_mesh, group=group, make_groups=make_groups)
    checking.note_group_of_operator(text, names, group)
    return {"plan": text, "groups": names, "rank": rank}


def arguments_for_sizes(
    plan: _planner.Plan, sizes: Sequence[Any], device_mesh: DeviceMesh, make_groups: bool
) -> dict[str, Any]:
    """Returns the arguments of a redistribute that is planned when it runs. Only the layouts of `plan` are used.

    Does not communicate, so a rank may trace alone.
    """
    return {
        "plan": _planner.plan_text(plan),
        "groups": plans.group_names(device_mesh),
        "rank": dist.get_rank(),
        "sizes": list(sizes),
        "make_groups": make_groups,
    }


def trace(
    local: torch.Tensor, plan: str, groups: Sequence[str], rank: int, sizes: Sequence[Any], make_groups: bool
) -> torch.Tensor:
    """Records start and wait in a trace."""
    planned = plan_of(plan)
    for end in (planned.src, planned.dst):  # guards all sizes that decide the order of transfers (graph/order.py)
        plans.local_shape(end, sizes, rank)
    handle = order.start(local, make_groups, plan, groups, rank, sizes)
    moved: torch.Tensor = torch.ops.shardwright.redistribute_wait(handle, local, plan, rank, sizes)
    return moved


@functools.lru_cache(maxsize=4096)
def _ends(plan: str, rank: int) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Returns the local shapes of source and destination, and the dtype."""
    planned = plan_of(plan)
    return tuple(planned.src.local_shape(rank)), tuple(planned.dst.local_shape(rank)), planned.src.dtype


@functools.lru_cache(maxsize=4096)
def _divides_integers(plan: str) -> bool:
    """Returns True if integers become pending values, whose contributions are floating-point, as with PyTorch."""
    planned = plan_of(plan)
    dtype = getattr(torch, planned.src.dtype)
    return any(step.op == "partition" for step in planned.steps) and not (dtype.is_floating_point or dtype.is_complex)


def _new_result(input: torch.Tensor, plan: str, rank: int, sizes: Sequence[Any] | None = None) -> torch.Tensor:
    """Returns a fake result of an operator. Raises ValueError if the input contradicts the plan."""
    dtype = torch.get_default_dtype() if _divides_integers(plan) else input.dtype
    return input.new_empty(_result_shape(input, plan, rank, sizes), dtype=dtype)


def _result_shape(input: torch.Tensor, plan: str, rank: int, sizes: Sequence[Any] | None = None) -> Sequence[Any]:
    """Returns the shape of an operator's result. Raises ValueError if the input contradicts the plan."""
    before, after, dtype = _ends(plan, rank)
    if sizes is not None and not plans.is_symbolic(sizes):
        before = tuple(plans.local_shape(plan_of(plan).src, sizes, rank))
    if not (sizes is not None and plans.is_symbolic(sizes)) and tuple(input.shape) != before:
        raise argument_error("input", f"of shape {before} on rank {rank}, as in the plan", tuple(input.shape))
    if str(input.dtype) != f"torch.{dtype}":
        raise argument_error("input", f"of dtype {dtype}, as in the plan", input.dtype)
    return after if sizes is None else plans.local_shape(plan_of(plan).dst, sizes, rank)


@torch.library.register_fake("shardwright::redistribute")
def _(
    input: torch.Tensor,
    plan: str,
    groups: Sequence[str],
    rank: int,
    backward_plan: str,
    backward_groups: Sequence[str],
) -> torch.Tensor:
    return _new_result(input, plan, rank)


@torch.library.register_fake("shardwright::redistribute_out")
def _(input: torch.Tensor, plan: str, groups: Sequence[str], rank: int, out: torch.Tensor) -> None:
    shape = _result_shape(input, plan, rank)
    if tuple(out.shape) != shape:
        raise argument_error("out", f"of shape {shape} on rank {rank}", tuple(out.shape))


def _fake_start(
    input: torch.Tensor,
    plan: str,
    groups: Sequence[str],
    rank: int,
    sizes: Sequence[Any] | None = None,
    after: torch.Tensor | None = None,
    make_groups: bool = True,
) -> torch.Tensor:
    """Returns a fake handle, larger than input and output together, so that compilers do not save it for a backward."""
    numel = torch.sym_max(input.numel(), math.prod(_result_shape(input, plan, rank, sizes)))
    return torch.empty(1, dtype=torch.int64, device="cpu").expand(numel * input.element_size() // 8 + 1)


def _fake_wait(
    handle: torch.Tensor, input: torch.Tensor, plan: str, rank: int, sizes: Sequence[Any] | None = None
) -> torch.Tensor:
    return _new_result(input, plan, rank, sizes)


for _overload in ("", ".recomputable"):
    torch.library.register_fake("shardwright::redistribute_start" + _overload, _fake_start)
    torch.library.register_fake("shardwright::redistribute_wait" + _overload, _fake_wait)


@functools.lru_cache(maxsize=4096)
def _matmul_shapes(program: str, rank: int) -> tuple[list[list[int]], list[tuple[list[int], str]]]:
    """Returns the shapes of a rank's inputs, and the shapes and dtypes of its outputs."""
    matmul, _ = _planner.Matmul.parse(program)
    return matmul.shapes(rank)


@torch.library.register_fake("shardwright::matmul")
def _(inputs: Sequence[torch.Tensor], program: str, groups: Sequence[str], rank: int) -> list[torch.Tensor]:
    expected, results = _matmul_shapes(program, rank)
    if [list(tensor.shape) for tensor in inputs] != expected:
        allowed = f"of shapes {[tuple(shape) for shape in expected]} on rank {rank}, as in the program"
        raise argument_error("inputs", allowed, [tuple(tensor.shape) for tensor in inputs])
    return [inputs[0].new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in results]
