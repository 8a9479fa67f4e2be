"""The ranks of a measurement, their agreement on times, and their assignment to nodes."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._native import _planner
from ..layouts.errors import argument_error
from ..progress_bar import Bar
from ..runtime import argument_checks, executables, groups


class Ranks:
    """The ranks of a group, which measure at the same time. Without torch.distributed, this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.is_alone = not dist.is_available() or not dist.is_initialized()
        self._bar: Bar | None = None

    def from_all(self, mine: Any) -> list[Any]:
        """Returns every rank's value, by rank."""
        if self.is_alone:
            return [mine]
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def wait(self) -> None:
        """Waits for all ranks."""
        if not self.is_alone:
            dist.barrier(self.group)

    @contextlib.contextmanager
    def showing(self, num_rounds: int) -> Iterator[None]:
        """Shows a bar of the rounds measured in the block on the first rank; nothing if `num_rounds` is 0."""
        if num_rounds == 0 or not (self.is_alone or dist.get_rank(self.group) == 0):
            yield
            return
        with Bar("calibrate", num_rounds, "round") as self._bar:
            yield
        self._bar = None

    def rounds(self, count: int) -> Iterator[int]:
        """Yields the index of each round of measurements, and advances the bar after the round."""
        for index in range(count):
            yield index
            if self._bar is not None:
                self._bar.advance()

    def slowest(self, seconds_by_round: list[list[float]], quantile: float) -> list[float]:
        """Returns the seconds of each measured call: a low quantile over rounds of the time on the slowest rank.

        Args:
            seconds_by_round: seconds_by_round[i][j] has the seconds of call j in round i on this rank.
            quantile: in [0, 1]. It should be low, because disturbances only add time.

        The slowest rank counts, because ranks that share a core may run one after the other.
        """
        by_round = [[max(times) for times in zip(*one_round)] for one_round in zip(*self.from_all(seconds_by_round))]
        return [sorted(times)[int(quantile * (len(times) - 1))] for times in zip(*by_round)]


def seconds_of(device: torch.device, call: Callable[[], object], repeats: int = 1) -> float:
    """Returns the seconds per call on this rank, with all work on the device finished."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _synchronize(device)
    return (time.perf_counter() - start) / repeats


def _synchronize(device: torch.device) -> None:
    """Waits until a CUDA device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Job(NamedTuple):
    """A measurement: its ranks, this rank's device, and the settings."""

    ranks: Ranks
    members: list[int]  # global ranks
    device: torch.device
    lowering: _planner.Lowering  # the lowering of plans that use the measurements
    quick: bool


def job_of(group: dist.ProcessGroup | None, device: torch.device | str | None, mesh: Any | None, quick: bool) -> Job:
    """Checks the arguments of `calibrate`, and returns the job."""
    groups.check_initialized()
    argument_checks.check_group(group)
    group = groups.default_if_none(group)
    if dist.get_rank(group) < 0:
        raise ValueError(f"group must contain this rank, got a group without rank {dist.get_rank()}")
    members = dist.get_process_group_ranks(group)
    if len(members) < 2:
        raise ValueError(f"group must have at least 2 ranks, got {len(members)}")
    kinds = sorted(kind.type for kind in group._device_types)
    if device is None:
        device = getattr(mesh, "device_type", None) or _default_device(group, kinds)
    measured_device = argument_checks.device_of("device", device)
    if measured_device.type not in kinds:
        raise argument_error("device", f"one of {', '.join(kinds)}, as the group's backends", measured_device.type)
    name, default = (executables.backend_name(measured_device.type, each) for each in (group, None))
    if name != default:  # groups of two ranks, four ranks and so on are made with the default group's backends
        allowed = f"a group with the default group's backend for {measured_device.type}, {default}"
        raise argument_error("group", allowed, name)
    lowering = executables.lowering(measured_device.type, group)
    return Job(Ranks(group), members, measured_device, lowering, quick)


def _default_device(group: dist.ProcessGroup, kinds: list[str]) -> str:
    """Returns CUDA if the group sends from CUDA memory, else CPU if the group has a backend for it, else any other."""
    # Gloo accepts CUDA tensors too, but calibrating it for them is rarely wanted.
    has_cuda = "cuda" in kinds and torch.cuda.is_available()
    if has_cuda and executables.lowering("cuda", group).is_on_device:
        return "cuda"
    return "cpu" if "cpu" in kinds else kinds[0]


def ranks_per_node(job: Job, num_ranks: int | None) -> int:
    """Returns the number of consecutive ranks on a node, or 0 if all ranks of the job are on one."""
    if num_ranks is not None and num_ranks < 0:
        raise argument_error("ranks_per_node", "at least 0 (0 for all ranks)", num_ranks)
    everyone = job.ranks.from_all((num_ranks, os.environ.get("LOCAL_WORLD_SIZE"), socket.gethostname()))
    given_by_all, by_torchrun, hosts = map(list, zip(*everyone))
    if len(set(given_by_all)) > 1:
        raise argument_error("ranks_per_node", "equal on all ranks", given_by_all)
    if num_ranks is None and None not in by_torchrun and len(set(by_torchrun)) == 1:
        num_ranks = int(by_torchrun[0])
    if num_ranks is None:
        num_ranks = ranks_per_host(job.members, hosts)
    return 0 if len(by_node(job.members, num_ranks)) == 1 else num_ranks


def ranks_per_host(ranks: list[int], hosts: list[str]) -> int:
    """Returns `ranks_per_node`, the largest number of ranks on a host, or 0 if all ranks are on one host.

    `hosts` has the host of each rank. Raises ValueError unless ``rank // ranks_per_node`` numbers the hosts.
    """
    if len(set(hosts)) == 1:
        return 0
    largest = max(hosts.count(host) for host in hosts)
    nodes = [rank // largest for rank in ranks]
    if not len(set(zip(hosts, nodes))) == len(set(hosts)) == len(set(nodes)):
        raise ValueError(
            "ranks_per_node must be given unless each host has the same number of consecutive ranks, got ranks "
            f"{ranks} on hosts {hosts}"
        )
    return largest


def by_node(ranks: list[int], per_node: int) -> list[list[int]]:
    """Returns the ranks of each node, ascending. `per_node` is 0 if all ranks are on one node."""
    nodes: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(rank // per_node if per_node else 0, []).append(rank)
    return list(nodes.values())
