"""Tokens to their experts and back: `dispatch` and `combine`.

    rows, tokens_per_expert, handle = sw.experts.dispatch(x, expert_ids, scores, placement)
    y = experts(rows, tokens_per_expert)         # one row of y for each row
    out = sw.experts.combine(y, handle)          # the weighted sums, on the ranks of the tokens

A token is sent once to each rank that has any of its experts, and one sum is returned from each of these ranks. The
backward of either function is the other: gradients of rows are summed on the token's rank, gradients of sums are sent
once to each rank. docs/experts.md has the details, ranks.py defines replicas and codes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from .._native import _runtime
from ..layouts import argument_values
from ..layouts.errors import argument_error
from ..layouts.topology import Topology
from ..runtime import argument_checks, checking
from ..runtime.agreement import Statement
from ..runtime.counters import counts
from ..runtime.plain_tensors import waited_with_history
from .counts import compare, exchange_capacity, exchange_counts
from .gradients import Collect, Contract, Expand, Expansion, Send
from .ranks import ExpertGroup, ExpertRanks, Group, Nodes, expert_ranks, group_for_errors

_ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_OVERFLOWS = ("raise", "drop")
_NO_CAPACITY = (1 << 63) - 1  # for `expand_rows_on_device`: any number of tokens per expert

# The result of `_runtime.route_rows`: rows to send, return map, rows by rank, pairs by rank.
Routes = tuple[torch.Tensor, torch.Tensor, list[int], list[int]]


F = TypeVar("F", bound=Callable[..., Any])


def _outside_graphs(function: F) -> F:
    """Returns a function that runs eagerly in compiled code too. There the graph breaks once, at its call."""
    outside = torch._disable_dynamo(function)  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (outside if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call  # type: ignore[return-value]


class DispatchHandle:
    """The record of a `dispatch` that `combine` needs. Holds no process group.

    Attributes:
        experts: the experts of this rank, in the order of ``tokens_per_expert``.
        scales: the scales of the rows if scales were given, else None.
        dropped: the number of (token, expert) pairs that this rank dropped because of a capacity; the sum over ranks is
            the number of the job. An int, or a tensor if ``rows_per_rank`` was given.
        payload_bytes: bytes of tokens that the dispatch received from other ranks.
        metadata_bytes: the same for their scores, scales, expert ids and counts.
    """

    def __init__(
        self,
        ranks: ExpertRanks,
        exchanges: list[_runtime.RowExchange],
        expansion: Expansion,
        scores: torch.Tensor | None,
        anchor: torch.Tensor,
    ) -> None:
        self._ranks = ranks
        self._exchanges = exchanges
        self._expansion = expansion
        self._scores = scores
        # An empty tensor. `combine` passes it to `Collect`, so that all ranks take part in the backward.
        self._anchor = anchor
        self.experts = ranks.experts
        self.scales: torch.Tensor | None = None
        self.dropped: int | torch.Tensor = 0
        self.payload_bytes = 0
        self.metadata_bytes = 0
        # True if `combine` compares arguments among ranks. On a device, that would wait for the experts to finish.
        self._compares = False

    def __repr__(self) -> str:
        copies, received = self._expansion.pairs.shape[0], self._exchanges[-1].num_received
        return f"<DispatchHandle: {copies} rows for {len(self.experts)} experts, of {received} tokens>"


class Dispatched(NamedTuple):
    """The result of `dispatch`.

    Attributes:
        rows: ``[copies, hidden]``, sorted by expert of this rank, then by the token's rank, then by token.
        tokens_per_expert: int64, on the device of the rows.
        handle: the argument of `combine`.
    """

    rows: torch.Tensor
    tokens_per_expert: torch.Tensor
    handle: DispatchHandle


@_outside_graphs
def dispatch(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scores: torch.Tensor | None,
    placement: Any,
    capacity: int | None = None,
    *,
    overflow: str = "raise",
    scales: torch.Tensor | None = None,
    group: Group = None,
    topology: Topology | str | None = None,
    rows_per_rank: int | None = None,
) -> Dispatched:
    """Sends each token to the ranks of its experts, once to each. Every rank must call, with or without tokens.

    Args:
        x: ``[tokens, hidden]``, this rank's tokens; any dtype.
        expert_ids: ``[tokens, top-k]``, int64 or int32; -1 is no expert.
        scores: ``[tokens, top-k]``, weights by which `combine` multiplies the experts' rows, in float32, float64,
            bfloat16 or float16; None means 1.
        placement: the experts of each rank: a `Layout` with experts in dim 0 that cuts only this dim, or a
            list of expert ids for each rank of the group. Ranks may hold any number of experts. An expert may be on
            several ranks; a token then prefers a rank to which it is sent anyway.
        capacity: the maximum number of tokens of an expert, on each rank that holds it, in the order of ranks, then
            tokens.
        overflow: ``"raise"``: more tokens are an error on all ranks. ``"drop"``: later tokens miss the expert.
        scales: ``[tokens, n]``, such as row scales of 8-bit floats; they are sent with the tokens and returned as
            ``handle.scales``.
        group: the process group or DeviceMesh that the placement is on; default: all ranks. With a Layout and a
            process group, the layout's ranks are ranks of the group, or the global ranks of all its members.
        topology: the topology that defines nodes; default: the topology of the Layout's mesh. If nodes are known, a
            token is sent once to each node, and forwarded there.
        rows_per_rank: the number of rows that each rank sends to every other, padded with zeros. Nothing waits for the
            host, shapes do not depend on values, and a CUDA graph can capture the call; tokens beyond are dropped, so
            overflow must be ``"drop"``. The number of tokens is always enough. Rows after the last one are zeros.

    Returns:
        A `Dispatched` with the rows for the experts of this rank, the number of rows of each, and a handle for
        `combine`. Differentiable by x and, through `combine`, by scores.

    Raises:
        ValueError: an argument is not allowed, on the rank that passes it (RuntimeError on the others); arguments
            differ between ranks, or tokens exceed a capacity, on all ranks. An invalid group is an error on that rank
            alone.
        torch.distributed.DistBackendError: a transfer failed or timed out; names rank, step and group.
    """
    try:
        ranks = expert_ranks(placement, group, topology)
    except ValueError as error:
        error_group = group_for_errors(placement, group)
        if error_group is None:
            raise
        _refuse(error_group, error, rows_per_rank)
    x, expert_ids, scores, scales = map(waited_with_history, (x, expert_ids, scores, scales))
    try:
        arguments = Arguments.checked(x, expert_ids, scores, scales, capacity, overflow, rows_per_rank)
        ranks.check_device(arguments.x.device)
        codes = None if rows_per_rank is not None else arguments.replica_codes(ranks)
    except ValueError as error:
        _refuse(ranks, error, rows_per_rank)
    if checking.is_on():
        _compare("dispatch", ranks, arguments.fields(ranks), None)
    counts.dispatches += 1
    return _dispatch_fixed(arguments, ranks) if codes is None else _dispatch(arguments, ranks, codes)


def _refuse(ranks: ExpertGroup, error: ValueError, rows_per_rank: Any) -> NoReturn:
    """Raises this rank's error, after reporting it to the other ranks if they compare arguments."""
    if checking.is_on():
        _compare("dispatch", ranks, {}, error)
    if rows_per_rank is None:
        compare(ranks, {}, error)
    raise error


class Arguments(NamedTuple):
    """The checked arguments of a `dispatch`."""

    x: torch.Tensor
    expert_ids: torch.Tensor
    scores: torch.Tensor | None
    scales: torch.Tensor | None
    capacity: int | None
    overflow: str
    rows_per_rank: int | None

    @staticmethod
    def checked(
        x: Any, expert_ids: Any, scores: Any, scales: Any, capacity: Any, overflow: Any, rows_per_rank: Any
    ) -> Arguments:
        """Returns the arguments of `dispatch`. Raises ValueError for invalid ones."""
        argument_checks.check_tensor("x", x)
        if x.ndim != 2:
            raise argument_error("x", "of shape [tokens, hidden]", tuple(x.shape))
        if x.requires_grad and torch.is_grad_enabled() and x.dtype not in _ROW_DTYPES:
            raise argument_error("x", f"one of {_dtype_names(_ROW_DTYPES)} if it requires grad", x.dtype)
        _check_per_token("expert_ids", expert_ids, x)
        if expert_ids.dtype not in (torch.int64, torch.int32) or expert_ids.shape[1] < 1:
            described = f"{expert_ids.dtype} of shape {tuple(expert_ids.shape)}"
            raise argument_error("expert_ids", "int64 or int32, with at least one column", described)
        if scores is not None:
            _check_per_token("scores", scores, x)
            if scores.dtype not in _ROW_DTYPES or scores.shape != expert_ids.shape:
                allowed = f"one of {_dtype_names(_ROW_DTYPES)}, of the shape of expert_ids, {tuple(expert_ids.shape)}"
                raise argument_error("scores", allowed, f"{scores.dtype} of shape {tuple(scores.shape)}")
        if scales is not None:
            _check_per_token("scales", scales, x)
        if capacity is not None and argument_values.integer(capacity, "capacity") < 0:
            raise argument_error("capacity", "None or at least 0", capacity)
        if overflow not in _OVERFLOWS:
            raise argument_error("overflow", f"one of {', '.join(map(repr, _OVERFLOWS))}", repr(overflow))
        if rows_per_rank is not None:
            if argument_values.integer(rows_per_rank, "rows_per_rank") < 0:
                raise argument_error("rows_per_rank", "None or at least 0", rows_per_rank)
            if overflow != "drop":
                why = "with rows_per_rank, where the host cannot count tokens"
                raise argument_error("overflow", f"'drop' {why}", repr(overflow))
        return Arguments(x, expert_ids, scores, scales, capacity, overflow, rows_per_rank)

    @property
    def top_k(self) -> int:
        """The number of experts of each token."""
        return self.expert_ids.shape[1]

    @property
    def gradients(self) -> tuple[bool, bool]:
        """Returns two flags: True if x requires a gradient, and True if the scores do."""
        on = torch.is_grad_enabled()
        return on and self.x.requires_grad, on and self.scores is not None and self.scores.requires_grad

    def replica_codes(self, ranks: ExpertRanks) -> torch.Tensor:
        """Returns the replica code (ranks.py) of each expert id, on the host. Raises ValueError for invalid ids."""
        ids = self.expert_ids.detach().to(device="cpu", dtype=torch.int64).contiguous()
        return ranks.placement.choose(ids, ranks.rank, ranks.node_of_rank)

    def fields(self, ranks: ExpertRanks) -> dict[str, Any]:
        """Returns the arguments and properties that must be the same on all ranks."""
        return {
            "hidden_size": self.x.shape[1],
            "dtype": _dtype_name(self.x.dtype),
            "in_host_memory": ranks.wire(self.x.device).type == "cpu",  # tokens are sent from there
            "top_k": self.top_k,
            "num_experts": ranks.placement.num_experts,
            "placement": f"{ranks.placement.hash & ((1 << 64) - 1):016x}",
            "ranks_per_node": 0 if ranks.nodes is None else ranks.nodes.ranks_per_node,
            "capacity": str(self.capacity),
            "overflow": self.overflow,
            "rows_per_rank": str(self.rows_per_rank),
            "scores": "None" if self.scores is None else _dtype_name(self.scores.dtype),
            "num_scales": 0 if self.scales is None else self.scales.shape[1],
            "scales": "None" if self.scales is None else _dtype_name(self.scales.dtype),
            "x_has_gradient": self.gradients[0],
            "scores_have_gradient": self.gradients[1],
        }


def _dtype_name(dtype: torch.dtype) -> str:
    """Returns a text such as "float32"."""
    return str(dtype).removeprefix("torch.")


def _dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    """Returns a text such as "float32, float16"."""
    return ", ".join(map(_dtype_name, dtypes))


def _check_per_token(argument: str, tensor: Any, x: torch.Tensor) -> None:
    """Checks that a tensor has one row per token and is on the device of x."""
    argument_checks.check_tensor(argument, tensor)
    if tensor.ndim != 2 or tensor.shape[0] != x.shape[0]:
        allowed = f"a matrix of one row for each of {len(x)} tokens"
        raise argument_error(argument, allowed, f"shape {tuple(tensor.shape)}")
    if tensor.device != x.device:
        raise argument_error(argument, f"on the device of x, {x.device}", tensor.device)


def _compare(call: str, ranks: ExpertGroup, fields: dict[str, Any], error: Exception | None) -> None:
    """Compares a call among ranks in the debug mode. `error` is this rank's error, if any."""
    errors = {"arguments": None if error is None else str(error)}
    checking.compare_calls(Statement(call, fields, errors), ranks.ranks, ranks.ranks[ranks.rank])


# ------------------------------------------------------------------------------------------------------- dispatch


def _dispatch(arguments: Arguments, ranks: ExpertRanks, codes: torch.Tensor) -> Dispatched:
    """Runs a dispatch whose counts are known on the host: ranks send only the rows that are needed."""
    device, nodes = arguments.x.device, ranks.nodes
    wire = ranks.wire(device)
    targets = ranks.targets if nodes is None else nodes.relay_of_replica
    dropped = 0
    routes = _runtime.route_rows(codes, targets, ranks.size)
    receive, copies, words_bytes = compare(ranks, arguments.fields(ranks), None, routes[2:])
    if nodes is not None:
        nodes.connect()
    if arguments.capacity is not None:
        codes, dropped, more = exchange_capacity(ranks, codes, arguments.capacity, arguments.overflow == "drop")
        routes = _runtime.route_rows(codes, targets, ranks.size)
        receive, copies, words = exchange_counts(ranks.group_name, routes[2:], ranks.words.device)
        words_bytes += more + words
    counts.dropped += dropped
    state = _DispatchState(arguments, ranks, words_bytes, knows_origins=nodes is not None)
    state.exchange(_exchange(ranks.group_name, wire, routes, receive, device), codes.to(device))
    if nodes is not None:
        copies = state.forward_in_node(nodes)
    result = state.dispatched(state.expand(sum(copies)), dropped)
    result.handle._compares = ranks.words.device.type == "cpu"
    return result


def _exchange(
    group_name: str, wire: torch.device, routes: Routes, receive: list[int], device: torch.device
) -> _runtime.RowExchange:
    """Returns the exchange that sends rows by `routes` and receives `receive[r]` rows from rank r."""
    send_rows, rows_of_token, send, _ = routes
    return _runtime.RowExchange(group_name, wire.type, send_rows.to(device), rows_of_token.to(device), send, receive)


def _dispatch_fixed(arguments: Arguments, ranks: ExpertRanks) -> Dispatched:
    """Runs a dispatch whose counts stay on the device: every rank sends `rows_per_rank` rows to each rank."""
    rows_per_rank = arguments.rows_per_rank or 0
    tables = ranks.on_device(arguments.x.device)
    if arguments.x.device.type == "cpu":
        arguments.replica_codes(ranks)  # raises for an invalid id; on devices the check would wait
    codes = tables.choose(arguments.expert_ids.detach().to(torch.int64), ranks.rank)
    send_rows, rows_of_token, dropped = tables.route(codes, rows_per_rank)
    num_rows = [rows_per_rank] * ranks.size  # sent to, and received from, each rank
    state = _DispatchState(arguments, ranks, 0, knows_origins=False)
    wire = ranks.wire(arguments.x.device).type
    state.exchange(_runtime.RowExchange(ranks.group_name, wire, send_rows, rows_of_token, num_rows, num_rows), codes)
    num_local = len(ranks.experts)
    capacity = _NO_CAPACITY if arguments.capacity is None else arguments.capacity
    # A token may name one expert several times.
    max_copies = min(ranks.size * rows_per_rank * arguments.top_k, num_local * capacity) if num_local > 0 else 0
    *expansion, over_capacity = _runtime.expand_rows_on_device(
        state.codes, ranks.first_replica, num_local, None, capacity, max_copies
    )
    return state.dispatched(tuple(expansion), dropped + over_capacity)


class _DispatchState:
    """The rows of a dispatch that this rank holds: its own tokens at first, then those received by each exchange."""

    def __init__(self, arguments: Arguments, ranks: ExpertRanks, words_bytes: int, *, knows_origins: bool) -> None:
        self.arguments = arguments
        self.ranks = ranks
        self.x = x = arguments.x
        scores = arguments.scores
        self.scores = x.new_empty((x.shape[0], 0), dtype=torch.float32) if scores is None else scores
        self.scales = x.new_empty((x.shape[0], 0)) if arguments.scales is None else arguments.scales.detach()
        self.codes = torch.empty(0)
        # The origin of each row (`_origins_here`), if rows are not received in the order of ranks and tokens.
        self.origins: torch.Tensor | None = self._origins_here() if knows_origins else None
        self.anchor = torch.empty(0)
        self.exchanges: list[_runtime.RowExchange] = []
        self.payload_bytes = 0
        self.metadata_bytes = words_bytes

    def exchange(self, exchange: _runtime.RowExchange, codes: torch.Tensor) -> None:
        """Sends the rows by an exchange, and replaces them by the received rows. `codes` must be on the device of x."""
        others = [self.scales, codes]
        if self.origins is not None:
            others.append(self.origins.unsqueeze(1))
        row_bytes = self.x.shape[1] * self.x.element_size()
        record_bytes = _runtime.record_bytes([self.x, self.scores, *others])
        self.payload_bytes += exchange.num_received_from_others * row_bytes
        self.metadata_bytes += exchange.num_received_from_others * (record_bytes - row_bytes)
        step = f"dispatch, sending tokens ({self.x.dtype}[{self.x.shape[1]}]) to the ranks of their experts"
        received = Send.apply(exchange, step, self.arguments.gradients, self.x, self.scores, *others)  # type: ignore[no-untyped-call]
        self.anchor, self.x, self.scores, self.scales, self.codes, *origins = received
        self.origins = origins[0].reshape(-1).contiguous() if origins else None
        self.exchanges.append(exchange)

    def forward_in_node(self, nodes: Nodes) -> list[int]:
        """Forwards tokens within the node to the ranks of their experts. Returns the copies received from each rank."""
        device = self.x.device
        wire = self.ranks.wire(device)
        routes = _runtime.route_rows(self.codes.cpu().contiguous(), nodes.target_inside, nodes.size_inside)
        receive, copies, words_bytes = exchange_counts(nodes.inside_name, routes[2:], wire)
        self.metadata_bytes += words_bytes
        self.exchange(_exchange(nodes.inside_name, wire, routes, receive, device), self.codes)
        return copies

    def expand(self, num_copies: int) -> tuple[torch.Tensor, ...]:
        """Returns the copies of received tokens for the experts of this rank. `num_copies` is their exact number."""
        first, num_local = self.ranks.first_replica, len(self.ranks.experts)
        if self.x.device.type == "cpu":
            return _runtime.expand_rows(self.codes.contiguous(), first, num_local, self.origins)
        return _runtime.expand_rows_on_device(self.codes, first, num_local, self.origins, _NO_CAPACITY, num_copies)[:3]

    def dispatched(self, expansion: tuple[torch.Tensor, ...], dropped: int | torch.Tensor) -> Dispatched:
        """Returns the result of the dispatch. `expansion` is (pairs, copies, tokens per expert); see `Expansion`."""
        pairs, copies, tokens_per_expert = expansion
        rows = torch.div(pairs, self.arguments.top_k, rounding_mode="floor")
        copy_map = Expansion(pairs, rows, copies)
        scores = None if self.arguments.scores is None else self.scores
        handle = DispatchHandle(self.ranks, self.exchanges, copy_map, scores, self.anchor)
        handle.dropped = dropped
        handle.payload_bytes, handle.metadata_bytes = self.payload_bytes, self.metadata_bytes
        if self.arguments.scales is not None:
            handle.scales = _runtime.take_rows(self.scales, rows)
        return Dispatched(Expand.apply(copy_map, self.x), tokens_per_expert, handle)  # type: ignore[no-untyped-call]

    def _origins_here(self) -> torch.Tensor:
        """Returns the origin of each of this rank's tokens: its rank in the group * 2**40 + its index on this rank."""
        first = self.ranks.rank << 40
        return torch.arange(first, first + self.x.shape[0], device=self.x.device)


# -------------------------------------------------------------------------------------------------------- combine


@_outside_graphs
def combine(y: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
    """Sums the experts' rows of each token, weighted by its scores, and returns the sums to the tokens' ranks.

    Sums are taken on the ranks of the experts, then in the node if nodes are known, then on the token's rank, each in a
    fixed order, in float32 (float64 for float64), and rounded to the dtype of y. So the bits of the result do not
    depend on the order of arrival. With ``rows_per_rank``, or if the group does not communicate in host memory, `y` is
    checked on its own rank only, unless ``sw.debug.check_ranks`` is on.

    Args:
        y: ``[copies, any size]``: one row for each row that `dispatch` returned; float32, float64, bfloat16, float16.
        handle: the handle of the dispatch.

    Returns:
        ``[tokens, any size]``, in the dtype of y; zeros for a token without experts. Differentiable by y and scores. It
        requires a gradient on all ranks if an input does on any; where ranks do not compare `y`, always in grad mode.

    Raises:
        ValueError: y does not match the handle (RuntimeError on the other ranks); y differs between ranks in size or
            dtype. Without ``rows_per_rank`` all ranks raise, if the group communicates in host memory.
        torch.distributed.DistBackendError: a transfer failed or timed out; names rank, step and group.
    """
    if not isinstance(handle, DispatchHandle):
        raise argument_error("handle", "the handle that dispatch returned", f"a {type(handle).__name__}")
    y = waited_with_history(y)
    error = _error_in(y, handle)
    fields = {} if error is not None else {"size": y.shape[1], "dtype": _dtype_name(y.dtype)}
    if checking.is_on():
        _compare("combine", handle._ranks, fields, error)
    anchor = handle._anchor
    needs_backward = torch.is_grad_enabled()
    if handle._compares:
        has_gradient = needs_backward and any(getattr(t, "requires_grad", False) for t in (y, handle._scores, anchor))
        flags = handle._ranks.words.compare(Statement("combine", fields), error, torch.tensor([int(has_gradient)]))
        needs_backward = needs_backward and bool(flags.any())
    if error is not None:
        raise error
    counts.combines += 1
    sums: torch.Tensor = Contract.apply(handle._expansion, y, handle._scores)  # type: ignore[no-untyped-call]
    if needs_backward and not anchor.requires_grad:
        anchor = torch.empty(0, requires_grad=True)  # all ranks take part in the backward, also those without rows
    step = f"combine, returning sums ({y.dtype}[{y.shape[1]}]) to the ranks of the tokens"
    for exchange in reversed(handle._exchanges):
        sums = Collect.apply(exchange, step, sums, anchor)  # type: ignore[no-untyped-call]
    return sums


def _error_in(y: Any, handle: DispatchHandle) -> ValueError | None:
    """Returns the error if `y` does not match the handle's dispatch, or None."""
    try:
        argument_checks.check_tensor("y", y)
    except ValueError as error:
        return error
    copies, device = handle._expansion.pairs.shape[0], handle._expansion.pairs.device
    if y.ndim != 2 or y.shape[0] != copies or y.device != device:
        allowed = f"a matrix of one row for each of the {copies} rows that dispatch returned here, on {device}"
        return argument_error("y", allowed, f"shape {tuple(y.shape)} on {y.device}")
    if y.dtype not in _ROW_DTYPES:
        return argument_error("y", f"one of {_dtype_names(_ROW_DTYPES)}", y.dtype)
    return None
