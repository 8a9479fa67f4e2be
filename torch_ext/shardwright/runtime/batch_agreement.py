"""What ranks tell each other before a batch is first run: that all ask for the same, and are allowed to.

Batches are compared by digests of their beginnings. If they differ, a search by halves finds the first item that does,
in as many small exchanges on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .._native import _planner, _runtime
from . import executables

_SETTINGS = ("the number of items", "bucket_bytes or buckets", "the device", "whether out is given")
_STEP = "redistribute_many, comparing what the ranks ask for"


def agree(
    batch: _planner.Batch | None,
    refusal: Exception | None,
    device: torch.device,
    has_out: bool,
    group: dist.ProcessGroup | None,
) -> None:
    """Returns if all ranks of the group have equal batches. All of them must call.

    Raises `refusal` if there is one, RuntimeError if another rank has one, ValueError on all ranks where they differ.
    """
    carrier = group if group is not None else dist.group.WORLD
    assert carrier is not None
    digests = [_signed(digest) for digest in (batch.digests() if batch is not None else [0])]
    items = len(digests) - 1
    kind = ("cpu", "cuda").index(device.type) if device.type in ("cpu", "cuda") else 2
    words = [int(refusal is not None), items, digests[0], kind, int(has_out), digests[-1]]
    heard = exchange(carrier, words)
    if refusal is not None:
        raise refusal
    me = dist.get_rank(carrier)
    if refusing := [rank for rank, said in enumerate(heard) if said[0]]:
        raise RuntimeError(
            f"shardwright: redistribute_many: on ranks {refusing} the arguments are not allowed, as the error there "
            f"says; nothing was sent (this is rank {me})"
        )
    for place, what in enumerate(_SETTINGS, start=1):
        _check_same(what, [said[place] for said in heard], me)
    if len({said[-1] for said in heard}) == 1:
        return
    # The digests of the first `low` items agree on all ranks, those of the first `high` do not.
    low, high = 0, items
    while high - low > 1:
        middle = (low + high) // 2
        same = len({said[0] for said in exchange(carrier, [digests[middle]])}) == 1
        low, high = (middle, high) if same else (low, middle)
    said = [one[0] for one in exchange(carrier, [digests[high]])]
    assert batch is not None
    raise ValueError(
        f"shardwright: redistribute_many: the ranks ask for different things, nothing was sent. The first item that "
        f"differs is number {low}: {who_said_what(said)}; rank {me} has {batch.item_text(low)}"
    )


def _check_same(what: str, said: Sequence[int], me: int) -> None:
    if len(set(said)) > 1:
        remedy = "; device= says where ranks without tensors have theirs" if what == "the device" else ""
        values = f" ({', '.join(map(str, said))} by rank)" if what == _SETTINGS[0] else ""
        raise ValueError(
            f"shardwright: redistribute_many: {what} differs{values}: {who_said_what(said)}; nothing was sent "
            f"(this is rank {me}){remedy}"
        )


def who_said_what(said: Sequence[int]) -> str:
    """Returns which ranks said the same, the largest group first."""
    ranks_by_word: dict[int, list[int]] = {}
    for rank, word in enumerate(said):
        ranks_by_word.setdefault(word, []).append(rank)
    return " differ from ".join(
        f"ranks {ranks}" for ranks in sorted(ranks_by_word.values(), key=lambda ranks: (len(ranks), ranks[0]))
    )


def exchange(carrier: dist.ProcessGroup, words: list[int], step: str = _STEP) -> list[list[int]]:
    """Returns the words of every rank. All ranks of the group must call, with as many words."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    on_host = accelerator is None or executables.communicates_on("cpu", carrier)
    device = torch.device("cpu") if on_host or accelerator is None else accelerator
    rows = torch.tensor([words] * dist.get_world_size(carrier), dtype=torch.int64)
    heard: list[list[int]] = _runtime.exchange_words(carrier.group_name, step, rows, str(device)).tolist()
    return heard


def _signed(digest: int) -> int:
    return digest - (1 << 64) if digest >= 1 << 63 else digest
