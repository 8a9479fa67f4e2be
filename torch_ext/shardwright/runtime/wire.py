"""Counts the bytes that collectives deliver to this rank, in the same way for shardwright and for PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# The bytes (received, sent) of one collective at one rank, if every rank sent directly to every other rank. Data that
# an algorithm relays, and padding that it adds itself, are not counted. Padding in the caller's tensors is counted.
Traffic = tuple[int, int]
Arguments = dict[str, Any]  # an operator's arguments by name

# Namespaces of collectives. All of their operators must be in the tables below; others raise an error.
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")

# Operators of these namespaces that move no data.
_WITHOUT_PAYLOAD = (
    "barrier monitored_barrier_ check_for_nan mesh_get_process_group wait_tensor wait_tensors _wrap_tensor_autograd"
)


def _bytes(tensors: Any) -> int:
    """Returns the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(item) for item in tensors)


def _first(arguments: Arguments, *names: str) -> Any:
    """Returns the argument that the operator has under one of these names, which differ between namespaces."""
    for name in names:
        if name in arguments:
            return arguments[name]
    raise KeyError(f"The operator must have one of the arguments {names}, got {sorted(arguments)}")


def _contributed(arguments: Arguments) -> Any:
    """Returns the argument with the tensors that a rank contributes."""
    names = "input inputs input_tensor input_tensors input_list self shard tensors tensor"
    return _first(arguments, *names.split())


# Rules. Each returns the traffic of one call of a collective at this rank. Parameters: the operator's arguments, the
# number of ranks of the group, and this rank's index in the group.


def _all_gather(arguments: Arguments, size: int, rank: int) -> Traffic:
    """Every rank sends its tensors to all other ranks."""
    others = (size - 1) * _bytes(_contributed(arguments))
    return others, others


def _all_gather_lists(arguments: Arguments, size: int, rank: int) -> Traffic:
    """Like `_all_gather`, but outputs are lists with one tensor per rank, whose sizes may differ."""
    lists = _first(arguments, "output_tensors", "output_lists")
    return _bytes_of_others(lists, rank), (size - 1) * _bytes(_contributed(arguments))


def _reduce_scatter(arguments: Arguments, size: int, rank: int) -> Traffic:
    """The input holds one chunk per rank; a rank needs its own chunk from each of the others."""
    others = _bytes(_contributed(arguments)) // size * (size - 1)
    return others, others


def _reduce_scatter_lists(arguments: Arguments, size: int, rank: int) -> Traffic:
    """Like `_reduce_scatter`, but inputs are lists with one chunk per rank, whose sizes may differ."""
    return (size - 1) * _bytes(arguments["output_tensors"]), _bytes_of_others(arguments["input_tensors"], rank)


def _bytes_of_others(lists: Any, rank: int) -> int:
    """Returns the bytes in lists that have one tensor per rank, without the tensors of this rank."""
    return _bytes(lists) - sum(_bytes(tensors[rank]) for tensors in lists)


def _all_reduce(arguments: Arguments, size: int, rank: int) -> Traffic:
    """A reduce-scatter and an all-gather, each of (size - 1) / size of the tensor."""
    both = -(-2 * (size - 1) * _bytes(_contributed(arguments)) // size)
    return both, both


def _to_root(arguments: Arguments, size: int, rank: int) -> Traffic:
    """Every other rank sends its tensors to the root: gather, reduce."""
    own = _bytes(_contributed(arguments))
    return ((size - 1) * own, 0) if rank == arguments["root_rank"] else (0, own)


def _from_root(arguments: Arguments, size: int, rank: int) -> Traffic:
    """The root sends one tensor to every other rank: broadcast, scatter."""
    own = _bytes(_first(arguments, "output_tensors", "tensors", "input", "self"))
    return (0, (size - 1) * own) if rank == _first(arguments, "root_rank", "src") else (own, 0)


def _split_bytes(tensor_bytes: int, rows: int, splits: list[int] | None, size: int, rank: int) -> int:
    """Returns the bytes of a tensor's rows that belong to other ranks.

    Args:
        tensor_bytes: bytes of the tensor.
        rows: size of its dim 0.
        splits: number of rows of each rank; None or []: equal parts.
        size: number of ranks.
        rank: this rank's index.
    """
    if rows == 0:
        return 0
    own_rows = splits[rank] if splits else rows // size
    return tensor_bytes - tensor_bytes // rows * own_rows


def _all_to_all_single(arguments: Arguments, size: int, rank: int) -> Traffic:
    """Every rank sends a range of its rows (dim 0) to each rank: by the given split sizes, or equal ranges."""
    given = _contributed(arguments)
    rows, total = given.size(0), _bytes(given)
    in_splits, out_splits = arguments.get("input_split_sizes"), arguments.get("output_split_sizes")
    if "output" in arguments:
        out_rows, out_total = arguments["output"].size(0), _bytes(arguments["output"])
    else:
        out_rows = sum(out_splits) if out_splits else rows
        out_total = out_rows * math.prod(given.shape[1:]) * given.element_size()
    return _split_bytes(out_total, out_rows, out_splits, size, rank), _split_bytes(total, rows, in_splits, size, rank)


def _all_to_all_lists(arguments: Arguments, size: int, rank: int) -> Traffic:
    """Every rank sends one tensor of a list to each rank."""
    return _bytes_of_others([arguments["output_tensors"]], rank), _bytes_of_others([arguments["input_tensors"]], rank)


def _shard_dim_all_to_all(arguments: Arguments, size: int, rank: int) -> Traffic:
    """Every rank keeps one of `size` equal parts and sends the others. (DTensor on CPU gathers instead.)"""
    total = _bytes(arguments["input"])
    others = total - total // size
    return others, others


def _send(arguments: Arguments, size: int, rank: int) -> Traffic:
    """This rank sends its tensors to one rank."""
    return 0, _bytes(_contributed(arguments))


def _receive(arguments: Arguments, size: int, rank: int) -> Traffic:
    """This rank receives its tensors from one rank."""
    return _bytes(_contributed(arguments)), 0


def _batched_point_to_point(arguments: Arguments, size: int, rank: int) -> Traffic:
    """This rank sends and receives tensors, as a list of operations says."""
    moved = list(zip(arguments["op_list"], arguments["tensors"]))
    received = sum(_bytes(tensor) for kind, tensor in moved if kind.endswith("recv"))
    return received, _bytes(arguments["tensors"]) - received


# The names of the operators, without namespace, to which each rule applies.
_OPERATORS_BY_RULE: dict[Callable[[Arguments, int, int], Traffic], str] = {
    _all_gather: (
        "_allgather_base_ allgather_into_tensor_coalesced_ all_gather_into_tensor all_gather_into_tensor_coalesced "
        "all_gather_into_tensor_out"
    ),
    _all_gather_lists: "allgather_ allgather_coalesced_",
    _reduce_scatter: (
        "_reduce_scatter_base_ reduce_scatter_tensor_coalesced_ reduce_scatter_tensor reduce_scatter_tensor_coalesced "
        "reduce_scatter_tensor_out"
    ),
    _reduce_scatter_lists: "reduce_scatter_",
    _all_reduce: "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_",
    _to_root: "reduce_ gather_ gather_into_tensor_",
    _from_root: "broadcast_ broadcast scatter_",
    _all_to_all_single: "alltoall_base_ all_to_all_single",
    _all_to_all_lists: "alltoall_",
    _shard_dim_all_to_all: "shard_dim_alltoall",
    _send: "send isend",
    _receive: "recv_ recv_any_source_ irecv",
    _batched_point_to_point: "batch_p2p_ops",
}
_RULE_BY_OPERATOR = {name: rule for rule, names in _OPERATORS_BY_RULE.items() for name in names.split()}


def _group_size_and_rank(arguments: Arguments) -> tuple[int, int]:
    """Returns the size of the operator's group and this rank's index in the group."""
    if "ranks" in arguments:
        ranks = list(arguments["ranks"])
        return arguments["group_size"], ranks.index(dist.get_rank())
    group = _first(arguments, "process_group", "group_name")
    if isinstance(group, str):
        group = distributed_c10d._resolve_process_group(group)
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return group.size(), group.rank()


class WireMeter(TorchDispatchMode):
    """Counts the bytes that collectives called inside the block deliver to this rank and send from it.

    It sees every collective that goes through PyTorch's dispatcher: those of shardwright, DTensor and FSDP, and plain
    `torch.distributed` calls, in forward and backward, on the thread that entered the block. A collective that calls
    another one counts once. The counts are those of a direct exchange: data that an algorithm relays is not included;
    padding in the tensors is. A collective that the meter does not know raises NotImplementedError.

    Attributes:
        received_bytes: bytes of other ranks' data that this rank needs.
        sent_bytes: bytes of this rank's data that other ranks need.
        calls: number of collectives.
        by_op: operator name such as "c10d.allreduce_" to [calls, received bytes].
    """

    def __init__(self) -> None:
        super().__init__()
        self.received_bytes = 0
        self.sent_bytes = 0
        self.calls = 0
        self.by_op: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        # DTensor then unwraps its tensors, and its collectives reach this function with plain tensors.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload) and func.namespace in _NAMESPACES:
            self._count(func, args, kwargs)
        return result

    def _count(self, func: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> None:
        """Adds one call of a collective to the counters. Raises NotImplementedError for an unknown operator."""
        schema = func._schema
        operator = schema.name.partition("::")[2]
        if operator in _WITHOUT_PAYLOAD.split():
            return
        if operator not in _RULE_BY_OPERATOR:
            raise NotImplementedError(f"wire_meter has no rule for the bytes of {schema.name}")
        arguments = {argument.name: value for argument, value in zip(schema.arguments, args)}
        arguments.update(kwargs)
        received, sent = _RULE_BY_OPERATOR[operator](arguments, *_group_size_and_rank(arguments))
        self.calls += 1
        self.received_bytes += received
        self.sent_bytes += sent
        entry = self.by_op.setdefault(f"{func.namespace}.{operator}", [0, 0])
        entry[0] += 1
        entry[1] += received


def wire_meter() -> WireMeter:
    """Returns a meter to use as a context manager: `with wire_meter() as meter: ...; meter.received_bytes`."""
    return WireMeter()
