"""Collectives for PyTorch's own FSDP2: arguments of `set_custom_all_gather` and `set_custom_reduce_scatter`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_api

from .._native import _runtime
from ..layouts.errors import argument_error
from ..layouts.layout import Layout, Mesh
from ..runtime import argument_checks, executables, groups

_PLACEMENTS = {  # pending placements of a gradient, by operation
    dist.ReduceOp.SUM: "P(sum)",
    dist.ReduceOp.AVG: "P(avg)",
    dist.ReduceOp.MIN: "P(min)",
    dist.ReduceOp.MAX: "P(max)",
    dist.ReduceOp.PRODUCT: "P(product)",
}

ReduceOp: TypeAlias = Any  # a dist.ReduceOp, or one of its enum values, which have another type


class _Allocating:
    """Allocates the memory that FSDP2 requires: gathered parameters, or gradients before and after the reduction."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns memory for one call."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Allocating, _fsdp_api.AllGather):
    """All-gathers by shardwright for a module under FSDP2: ``module.set_custom_all_gather(sw.fsdp.AllGather())``.

    Results have the same bits as those of the process group's own all-gather. Its methods are FSDP2's:
    ``allocate(size, *, dtype, device)``, and a call with ``(output_tensor, input_tensor, group, async_op=False)``. With
    ``async_op=True`` the call returns a work handle, or None if nothing is pending. Until the work is done the caller
    must not touch either tensor. The input may be this rank's part of the output. Raises ValueError for tensors that do
    not match, are not contiguous or share memory in another way.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gathers `input_tensor` of all ranks of `group` into `output_tensor`, in the order of ranks in the group.

        Args:
            output_tensor: contiguous, with as many elements as all inputs together.
            input_tensor: contiguous, with the same number of elements on all ranks. It may be this rank's part of
                `output_tensor`, as FSDP2 passes it.
            group: every rank of it calls.
            async_op: return before the transfers end. The caller must not use either tensor until they end.

        Returns:
            A Work to wait for; None if nothing is pending.

        Raises:
            ValueError: sizes or dtypes of the tensors do not match, or a tensor is not contiguous.
            torch.distributed.DistBackendError: a transfer failed or timed out.
        """
        return _move("S(0)", "R", input_tensor, output_tensor, group, async_op)


class ReduceScatter(_Allocating, _fsdp_api.ReduceScatter):
    """Reduce-scatters by shardwright for a module under FSDP2.

    ``module.set_custom_reduce_scatter(sw.fsdp.ReduceScatter())``. On Gloo a rank sends each other rank only that rank's
    chunk, half the bytes of Gloo's own reduce-scatter. Contributions are summed in the order of ranks in the group;
    16-bit floats are summed in float32 and rounded once; averages are divided afterwards. On NCCL, NCCL sums. Its
    methods are those of `AllGather`; the call takes ``op`` before `async_op`: ``ReduceOp.SUM``, ``AVG``, ``MIN``,
    ``MAX`` or ``PRODUCT``. Raises ValueError for another ``op``.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces `input_tensor` over the ranks of `group`; rank i gets chunk i of the result in `output_tensor`.

        Args:
            output_tensor: contiguous, one chunk. It shares no memory with the input.
            input_tensor: contiguous, one chunk for each rank of the group.
            group: every rank of it calls.
            op: ReduceOp.SUM, AVG, MIN, MAX or PRODUCT.
            async_op: return before the transfers end. The caller must not use either tensor until they end.

        Returns:
            A Work to wait for; None if nothing is pending.

        Raises:
            ValueError: sizes or dtypes of the tensors do not match, a tensor is not contiguous, the tensors share
                memory, or `op` is another operation.
            torch.distributed.DistBackendError: a transfer failed or timed out.
        """
        placement = next((name for known, name in _PLACEMENTS.items() if op == known), None)
        if placement is None:
            raise ValueError(
                f"op must be ReduceOp.SUM, AVG, MIN, MAX or PRODUCT, got {op}. With a gradient divide factor in FSDP2, "
                "call module.set_force_sum_reduction_for_comms(True): FSDP2 then scales gradients after the sum"
            )
        return _move(placement, "S(0)", input_tensor, output_tensor, group, async_op)


def _move(
    src: str, dst: str, x: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Moves `x`, as a flat tensor, over a group from placement `src` to `dst`, into `out`."""
    for name, tensor in (("input_tensor", x), ("output_tensor", out)):
        argument_checks.check_tensor(name, tensor)
        if not tensor.is_contiguous():
            raise argument_error(name, "contiguous", f"strides {tensor.stride()}")
    full, part = (out, x) if dst == "R" else (x, out)
    size = group.size()
    if x.dtype != out.dtype:
        raise argument_error("output_tensor", f"{x.dtype}, as input_tensor is", out.dtype)
    if full.numel() != part.numel() * size:
        factor = f"{size} times" if dst == "R" else f"1/{size} of"
        allowed = f"a tensor with {factor} the elements of input_tensor ({x.numel()}) on {size} ranks"
        raise argument_error("output_tensor", allowed, f"{out.numel()} elements")
    executable = _executable(full.numel(), x.dtype, src, dst, x.device.type, group)
    with torch.no_grad():
        x, out = x.view(-1), out.view(-1)
    if not async_op:
        executables.run(executable, x, False, out)
        return None
    return executables.start_into(executable, x, out)


def _executable(
    numel: int, dtype: torch.dtype, src: str, dst: str, device_type: str, group: dist.ProcessGroup
) -> _runtime.Executable:
    """Returns the compiled move of `numel` elements between two placements, from the cache if possible."""

    def build() -> _runtime.Executable:
        mesh = Mesh({"shard": group.size()})
        plan = executables.make_plan(
            Layout(mesh, [numel], [src], dtype), Layout(mesh, [numel], [dst], dtype), device_type, group
        )
        return executables.bind(plan, group=group)

    key = ("flat", numel, dtype, src, dst, device_type, groups.weakly(group))
    executable = executables.lookup(key, build)
    assert isinstance(executable, _runtime.Executable)
    return executable
