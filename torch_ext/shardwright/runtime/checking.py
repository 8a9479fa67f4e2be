"""A debug mode in which ranks check, before anything is sent, that they all run the same redistributes.

If a rank runs another program than its peers, or none, the job usually hangs or gets wrong data elsewhere. In this
mode, each rank of a mesh writes a statement about each redistribute into the store of torch.distributed, and reads the
statements of the others. This needs no collective, so it does not hang if ranks are missing.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from .._native import _runtime
from ..layouts import tables
from ..layouts.errors import argument_error
from . import agreement, groups
from .agreement import Statement, StoreTexts

DEFAULT_TIMEOUT_SECONDS = 60.0


class _Setting(NamedTuple):
    """The arguments of the last `check_ranks`."""

    on: bool
    timeout_seconds: float


def _is_enabled(value: str) -> bool:
    """Returns True if this value of SHARDWRIGHT_CHECK_RANKS turns the mode on. Raises ValueError."""
    if value not in ("", "0", "1"):
        raise argument_error("SHARDWRIGHT_CHECK_RANKS", "0 or 1 in the environment", repr(value))
    return value == "1"


_setting = _Setting(_is_enabled(os.environ.get("SHARDWRIGHT_CHECK_RANKS", "")), DEFAULT_TIMEOUT_SECONDS)
_runtime.set_check_ranks(_setting.on)


# For each group that joins several jobs, the exchange of texts among its ranks (connecting.py).
connection_texts: weakref.WeakKeyDictionary[dist.ProcessGroup, StoreTexts] = weakref.WeakKeyDictionary()

# The group in which the ranks of an executable's mesh are counted. Meshes of all other executables have global ranks.
_group_of_executable: weakref.WeakKeyDictionary[_runtime.Executable, groups.WeakGroup] = weakref.WeakKeyDictionary()


def note_group(executable: _runtime.Executable, group: dist.ProcessGroup | None) -> None:
    """Records that the mesh of an executable has ranks of this group; None: global ranks."""
    if group is not None:
        _group_of_executable[executable] = groups.weakly(group)


# The group in which the ranks of an operator's mesh are counted, by its program and the names of its groups.
_group_of_operator: dict[tuple[str, ...], groups.WeakGroup] = {}
_MAX_OPERATORS = 8192  # entries of `_group_of_operator`; the oldest is dropped first


def note_group_of_operator(program: str, names: Sequence[str], group: dist.ProcessGroup | None) -> None:
    """Records that the mesh of an operator's program has ranks of this group; None: global ranks."""
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
        on: True to compare.
        timeout_seconds: time to wait for missing ranks, above 0; default 60.

    A redistribute raises RuntimeError, with nothing sent and inputs untouched, in three cases. If ranks differ in what
    they are about to run, or in their planning tables (pinned plans, measurements, the environment's topology), it
    raises on every rank and names the fields, their values and ranks. If a rank's input contradicts its layout, or its
    `out` is not allowed, it raises on every rank. If a rank is missing, it raises on the others, and names that rank.
    For moves between jobs that `connect` has joined, the ranks of all jobs must call this. Messages name global ranks,
    also if meshes have the ranks of a `group`; for the group of a connection they name ranks of that group.
    """
    global _setting
    if not isinstance(timeout_seconds, (int, float)) or not timeout_seconds > 0:
        raise argument_error("timeout_seconds", "a number above 0", repr(timeout_seconds))
    _setting = _Setting(bool(on), timeout_seconds)
    _runtime.set_check_ranks(_setting.on)


def is_on() -> bool:
    """Returns True if ranks compare what they run."""
    return _setting.on


def compare(
    executable: _runtime.Executable,
    local: torch.Tensor,
    async_op: bool | None,
    out: torch.Tensor | None = None,
    rows_are_own: bool = False,
) -> None:
    """Raises RuntimeError on all ranks of the executable's mesh unless all are about to run the same redistribute.

    Args:
        executable: the program that this rank is going to run.
        local: its input.
        async_op: the argument of the call; None in a graph, which matches both values on ranks that run eager code.
        out: the tensor for the result, if one was given.
        rows_are_own: ranks may have operands of different sizes, because no transfer of the product depends on them.
    """
    fields = {
        **{field: value for field, value in executable.signature.items() if field != "operands" or not rows_are_own},
        **tables.current.summary(),
        "async_op": async_op,
    }
    errors = {"input": _input_error(executable, local), "out": _out_error(executable, local, out)}
    about = f"{fields['src']} -> {fields['dst']} of {fields['tensor']}"
    known = _group_of_executable.get(executable)
    group = None if known is None else known.get()
    ranks, rank = executable.mesh_ranks, executable.rank
    if group is not None and group not in connection_texts:
        ranks = sorted(dist.get_global_rank(group, member) for member in ranks)
        rank = dist.get_rank()
    compare_calls(Statement("redistribute", fields, errors), ranks, rank, about, group)


def compare_calls(
    mine: Statement, ranks: Sequence[int], rank: int, about: str = "", group: dist.ProcessGroup | None = None
) -> None:
    """Raises RuntimeError on all of `ranks` unless all make the same call with valid arguments.

    Calls of all kinds on the same ranks share one counter.

    Args:
        mine: the statement of this rank.
        ranks: global ranks, or ranks of `group` if it joins several jobs.
        rank: this rank.
        about: a description of the call, for the error about missing ranks.
        group: the process group of the call, or None. It only matters if it joins several jobs.
    """
    texts = None if group is None else connection_texts.get(group)
    if texts is None:
        texts = agreement.in_default_store("calls")
    else:
        about += "; check_ranks must be on in all jobs"
    texts.compare(mine, tuple(ranks), rank, timedelta(seconds=_setting.timeout_seconds), about)


def _compare_operator(
    input: torch.Tensor, program: str, group_names: Sequence[str], rank: int, out: torch.Tensor | None
) -> None:
    """Kernel of `shardwright::compare_ranks`: checks that all ranks are about to run this redistribute."""
    executable = _runtime.executable(program, list(group_names), rank)
    group = _group_of_operator.get((program, *group_names))
    if group is not None:
        _group_of_executable[executable] = group
    compare(executable, input, None, out)


torch.library.impl("shardwright::compare_ranks", "CompositeExplicitAutograd")(_compare_operator)


def _input_error(executable: _runtime.Executable, local: torch.Tensor) -> str | None:
    """Returns the reason why a local tensor contradicts the source layout, or None if it does not."""
    expected, dtype = tuple(executable.input_shape), executable.signature["dtype"]
    has_shape = tuple(local.shape) == expected or differs_in_unit_dims_only(local, expected)
    if has_shape and str(local.dtype) == f"torch.{dtype}":
        return None
    return f"must be {dtype}{list(expected)}, got {str(local.dtype).removeprefix('torch.')}{list(local.shape)}"


def _out_error(executable: _runtime.Executable, local: torch.Tensor, out: torch.Tensor | None) -> str | None:
    """Returns the reason why the result cannot be written to `out`, or None."""
    try:
        if out is not None:
            executable.check_out(local, out)
    except ValueError as error:
        return str(error).removeprefix("out ")
    return None


def differs_in_unit_dims_only(local: torch.Tensor, shape: Sequence[int]) -> bool:
    """Returns True if a tensor has another number of dims than `shape`, but the same sizes apart from dims of size 1.

    torch 2.15 ends DTensor's product of a vector and a matrix with an in-place squeeze of the local tensor only.
    """
    return local.dim() != len(shape) and [n for n in local.shape if n != 1] == [n for n in shape if n != 1]
