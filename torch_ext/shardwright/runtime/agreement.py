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
_MAX_LINES = 20  # lines of differences
_MAX_RANKS = 16  # ranks in one list
_MAX_CHARACTERS = 300  # characters of one value
_CHARACTERS_BEFORE = 100  # characters shown before the first one that differs

_WORD_BYTES = 8
HEAD_WORDS = 2  # words that `compare` sends for a statement: the digest and the length in bytes of its JSON

V = TypeVar("V")  # a value that may differ between ranks
R = TypeVar("R", bound=int | str)  # a rank, or the name of a process among several jobs


class Statement(NamedTuple):
    """The statement of one rank about the call that it is going to make."""

    call: str  # name of the call, for errors
    fields: Mapping[str, object] = {}  # must be equal on all ranks that have any fields; None matches any value
    errors: Mapping[str, str | None] = {}  # by argument: the reason why this rank cannot make the call, or None
    mismatch: str = "differ, nothing was sent"  # the error about different fields begins "the ranks <mismatch>"
    remedy: str = ""  # the end of that error

    def to_json(self) -> str:
        """Returns [call, fields, errors] as JSON, without errors that are None."""
        fields = {name: None if value is None else str(value) for name, value in self.fields.items()}
        return json.dumps([self.call, fields, {name: why for name, why in self.errors.items() if why is not None}])


def error_text(mine: Statement, statements: Mapping[R, str], where: str) -> str:
    """Returns the text of the error that all ranks raise, or "" if their statements agree.

    Args:
        mine: the statement of this rank.
        statements: the statement of each rank, as JSON.
        where: a text for the end of the first line.
    """
    parsed = {text: json.loads(text) for text in set(statements.values())}

    def part_by_rank(part: int) -> dict[R, Any]:
        """Returns a part of each statement (0 call, 1 fields, 2 argument errors), without ranks where it is empty."""
        return {rank: parsed[text][part] for rank, text in statements.items() if parsed[text][part]}

    calls, fields, errors = part_by_rank(0), part_by_rank(1), part_by_rank(2)
    if len(set(calls.values())) > 1:  # fields of different calls cannot be compared
        fields, errors = {rank: {"call": call} for rank, call in calls.items()}, {}
    lines = [*_lines(fields, "not given", min_values=2), *_lines(errors, None, min_values=1)]
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"  and {len(lines) - _MAX_LINES} more"]
    found = f"the ranks {mine.mismatch}"
    if errors:
        found = f"on {ranks_text(list(errors))} the arguments are not allowed, nothing was sent"
    return "\n".join([f"shardwright: {mine.call}: {found}{where}", *lines, mine.remedy]).rstrip() if lines else ""


def _lines(rows: Mapping[R, Mapping[str, str | None]], default: str | None, min_values: int) -> list[str]:
    """Returns a line of text for each name that has at least `min_values` different values in the ranks' rows.

    A row without the name has the value `default`. Rows with the value None do not count.
    """
    lines = []
    for name in dict.fromkeys(name for row in rows.values() for name in row):
        values = {rank: value for rank, row in rows.items() if (value := row.get(name, default)) is not None}
        if len(set(values.values())) >= min_values:
            lines.append(f"  {name}: {values_text(values)}")
    return lines


def ranks_by_value(values: Mapping[R, V]) -> dict[V, list[R]]:
    """Returns the ranks that have each value. `values` maps ranks to values."""
    found: dict[V, list[R]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found


def values_text(values: Mapping[R, str]) -> str:
    """Returns a text such as "4 on ranks [0, 2]; 8 on ranks [1]" for values by rank.

    Of long values, the part around the first difference is shown.
    """
    ranks_of = ranks_by_value(values)
    first_difference = len(os.path.commonprefix(list(ranks_of)))
    return "; ".join(f"{_excerpt(text, first_difference)} on {ranks_text(ranks)}" for text, ranks in ranks_of.items())


def ranks_text(ranks: Sequence[R]) -> str:
    """Returns a text such as "ranks [0, 1]" or "trainer 0, server 1". Long lists are shortened."""
    shown = ", ".join(map(str, ranks[:_MAX_RANKS]))
    shown += f", ... {len(ranks)} in all" if len(ranks) > _MAX_RANKS else ""
    return shown if isinstance(ranks[0], str) else f"ranks [{shown}]"


def _excerpt(text: str, index: int) -> str:
    """Returns at most _MAX_CHARACTERS characters of a text. Those of a long text begin shortly before `index`."""
    begin = max(index - _CHARACTERS_BEFORE, 0) if len(text) > _MAX_CHARACTERS else 0
    end = begin + _MAX_CHARACTERS
    return f"{'... ' if begin else ''}{text[begin:end]}{' ...' if end < len(text) else ''}"


# ------------------------------------------------------------------------------------------------------------- words


class _Words(ABC):
    """Exchanges words (int64) between ranks.

    Attributes:
        ranks: the ranks, as errors name them.
        own: the index of this rank in `ranks`.
    """

    ranks: Sequence[int]
    own: int

    @abstractmethod
    def exchange(self, step: str, mine: torch.Tensor) -> torch.Tensor:
        """Sends words to all ranks. Returns a matrix whose row i has the words that rank i sent to this rank.

        Args:
            step: the name of the exchange in errors.
            mine: one row for all ranks, or a matrix with one row for each receiver (not in `MeshWords`).
        """

    def compare(
        self, mine: Statement, own_error: Exception | None = None, more: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compares the statements of all ranks. All ranks must call.

        Args:
            mine: the statement of this rank.
            own_error: an error in this rank's arguments. This rank raises it, and the others raise its text.
            more: further words to send, in the same form as for `exchange`.

        Returns:
            A matrix with the words of `more` from each rank.

        Raises:
            RuntimeError: another rank has invalid arguments.
            ValueError: the statements differ. All ranks raise it.
        """
        if own_error is not None:
            mine = mine._replace(fields={}, errors={"arguments": str(own_error)})
        text = mine.to_json().encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=_WORD_BYTES).digest(), "big", signed=True)
        head = torch.tensor([digest, len(text)])
        sent = head if more is None else torch.cat([head.expand(*more.shape[:-1], HEAD_WORDS), more], -1)
        step = f"{mine.call}, comparing arguments"
        received = self.exchange(step, sent)
        if own_error is None and bool((received[:, 0] == digest).all()):
            return received[:, HEAD_WORDS:]
        # Statements differ: exchange their texts, padded to the same whole number of words.
        size = -(-int(received[:, 1].max()) // _WORD_BYTES) * _WORD_BYTES
        padded = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.int64)
        texts = [bytes(row.view(torch.uint8).tolist()).decode() for row in self.exchange(step, padded)]
        if own_error is not None:
            raise own_error
        statements = dict(zip(self.ranks, texts, strict=True))
        kind = RuntimeError if any(json.loads(text)[2] for text in texts) else ValueError
        raise kind(error_text(mine, statements, f" (this is rank {self.ranks[self.own]})"))


class GroupWords(_Words):
    """Exchanges words between the ranks of a process group. Does not keep the group alive."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = groups.ranks_in_meshes(group)
        self.own = dist.get_rank(group)
        self.name: str = group.group_name
        self.moves_nothing = groups.moves_nothing(group)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        # The group alone decides the device, because ranks may pass tensors on different devices.
        self.device = torch.device("cpu") if accelerator is None or has_cpu(group) else accelerator

    def exchange(self, step: str, mine: torch.Tensor) -> torch.Tensor:
        rows = mine.expand(len(self.ranks), -1)
        if self.moves_nothing:
            return rows
        return _runtime.exchange_words(self.name, step, rows, str(self.device))


class MeshWords(_Words):
    """Exchanges words between the ranks of a DeviceMesh, over its groups.

    They are sent from the given device, or from the CPU over groups that have a CPU backend.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.ranks = mesh.mesh.flatten().tolist()
        self.own = self.ranks.index(dist.get_rank())
        self.mesh, self._device = mesh, device

    def exchange(self, step: str, mine: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(len(self.ranks), mine.shape[-1], dtype=torch.int64)
        table[self.own] = mine
        return self._all_reduce(table, dist.ReduceOp.SUM, step)  # other ranks have zeros in this rank's row

    def largest(self, mine: bytes | Sequence[int], step: str) -> list[int]:
        """Returns the elementwise maximum over all ranks. All ranks must call, with the same number of values.

        `step`: the name of the exchange in errors.
        """
        is_bytes = isinstance(mine, bytes)
        values = torch.tensor(list(mine), dtype=torch.uint8 if is_bytes else torch.int64)
        found: list[int] = self._all_reduce(values, dist.ReduceOp.MAX, step).tolist()
        return found

    def _all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType, step: str) -> torch.Tensor:
        """Reduces over all dims of the mesh. The host does not wait for the device if the groups have a CPU backend.

        Raises:
            torch.distributed.DistBackendError: the exchange has failed or timed out.
        """
        mesh = self.mesh
        if mesh.size() == 1:
            return values
        # Programs in flight must first start all their transfers, so that the order on a group is equal on all ranks.
        _runtime.drain([group.group_name for group in mesh.get_all_groups()])
        for group in mesh.get_all_groups():
            sent = values if has_cpu(group) else values.to(self._device)
            try:
                dist.all_reduce(sent, op, group=group)
                values = sent.cpu()
            except RuntimeError as error:
                raise dist.DistBackendError(
                    f"shardwright: rank {self.ranks[self.own]} failed in {step}, on {ranks_text(self.ranks)}: one of "
                    f"them has raised an error before, has ended, or is late\n{error}"
                ) from error
        return values


def has_cpu(group: dist.ProcessGroup) -> bool:
    """Returns True if the group has a backend for tensors on CPU."""
    return any(kind.type == "cpu" for kind in group._device_types)


# ------------------------------------------------------------------------------------------------------------- store


_LATE = "late: "  # begins the decision of a round in which a rank timed out


class StoreTexts:
    """Exchanges texts between ranks through a store that all of them reach.

    The exchanges of a set of ranks are rounds, counted from 0. A round is decided once: it succeeds on all ranks, or
    all ranks raise an error, those that call later too. A rank that succeeds in round n knows that all ranks have begun
    it, and so have left round n - 2, whose keys can be deleted. The keys of round 3 are:

        3/7     the text of rank 7
        3       the number of ranks that have written their text
        3/all   the decision. The last rank writes "same" if all texts are equal, otherwise "differ". A rank that times
                out before writes "late", and whom it has waited for
    """

    def __init__(self, store: dist.Store) -> None:
        self.rounds: Counter[tuple[int | str, ...]] = Counter()  # number of rounds begun by each set of ranks
        self._store = groups.client_of(store)

    def exchange(self, call: str, mine: str, ranks: tuple[R, ...], own: R, timeout: timedelta) -> dict[R, str]:
        """Sends a text to all ranks. Returns the text of each rank.

        Args:
            call: the name of the call, for errors.
            mine: the text of this rank.
            ranks: all ranks that take part.
            own: this rank.
            timeout: the time to wait for the others.

        Raises:
            RuntimeError: ranks are missing after the timeout of some rank. All ranks raise it, those that call later
                too. The message names the call and the missing ranks.
        """
        round_index = self.rounds[ranks]
        self.rounds[ranks] += 1
        name = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()[:16]
        store = dist.PrefixStore(name, self._store)
        keys, decision_key = [f"{round_index}/{rank}" for rank in ranks], f"{round_index}/all"
        store.set(f"{round_index}/{own}", mine)
        if store.add(str(round_index), 1) == len(ranks):
            store.compare_set(decision_key, "", "same" if len(set(store.multi_get(keys))) == 1 else "differ")
        who = f"rank {own}" if isinstance(own, int) else own
        try:
            store.wait([decision_key], timeout)
        except RuntimeError:
            missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
            if missing:
                waited = f"{who} waited {timeout.total_seconds():g} s for {ranks_text(missing)} to call {call}"
                store.compare_set(decision_key, "", f"{_LATE}{waited}, number {round_index + 1} on {ranks_text(ranks)}")
        decision = store.get(decision_key).decode()
        if decision.startswith(_LATE):
            raise RuntimeError(f"shardwright: {decision.removeprefix(_LATE)} (this is {who})")
        statements = [mine] * len(ranks) if decision == "same" else [text.decode() for text in store.multi_get(keys)]
        for key in (f"/{own}", *(("", "/all") if own == ranks[0] else ())) if round_index >= 2 else ():
            store.delete_key(f"{round_index - 2}{key}")
        return dict(zip(ranks, statements, strict=True))

    def compare(
        self, mine: Statement, ranks: tuple[int, ...], own: int, timeout: timedelta | None = None, about: str = ""
    ) -> None:
        """Raises RuntimeError on all ranks if their statements differ or have argument errors. All ranks must call.

        Args:
            mine: the statement of this rank.
            ranks: all ranks that take part.
            own: this rank.
            timeout: the time to wait for the others; default: the default group's timeout.
            about: a description of the call, for the error about missing ranks.
        """
        call = f"{mine.call} ({about})" if about else mine.call
        statements = self.exchange(call, mine.to_json(), ranks, own, timeout or groups.default_timeout())
        where = f" (number {self.rounds[ranks]} on {ranks_text(ranks)}; this is rank {own})"
        if error := error_text(mine, statements, where):
            raise RuntimeError(error)


# Results of `in_default_store` by default process group, then by name.
_by_default_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, StoreTexts]] = weakref.WeakKeyDictionary()
groups.default_group_gone_hooks.append(_by_default_group.clear)


def in_default_store(name: str) -> StoreTexts:
    """Returns the `StoreTexts` of this name in the store of the default group."""
    groups.note_world()
    assert dist.group.WORLD is not None
    known = _by_default_group.setdefault(dist.group.WORLD, {})
    if name not in known:
        known[name] = StoreTexts(dist.PrefixStore(f"shardwright/{name}", distributed_c10d._get_default_store()))
    return known[name]
