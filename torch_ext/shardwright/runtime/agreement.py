"""Comparisons between ranks: each states what it is about to do, and if they differ, all raise the same error.

There are two ways to tell the others, against two dangers:

    words   a few numbers in one small exchange. It costs little, but all ranks must come: for what is about to travel
            anyway. Texts follow only if digests differ. `GroupWords` is an all-to-all that takes its turn in the issue
            order. `MeshWords` is an all-reduce over each dim of a mesh: at the end of every backward, what a rank
            receives must not grow with the number of ranks.
    store   texts in the store of torch.distributed (`StoreTexts`). It takes milliseconds, but names the ranks that do
            not come instead of hanging: for the debug mode, moves between meshes, and jobs that `connect` joins.

A rank whose arguments are not allowed takes part, states why, and raises with the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from .._native import _runtime
from . import groups

# Limits of what an error shows.
_MAX_LINES = 20
_MAX_RANKS = 16
_MAX_CHARACTERS = 300  # of a value
_CHARACTERS_BEFORE = 100  # of them, those before the first that differs

_WORD_BYTES = 8
HEAD_WORDS = 2  # words of a statement: the digest and the length of its text

V = TypeVar("V")
# A rank, or the name of a process among several jobs.
R = TypeVar("R", bound=int | str)


class Statement(NamedTuple):
    """The statement of one rank before a call.

    `fields` are the same on all ranks that have some; None goes with any value. `refusals` say by argument why this
    rank cannot make the call; those that are None say nothing. An error says that the ranks `differ`, and ends with
    the remedy.
    """

    call: str
    fields: Mapping[str, object] = {}
    refusals: Mapping[str, str | None] = {}
    differ: str = "ask for different things, nothing was sent"
    remedy: str = ""

    def to_json(self) -> str:
        fields = {name: None if value is None else str(value) for name, value in self.fields.items()}
        return json.dumps([self.call, fields, {name: why for name, why in self.refusals.items() if why is not None}])


def report(mine: Statement, said: Mapping[R, str], where: str) -> str:
    """Returns the error of a comparison, or "" if nothing is wrong. `said`: statements as JSON, by rank."""
    parts = {text: json.loads(text) for text in set(said.values())}

    def each(part: int) -> dict[R, Any]:
        return {rank: parts[text][part] for rank, text in said.items() if parts[text][part]}

    calls, fields, refusals = each(0), each(1), each(2)
    if len(set(calls.values())) > 1:  # other calls have other fields
        fields, refusals = {rank: {"call": call} for rank, call in calls.items()}, {}
    lines = [*_lines(fields, "not given", least=2), *_lines(refusals, None, least=1)]
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"  and {len(lines) - _MAX_LINES} more"]
    found = f"the ranks {mine.differ}"
    if refusals:
        found = f"on {ranks_text(list(refusals))} the arguments are not allowed, nothing was sent"
    return "\n".join([f"shardwright: {mine.call}: {found}{where}", *lines, mine.remedy]).rstrip() if lines else ""


def _lines(said: Mapping[R, Mapping[str, str | None]], otherwise: str | None, least: int) -> list[str]:
    """Returns a line for each name with at least so many values. Ranks without one have the other value."""
    lines = []
    for name in dict.fromkeys(name for one in said.values() for name in one):
        values = {rank: value for rank, one in said.items() if (value := one.get(name, otherwise)) is not None}
        if len(set(values.values())) >= least:
            lines.append(f"  {name}: {who_said(values)}")
    return lines


def by_value(said: Mapping[R, V]) -> dict[V, list[R]]:
    """Returns the ranks that said each value, in the order of their first ranks."""
    found: dict[V, list[R]] = {}
    for rank, value in said.items():
        found.setdefault(value, []).append(rank)
    return found


def who_said(said: Mapping[R, str]) -> str:
    """Returns "4 on ranks [0, 2]; 8 on ranks [1]". Of long values it has the part around the first difference."""
    texts = by_value(said)
    first = len(os.path.commonprefix(list(texts)))
    return "; ".join(f"{_around(text, first)} on {ranks_text(ranks)}" for text, ranks in texts.items())


def ranks_text(ranks: Sequence[R]) -> str:
    """Returns "ranks [0, 1]", or the names as they are. Long lists are cut."""
    shown = ", ".join(map(str, ranks[:_MAX_RANKS]))
    shown += f", ... {len(ranks)} in all" if len(ranks) > _MAX_RANKS else ""
    return shown if isinstance(ranks[0], str) else f"ranks [{shown}]"


def _around(text: str, place: int) -> str:
    begin = max(place - _CHARACTERS_BEFORE, 0) if len(text) > _MAX_CHARACTERS else 0
    end = begin + _MAX_CHARACTERS
    return f"{'... ' if begin else ''}{text[begin:end]}{' ...' if end < len(text) else ''}"


# ------------------------------------------------------------------------------------------------------------- words


class _Words(ABC):
    """Ranks that tell each other words.

    Attributes:
        ranks: as errors name them.
        own: the place of this rank among them.
    """

    ranks: Sequence[int]
    own: int

    @abstractmethod
    def exchange(self, step: str, mine: torch.Tensor) -> torch.Tensor:
        """Returns a row of int64 from each rank. `mine`: a row for all ranks, or one for each of them."""

    def compare(
        self, mine: Statement, refusal: Exception | None = None, more: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compares statements. All ranks call.

        Args:
            refusal: the error that this rank raises after it has told the others.
            more: words that travel along, as in `exchange`.

        Returns:
            The words of `more` from each rank.

        Raises:
            RuntimeError: another rank cannot make the call.
            ValueError: statements differ. All ranks raise.
        """
        if refusal is not None:
            mine = mine._replace(fields={}, refusals={"arguments": str(refusal)})
        text = mine.to_json().encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=_WORD_BYTES).digest(), "big", signed=True)
        head = torch.tensor([digest, len(text)])
        sent = head if more is None else torch.cat([head.expand(*more.shape[:-1], HEAD_WORDS), more], -1)
        step = f"{mine.call}, comparing what the ranks ask for"
        heard = self.exchange(step, sent)
        if refusal is None and bool((heard[:, 0] == digest).all()):
            return heard[:, HEAD_WORDS:]
        size = -(-int(heard[:, 1].max()) // _WORD_BYTES) * _WORD_BYTES
        padded = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.int64)
        texts = [bytes(row.view(torch.uint8).tolist()).decode() for row in self.exchange(step, padded)]
        if refusal is not None:
            raise refusal
        said = dict(zip(self.ranks, texts, strict=True))
        kind = RuntimeError if any(json.loads(text)[2] for text in texts) else ValueError
        raise kind(report(mine, said, f" (this is rank {self.ranks[self.own]})"))


class GroupWords(_Words):
    """The ranks of a process group. Does not keep the group alive."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = groups.ranks_in_meshes(group)
        self.own = dist.get_rank(group)
        self.name: str = group.group_name
        self.moves_nothing = groups.moves_nothing(group)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        # The group alone decides it, because ranks may be called with tensors on different devices.
        self.device = torch.device("cpu") if accelerator is None or _has_cpu(group) else accelerator

    def exchange(self, step: str, mine: torch.Tensor) -> torch.Tensor:
        rows = mine.expand(len(self.ranks), -1)
        if self.moves_nothing:
            return rows
        return _runtime.exchange_words(self.name, step, rows, str(self.device))


class MeshWords(_Words):
    """The ranks of a DeviceMesh whose tensors are on this device."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.ranks = mesh.mesh.flatten().tolist()
        self.own = self.ranks.index(dist.get_rank())
        self._mesh, self._device = mesh, device

    def exchange(self, step: str, mine: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(len(self.ranks), mine.shape[-1], dtype=torch.int64)
        table[self.own] = mine
        return self._all_reduce(table, dist.ReduceOp.SUM)  # each row is one rank's, so it arrives once

    def largest(self, mine: bytes | Sequence[int]) -> list[int]:
        """Returns each value's largest over the ranks. All of them call, with as many."""
        is_bytes = isinstance(mine, bytes)
        said = torch.tensor(list(mine), dtype=torch.uint8 if is_bytes else torch.int64)
        found: list[int] = self._all_reduce(said, dist.ReduceOp.MAX).tolist()
        return found

    def _all_reduce(self, said: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """If a group of the mesh has a backend for CPU, the host does not wait for the device."""
        mesh = self._mesh
        if mesh.size() == 1:
            return said
        # Ours that are under way start all they communicate before, on all ranks alike.
        _runtime.drain([group.group_name for group in mesh.get_all_groups()])
        for group in mesh.get_all_groups():
            sent = said if _has_cpu(group) else said.to(self._device)
            dist.all_reduce(sent, op, group=group)
            said = sent.cpu()
        return said


def _has_cpu(group: dist.ProcessGroup) -> bool:
    return any(kind.type == "cpu" for kind in group._device_types)


# ------------------------------------------------------------------------------------------------------------- store


class StoreTexts:
    """Ranks that tell each other texts through a store which all of them reach.

    The rounds of each set of ranks are counted. A rank that begins a round has read all of the round before, so the
    keys of the one before that are not needed any more:

        3/7     what rank 7 says in round 3
        3       the number of ranks that have said something
        3/all   1 if all say the same, otherwise 0; there once all have said something
    """

    def __init__(self, store: dist.Store) -> None:
        self.rounds: Counter[tuple[int | str, ...]] = Counter()  # of each set of ranks
        self._store = groups.client_of(store)

    def exchange(self, call: str, mine: str, ranks: tuple[R, ...], own: R, timeout: timedelta) -> dict[R, str]:
        """Returns the text of each rank. Raises RuntimeError that names the ranks that do not come in time."""
        number = self.rounds[ranks]
        self.rounds[ranks] += 1
        name = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()[:16]
        store = dist.PrefixStore(name, self._store)
        keys = [f"{number}/{rank}" for rank in ranks]
        store.set(f"{number}/{own}", mine)
        if store.add(str(number), 1) == len(ranks):
            store.set(f"{number}/all", str(int(len(set(store.multi_get(keys))) == 1)))
        try:
            store.wait([f"{number}/all"], timeout)
        except RuntimeError as error:
            missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
            if missing:
                who = f"rank {own}" if isinstance(own, int) else own
                raise RuntimeError(
                    f"shardwright: {who} waited {timeout.total_seconds():g} s for {ranks_text(missing)} to come to "
                    f"{call}, number {number + 1} on {ranks_text(ranks)}"
                ) from error
        are_same = store.get(f"{number}/all") == b"1"
        said = [mine] * len(ranks) if are_same else [text.decode() for text in store.multi_get(keys)]
        for key in (f"/{own}", *(("", "/all") if own == ranks[0] else ())) if number >= 2 else ():
            store.delete_key(f"{number - 2}{key}")
        return dict(zip(ranks, said, strict=True))

    def compare(
        self, mine: Statement, ranks: tuple[int, ...], own: int, timeout: timedelta | None = None, about: str = ""
    ) -> None:
        """Raises RuntimeError on all of these ranks if statements differ or hold refusals. All of them call."""
        call = f"{mine.call} ({about})" if about else mine.call
        said = self.exchange(call, mine.to_json(), ranks, own, timeout or groups.default_timeout())
        where = f" (number {self.rounds[ranks]} on {ranks_text(ranks)}; this is rank {own})"
        if error := report(mine, said, where):
            raise RuntimeError(error)


_of_worlds: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, StoreTexts]] = weakref.WeakKeyDictionary()
groups.when_gone.append(_of_worlds.clear)


def in_default_store(name: str) -> StoreTexts:
    """Returns the texts of this name in the store of the default group."""
    groups.note_world()
    assert dist.group.WORLD is not None
    known = _of_worlds.setdefault(dist.group.WORLD, {})
    if name not in known:
        known[name] = StoreTexts(dist.PrefixStore(f"shardwright/{name}", distributed_c10d._get_default_store()))
    return known[name]
