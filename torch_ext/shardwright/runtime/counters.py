"""Counters of the calls, plans, fallbacks and bytes of this process, since its start or since `reset_stats`."""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import Any

from .._native import _planner, _runtime
from ..layouts.errors import argument_error
from . import layout_stats

_log = logging.getLogger("shardwright")


class _Counts:
    """The counters that are plain numbers. `stats` describes each."""

    __slots__ = (
        *("batched_tensors", "batches", "cache_hits", "calls", "combines", "dispatches", "dropped", "misfits", "plans"),
        *("products", "traced", "unplanned_steps", "views", "activations_cut", "activation_gathers"),
        *("changed_starts", "full_starts", "changed_bytes"),
    )

    def __init__(self) -> None:
        self.calls = self.cache_hits = self.misfits = self.plans = self.products = self.traced = 0
        self.dispatches = self.combines = self.dropped = self.unplanned_steps = 0
        self.batches = self.batched_tensors = self.views = 0
        self.activations_cut = self.activation_gathers = self.changed_starts = self.full_starts = self.changed_bytes = 0


counts = _Counts()
_reasons: Counter[str] = Counter()  # redistributes that were left to PyTorch, by reason
_view_reasons: Counter[str] = Counter()  # views that were left to PyTorch, by reason
_strided_reasons: Counter[str] = Counter()  # operators whose inputs were gathered, by operator
_break_reasons: Counter[str] = Counter()  # forwards left out of compiled graphs, by reason
_product_reasons: Counter[str] = Counter()  # products computed from decoded values, by reason


def stats(*, by: str | None = None) -> dict[str, Any]:
    """Returns the counters.

    Args:
        by: None, or ``"layout"`` for the redistributes that `sw.debug.record_layouts` recorded.

    Raises:
        ValueError: `by` is invalid.
        RuntimeError: ``by="layout"``, and nothing was recorded.

    Returns:
        With ``by="layout"``, a dict from layouts, such as ``"float32[8, 8] on dp=2: [S(0)] -> [R]"``, to a dict with
        ``calls``; ``bytes`` that this rank received, according to the plans; ``seconds``, the time that the calls took
        on the host; and ``slowest``, the longest of them. Transfers on a device, and of calls with ``async_op``, go on
        after a call returns. The pair with the longest total time comes first.

        Otherwise a dict with an entry for each counter, by name.

        - ``calls``: redistributes that shardwright ran.
        - ``traced``: redistributes that were recorded in graphs as operators.
        - ``misfits``: redistributes whose local tensor did not have the shape of its layout, and was cut or padded with
          zeros. Additional or missing dims of size 1 do not count.
        - ``fallbacks``: redistributes that were left to PyTorch; ``fallback_reasons`` counts them by reason. Until the
          next `reset_stats` each reason is logged once, with its first case, by the logger ``shardwright``.
        - ``plans``: plans made for redistributes.
        - ``cache_hits``: calls that found their executable in the cache.
        - ``plan_cache_hits``, ``plan_cache_misses``, ``plan_cache_size``: counts of the cache of `plan`.
        - ``bytes``: bytes that this rank received from others, according to the plans.
        - ``changed_starts``, ``full_starts``: starts of transfers with `only_changed` that sent only what changed, and
          that sent everything; the report of each start has the reason.
        - ``peer_bytes``: the part of ``bytes`` that was copied from peers' memory, if `prepare` made arenas; replays of
          graphs are not counted.
        - ``through_host``: programs on device tensors that ran in host memory because their groups are Gloo's.
        - ``staging_bytes``: memory of temporaries that is kept for the next run, on CPU at most 256 MiB;
          `release_staging` frees it.
        - ``batches``: calls of `redistribute_many`; ``batched_tensors``: the tensors that they moved.
        - ``products``: programs of matrix products that ran.
        - ``product_fallbacks``: products of 8-bit floats, on devices other than CPU, that were cast to float32 because
          the device's units for them could not be used; and products of weights that are gathered in MXFP8 or NVFP4 but
          were multiplied as dequantized rows. ``product_fallback_reasons`` counts them by reason.
        - ``dispatches``, ``combines``: calls of `sw.experts.dispatch` and `sw.experts.combine`.
        - ``dropped``: tokens of this rank that missed one of their experts because of a capacity, counted once per
          expert, if the host has the count: not with ``rows_per_rank``.
        - ``unplanned_steps``: steps of models under `fully_shard` that left the sequence of uses for which their
          schedule was made.
        - ``graph_breaks``: forwards of units under `fully_shard` that ran as eager code in a model that
          ``torch.compile`` compiles, so that its graph ends before them; ``graph_break_reasons`` counts them by reason.
        - ``activations_cut``: activations of which `sw.fsdp.checkpoint_cut` keeps a part; ``activation_gathers``: those
          that were gathered again.
        - ``views``: views that DTensor does by our rules without moving data, and products of the strided shards that
          such views make; ``view_fallbacks``: views that were left to PyTorch, ``view_fallback_reasons`` by reason.
        - ``strided_gathers``: operators whose inputs are gathered while views are on, because the inputs are strided
          shards that neither our rules nor PyTorch's are known to handle; ``strided_gather_reasons`` counts them by
          operator. The counters of views and strided gathers count an operator once for each combination of placements
          and sizes, because DTensor caches the answer.
    """
    if by is not None:
        if by != "layout":
            raise argument_error("by", "None or 'layout'", repr(by))
        return layout_stats.by_layout()
    planned = _planner.plan_cache_counts()
    cast = Counter(_runtime.cast_products()) + _product_reasons
    return {
        "calls": counts.calls,
        "products": counts.products,
        "product_fallbacks": sum(cast.values()),
        "product_fallback_reasons": dict(cast),
        "batches": counts.batches,
        "batched_tensors": counts.batched_tensors,
        "dispatches": counts.dispatches,
        "combines": counts.combines,
        "dropped": counts.dropped,
        "traced": counts.traced,
        "unplanned_steps": counts.unplanned_steps,
        "graph_breaks": sum(_break_reasons.values()),
        "graph_break_reasons": dict(_break_reasons),
        "activations_cut": counts.activations_cut,
        "activation_gathers": counts.activation_gathers,
        "misfits": counts.misfits,
        "fallbacks": sum(_reasons.values()),
        "fallback_reasons": dict(_reasons),
        "views": counts.views,
        "view_fallbacks": sum(_view_reasons.values()),
        "view_fallback_reasons": dict(_view_reasons),
        "strided_gathers": sum(_strided_reasons.values()),
        "strided_gather_reasons": dict(_strided_reasons),
        "plans": counts.plans,
        "cache_hits": counts.cache_hits,
        "plan_cache_hits": planned["hits"],
        "plan_cache_misses": planned["misses"],
        "plan_cache_size": planned["size"],
        "bytes": _runtime.counters()["received_bytes"] + counts.changed_bytes,
        "changed_starts": counts.changed_starts,
        "full_starts": counts.full_starts,
        "peer_bytes": _runtime.counters()["peer_bytes"],
        "through_host": _runtime.counters()["through_host"],
        "staging_bytes": _runtime.cached_staging_bytes(),
    }


def reset_stats() -> None:
    """Sets all counters to zero. Caches are kept."""
    counts.__init__()  # type: ignore[misc]
    for reasons in (_reasons, _view_reasons, _strided_reasons, _break_reasons, _product_reasons):
        reasons.clear()
    layout_stats.reset()
    _runtime.reset_counters()
    _planner.reset_plan_cache_counts()


def count_fallback(reason: str, example: str = "") -> None:
    """Counts a redistribute that is left to PyTorch. Logs the first case of each reason, with `example` in full."""
    _reasons[reason] += 1
    if _reasons[reason] == 1:
        _log.warning("redistribute goes to PyTorch's own path: %s", example or reason)


def count_view_fallback(reason: str, example: str = "") -> None:
    """Counts a view that is left to PyTorch. Logs the first case of each reason, with `example` in full."""
    _view_reasons[reason] += 1
    if _view_reasons[reason] == 1:
        _log.info("view is left to PyTorch: %s", example or reason)


def count_strided_gather(operator: str) -> None:
    """Counts an operator whose strided shards are gathered before it. Logs the first case of each operator."""
    _strided_reasons[operator] += 1
    if _strided_reasons[operator] == 1:
        _log.info("inputs that are strided shards are gathered for %s", operator)


def count_product_fallback(reason: str) -> None:
    """Counts a product of codes and scales that is computed from their decoded values."""
    _product_reasons[reason] += 1


def count_graph_break(reason: str, example: str) -> None:
    """Counts a forward that a compiled graph leaves out. Logs the first case of each reason, with `example`."""
    _break_reasons[reason] += 1
    if _break_reasons[reason] == 1:
        _log.info("a graph breaks at a unit under fully_shard: %s: %s", example, reason)


def count_misfit(description: str) -> None:
    """Counts a local tensor that contradicts its layout, and logs the first one."""
    counts.misfits += 1
    if counts.misfits == 1:
        _log.warning("redistribute of a DTensor whose parts contradict its spec: %s", description)


def cause_of(error: Exception) -> str:
    """Returns an error's text without values and remedy, so that all errors of one cause have the same text.

    "chunks must be in [1, 4], got 7 on mesh 'a'; pass fewer" becomes "chunks must be in ..., got ... on mesh ...".
    """
    text = " ".join(str(error).split())
    while (shorter := _INNERMOST_BRACKETS.sub("...", text)) != text:
        text = shorter
    return _VALUES.sub("...", text.partition(";")[0]).strip()


_INNERMOST_BRACKETS = re.compile(r"\[[^][(){}]*\]|\([^][(){}]*\)|\{[^][(){}]*\}")  # brackets without brackets inside
# Quoted texts, words with digits, and "...", with any further "..." behind them.
_VALUES = re.compile(r"""(?:'[^']*'|"[^"]*"|[-\w.]*\d[-\w.]*|\.\.\.)(?:(?:\s*,\s*|\s+)\.\.\.)*""")
