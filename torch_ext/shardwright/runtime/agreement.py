"""Comparisons between ranks: each rank states what it is about to do. If statements differ, all raise the same error.

There are two transports:

    words   a few integers in one small exchange. It is cheap, but all ranks must take part, so it serves calls that
            communicate anyway. Texts are sent only if digests differ. `GroupWords` is an all-to-all in the issue order
            of transfers. `MeshWords` is an all-reduce over each dim of a mesh: at the end of every backward, the bytes
            that a rank receives must not grow with the number of ranks.
    store   texts in the store of torch.distributed (`StoreTexts`). It takes milliseconds, but names missing ranks
            instead of hanging. It serves the debug mode, moves between meshes, and jobs that `connect` joins.

A rank with invalid arguments takes part, states the reason, and raises with the others.
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

# Limits on the length of an error.
_MAX_LINES = 20
_MAX_RANKS = 16
_MAX_CHARACTERS = 300  # shown of one value
_CHARACTERS_BEFORE = 100  # shown before the first character that differs

_WORD_BYTES = 8
HEAD_WORDS = 2  # words of a statement: the digest and the length of its text

V = TypeVar("V")  # the type of a value that ranks may differ in
# The type of a rank; str for the name of a process among several jobs.
R = TypeVar("R", bound=int | str)


class Statement(NamedTuple):
    """The statement of one rank before a call.

    `fields` must be equal on all ranks that have any; None matches any value. `errors` maps an argument to the reason
    why this rank cannot make the call, or to None. The error reads "the ranks <mismatch>", and ends with the remedy.
    """

    call: str  # name of the call, for errors
    fields: Mapping[str, object] = {}
    errors: Mapping[str, str | None] = {}
    mismatch: str = "differ, nothing was sent"
    remedy: str = ""

    def to_json(self) -> str:
        """Returns [call, fields, errors] as JSON, without errors that are None."""
        fields = {name: None if value is None else str(value) for name, value in self.fields.items()}
        return json.dumps([self.call, fields, {name: why for name, why in self.errors.items() if why is not None}])


def report(mine: Statement, statements: Mapping[R, str], where: str) -> str:
    """Returns the text of an error, or "" if all ranks agree. `statements` maps each rank to its statement as JSON."""
    parts = {text: json.loads(text) for text in set(statements.values())}

    def each(part: int) -> dict[R, Any]:
        """Returns one part of the statements by rank: 0 calls, 1 fields, 2 argument errors. Leaves out empty ones."""
        return {rank: parts[text][part] for rank, text in statements.items() if parts[text][part]}

    calls, fields, errors = each(0), each(1), each(2)
    if len(set(calls.values())) > 1:  # other calls have other fields
        fields, errors = {rank: {"call": call} for rank, call in calls.items()}, {}
    lines = [*_lines(fields, "not given", least=2), *_lines(errors, None, least=1)]
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"  and {len(lines) - _MAX_LINES} more"]
    found = f"the ranks {mine.mismatch}"
    if errors:
        found = f"on {ranks_text(list(errors))} the arguments are not allowed, nothing was sent"
    return "\n".join([f"shardwright: {mine.call}: {found}{where}", *lines, mine.remedy]).rstrip() if lines else ""


def _lines(statements: Mapping[R, Mapping[str, str | None]], otherwise: str | None, least: int) -> list[str]:
    """Returns a line for each name with at least `least` different values.

    A rank without the name counts with the value `otherwise`, or is left out if that is None.
    """
    lines = []
    for name in dict.fromkeys(name for row in statements.values() for name in row):
        values = {rank: value for rank, row in statements.items() if (value := row.get(name, otherwise)) is not None}
        if len(set(values.values())) >= least:
            lines.append(f"  {name}: {values_text(values)}")
    return lines


def by_value(statements: Mapping[R, V]) -> dict[V, list[R]]:
    """Returns the ranks of each value, ordered by their first ranks."""
    ranks_by_value: dict[V, list[R]] = {}
    for rank, value in statements.items():
        ranks_by_value.setdefault(value, []).append(rank)
    return ranks_by_value


def values_text(statements: Mapping[R, str]) -> str:
    """Returns a text such as "4 on ranks [0, 2]; 8 on ranks [1]". Long values are cut around the first difference."""
    texts = by_value(statements)
    first = len(os.path.commonprefix(list(texts)))
    return "; ".join(f"{_excerpt(text, first)} on {ranks_text(ranks)}" for text, ranks in texts.items())


def ranks_text(ranks: Sequence[R]) -> str:
    """Returns "ranks [0, 1]", or the names of processes. Long lists are cut."""
    shown = ", ".join(map(str, ranks[:_MAX_RANKS]))
    shown += f", ... {len(ranks)} in all" if len(ranks) > _MAX_RANKS else ""
    return shown if isinstance(ranks[0], str) else f"ranks [{shown}]"


def _excerpt(text: str, index: int) -> str:
    """Returns a long text cut to _MAX_CHARACTERS characters, from shortly before index `index` on."""
    begin = max(index - _CHARACTERS_BEFORE, 0) if len(text) > _MAX_CHARACTERS else 0
    end = begin + _MAX_CHARACTERS
    return f"{'... ' if begin else ''}{text[begin:end]}{' ...' if end < len(text) else ''}"


# ------------------------------------------------------------------------------------------------------------- words


class _Words(ABC):
    """Ranks that exchange words (int64).

    Attributes:
        ranks: the ranks, as errors name them.
        own: the index of this rank in `ranks`.
    """

    ranks: Sequence[int]
    own: int

    @abstractmethod
    def exchange(self, step: str, mine: torch.Tensor) -> torch.Tensor:
        """Returns a matrix with the row of words that each rank sent here. `step` names the exchange in errors.

        `mine` is one row, sent to every rank, or (not for `MeshWords`) a matrix with one row per receiver.
        """

    def compare(
        self, mine: Statement, refusal: Exception | None = None, more: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compares the statements of all ranks. All ranks must call.

        Args:
            mine: the statement of this rank.
            refusal: an error in this rank's arguments. The other ranks are told; this rank raises it.
            more: further words to send, of the form that `exchange` takes.

        Returns:
            A matrix with the words of `more` from each rank.

        Raises:
            RuntimeError: another rank has invalid arguments.
            ValueError: the statements differ. All ranks raise it.
        """
        if refusal is not None:
            mine = mine._replace(fields={}, errors={"arguments": str(refusal)})
        text = mine.to_json().encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=_WORD_BYTES).digest(), "big", signed=True)
        head = torch.tensor([digest, len(text)])
        sent = head if more is None else torch.cat([head.expand(*more.shape[:-1], HEAD_WORDS), more], -1)
        step = f"{mine.call}, comparing arguments"
        received = self.exchange(step, sent)
        if refusal is None and bool((received[:, 0] == digest).all()):
            return received[:, HEAD_WORDS:]
        size = -(-int(received[:, 1].max()) // _WORD_BYTES) * _WORD_BYTES
        padded = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.int64)
        texts = [bytes(row.view(torch.uint8).tolist()).decode() for row in self.exchange(step, padded)]
        if refusal is not None:
            raise refusal
        statements = dict(zip(self.ranks, texts, strict=True))
        kind = RuntimeError if any(json.loads(text)[2] for text in texts) else ValueError
        raise kind(report(mine, statements, f" (this is rank {self.ranks[self.own]})"))


class GroupWords(_Words):
    """Words over a process group. Does not keep the group alive."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = groups.ranks_in_meshes(group)
        self.own = dist.get_rank(group)
        self.name: str = group.group_name
        self.moves_nothing = groups.moves_nothing(group)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        # The group alone decides the device, because ranks may pass tensors on different devices.
        self.device = torch.device("cpu") if accelerator is None or _has_cpu(group) else accelerator

    def exchange(self, step: str, mine: torch.Tensor) -> torch.Tensor:
        rows = mine.expand(len(self.ranks), -1)
        if self.moves_nothing:
            return rows
        return _runtime.exchange_words(self.name, step, rows, str(self.device))


class MeshWords(_Words):
    """Words over the groups of a DeviceMesh, sent from this device."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.ranks = mesh.mesh.flatten().tolist()
        self.own = self.ranks.index(dist.get_rank())
        self._mesh, self._device = mesh, device

    def exchange(self, step: str, mine: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(len(self.ranks), mine.shape[-1], dtype=torch.int64)
        table[self.own] = mine
        return self._all_reduce(table, dist.ReduceOp.SUM)  # other ranks have zeros in this rank's row

    def largest(self, mine: bytes | Sequence[int]) -> list[int]:
        """Returns the elementwise maximum over the ranks. All ranks must call, with equally many values."""
        is_bytes = isinstance(mine, bytes)
        values = torch.tensor(list(mine), dtype=torch.uint8 if is_bytes else torch.int64)
        found: list[int] = self._all_reduce(values, dist.ReduceOp.MAX).tolist()
        return found

    def _all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Reduces over all dims of the mesh. The host does not wait for the device if the groups have a CPU backend."""
        mesh = self._mesh
        if mesh.size() == 1:
            return values
        # Programs in flight first start all of their transfers, so that the order is the same on all ranks.
        _runtime.drain([group.group_name for group in mesh.get_all_groups()])
        for group in mesh.get_all_groups():
            sent = values if _has_cpu(group) else values.to(self._device)
            dist.all_reduce(sent, op, group=group)
            values = sent.cpu()
        return values


def _has_cpu(group: dist.ProcessGroup) -> bool:
    """Returns True if the group has a backend for tensors on CPU."""
    return any(kind.type == "cpu" for kind in group._device_types)


# ------------------------------------------------------------------------------------------------------------- store


class StoreTexts:
    """Ranks that exchange texts through a store that all of them reach.

    Rounds are counted for each set of ranks. A rank that begins round n has read all of round n - 1, so the keys of
    round n - 2 are deleted. The keys of round 3 are:

        3/7     the text of rank 7
        3       the number of ranks that have written their text
        3/all   1 if all texts are equal, otherwise 0; written by the last rank
    """

    def __init__(self, store: dist.Store) -> None:
        self.rounds: Counter[tuple[int | str, ...]] = Counter()  # number of rounds begun by each set of ranks
        self._store = groups.client_of(store)

    def exchange(self, call: str, mine: str, ranks: tuple[R, ...], own: R, timeout: timedelta) -> dict[R, str]:
        """Sends the text `mine` of rank `own` to all `ranks`. Returns the text of each rank.

        Raises RuntimeError, naming the call and the missing ranks, after the timeout.
        """
        round_index = self.rounds[ranks]
        self.rounds[ranks] += 1
        name = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()[:16]
        store = dist.PrefixStore(name, self._store)
        keys = [f"{round_index}/{rank}" for rank in ranks]
        store.set(f"{round_index}/{own}", mine)
        if store.add(str(round_index), 1) == len(ranks):
            store.set(f"{round_index}/all", str(int(len(set(store.multi_get(keys))) == 1)))
        try:
            store.wait([f"{round_index}/all"], timeout)
        except RuntimeError as error:
            missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
            if missing:
                who = f"rank {own}" if isinstance(own, int) else own
                raise RuntimeError(
                    f"shardwright: {who} waited {timeout.total_seconds():g} s for {ranks_text(missing)} to call "
                    f"{call}, number {round_index + 1} on {ranks_text(ranks)}"
                ) from error
        are_same = store.get(f"{round_index}/all") == b"1"
        statements = [mine] * len(ranks) if are_same else [text.decode() for text in store.multi_get(keys)]
        for key in (f"/{own}", *(("", "/all") if own == ranks[0] else ())) if round_index >= 2 else ():
            store.delete_key(f"{round_index - 2}{key}")
        return dict(zip(ranks, statements, strict=True))

    def compare(
        self, mine: Statement, ranks: tuple[int, ...], own: int, timeout: timedelta | None = None, about: str = ""
    ) -> None:
        """Raises RuntimeError on all `ranks` if their statements differ or have argument errors. All of them must call.

        `own` is this rank. `about` describes the call further in the error about missing ranks.
        """
        call = f"{mine.call} ({about})" if about else mine.call
        statements = self.exchange(call, mine.to_json(), ranks, own, timeout or groups.default_timeout())
        where = f" (number {self.rounds[ranks]} on {ranks_text(ranks)}; this is rank {own})"
        if error := report(mine, statements, where):
            raise RuntimeError(error)


# The result of `in_default_store` by default process group, then by name.
_of_worlds: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, StoreTexts]] = weakref.WeakKeyDictionary()
groups.when_gone.append(_of_worlds.clear)


def in_default_store(name: str) -> StoreTexts:
    """Returns the `StoreTexts` of this name in the store of the default group."""
    groups.note_world()
    assert dist.group.WORLD is not None
    known = _of_worlds.setdefault(dist.group.WORLD, {})
    if name not in known:
        known[name] = StoreTexts(dist.PrefixStore(f"shardwright/{name}", distributed_c10d._get_default_store()))
    return known[name]
