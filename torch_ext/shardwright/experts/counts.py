"""Numbers that ranks exchange before they send tokens or sums: digests of their arguments, and counts of rows.

They are a few numbers per rank, in one small all-to-all, so every dispatch and most combines compare. A rank with
invalid arguments takes part in it too, and all ranks raise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._native import _runtime
from ..layouts.errors import argument_error
from ..runtime.agreement import HEAD_WORDS, Statement
from .ranks import ExpertGroup, ExpertRanks

_WORD_BYTES = 8

# Numbers of rows, and of (row, expert) pairs, by rank.
Counts = tuple[Sequence[int], Sequence[int]]


def compare(
    ranks: ExpertGroup, fields: Mapping[str, Any], error: Exception | None, counts: Counts | None = None
) -> tuple[list[int], list[int], int]:
    """Compares the fields of all ranks and exchanges counts. All ranks must call.

    Args:
        ranks: the group.
        fields: values that must be equal on all ranks.
        error: the error in this rank's arguments, if any.
        counts: the numbers of rows and pairs that this rank sends to each rank; None means none.

    Returns:
        The numbers of rows and pairs that each rank sends to this rank, and the bytes received for the comparison.

    Raises:
        error: if it is given.
        RuntimeError: another rank has an error.
        ValueError: fields differ; raised on all ranks.
    """
    words = torch.zeros(ranks.size, 2, dtype=torch.int64) if counts is None else torch.tensor(counts).t()
    received = ranks.words.compare(Statement("dispatch", fields), error, words)
    return received[:, 0].tolist(), received[:, 1].tolist(), _received_bytes(ranks.size, HEAD_WORDS + 2)


def exchange_counts(group_name: str, counts: Counts, device: torch.device) -> tuple[list[int], list[int], int]:
    """Exchanges counts. Returns the numbers of rows and pairs that each rank sends to this rank, and the bytes
    received.

    `counts` are the numbers that this rank sends to each rank. Counts are sent from `device`.
    """
    words = torch.tensor(counts).t()
    received = _runtime.exchange_words(group_name, "dispatch, counting rows", words, str(device))
    return received[:, 0].tolist(), received[:, 1].tolist(), _received_bytes(*words.shape)


def exchange_capacity(
    ranks: ExpertRanks, codes: torch.Tensor, capacity: int, drops: bool
) -> tuple[torch.Tensor, int, int]:
    """Drops codes beyond the capacity of replicas. Tokens are taken in the order of ranks, then of tokens on a rank.

    Returns the remaining codes, the number of dropped codes, and the bytes received for counts. Raises ValueError on
    all ranks if codes exceed the capacity and `drops` is False. Example with capacity 3: ranks 0 and 1 have 2 codes
    each for a replica. Rank 0 keeps both. Rank 1 receives the count 2 of rank 0, keeps its first code, and drops the
    second.
    """
    placement = ranks.placement
    counts = _runtime.count_by_replica(codes, placement.num_replicas)
    received = ranks.words.exchange("dispatch, counting tokens by expert", counts)
    totals = received.sum(0)
    if not drops and bool((totals > capacity).any()):
        replica = int(totals.argmax())
        rank = placement.rank_of_replica[replica]
        expert = ranks.expert_of(replica)
        least = f"at least {int(totals[replica])} for expert {expert} on rank {ranks.ranks[rank]}"
        raise argument_error("capacity", least, f"{capacity}; overflow='drop' drops later tokens")
    left, dropped = _runtime.drop_beyond_capacity(codes, received[: ranks.rank].sum(0), capacity)
    return left, dropped, _received_bytes(*received.shape)


def _received_bytes(num_ranks: int, num_words: int) -> int:
    """Returns the bytes received from other ranks if each rank sends `num_words` words to each."""
    return (num_ranks - 1) * num_words * _WORD_BYTES
