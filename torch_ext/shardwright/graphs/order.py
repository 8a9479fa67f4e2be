"""One order of redistributes in compiled code on all ranks, where their graphs differ because their shards do.

Compilers order what is independent by sizes, and leave out what nobody needs, as whatever becomes an empty shard. Ranks
would start different collectives then. Therefore:

- Within a trace each start takes a part of the handle of the start before, forwards and backwards apart:
  a backward runs behind its forward anyway, and would have to keep the handle.
- Starts and waits count as having side effects, so that none is left out.
- Such operators are in the forward or in the backward and not in both: PyTorch's partitioner is told before it cuts a
  joint graph. Checkpointed regions are the exception, where all ranks hold parts of one size and so decide alike what
  to compute again: there the operators without side effects stand in. Where anything that is redistributed in the
  graph is uneven, what was redistributed is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import partitioners
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from . import plans

_ops = torch.ops.shardwright
_START, _WAIT = _ops.redistribute_start, _ops.redistribute_wait
_RECOMPUTABLE = {_START.default: _START.recomputable, _WAIT.default: _WAIT.recomputable}
_HANDLES = "_shardwright_handles"

for _operator in _RECOMPUTABLE:
    torch.fx.node.has_side_effect(_operator)


def start(local: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """`redistribute_start` behind all those that the same trace has recorded so far."""
    mode = get_proxy_mode()
    if mode is None:  # fake tensors alone: nothing is recorded
        handle: torch.Tensor = _START(local, *arguments)
        return handle
    # What is functionalized apart from each other cannot be mixed.
    functional = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    in_backward = torch._C._current_autograd_node() is not None
    last = vars(mode.tracer).setdefault(_HANDLES, {})
    key = (in_backward, functional)
    handle = _START(local, *arguments, after=last.get(key))
    last[key] = handle[:1]  # of the handle's size, keeping it for a backward would seem dear
    return handle


def _is_even(node: torch.fx.Node) -> bool:
    plan = plans.plan_of(node.args[1 if node.target is _START.default else 2])  # type: ignore[arg-type]
    return plan.src.has_equal_parts and plan.dst.has_equal_parts


def _settle(joint_module: torch.fx.GraphModule) -> None:
    """Says of each start and wait in a joint graph in which half it is, and whether it may be in both."""
    ours = [node for node in joint_module.graph.nodes if node.target in _RECOMPUTABLE]
    is_even = all(map(_is_even, ours))
    for node in ours:
        is_checkpointed = partitioners.must_recompute(node)
        if is_even and is_checkpointed:
            node.target = _RECOMPUTABLE[node.target]
            continue
        is_backward = node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
        node.meta["partitioner_tag"] = "must_be_in_backward" if is_backward else "must_be_in_forward"
        if not is_backward:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _before_cutting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def force_save_collectives(joint_module: torch.fx.GraphModule) -> None:
        _settle(joint_module)
        original(joint_module)

    return force_save_collectives


# Both of PyTorch's partitioners ask this of a joint graph before they cut it.
partitioners.force_save_collectives = _before_cutting(partitioners.force_save_collectives)
