"""Keeps redistributes in compiled code in one order on all ranks, even if their graphs differ because their shards do.

Compilers order independent operators by size, and drop operators whose results are not used, such as those that make an
empty shard. Ranks would then start different collectives. Therefore:

- Within a trace, each start takes a slice of the handle of the start before it. Forwards and backwards have separate
  chains: a backward runs after its forward anyway, and would have to keep the handle.
- Starts and waits count as having side effects, so that none is dropped. Other operators (`register`) have effect
  tokens, which also order them.
- Each start and wait is in the forward or in the backward, not in both; tags tell this to PyTorch's partitioner before
  it cuts a joint graph. The exception is checkpointed regions of graphs that redistribute only even shards. All ranks
  then decide alike what to recompute, and overloads without side effects are used. If any redistributed shard in the
  graph is uneven, results of redistributes are saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import partitioners
from torch._higher_order_ops.effects import with_effects
from torch._inductor import utils as inductor_utils
from torch._library.effects import EffectType
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from . import plans

_ops = torch.ops.shardwright
_START, _WAIT = _ops.redistribute_start, _ops.redistribute_wait
_RECOMPUTABLE = {_START.default: _START.recomputable, _WAIT.default: _WAIT.recomputable}
_HANDLES = "_shardwright_handles"  # attribute of a tracer: the last handle of each chain

for _operator in _RECOMPUTABLE:
    torch.fx.node.has_side_effect(_operator)


def register(name: str) -> None:
    """Makes compiled code run an operator in the order of the trace, relative to other registered operators."""
    torch.library._register_effectful_op(name, EffectType.ORDERED)


def start(local: torch.Tensor, make_groups: bool, *arguments: Any) -> torch.Tensor:
    """Records `redistribute_start` after all earlier starts of the same trace."""
    mode = get_proxy_mode()
    if mode is None:  # only fake tensors, nothing is recorded
        handle: torch.Tensor = _START(local, *arguments, make_groups=make_groups)
        return handle
    # Tensors of different functionalizations cannot be mixed.
    functional = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    in_backward = torch._C._current_autograd_node() is not None
    last = vars(mode.tracer).setdefault(_HANDLES, {})
    key = (in_backward, functional)
    handle = _START(local, *arguments, after=last.get(key), make_groups=make_groups)
    last[key] = handle[:1]  # a slice, because saving the handle's full size for a backward would seem expensive
    return handle


def _is_even(node: torch.fx.Node) -> bool:
    """Returns True if all ranks hold equally large parts before and after the redistribute of this start or wait."""
    plan = plans.plan_of(node.args[1 if node.target is _START.default else 2])  # type: ignore[arg-type]
    return plan.src.has_equal_parts and plan.dst.has_equal_parts


def _assign_passes(joint_module: torch.fx.GraphModule) -> None:
    """Assigns each start and wait of a joint graph to the forward or the backward, unless it may be in both."""
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


# Functions that change a joint graph before it is cut into forward and backward.
before_partitioning: list[Callable[[torch.fx.GraphModule], None]] = [_assign_passes]


def _before_partitioning(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps PyTorch's function so that it first runs the functions of `before_partitioning`."""

    @functools.wraps(original)
    def force_save_collectives(joint_module: torch.fx.GraphModule) -> None:
        for prepare in before_partitioning:
            prepare(joint_module)
        original(joint_module)

    return force_save_collectives


# Both of PyTorch's partitioners call this on a joint graph before they cut it.
partitioners.force_save_collectives = _before_partitioning(partitioners.force_save_collectives)


_is_unsafe_without_token = inductor_utils.is_cudagraph_unsafe_fx_node


def _is_unsafe_in_cuda_graphs(node: torch.fx.Node) -> bool:
    """Replaces inductor's function, which misses the tag `cudagraph_unsafe` of an operator with an effect token.

    Such a node's target is `with_effects`, and the operator is an argument. Inductor asks about an operator that
    returns a list and about each tensor of its list with the same node, so they stay together.
    """
    operator = node.args[1] if node.target is with_effects else None
    return _is_unsafe_without_token(node) or torch.Tag.cudagraph_unsafe in getattr(operator, "tags", ())


inductor_utils.is_cudagraph_unsafe_fx_node = _is_unsafe_in_cuda_graphs
