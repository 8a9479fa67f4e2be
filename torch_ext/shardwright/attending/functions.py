"""`attention`, and `explain_attention` which shows what it would do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .. import argument_values
from .operators import attend
from .problem import Asked, AttentionMask, Call, call_for, plan, tables_of

__all__ = ["AttentionMask", "attention", "explain_attention"]

METHODS = ("auto", "ring", "gather", "ulysses", "two_level", "serial")


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    mask: AttentionMask | None = None,
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
    dropout_p: float = 0.0,
) -> Any:
    """Attention over a sequence that is cut over ranks; keys travel while others are attended to.

    It computes what ``torch.nn.functional.scaled_dot_product_attention`` does of the whole tensors, without dropout,
    and in the dtype of autocast where that is on. The first call with given arguments, shapes and dtypes compares them
    among the ranks.

    Args:
        q: shape [batch, heads, sequence, depth]: float32, bfloat16, float16 or float64. Plain tensors are this rank's
            part of the sequence. DTensors bring their placements: one mesh dim may cut the sequence, others batch and
            heads; nothing moves along those.
        k, v: placed like `q`, with the same length and depth, and with `enable_gqa` fewer heads.
        is_causal: a query sees no later places of the whole sequence.
        mask: what queries see besides: a sliding window, documents. See `AttentionMask`.
        scale: of scores; default 1 / sqrt(depth).
        enable_gqa: the heads of `q` may be a multiple of those of `k` and `v`; consecutive ones share one.
        method: ``"ring"``: keys of one rank after the other arrive, each while those before are attended to. At most
            two parts of them are held. ``"gather"``: all at once. ``"ulysses"``: sequence is exchanged for heads and
            back. ``"two_level"``: ulysses within nodes and a ring between them, where the topology has several nodes of
            several ranks. ``"serial"``: a gather during which nothing is computed. ``"auto"``: the one predicted to be
            fastest.
        chunks: cut the whole sequence into this many blocks of equal length (as torch.chunk does). Where the parts of
            ranks begin and end at these cuts, result and gradients are bitwise the same for any number of ranks and any
            method. Default: blocks are the runs that ranks hold.
        save: ``"shard"``: the backward keeps this rank's part of `k` and `v`, and moves the rest again.
        merge: ``"float32"``: results of blocks are merged in float32, in the order of their places. With `chunks`, so
            are gradients.
        return_lse: also return the log-sum-exp of each query's scores, shape [batch, heads, sequence], float32 (float64
            for float64); minus infinity for a query that sees nothing, whose result is zeros. It has no gradient.
        size: for plain tensors on several ranks: the length of the whole sequence. It is required, because a rank
            cannot know what others hold.
        group: for plain tensors: the process group; default: the default group.
        layout: which places of the sequence each rank holds: None or ``"contiguous"``, ``"zigzag"``, or a placement of
            dim 2, such as `Pieces`, whose parts may be uneven or empty. With DTensors: what their parts hold if it is
            not what their placements say, as after `to_layout`.
        dropout_p: must be 0. There is no dropout of attention weights.

    Returns:
        The result, placed like `q`; with `return_lse` a pair of it and the log-sum-exp. It is differentiable once.

    Raises:
        ValueError: names the argument that does not fit, or in which ranks differ. If a call is the first of its kind,
            all ranks raise, and nothing was sent.
        RuntimeError: the arguments of another rank do not fit.
        NotImplementedError: the tensors are on a device without fused attention.
        torch.distributed.DistBackendError: a transfer failed or timed out.
    """
    _check_no_dropout(dropout_p)
    asked = ask(is_causal, mask, scale, enable_gqa, method, chunks, save, merge, size, layout)
    q, k, v = _as_autocast(q, k, v)
    call = call_for(asked, (q, k, v), group)
    out, lse = _attend(call, *(t.to_local() if isinstance(t, DTensor) else t for t in (q, k, v)))
    if isinstance(q, DTensor):
        out, lse = _as_dtensor(out, q, q.shape), _as_dtensor(lse, q, q.shape[:3])
    return (out, lse) if return_lse else out


def explain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: dist.ProcessGroup | None = None, **arguments: Any
) -> str:
    """Returns what `attention` with these arguments would do: products of blocks by rank, and predicted times.

    All ranks that share the sequence call it. Nothing is computed, and no part of the tensors is sent.
    """
    q, k, v = _as_autocast(q, k, v)
    if unknown := sorted(set(arguments) - {*_DEFAULTS, "return_lse", "dropout_p"}):
        raise TypeError(f"explain_attention() got an unexpected keyword argument {unknown[0]!r}")
    arguments.pop("return_lse", None)
    _check_no_dropout(arguments.pop("dropout_p", 0.0))
    asked = ask(**{**_DEFAULTS, **arguments})
    attention = plan(asked, (q, k, v), group).attention
    return attention.describe(*tables_of(attention, q.device.type))


_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("mask", "scale", "chunks", "size", "layout")),
    "is_causal": False,
    "enable_gqa": False,
    "method": "auto",
    "save": "shard",
    "merge": "float32",
}


def ask(
    is_causal: bool,
    mask: AttentionMask | None,
    scale: float | None,
    enable_gqa: bool,
    method: str,
    chunks: int | None,
    save: str,
    merge: str,
    size: int | None,
    layout: Any,
) -> Asked:
    """Returns the options in a hashable form. Raises ValueError, naming the argument, for what is not allowed."""
    if mask is not None and not isinstance(mask, AttentionMask):
        raise ValueError(
            f"mask: got a {type(mask).__name__}; allowed is an AttentionMask, from which a rank knows which blocks of "
            "the sequence see each other before they are moved"
        )
    check_method(method)
    if save != "shard":
        raise ValueError(f"save: {save!r}; allowed is 'shard'")
    if merge != "float32":
        raise ValueError(f"merge: {merge!r}; allowed is 'float32'")
    try:
        if not torch.compiler.is_compiling():  # Dynamo in torch 2.11 takes no hash
            hash(layout)
    except TypeError:
        raise ValueError(
            f"layout: got a {type(layout).__name__}; allowed are 'contiguous', 'zigzag' and placements of dim 2"
        ) from None
    window, documents = mask or (None, None)
    if documents is not None:
        documents = argument_values.items(documents, "documents", "a list of lengths")
    if chunks is not None and argument_values.integer(chunks, "chunks") < 1:
        raise ValueError(f"chunks: {chunks}; allowed are 1 and more")
    return Asked(
        bool(is_causal),
        None if window is None else argument_values.integer(window, "window"),
        tuple(argument_values.integer(length, "documents") for length in documents or ()),
        None if scale is None else _scale(scale),
        bool(enable_gqa),
        method,
        chunks or 0,
        None if size is None else argument_values.integer(size, "size"),
        layout,
    )


def _check_no_dropout(dropout_p: Any) -> None:
    if dropout_p != 0:
        raise ValueError(
            f"dropout_p must be 0, got {dropout_p!r}: attention over ranks has no dropout of attention weights; apply "
            "torch.nn.functional.dropout to the result, or set dropout_p=0 in the attention layers"
        )


def check_method(method: Any) -> None:
    if method not in METHODS:
        raise ValueError(f"method: {method!r}; allowed are {', '.join(METHODS)}")


def _scale(given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"scale: got a {type(given).__name__}; allowed are finite numbers") from None


def _as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns tensors as autocast would hand them to PyTorch's attention."""
    kinds = {tensor.device.type for tensor in tensors if isinstance(tensor, torch.Tensor)}
    for kind in kinds:
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)
    return tensors


def _attend(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Sequence[torch.Tensor]:
    result: Sequence[torch.Tensor] = attend(q, k, v, *call)
    return result


def _as_dtensor(local: torch.Tensor, like: DTensor, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
