"""What ranks tell each other before tokens or sums travel: that they ask for the same, and how much each will send.

All of it is a few numbers for each rank, in one small all-to-all, so every dispatch and most combines compare. A rank
whose arguments are not allowed takes part in it too, and all raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._native import _runtime
from .ranks import ExpertGroup, ExpertRanks

# In an order that all ranks share.
_DTYPES: list[torch.dtype | None] = [
    None,
    *sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str),
]
_WORD_BYTES = 8

# Rows and pairs of a row and an expert, by rank.
Counts = tuple[Sequence[int], Sequence[int]]


class Said(NamedTuple):
    """What must be the same on all ranks of a dispatch."""

    hidden_size: int = 0
    dtype: torch.dtype | None = None
    in_host_memory: bool = False  # whether tokens travel there
    top_k: int = 0
    num_experts: int = 0
    placement: int = 0
    ranks_per_node: int = 0
    capacity: int = 0
    drops: bool = False
    rows_per_rank: int = 0
    scores: torch.dtype | None = None
    num_scales: int = 0
    scales: torch.dtype | None = None
    x_has_gradient: bool = False
    scores_have_gradient: bool = False


class SaidOfSums(NamedTuple):
    """What must be the same on all ranks of a combine."""

    size: int = 0
    dtype: torch.dtype | None = None


_ARE_DTYPES = ("dtype", "scores", "scales")
_ARE_FLAGS = ("drops", "in_host_memory", "x_has_gradient", "scores_have_gradient")


def texts_of(said: Said | SaidOfSums) -> dict[str, str]:
    return {name: _text(name, word) for name, word in zip(said._fields, _words_of(said), strict=True)}


def _words_of(said: Said | SaidOfSums) -> list[int]:
    return [_DTYPES.index(value) if name in _ARE_DTYPES else int(value) for name, value in said._asdict().items()]


def _text(name: str, word: int) -> str:
    if name in _ARE_DTYPES:
        return str(_DTYPES[word]).removeprefix("torch.")
    if name in _ARE_FLAGS:
        return str(bool(word))
    if name in ("capacity", "rows_per_rank") and word < 0:
        return "None"
    return f"{word & ((1 << 64) - 1):016x}" if name == "placement" else str(word)


def agree(
    ranks: ExpertGroup, kind: str, said: Said | SaidOfSums, refusal: Exception | None, counts: Counts | None = None
) -> tuple[list[int], list[int], int]:
    """Rows and pairs that each rank sends here, and the bytes that brought this. `kind`: "dispatch" or "combine".

    Raises `refusal` if there is one, RuntimeError if another rank has one, ValueError on all ranks where they differ.
    """
    zeros = [0] * ranks.size
    rows, pairs = counts or (zeros, zeros)
    mine = [int(refusal is not None), *_words_of(said)]
    words = torch.tensor([[*mine, rows[r], pairs[r]] for r in range(ranks.size)])
    step = f"{kind}, comparing what the ranks ask for"
    heard = _runtime.exchange_words(ranks.group_name, step, words, str(ranks.words())).tolist()
    if refusal is not None:
        raise refusal
    refusing = [ranks.ranks[r] for r, one in enumerate(heard) if one[0]]
    if refusing:
        raise RuntimeError(
            f"shardwright: {kind}: on ranks {refusing} the arguments are not allowed, as the error there says; "
            f"nothing was sent (this is rank {ranks.ranks[ranks.rank]})"
        )
    _check_same(ranks, kind, said._fields, [one[1 : 1 + len(said)] for one in heard])
    return [one[-2] for one in heard], [one[-1] for one in heard], _received_bytes(words)


def _check_same(ranks: ExpertGroup, kind: str, names: Sequence[str], heard: list[list[int]]) -> None:
    differing = []
    for i, name in enumerate(names):
        ranks_by_word: dict[int, list[int]] = {}
        for rank, words in zip(ranks.ranks, heard, strict=True):
            ranks_by_word.setdefault(words[i], []).append(rank)
        if len(ranks_by_word) > 1:
            said = "; ".join(f"{_text(name, word)} on ranks {those}" for word, those in ranks_by_word.items())
            differing.append(f"  {name}: {said}")
    if differing:
        raise ValueError(
            f"shardwright: {kind}: the ranks ask for different things, nothing was sent (this is rank "
            f"{ranks.ranks[ranks.rank]})\n" + "\n".join(differing)
        )


def exchange_counts(group_name: str, counts: Counts, device: torch.device) -> tuple[list[int], list[int], int]:
    """Rows and pairs that each rank of a group sends here, and the bytes that brought this."""
    words = torch.tensor(counts).t()
    heard = _runtime.exchange_words(group_name, "dispatch, counting rows", words, str(device))
    return heard[:, 0].tolist(), heard[:, 1].tolist(), _received_bytes(words)


def exchange_capacity(
    ranks: ExpertRanks, codes: torch.Tensor, capacity: int, drops: bool, device: torch.device
) -> tuple[torch.Tensor, int, int]:
    """The codes that are left where each replica takes `capacity` tokens, in the order of ranks and tokens; how many
    are not; and the bytes that brought this. Raises ValueError on all ranks where nothing may be dropped."""
    placement = ranks.placement
    asked = _runtime.count_by_replica(codes, placement.num_replicas)
    words = asked.expand(ranks.size, -1)
    heard = _runtime.exchange_words(ranks.group_name, "dispatch, counting tokens by expert", words, str(device))
    totals = heard.sum(0)
    if not drops and bool((totals > capacity).any()):
        replica = int(totals.argmax())
        rank = placement.rank_of_replica[replica]
        expert = ranks.expert_of(replica)
        raise ValueError(
            f"capacity: expert {expert} on rank {ranks.ranks[rank]} is asked for {int(totals[replica])} times; allowed "
            f"are {capacity} (overflow='drop' drops later tokens)"
        )
    left, dropped = _runtime.drop_beyond(codes, heard[: ranks.rank].sum(0), capacity)
    return left, dropped, _received_bytes(words)


def _received_bytes(words: torch.Tensor) -> int:
    return (words.shape[0] - 1) * words.shape[1] * _WORD_BYTES
