"""Shards other tensors like the sequence: `redistribute_sequence`, and `context_parallel` around entire models."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from ..layouts import argument_values
from ..layouts.errors import argument_error
from ..layouts.layout import Layout, Mesh
from ..runtime import argument_checks, groups
from ..runtime.plain_tensors import redistribute_local
from .functions import check_method, scaled_dot_product_attention
from .problem import parts_of, sequence_dims, sequence_layout

__all__ = ["context_parallel", "context_parallel_unshard", "redistribute_sequence"]


def redistribute_sequence(
    local: torch.Tensor,
    src: Any,
    dst: Any,
    *,
    dim: int,
    size: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Moves a tensor, such as tokens, rotary tables, labels or losses, between layouts of its sequence.

    Args:
        local: this rank's part.
        src, dst: ``"contiguous"``, ``"zigzag"``, ``"whole"`` (the full sequence on every rank) or a placement of dim 2,
            as for the argument `layout` of `scaled_dot_product_attention`.
        dim: the dim of the sequence.
        size: the length of the full sequence.
        group: the process group; default: the default group.

    Returns:
        This rank's part in `dst`; differentiable.
    """
    argument_checks.check_tensor("local", local)
    argument_checks.check_group_of_this_rank(group)
    groups.check_initialized()
    count = dist.get_world_size(group)
    size = argument_values.integer(size, "size")
    dim = argument_values.dim(dim, "dim", local.ndim)
    shape = (*local.shape[:dim], size, *local.shape[dim + 1 :])
    mesh = Mesh({"sequence": count})
    ends = [_placement(argument, dim, size, count, name) for name, argument in (("src", src), ("dst", dst))]
    layouts = [Layout(mesh, shape, [end], local.dtype) for end in ends]
    return redistribute_local(local, *layouts, group=group)


def _placement(placement: Any, dim: int, size: int, count: int, argument: str) -> Any:
    """Returns the placement of a tensor whose sequence is its dim `dim`.

    Args:
        placement: the argument `src` or `dst` of `redistribute_sequence`.
        dim: the dim of the sequence.
        size: the length of the full sequence.
        count: the number of ranks.
        argument: "src" or "dst", for errors.
    """
    if isinstance(placement, str) and placement == "whole":
        return Replicate()
    (text,) = sequence_layout(placement, size, count, argument).placements
    return text.replace("(2", f"({dim}", 1)  # the layout of a sequence cuts dim 2


# Functions that call attention, directly or in a backward that recomputes a checkpoint. PyTorch disables a mode while
# it handles a function, so `AttentionMode` enters itself again for these.
_CALLS_ATTENTION = (
    F.multi_head_attention_forward,
    torch.Tensor.backward,
    torch.autograd.backward,
    torch.autograd.grad,
)


def _without_mode_dispatch(func: Any) -> Any:
    """Returns a copy of a PyTorch function that runs its body while a mode is on, instead of calling the mode."""
    dispatch_checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**func.__globals__, **dict.fromkeys(dispatch_checks, lambda *_: False)}
    copy = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


class AttentionMode(TorchFunctionMode):
    """A mode that replaces PyTorch's scaled_dot_product_attention by shardwright's, on the thread that entered it.

    `arguments` are passed to every call of `scaled_dot_product_attention`.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self._arguments = arguments

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward and kwargs.get("need_weights", True):
            raise argument_error("need_weights", "False while the sequence is sharded over ranks", True)
        if func in _CALLS_ATTENTION:
            with self:
                return _without_mode_dispatch(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Runs shardwright's attention with the arguments of PyTorch's function."""
        arguments = dict(self._arguments)
        if isinstance(query, DTensor):
            del arguments["size"]
            with_heads = query.unsqueeze(1) if query.ndim == 3 else query
            _check_sequence_is_sharded_over(with_heads, arguments.pop("group"))
        result: torch.Tensor = scaled_dot_product_attention(
            query,
            key,
            value,
            mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            **arguments,
        )
        return result


def _check_sequence_is_sharded_over(query: DTensor, group: dist.ProcessGroup) -> None:
    """Raises ValueError unless the query's sequence is sharded over the ranks of the group."""
    ranks = sorted(dist.get_process_group_ranks(group))
    dim_groups = (query.device_mesh.get_group(dim) for dim in sequence_dims(query))
    if len(ranks) > 1 and all(sorted(dist.get_process_group_ranks(dim_group)) != ranks for dim_group in dim_groups):
        raise ValueError(
            f"query must be a plain tensor, or a DTensor whose sequence is sharded over ranks {ranks}, got placements "
            f"{query.placements} on {query.device_mesh}. Use to_local() for a plain tensor"
        )


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[torch.Tensor] | None = None,
    size: int | None = None,
    layout: Any = "zigzag",
    method: str = "auto",
) -> Iterator[None]:
    """PyTorch's ``context_parallel``, on any device with fused attention and for sequences of any length.

    During the block `buffers` hold this rank's part of the sequence instead of the full sequence. Calls of
    ``torch.nn.functional.scaled_dot_product_attention`` on this thread run ours, including the calls in
    ``torch.nn.MultiheadAttention`` without weights. Unlike PyTorch's, it is not process-wide: other threads are not
    affected. The backward of a loss that was computed in the block must run in the block too.

    Args:
        mesh: a mesh of one dim, with the ranks that share the sequence.
        buffers: full tensors without gradients, the same on all ranks: tokens, labels, rotary tables. They may be
            views, also of the same memory. During the block each has memory of its own; at the end each gets its old
            memory back.
        buffer_seq_dims: the dim of the sequence in each buffer.
        no_restore_buffers: the buffers that keep this rank's part at the end.
        size: the length of the full sequence; default: the length of the buffers. Required without buffers.
        layout, method: as in `scaled_dot_product_attention`.

    Raises:
        ValueError: the mesh has several dims; buffers have different lengths or gradients. Within the block, calls of
            attention raise it for dropout, ``need_weights``, masks without a column for each key of the full sequence,
            and DTensors that do not shard the sequence over the mesh.
    """
    tensors = argument_values.items(() if buffers is None else buffers, "buffers", "a list of tensors")
    dims = argument_values.items(
        () if buffer_seq_dims is None else buffer_seq_dims, "buffer_seq_dims", "a list of dims"
    )
    if not argument_values.is_device_mesh(mesh):
        raise argument_error("mesh", "a DeviceMesh of one dim", f"a {type(mesh).__name__}")
    check_mesh(mesh, "mesh")
    if len(tensors) != len(dims):
        raise argument_error("buffer_seq_dims", f"of length {len(tensors)}, one dim per buffer", len(dims))
    for tensor in tensors:
        argument_checks.check_tensor("buffers", tensor)
        if tensor.requires_grad:
            raise argument_error("buffers", "tensors without gradients", "one that requires a gradient")
    dims = [argument_values.dim(dim, "buffer_seq_dims", tensor.ndim) for tensor, dim in zip(tensors, dims, strict=True)]
    known = set() if size is None else {size}
    sizes = {tensor.shape[dim] for tensor, dim in zip(tensors, dims, strict=True)} | known
    if len(sizes) > 1:
        raise argument_error("buffers", "tensors of one sequence length, equal to size if given", sorted(sizes))
    total = sizes.pop() if sizes else None
    not_restored = {id(tensor) for tensor in no_restore_buffers or ()}
    if not not_restored <= {id(tensor) for tensor in tensors}:
        raise argument_error("no_restore_buffers", "a list of tensors in buffers", "a tensor that is not in it")
    check_method(method)
    group = mesh.get_group()
    intervals = parts_of(layout, total, mesh.size())[dist.get_rank(group)] if total is not None else []
    full_tensors = [tensor.data for tensor in tensors]
    parts = [
        torch.cat([tensor.narrow(dim, a, b - a) for a, b in [(0, 0), *intervals]], dim)
        for tensor, dim in zip(full_tensors, dims, strict=True)
    ]
    try:
        for tensor, part in zip(tensors, parts, strict=True):
            _set_content(tensor, part)
        with AttentionMode(group=group, size=total, layout=layout, method=method):
            yield
    finally:
        for tensor, before in zip(tensors, full_tensors, strict=True):
            if id(tensor) not in not_restored:
                _set_content(tensor, before)


def check_mesh(mesh: Any, argument: str) -> None:
    """Raises ValueError, naming `argument`, unless a DeviceMesh has one dim and its ranks are in ascending order.

    The parts of a sequence are numbered by rank in the process group, whose ranks are ascending, but DTensors number
    them by coordinate in the mesh.
    """
    if mesh.ndim != 1:
        raise argument_error(argument, "a DeviceMesh of one dim, such as mesh['cp']", f"{mesh.ndim} dims")
    ranks = mesh.mesh.tolist()
    if ranks != sorted(ranks):
        raise argument_error(argument, "a DeviceMesh with ascending ranks", ranks)


def _set_content(tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Gives a tensor the shape and memory of `content`. A backward that has saved the tensor raises an error."""
    tensor.data = content
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], *, size: int, layout: Any = "zigzag"
) -> list[torch.Tensor]:
    """Returns the full tensors, in sequence order, for parts that were made or computed under `context_parallel`.

    Args:
        mesh: the mesh that was given to `context_parallel`.
        buffers: this rank's parts.
        seq_dims: the dim of the sequence in each part.
        size: the length of the full sequence.
        layout: the layout that was given to `context_parallel`.
    """
    group = mesh.get_group()
    parts = argument_values.items(buffers, "buffers", "a list of tensors")
    dims = argument_values.items(seq_dims, "seq_dims", "a list of integers")
    if len(parts) != len(dims):
        raise argument_error("seq_dims", f"of length {len(parts)}, one dim per buffer", len(dims))
    return [
        redistribute_sequence(part, layout, "whole", dim=dim, size=size, group=group)
        for part, dim in zip(parts, dims, strict=True)
    ]
