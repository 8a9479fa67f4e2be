"""One operator for each direction of attention, with its gradient and its shapes for compilers.

The arguments are tensors, strings and ints. A mask has four dims, of size 1 if it broadcasts along them. `forward` and
`backward` are attentions as text (csrc/attention/serialize.h), the groups are names of process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d

from .._native import _runtime
from ..runtime import checking, counters
from ..runtime.agreement import Statement


def _run(inputs: list[torch.Tensor], text: str, groups: Sequence[str], rank: int) -> list[torch.Tensor]:
    """Runs an attention of either direction, given as text, on this rank. Returns its outputs."""
    executable = _runtime.executable(text, list(groups), rank)
    if checking.is_on():
        _compare_ranks(executable, inputs)
    counters.counts.calls += 1
    return executable.run_all(inputs)


def _compare_ranks(executable: _runtime.Executable, inputs: list[torch.Tensor]) -> None:
    """Raises on all ranks, in the debug mode, if ranks run different attentions or an input has a wrong shape."""
    errors = {}
    for name, tensor, shape in zip(("q", "k"), inputs, executable.input_shapes, strict=False):
        text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        expected = f"{executable.signature['dtype']}{shape}"
        if text != expected:
            errors[name] = f"must be {expected}, got {text}"
    names = executable.group_names
    group = distributed_c10d._resolve_process_group(names[0]) if names else None
    ranks, rank = executable.mesh_ranks, executable.rank
    checking.compare_calls(Statement("attention", executable.signature, errors), ranks, rank, group=group)


@torch.library.custom_op(
    "shardwright::attention",
    mutates_args=(),
    tags=[torch.Tag.cudagraph_unsafe],
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, str forward, str backward, str[] forward_groups, "
    "str[] backward_groups, int rank) -> (Tensor, Tensor)",
)
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    forward: str,
    backward: str,
    forward_groups: Sequence[str],
    backward_groups: Sequence[str],
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output, of q's shape but v's head dim, and the log-sum-exp of the scores."""
    out, lse = _run([q, k, v, *([] if mask is None else [mask])], forward, forward_groups, rank)
    return out, lse


@torch.library.custom_op(
    "shardwright::attention_backward",
    mutates_args=(),
    tags=[torch.Tag.cudagraph_unsafe],
    schema="(Tensor q, Tensor k, Tensor v, Tensor out, Tensor dout, Tensor lse, Tensor? mask, str backward, "
    "str[] groups, int rank) -> (Tensor, Tensor, Tensor)",
)
def attend_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    backward: str,
    groups: Sequence[str],
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of q, k and v."""
    dq, dk, dv = _run([q, k, v, out, dout, lse, *([] if mask is None else [mask])], backward, groups, rank)
    return dq, dk, dv


@attend.register_fake
def _(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=sums)


@attend_backward.register_fake
def _(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Saves on the autograd node what `_gradients` needs."""
    q, k, v, mask, _, backward, _, backward_groups, rank = inputs
    ctx.save_for_backward(q, k, v, *output, mask)
    ctx.program = backward, backward_groups, rank
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    """Returns the gradients of the arguments of `attend`, from those of its output and of the log-sum-exp."""
    if dlse is not None:
        raise NotImplementedError("attention: lse has no gradient; detach it before it is used in a loss")
    if dout is None:
        return (None,) * 9
    q, k, v, out, lse, mask = ctx.saved_tensors
    backward, groups, rank = ctx.program
    gradients = attend_backward(q, k, v, out, dout, lse, mask, backward, groups, rank)
    return (*gradients, None, None, None, None, None, None)


attend.register_autograd(_gradients, setup_context=_setup_context)
