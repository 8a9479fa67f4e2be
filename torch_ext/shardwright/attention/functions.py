"""`scaled_dot_product_attention`, and `explain`, which describes its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..layouts import argument_values
from ..layouts.errors import argument_error
from .operators import attend
from .problem import Call, Mask, Options, call_for, plan, tables_for

__all__ = ["Mask", "scaled_dot_product_attention", "explain"]

METHODS = ("auto", "ring", "gather", "ulysses", "two_level", "serial")


def scaled_dot_product_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    mask: Mask | torch.Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    method: str = "auto",
    chunks: int | None = None,
    save: str = "shard",
    merge: str = "float32",
    return_lse: bool = False,
    size: int | None = None,
    group: dist.ProcessGroup | None = None,
    layout: Any = None,
    kv_size: int | None = None,
    kv_layout: Any = None,
    dropout_p: float = 0.0,
) -> Any:
    """Attention over a sequence that is sharded over ranks. Keys are sent while the products of other keys run.

    Equals ``torch.nn.functional.scaled_dot_product_attention`` of the full tensors, without dropout, and in the dtype
    of autocast if that is on. All ranks that share the sequence call it, also those with an empty part. The first call
    with given arguments, shapes and dtypes compares them among the ranks.

    Args:
        q: shape [batch, heads, sequence, depth]: float32, bfloat16, float16 or, not on CUDA, float64. Plain tensors are
            this rank's part of the sequence. DTensors have placements: one mesh dim may shard the sequence, others
            batch and heads, along which nothing moves. Or q, k and v are all [batch, sequence, depth], with one head.
        k, v: shaped and placed like `q`; with `enable_gqa` they may have fewer heads. `v` may have another depth, which
            is the depth of the result. Both may belong to another sequence, sharded over the same ranks or replicated:
            see `kv_size` and `kv_layout`. With DTensors, size and placements of `k` describe it.
        is_causal: the query at position i of its sequence sees the keys at positions up to i of theirs.
        mask: a further limit on the keys that queries see: a sliding window or documents; see `Mask`. Or a tensor, as
            in torch not together with `is_causal`: bool (True: the query sees the key) or float (added to scores),
            without a gradient, which broadcasts to [batch, heads, this rank's rows of `q`, all keys in sequence order].
            With DTensors, it is plain or placed like `q`. ``"ulysses"`` and ``"two_level"`` cannot use a tensor.
        scale: the factor of scores; default 1 / sqrt(depth).
        enable_gqa: the heads of `q` may be a multiple of the heads of `k` and `v`; consecutive ones share one.
        method: ``"ring"``: keys are received from one rank after the other, each during the products of the keys
            before. At most two parts of the keys are held. ``"gather"``: all keys are received at once. ``"ulysses"``:
            sequence is exchanged for heads and back. ``"two_level"``: ulysses within nodes and a ring between them, if
            the topology has several nodes of several ranks. ``"serial"``: a gather without overlap. ``"auto"``: the
            method predicted to be fastest.
        chunks: cut the full sequence into this many blocks of equal length (as torch.chunk does). If the parts of ranks
            begin and end at these cuts, result and gradients are bitwise the same for any number of ranks and any
            method. Default: blocks are the contiguous runs that ranks hold.
        save: ``"shard"``: the backward keeps this rank's part of `k` and `v`, and moves the rest again.
        merge: ``"float32"``: results of blocks, and with `chunks` gradients, are merged in float32, in sequence order.
        return_lse: also return the log-sum-exp of each query's scores, shape [batch, heads, sequence], float32 (float64
            for float64); minus infinity for a query that sees nothing, whose result is zeros. It has no gradient.
        size: for plain tensors on several ranks: the length of the full sequence. It is required, because a rank
            cannot see the lengths of others.
        group: for plain tensors: the process group; default: the default group.
        layout: the positions of the sequence that each rank holds: None or ``"contiguous"``, ``"zigzag"``, or a
            placement of dim 2, such as `Pieces`, whose parts may be uneven or empty. With DTensors: the positions that
            their parts hold, if they differ from their placements, as after `to_layout`.
        kv_size: for plain tensors: the length of the full sequence of `k` and `v`; default: the length of `q`'s.
        kv_layout: the positions of `k` and `v` that each rank holds, as in `layout`, or ``"whole"`` if every rank holds
            all. Default: as `q` if the lengths are equal, else ``"contiguous"``; with DTensors, their placements.
        dropout_p: must be 0. There is no dropout of attention weights.

    Returns:
        The result, placed like `q`; with `return_lse` a pair of it and the log-sum-exp. It is differentiable once.

    Raises:
        ValueError: an argument is invalid or differs among ranks; names the argument. If a call is the first with these
            arguments, all ranks raise, and nothing was sent.
        RuntimeError: the arguments of another rank are invalid.
        NotImplementedError: the tensors are on a device without fused attention.
        torch.distributed.DistBackendError: a transfer failed or timed out.
    """
    _check_no_dropout(dropout_p)
    options = checked(is_causal, mask, scale, enable_gqa, method, chunks, save, merge, size, layout, kv_size, kv_layout)
    tensors, is_3d = _with_four_dims(_as_autocast(q, k, v), mask)
    call = call_for(options, tensors, group)
    q, k, v = tensors[:3]
    out, lse = _attend(call, *(t.to_local() if isinstance(t, DTensor) else t for t in tensors))
    if isinstance(q, DTensor):
        out, lse = _as_dtensor(out, q, (*q.shape[:3], v.shape[3])), _as_dtensor(lse, q, q.shape[:3])
    if is_3d:
        out, lse = out.squeeze(1), lse.squeeze(1)
    return (out, lse) if return_lse else out


def explain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: dist.ProcessGroup | None = None, **arguments: Any
) -> str:
    """Returns the products of blocks that each rank would compute for these arguments, as text.

    The text also has the predicted time and memory of each method. All ranks that share the sequence call it. Nothing
    is computed, and no part of the tensors is sent. The arguments are those of `scaled_dot_product_attention`.
    """
    tensors, _ = _with_four_dims(_as_autocast(q, k, v), arguments.get("mask"))
    if unknown := sorted(set(arguments) - {*_DEFAULTS, "return_lse", "dropout_p"}):
        raise TypeError(f"explain() got an unexpected keyword argument {unknown[0]!r}")
    arguments.pop("return_lse", None)
    _check_no_dropout(arguments.pop("dropout_p", 0.0))
    options = checked(**{**_DEFAULTS, **arguments})
    attention = plan(options, tensors, group).attention
    return attention.describe(*tables_for(attention, tensors[0].device.type))


# Default arguments of `checked`, for `explain`.
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("mask", "scale", "chunks", "size", "layout", "kv_size", "kv_layout")),
    "is_causal": False,
    "enable_gqa": False,
    "method": "auto",
    "save": "shard",
    "merge": "float32",
}


def checked(
    is_causal: bool,
    mask: Mask | torch.Tensor | None,
    scale: float | None,
    enable_gqa: bool,
    method: str,
    chunks: int | None,
    save: str,
    merge: str,
    size: int | None,
    layout: Any,
    kv_size: int | None,
    kv_layout: Any,
) -> Options:
    """Returns the options in a hashable form. Raises ValueError, naming the argument, for invalid ones."""
    if isinstance(mask, torch.Tensor):
        mask = None  # mask tensors are planned by shape and dtype, not as an option
    if mask is not None and not isinstance(mask, Mask):
        raise argument_error("mask", "a Mask or a tensor", f"a {type(mask).__name__}")
    check_method(method)
    if save != "shard":
        raise argument_error("save", "'shard'", repr(save))
    if merge != "float32":
        raise argument_error("merge", "'float32'", repr(merge))
    for name, given in (("layout", layout), ("kv_layout", kv_layout)):
        try:
            if not torch.compiler.is_compiling():  # Dynamo in torch 2.11 cannot trace hash()
                hash(given)
        except TypeError:
            allowed = "'contiguous', 'zigzag' or a placement of dim 2"
            raise argument_error(name, allowed, f"a {type(given).__name__}") from None
    window, documents = mask or (None, None)
    if documents is not None:
        documents = argument_values.items(documents, "documents", "a list of lengths")
    if chunks is not None and argument_values.integer(chunks, "chunks") < 1:
        raise argument_error("chunks", "at least 1", chunks)
    return Options(
        bool(is_causal),
        None if window is None else argument_values.integer(window, "window"),
        tuple(argument_values.integer(length, "documents") for length in documents or ()),
        None if scale is None else _scale(scale),
        bool(enable_gqa),
        method,
        chunks or 0,
        None if size is None else argument_values.integer(size, "size"),
        layout,
        None if kv_size is None else argument_values.integer(kv_size, "kv_size"),
        kv_layout,
    )


def _check_no_dropout(dropout_p: Any) -> None:
    """Raises ValueError unless the dropout is 0."""
    if dropout_p != 0:
        raise ValueError(
            f"dropout_p must be 0, got {dropout_p!r}. Attention over ranks has no dropout of attention weights. Apply "
            "torch.nn.functional.dropout to the result instead"
        )


def check_method(method: Any) -> None:
    """Raises ValueError unless `method` is one of METHODS."""
    if method not in METHODS:
        raise argument_error("method", f"one of {', '.join(METHODS)}", repr(method))


def _scale(value: Any) -> float:
    """Returns the argument scale as a float. Raises ValueError for other types."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise argument_error("scale", "a finite number", f"a {type(value).__name__}") from None


def _as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the tensors in the dtype in which autocast would pass them to PyTorch's attention."""
    kinds = {tensor.device.type for tensor in tensors if isinstance(tensor, torch.Tensor)}
    for kind in kinds:
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)
    return tensors


def _with_four_dims(tensors: tuple[Any, ...], mask: Any) -> tuple[tuple[torch.Tensor, ...], bool]:
    """Returns q, k, v and the mask if that is a tensor, all with four dims; and True if q, k and v had three."""
    is_3d = all(isinstance(t, torch.Tensor) and t.ndim == 3 for t in tensors)
    if is_3d:
        tensors = tuple(t.unsqueeze(1) for t in tensors)
    if not isinstance(mask, torch.Tensor):
        return tensors, is_3d
    max_dims = 3 if is_3d else 4
    if mask.ndim > max_dims:
        raise argument_error("mask", f"of at most {max_dims} dims, as q", f"shape {tuple(mask.shape)}")
    if is_3d and mask.ndim == 3:
        mask = mask.unsqueeze(1)
    if isinstance(mask, DTensor):
        mask = _local_mask(mask, tensors[0])
    mask = mask[(None,) * (4 - mask.ndim)]
    for dim in range(4):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:  # expanded, so one element is enough
            mask = mask.narrow(dim, 0, 1)
    return (*tensors, mask), is_3d


def _local_mask(mask: DTensor, q: Any) -> torch.Tensor:
    """Returns this rank's part of a mask DTensor. Raises ValueError unless the mask is placed like q.

    Along mesh dims that shard q in a dim in which the mask broadcasts, the mask must be replicated.
    """
    num_missing = 4 - mask.ndim
    has_placements_of_q = isinstance(q, DTensor) and q.device_mesh == mask.device_mesh
    for mesh_dim, placement in enumerate(mask.placements if has_placements_of_q else ()):
        q_placement = q.placements[mesh_dim]
        dim = None if q_placement.is_replicate() or q_placement.is_partial() else q_placement.dim % 4 - num_missing
        is_broadcast = dim is None or dim < 0 or mask.shape[dim] == 1
        sharded_dim = None if placement.is_replicate() else -1 if placement.is_partial() else placement.dim % mask.ndim
        has_placements_of_q = has_placements_of_q and sharded_dim == (None if is_broadcast else dim)
    if not has_placements_of_q:
        raise argument_error("mask", "plain or placed like q, with all keys on each rank", mask.placements)
    return mask.to_local()


def _attend(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> Sequence[torch.Tensor]:
    """Runs a planned call. Returns the output and the log-sum-exp."""
    result: Sequence[torch.Tensor] = attend(q, k, v, mask, *call)
    return result


def _as_dtensor(local: torch.Tensor, like: DTensor, shape: tuple[int, ...]) -> DTensor:
    """Returns a DTensor with this local tensor and global shape, placed like `like`."""
    stride = torch.empty(shape, device="meta").stride()
    size = torch.Size(shape)
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=size, stride=stride)
