"""One operator for each direction of attention, with its gradient and its shapes for compilers.

The arguments are tensors, strings and ints. `forward` and `backward` are attentions as text
(csrc/attention/serialize.h), the groups are names of process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d

from .. import _runtime, checking, counters


def _run(inputs: list[torch.Tensor], text: str, groups: Sequence[str], rank: int) -> list[torch.Tensor]:
    executable = _runtime.executable(text, list(groups), rank)
    if checking.is_on():
        _compare(executable, inputs)
    counters.counts.calls += 1
    return executable.run_all(inputs)


def _compare(executable: _runtime.Executable, inputs: list[torch.Tensor]) -> None:
    shapes = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs[:1]]
    expected = f"{executable.signature['dtype']}{executable.input_shape}"
    mine = {**executable.signature, "q": "as its layout says" if shapes == [expected] else shapes[0]}
    ranks = tuple(executable.mesh_ranks)
    names = executable.group_names
    group = distributed_c10d._resolve_process_group(names[0]) if names else None
    checking.compare_calls(ranks, executable.rank, "attention", mine, judged={"q": "as its layout says"}, group=group)


@torch.library.custom_op(
    "shardwright::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, str forward, str backward, str[] forward_groups, str[] backward_groups, "
    "int rank) -> (Tensor, Tensor)",
)
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    forward: str,
    backward: str,
    forward_groups: Sequence[str],
    backward_groups: Sequence[str],
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the result, shaped like q, and the log-sum-exp of its scores."""
    out, lse = _run([q, k, v], forward, forward_groups, rank)
    return out, lse


@torch.library.custom_op(
    "shardwright::attention_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor out, Tensor dout, Tensor lse, str backward, str[] groups, int rank) "
    "-> (Tensor, Tensor, Tensor)",
)
def attend_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    backward: str,
    groups: Sequence[str],
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of q, k and v."""
    dq, dk, dv = _run([q, k, v, out, dout, lse], backward, groups, rank)
    return dq, dk, dv


@attend.register_fake
def _(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=sums)


@attend_backward.register_fake
def _(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, _, backward, _, backward_groups, rank = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.program = backward, backward_groups, rank
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    if dlse is not None:
        raise NotImplementedError("attention: lse has no gradient; detach it before it is used in a loss")
    if dout is None:
        return (None,) * 8
    q, k, v, out, lse = ctx.saved_tensors
    backward, groups, rank = ctx.program
    gradients = attend_backward(q, k, v, out, dout, lse, backward, groups, rank)
    return (*gradients, None, None, None, None, None)


attend.register_autograd(_gradients, setup_context=_setup_context)
