"""Weights as plain tensors, sharded between uses, for modules that decide themselves when to gather."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from .._native import _planner
from ..layouts.errors import argument_error
from ..layouts.layout import Layout
from ..planning import check_layout
from ..runtime import argument_checks, groups
from ..runtime.plain_tensors import redistribute_local
from . import moves, reads


def jit_weight(
    local: torch.Tensor,
    shards: _planner.Layout,
    use: _planner.Layout,
    *,
    grad: _planner.Layout | None = None,
    group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
) -> JitWeight:
    """Makes a weight that is sharded between uses, and gathered for each use.

        weight = sw.fsdp.jit_weight(local, shards, use)
        with weight as whole:                       # gathered
            y = F.linear(x, whole)
        y.sum().backward()                          # gathered again; weight.parameter.grad is reduced to `shards`

    Args:
        local: this rank's shard: a parameter, or a tensor that becomes one.
        shards: the layout of the weight between uses, without pending reductions.
        use: the layout of the gathered weight on the same mesh, without pending reductions.
        grad: the layout of the gradient that a backward computes. Default: a pending average over the mesh dims over
            which `use` is replicated, for ranks with different data. For mesh dims along which all ranks have the same
            data, pass R.
        group, device_mesh: as in `redistribute_local`.

    Raises:
        ValueError: the tensor does not match `shards`, layouts do not match each other, or a type is wrong.
    """
    parameter = local if isinstance(local, nn.Parameter) else None
    argument_checks.check_tensor("local", local.detach() if isinstance(local, torch.Tensor) else local)
    argument_checks.check_group(group)
    argument_checks.check_device_mesh("device_mesh", device_mesh)
    check_layout("shards", shards)
    check_layout("use", use)
    for name, layout in (("shards", shards), ("use", use)):
        if layout.has_pending:
            raise argument_error(name, "a layout without pending reductions", layout)
    if grad is None:
        averages = ["P(avg)" if text == "R" else text for text in use.placements]
        grad = Layout(use.mesh, use.shape, averages, use.dtype, use.shard_order, "literal", use.flattened)
    check_layout("grad", grad)
    for name, layout in (("use", use), ("grad", grad)):
        if (layout.mesh, layout.shape, layout.dtype) != (shards.mesh, shards.shape, shards.dtype):
            raise argument_error(name, f"a layout with the shape, dtype and mesh of shards ({shards})", layout)
    rank = dist.get_rank(group)
    if shards.mesh.coordinate(rank) is None:
        given = f"{shards}; only ranks of its mesh call sw.fsdp.jit_weight"
        raise argument_error("shards", f"on a mesh that contains this rank ({rank})", given)
    shape = tuple(shards.local_shape(rank))
    if tuple(local.shape) != shape or str(local.dtype) != f"torch.{shards.dtype}":
        raise ValueError(
            f"local must have shape {shape} and dtype {shards.dtype} on rank {rank}, as shards ({shards}) has, got "
            f"shape {tuple(local.shape)} and dtype {local.dtype}"
        )
    if parameter is None:
        parameter = nn.Parameter(local.detach(), requires_grad=local.is_floating_point() or local.is_complex())
    return JitWeight(parameter, shards, use, grad, group, device_mesh)


class JitWeight:
    """A weight that `jit_weight` made. All ranks of its mesh call its functions in the same order.

    ``with weight as whole`` gathers it for a block. The tensors that autograd saves in the block do not keep the memory
    of `whole`: a backward gathers the weight again, once for each block, and frees it when the gradient of `whole` is
    complete. If `parameter` does not require gradients, it gathers once for each saved view of it. Other hooks for
    saved tensors (``torch.autograd.graph.saved_tensors_hooks``) do not see tensors that are saved in the block.

    `parameter` has the members of TransformerEngine's protocol DistributedWeight, for groups of one weight:
    ``is_distributed_weight``, ``materialize_group_for_forward()``, ``materialize_group_for_backward()``,
    ``finalize_group_grads(wgrad)``, which returns the reduced gradient, and ``grad_buffer()``.
    """

    parameter: nn.Parameter  # this rank's shard

    def __init__(
        self,
        parameter: nn.Parameter,
        shards: _planner.Layout,
        use: _planner.Layout,
        grad: _planner.Layout,
        group: dist.ProcessGroup | None,
        device_mesh: DeviceMesh | None,
    ) -> None:
        self.parameter = parameter
        self.shards, self.use, self.grad = shards, use, grad
        self._group = groups.weakly(group)
        self._device_mesh = device_mesh
        # The prefetched weight, and the version of the parameter that it is gathered from.
        self._prefetched: tuple[torch.Tensor, tuple[int, ...]] | None = None
        self._held: torch.Tensor | None = None  # the weight that `materialize` gathered
        self._blocks: list[_Block] = []  # open `with` blocks, innermost last
        protocol = {
            "is_distributed_weight": True,
            "materialize_group_for_forward": self._gather,
            "materialize_group_for_backward": self._gather,
            "finalize_group_grads": self._reduce,
            "grad_buffer": self._grad_buffer,
        }
        for name, member in protocol.items():
            setattr(parameter, name, member)

    @property
    def _version(self) -> tuple[int, ...]:
        """A value that changes with each write to the parameter."""
        return moves.version_of_plain(self.parameter)

    def prefetch(self) -> None:
        """Starts to gather for the next use, and returns before the gather ends."""
        if self._prefetched is None or self._prefetched[1] != self._version:
            self._prefetched = self._move(self.parameter.detach(), self.shards, self.use, True), self._version

    def materialize(self) -> torch.Tensor:
        """Returns the gathered weight, without autograd, and holds it until `release`. A second call gathers again."""
        self._held = self._gather()
        return self._held

    def release(self) -> None:
        """Drops the weight that `prefetch` or `materialize` gathered. Its memory is freed when callers drop it too."""
        self._prefetched = self._held = None

    def __enter__(self) -> torch.Tensor:
        block = _Block(self, self._gather())
        self._blocks.append(block)
        return block.enter()

    def __exit__(self, *_: object) -> None:
        self._blocks.pop().exit()

    def _gather(self) -> torch.Tensor:
        """Returns the gathered weight: the prefetched one, unless the parameter was written since."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None or prefetched[1] != self._version:
            return self._move(self.parameter.detach(), self.shards, self.use, False)
        full = prefetched[0]
        return full.wait() if isinstance(full, AsyncCollectiveTensor) else full

    def _reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the shard of the gradient, from a full gradient in layout `grad`."""
        return self._move(gradient.detach(), self.grad, self.shards, False)

    def _grad_buffer(self) -> torch.Tensor:
        """Returns uninitialized memory for a full gradient of this rank."""
        return self.parameter.new_empty(self.use.local_shape(dist.get_rank(self._group.get())))

    def _move(self, tensor: torch.Tensor, src: _planner.Layout, dst: _planner.Layout, async_op: bool) -> torch.Tensor:
        """Returns the tensor in layout `dst`, from this rank's part in layout `src`. Autograd does not record it."""
        with torch.no_grad():
            return redistribute_local(
                tensor, src, dst, group=self._group.get(), device_mesh=self._device_mesh, async_op=async_op
            )


class _View(NamedTuple):
    """The object that autograd saves in place of a view of the weight of a block."""

    block: _Block
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Innermost(threading.local):
    """The innermost open block of a thread."""

    block: _Block | None = None


_innermost = _Innermost()


class _Block:
    """One `with` block of a weight, and the backward of the forward in it."""

    def __init__(self, weight: JitWeight, full: torch.Tensor) -> None:
        self._weight = weight
        self._full: torch.Tensor | None = full  # the gathered weight: in the block, and in the backward
        self._version = weight._version  # to detect writes before the backward
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._outer: _Block | None = None  # the block around this one, while both are open
        self._is_differentiated = torch.is_grad_enabled() and weight.parameter.requires_grad

    def enter(self) -> torch.Tensor:
        """Returns the weight for the block, as a result of `parameter` for autograd."""
        full = self._full
        assert full is not None
        if self._is_differentiated:
            full = _Use.apply(self._weight.parameter, self, full)  # type: ignore[no-untyped-call]
        self._hooks.__enter__()
        self._outer, _innermost.block = _innermost.block, self
        return full

    def exit(self) -> None:
        """Ends the `with` block. A backward gathers the weight again."""
        self._hooks.__exit__()
        self._full = None
        _innermost.block, self._outer = self._outer, None

    def end_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the reduced gradient of the weight, from the complete gradient of the result of `enter`."""
        self._full = None
        return self._weight._reduce(gradient)

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Hook: saves views of the weights of this and outer blocks without their memory."""
        block: _Block | None = self
        while block is not None:  # autograd calls the hooks of the innermost block only
            if block._holds(tensor):
                return _View(block, tensor.size(), tensor.stride(), tensor.storage_offset())
            block = block._outer
        return reads.pack(tensor)

    def _holds(self, tensor: torch.Tensor) -> bool:
        """Returns True if a tensor is a view of the gathered weight."""
        full = self._full
        return (
            full is not None
            and type(tensor) in (torch.Tensor, nn.Parameter)
            and tensor.dtype == full.dtype
            and tensor.layout is torch.strided
            and tensor.untyped_storage()._cdata == full.untyped_storage()._cdata
        )

    def _unpack(self, saved: Any) -> torch.Tensor:
        """Hook: returns a saved tensor."""
        return saved.block._gathered(saved) if type(saved) is _View else reads.unpack(saved)

    def _gathered(self, saved: _View) -> torch.Tensor:
        """Returns a saved view of the weight. Gathers the weight again unless it is held."""
        if self._weight._version != self._version:
            raise RuntimeError(
                "the weight was written between a forward and its backward, which needs the old values. Write it after "
                "the backward"
            )
        full = self._weight._gather() if self._full is None else self._full
        if self._is_differentiated:
            self._full = full  # held until its gradient is complete
        return full.as_strided(saved.size, saved.stride, saved.offset)


class _Use(torch.autograd.Function):
    """Returns a view of the gathered weight. Its backward reduces the gradient to the parameter's shard."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, block: _Block, full: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.block = block
        return full.view_as(full)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.block.end_backward(gradients[0]), None, None
