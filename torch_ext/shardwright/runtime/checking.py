"""A debug mode in which ranks check, before anything is sent, that they all run the same redistributes.

If a rank runs another program than its peers, or none, the job usually hangs or gets wrong data elsewhere. With this
mode on, the ranks of a mesh write what they are about to run into the store of torch.distributed, for every
redistribute, and compare. No collective is needed, so the check does not hang when some ranks are missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .._native import _runtime
from ..layouts import tables
from . import groups

DEFAULT_TIMEOUT_SECONDS = 60.0


class _Setting(NamedTuple):
    on: bool
    timeout_seconds: float


def _is_asked_for(said: str) -> bool:
    """What the environment variable says."""
    if said not in ("", "0", "1"):
        raise ValueError(f"SHARDWRIGHT_CHECK_RANKS: got {said!r} in the environment; allowed are 0 and 1")
    return said == "1"


_setting = _Setting(_is_asked_for(os.environ.get("SHARDWRIGHT_CHECK_RANKS", "")), DEFAULT_TIMEOUT_SECONDS)
_runtime.compare_ranks(_setting.on)


class Meeting(NamedTuple):
    """Where ranks meet: a store that all of them reach, and how often each set of them has met."""

    store: dist.Store
    turns: Counter[tuple[int, ...]]
    note: str = ""  # for the ranks that waited for others


_turns_of: object | None = None  # the default process group for which the turns are counted
_turns: Counter[tuple[int, ...]] = Counter()

# Of the groups that join several jobs (connecting.py).
meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, Meeting] = weakref.WeakKeyDictionary()

# The group whose ranks the mesh of an executable has. Others have global ranks.
_group_of: weakref.WeakKeyDictionary[_runtime.Executable, groups.WeakGroup] = weakref.WeakKeyDictionary()


def note_group(executable: _runtime.Executable, group: dist.ProcessGroup | None) -> None:
    """Notes that the mesh of an executable has the ranks of this group."""
    if group is not None:
        _group_of[executable] = groups.weakly(group)


# The same for operators, by their program and the names of their groups.
_group_of_operator: dict[tuple[str, ...], groups.WeakGroup] = {}
_MAX_OPERATORS = 8192


def note_group_of_operator(program: str, names: Sequence[str], group: dist.ProcessGroup | None) -> None:
    key = (program, *names)
    _group_of_operator.pop(key, None)
    if group is not None:
        while len(_group_of_operator) >= _MAX_OPERATORS:
            del _group_of_operator[next(iter(_group_of_operator))]
        _group_of_operator[key] = groups.weakly(group)


def check_ranks(on: bool = True, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
    """Makes the ranks of a mesh compare what they run, before every redistribute. All of them must call this.

    This is for debugging: a redistribute then takes milliseconds. ``SHARDWRIGHT_CHECK_RANKS=1`` in the environment does
    the same from the start. Redistributes in compiled code are compared too, also with eager ones of other ranks.

    Args:
        on: whether to compare.
        timeout_seconds: how long to wait for ranks that do not arrive.

    A redistribute raises RuntimeError, with nothing sent and inputs untouched, in three cases. If ranks differ in what
    they are about to run, or in the tables they plan with (pinned plans, measurements, the environment's topology), it
    raises on every rank and names the fields, their values and ranks. If a rank's input contradicts its layout, or what
    it passes as `out` is not allowed, it raises on every rank. If a rank does not arrive, it raises on the ranks that
    did, and names the missing one. For moves between jobs that `connect` has joined, the ranks of all jobs call this.
    """
    global _setting
    if not isinstance(timeout_seconds, (int, float)) or not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds: got {timeout_seconds}; allowed is a number above 0")
    _setting = _Setting(bool(on), timeout_seconds)
    _runtime.compare_ranks(_setting.on)


def is_on() -> bool:
    return _setting.on


def compare(
    executable: _runtime.Executable,
    local: torch.Tensor,
    async_op: bool | None,
    out: torch.Tensor | None = None,
    rows_are_own: bool = False,
) -> None:
    """Raises RuntimeError on all ranks of the executable's mesh unless all are about to run the same redistribute.

    `async_op`: None in a graph, where eager code on other ranks may do either. `rows_are_own`: the operands of products
    may have other sizes on each rank, which nothing that travels depends on.
    """
    mine = {
        **{field: said for field, said in executable.signature.items() if field != "operands" or not rows_are_own},
        **tables.current.summary(),
        **({} if async_op is None else {"async_op": str(async_op)}),
        "input": _judge(executable, local),
        "out": _judge_out(executable, local, out),
    }
    what = f"{mine['src']} -> {mine['dst']} of {mine['tensor']}"
    judged = {"input": _AS_SAID, "out": _ALLOWED}
    known = _group_of.get(executable)
    group = None if known is None else known.get()
    ranks, rank = executable.mesh_ranks, executable.rank
    if group is not None and group not in meetings:
        ranks = sorted(dist.get_global_rank(group, one) for one in ranks)
        rank = dist.get_rank()
    compare_calls(tuple(ranks), rank, "redistribute", mine, judged=judged, what=what, group=group)


def compare_calls(
    ranks: tuple[int, ...],
    rank: int,
    kind: str,
    mine: dict[str, str],
    *,
    judged: dict[str, str],
    what: str = "",
    group: dist.ProcessGroup | None = None,
    meeting: Meeting | None = None,
    timeout: timedelta | None = None,
    remedy: str = "",
) -> None:
    """Raises RuntimeError on all of `ranks` unless all are about to make the same call.

    Calls of all kinds on the same ranks are counted together, except those with a `meeting` of their own. `judged`:
    fields of `mine` that must be so. Ranks are global ones, except in a `group` that joins several jobs.
    """
    if meeting is None:
        meeting = (meetings.get(group) if group is not None else None) or _meeting_of_the_world()
    turn = meeting.turns[ranks]
    meeting.turns[ranks] += 1
    mine = {"call": kind, **mine}
    wait = timeout or timedelta(seconds=_setting.timeout_seconds)
    said = _exchange(meeting, ranks, turn, mine, rank, f"{kind} number {turn + 1}", what, wait)
    fields = dict.fromkeys(field for one in said.values() for field in one)
    if any(one["call"] != kind for one in said.values()):
        fields = {"call": None}  # other calls have other fields
    # A field that a rank leaves out may have any value there.
    differing = [name for name in fields if len({one[name] for one in said.values() if name in one}) > 1]
    if not differing and all(mine[field] == value for field, value in judged.items()):
        return
    lines = [f"  {field}: {_by_value(field, said)}" for field in differing or judged]
    raise RuntimeError(
        f"shardwright: the ranks of a mesh do not run the same {kind} (number {turn + 1} on ranks "
        f"{_text(ranks)}; this is rank {rank})\n" + "\n".join(lines) + remedy
    )


def _meeting_of_the_world() -> Meeting:
    global _turns_of
    if dist.group.WORLD is not _turns_of:
        _turns.clear()
        _turns_of = dist.group.WORLD
    return Meeting(dist.PrefixStore("shardwright", distributed_c10d._get_default_store()), _turns)


def _compare_operator(
    input: torch.Tensor, program: str, group_names: Sequence[str], rank: int, out: torch.Tensor | None
) -> None:
    executable = _runtime.executable(program, list(group_names), rank)
    group = _group_of_operator.get((program, *group_names))
    if group is not None:
        _group_of[executable] = group
    compare(executable, input, None, out)


torch.library.impl("shardwright::compare_ranks", "CompositeExplicitAutograd")(_compare_operator)


_AS_SAID = "as its layout says"


def _judge(executable: _runtime.Executable, local: torch.Tensor) -> str:
    expected, dtype = tuple(executable.input_shape), executable.signature["dtype"]
    has_shape = tuple(local.shape) == expected or differs_in_ones(local, expected)
    if has_shape and str(local.dtype) == f"torch.{dtype}":
        return _AS_SAID
    return f"{str(local.dtype).removeprefix('torch.')}{list(local.shape)} where its layout has {dtype}{list(expected)}"


_ALLOWED = "as allowed"


def _judge_out(executable: _runtime.Executable, local: torch.Tensor, out: torch.Tensor | None) -> str:
    try:
        if out is not None:
            executable.check_out(local, out)
    except ValueError as error:
        return str(error).removeprefix("out: ")
    return _ALLOWED


def _exchange(
    meeting: Meeting,
    ranks: tuple[int, ...],
    turn: int,
    mine: dict[str, str],
    rank: int,
    which: str,
    what: str,
    timeout: timedelta,
) -> dict[int, dict[str, str]]:
    """Returns what every rank wrote on this turn."""
    name = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()[:16]
    store = dist.PrefixStore(name, meeting.store)
    store.set(f"{turn}/{rank}", json.dumps(mine))
    keys = [f"{turn}/{one}" for one in ranks]
    missing = []
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        missing = [one for one, key in zip(ranks, keys, strict=True) if not store.check([key])]
    if missing:
        raise RuntimeError(
            f"shardwright: rank {rank} waited {timeout.total_seconds():g} s for ranks {_text(tuple(missing))} "
            f"to come to {which} on ranks {_text(ranks)}{': ' if what else ''}{what}{meeting.note}"
        )
    said = {one: json.loads(text) for one, text in zip(ranks, store.multi_get(keys), strict=True)}
    # Every rank that has written on this turn has read everything of two turns ago.
    if turn >= 2:
        store.delete_key(f"{turn - 2}/{rank}")
    return said


def _by_value(field: str, said: dict[int, dict[str, str]]) -> str:
    ranks_by_value: dict[str, list[int]] = {}
    for rank, one in said.items():
        ranks_by_value.setdefault(one.get(field, "any"), []).append(rank)
    return "; ".join(f"{value} on {_text(tuple(ranks))}" for value, ranks in ranks_by_value.items())


def _text(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"({shown}, ... {len(ranks)} in all)" if len(ranks) > 8 else f"({shown})"


def differs_in_ones(local: torch.Tensor, shape: Sequence[int]) -> bool:
    """Returns whether a part has another number of dims than its layout, but only dims of one element more or fewer.

    torch 2.15 ends the product of a vector and a matrix with an in-place squeeze that changes the part alone.
    """
    return local.dim() != len(shape) and [n for n in local.shape if n != 1] == [n for n in shape if n != 1]
