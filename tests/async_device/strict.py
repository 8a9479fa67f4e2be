"""The process groups with NCCL's rules (process_group.h) as a torch.distributed backend, "strict".

    strict.register(native)                                    # once per process; `native` is the built extension
    strict.set_rules(is_eager=False, has_real_work=False)      # for groups made from now on
    dist.init_process_group("cpu:gloo,asyncdev:strict", ...)   # device_id=torch.device("asyncdev", 0) binds it
    dist.new_group(ranks, pg_options=strict.rules(is_high_priority=True))

PyTorch decides which calls split a communicator, and so need all ranks of the default group: the group reports that it
can be split, as NCCL's does. Torch 2.15 passes the group to split from. Torch 2.11 does so only for NCCL, so this file
looks it up.
"""

from __future__ import annotations

import dataclasses
import types
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

BACKEND = "strict"
DEVICE = "asyncdev"
_IS_AT_LEAST_2_15 = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 15)


@dataclasses.dataclass(frozen=True)
class Rules:
    """See Rules in process_group.h. The defaults are those of the installed torch's "nccl"."""

    is_eager: bool = _IS_AT_LEAST_2_15
    has_real_work: bool = _IS_AT_LEAST_2_15
    is_high_priority_stream: bool = False
    waits_block_host: bool = False
    records_streams: bool = False
    keeps_tensors: bool = False
    holds_thread: bool = not _IS_AT_LEAST_2_15
    refuses_to_end: bool = False


_native: types.ModuleType | None = None
_rules = Rules()
_longest_wait: timedelta | None = None


def rules(**changes: bool) -> Rules:
    """Returns the current rules with these changes, for `pg_options`."""
    return dataclasses.replace(_rules, **changes)


def set_rules(**changes: bool) -> Rules:
    """Changes the rules of groups made from now on, and returns the previous rules."""
    global _rules
    before, _rules = _rules, rules(**changes)
    return before


def restore_rules(before: Rules) -> None:
    global _rules
    _rules = before


def counters() -> dict[str, int]:
    """Returns this process's counts since `reset_counters`: calls by name, "batch", "rendezvous", "split"; also the
    number of "communicators" now."""
    assert _native is not None
    return dict(_native.process_group_counters())


def reset_counters() -> None:
    assert _native is not None
    _native.reset_process_group_counters()


def register(native: types.ModuleType) -> None:
    """Registers "strict" with torch.distributed. Does nothing the second time."""
    global _native
    if _native is not None:
        return
    _native = native
    native.set_gloo_maker(_make_gloo)
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[DEVICE])


def _make_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 1
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _create(options: Any, backend_options: object) -> Any:
    assert _native is not None
    chosen = _rules if backend_options is None else backend_options
    if not isinstance(chosen, Rules):
        raise TypeError(f"pg_options: strict groups take strict.Rules, got {type(chosen).__name__}")
    native_rules = _native.Rules()
    native_rules.is_eager = chosen.is_eager
    native_rules.has_real_work = chosen.has_real_work
    native_rules.is_high_priority = chosen.is_high_priority_stream
    native_rules.waits_block_host = chosen.waits_block_host
    native_rules.records_streams = chosen.records_streams
    native_rules.keeps_tensors = chosen.keeps_tensors
    native_rules.holds_thread = chosen.holds_thread
    native_rules.refuses_to_end = chosen.refuses_to_end

    # The default timeout of new_group is half an hour. No test should wait longer than the timeout of its default
    # group.
    global _longest_wait
    is_default = not options.global_ranks_in_group
    timeout = options.timeout
    if is_default:
        _longest_wait = timeout
    elif _longest_wait is not None:
        timeout = min(timeout, _longest_wait)

    split_from = _split_source(options)
    if split_from is not None:
        ranks = list(options.global_ranks_in_group)
        return split_from.split_off(options.store, ranks, options.group_id, timeout, native_rules)
    group = _native.StrictGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.group_id,
        list(options.global_ranks_in_group),
        timeout,
        native_rules,
    )
    if chosen.is_eager:
        process_group = getattr(options, "process_group", None)
        if process_group is not None and process_group.bound_device_id is None:
            process_group.bound_device_id = torch.device(DEVICE, 0)
        group.connect()
    return group


def _split_source(options: Any) -> Any:
    """Returns the group that PyTorch would split this one from if it were NCCL's: a group of all ranks, or None."""
    if hasattr(options, "split_from"):
        return options.split_from
    if not dist.is_initialized() or not distributed_c10d._get_default_group().bound_device_id:
        return None
    return distributed_c10d._get_split_source(distributed_c10d._get_default_group())
