"""Measures latencies and bandwidths with all-to-alls of several message sizes, in teams of several sizes.

A team is a group of ranks that run an all-to-all. Each part of a topology is measured with other teams:

    inside, step       teams of neighbors on a node: 2, 4, ..., all ranks of the node
    between            teams across nodes, of the ranks with the same index on their nodes
    a mesh dim         the mesh dim's own groups
    memory             no teams: each rank copies a large tensor into new memory, as for a result

csrc/cost/link_fit.h describes how the parameters are fitted to the times.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._planner import Link, LinkFit, Topology, fit_links
from ..layouts import argument_values
from ..layouts.errors import argument_error
from ..layouts.topology import load_topology
from ..runtime import executables, groups
from .job import Job, by_node, ranks_per_node, seconds_of
from .products import Traffic

# Total bytes that a rank sends to its peers, from latency-bound to bandwidth-bound.
_SIZES_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
_SIZES_BYTES_QUICK = (1 << 10, 1 << 16, 1 << 20)
_MEMORY_BYTES = 1 << 23  # of the tensor that is copied

# Larger teams add no information about the cost of one more peer.
_MAX_TEAM = 16

_MAX_TRAFFIC_BYTES = 1 << 27  # of one message during products

# All combinations of team and size alternate (round robin) in short batches, so that other load on the machine
# affects all of them equally.
_ROUNDS, _ROUNDS_QUICK = 24, 6
_BATCH_SECONDS, _BATCH_SECONDS_QUICK = 0.006, 0.002
_MAX_CALLS = 32  # of one all-to-all, or of the copy, per batch
_LOW_QUANTILE = 0.1  # of the times of all rounds

_PS = 1e12  # picoseconds per second


class _Measurement(NamedTuple):
    """An all-to-all to measure: this rank's team, None if it idles, and the bytes to send to all peers together."""

    name: str  # of the link that it measures
    team: dist.ProcessGroup | None
    peers: int
    sent_bytes: int


_Points = list[tuple[int, int, float]]  # peers, sent bytes, seconds


def num_link_rounds(quick: bool) -> int:
    """Returns the number of rounds of `measure_links`."""
    return _ROUNDS_QUICK if quick else _ROUNDS


def measure_links(job: Job, given_per_node: int | None, name: str, mesh: Any | None) -> tuple[Topology, list[str]]:
    """Returns the topology and a report of the measurements, both equal on all ranks."""
    if not isinstance(name, str):
        raise argument_error("name", "text", repr(name))
    if given_per_node is not None:
        given_per_node = argument_values.integer(given_per_node, "ranks_per_node")
    per_node = ranks_per_node(job, given_per_node)
    nodes = by_node(job.members, per_node)
    teams = ([rank for rank in team if rank is not None] for team in itertools.zip_longest(*nodes))
    measurements = [*_in_teams(job, "inside", nodes), *_in_teams(job, "between", list(teams)), *_along(job, mesh)]
    points, copy_seconds = _measure(job, measurements)
    along = {where.removeprefix(_ALONG): taken for where, taken in points.items() if where.startswith(_ALONG)}
    crossing = _crossing(mesh, per_node)
    inside, between, mesh_dims = fit_links(points.get("inside", []), points.get("between", []), along, crossing)
    fits = {"inside": inside, "between": between, **{_ALONG + mesh_dim: fit for mesh_dim, fit in mesh_dims.items()}}
    topology = Topology(
        name,
        per_node,
        round(inside.step * _PS),
        max(1, round(copy_seconds / _MEMORY_BYTES * 1024 * _PS)),
        _link(inside),
        _link(between),
        {mesh_dim: _link(fit) for mesh_dim, fit in mesh_dims.items()},
    )
    results = topology.to_json(), _report(job, fits, points, copy_seconds)
    text, report = job.ranks.from_all(results)[0]  # all ranks use the first rank's results
    return load_topology(json.loads(text)), report


def _link(fit: LinkFit) -> Link:
    """Returns the fitted link with times in picoseconds."""
    return Link(message_ps=round(fit.message * _PS), ps_per_kib=max(1, round(fit.byte * 1024 * _PS)))


# ---- all-to-alls to measure

_ALONG = "mesh dim "  # prefix of the names of measurements along a mesh dim


def _in_teams(job: Job, name: str, lines: list[list[int]]) -> Iterable[_Measurement]:
    """Yields measurements in teams of 2, 4, 8, ... consecutive ranks of each line (a list of ranks), and in full lines.

    Leftover ranks idle.
    """
    longest = min(max(map(len, lines)), _MAX_TEAM)
    for size in sorted({*(1 << n for n in range(1, longest.bit_length())), longest} - {1}):
        team = None
        for line in lines:
            for begin in range(0, len(line) - size + 1, size):
                if dist.get_rank() in line[begin : begin + size]:
                    team = groups.find_or_make(line[begin : begin + size])
        yield from _at_all_sizes(job, name, team, size - 1)


def _along(job: Job, mesh: Any | None) -> Iterable[_Measurement]:
    """Yields measurements in the process groups of each mesh dim."""
    if mesh is None:
        return
    if not argument_values.is_device_mesh(mesh):
        raise argument_error("mesh", "a DeviceMesh", f"a {type(mesh).__name__}")
    names, sizes, ranks = argument_values.device_mesh_parts(mesh)
    if outside := sorted(set(ranks) - set(job.members)):
        raise ValueError(f"mesh must have only ranks of the group {job.members}, got {outside}")
    for mesh_dim, (name, size) in enumerate(zip(names, sizes)):
        if size > 1:
            team = mesh.get_group(mesh_dim) if dist.get_rank() in ranks else None
            yield from _at_all_sizes(job, _ALONG + name, team, size - 1)


def _at_all_sizes(job: Job, name: str, team: dist.ProcessGroup | None, peers: int) -> Iterable[_Measurement]:
    """Yields a measurement for each message size."""
    for size in _SIZES_BYTES_QUICK if job.quick else _SIZES_BYTES:
        yield _Measurement(name, team, peers, size // peers * peers)


def _crossing(mesh: Any | None, per_node: int) -> set[str]:
    """Returns the mesh dims along which ranks are on different nodes."""
    if mesh is None or per_node == 0:
        return set()
    names, sizes, ranks = argument_values.device_mesh_parts(mesh)
    nodes = (torch.tensor(ranks) // per_node).view(tuple(sizes))
    return {name for d, name in enumerate(names) if bool((nodes != nodes.narrow(d, 0, 1)).any())}


# ---- measuring


def _measure(job: Job, measurements: list[_Measurement]) -> tuple[dict[str, _Points], float]:
    """Times all measurements. Returns their points by name, and the seconds per copy of `_MEMORY_BYTES`."""
    large = torch.zeros(_MEMORY_BYTES, dtype=torch.uint8, device=job.device)
    calls = [_all_to_all(job, measurement) for measurement in measurements] + [large.clone]

    def batch(call: Callable[[], object], repeats: int) -> float:
        job.ranks.wait()
        return seconds_of(job.device, call, repeats)

    for call in calls:
        batch(call, 1)  # connects and warms up
    once = job.ranks.slowest([[batch(call, 2) for call in calls]], _LOW_QUANTILE)
    budget = _BATCH_SECONDS_QUICK if job.quick else _BATCH_SECONDS
    repeats = [min(max(round(budget / seconds), 1), _MAX_CALLS) for seconds in once]
    rounds = job.ranks.rounds(num_link_rounds(job.quick))
    seconds_by_round = [[batch(*call_and_repeats) for call_and_repeats in zip(calls, repeats)] for _ in rounds]
    *measured, copy_seconds = job.ranks.slowest(seconds_by_round, _LOW_QUANTILE)
    points: dict[str, _Points] = {}
    for measurement, seconds in zip(measurements, measured):
        points.setdefault(measurement.name, []).append((measurement.peers, measurement.sent_bytes, seconds))
    return points, copy_seconds


def _all_to_all(job: Job, measurement: _Measurement) -> Callable[[], object]:
    """Returns a function that runs the all-to-all as the runtime does, sending nothing to itself.

    On ranks that idle, the function does nothing.
    """
    if measurement.team is None:
        return lambda: None
    team = measurement.team
    wire = executables.wire(job.device, team)
    sent, received = torch.zeros(2, measurement.sent_bytes, dtype=torch.uint8, device=wire)
    if job.lowering.uses_messages(measurement.sent_bytes // measurement.peers):
        peers = [rank for rank in dist.get_process_group_ranks(team) if rank != dist.get_rank()]
        parts = sent.chunk(measurement.peers), received.chunk(measurement.peers)
        return lambda: _start_messages(team, peers, *parts)()
    splits = [measurement.sent_bytes // measurement.peers] * (measurement.peers + 1)
    splits[dist.get_rank(team)] = 0
    return lambda: dist.all_to_all_single(received, sent, splits, splits, group=team)


def _start_messages(
    team: dist.ProcessGroup, peers: Sequence[int], sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """Starts a message to each of these global ranks and one from each. Returns a function that waits for them.

    Receives are posted first, so that data goes both ways at once.
    """
    works = [dist.irecv(part, peer, group=team) for part, peer in zip(received, peers)]
    works += [dist.isend(part, peer, group=team) for part, peer in zip(sent, peers)]

    def finish() -> None:
        for work in works:
            work.wait()

    return finish


def traffic_of(job: Job, topology: Topology) -> Traffic | None:
    """Returns a function that exchanges messages with the rank half the job away for a given time.

    Products are measured while these run. Returns None on a GPU, where the slowdown of products by transfers is not
    measured.
    """
    if job.device.type != "cpu":
        return None
    group = job.ranks.group
    assert group is not None
    half = len(job.members) // 2
    me = dist.get_rank(group)
    if me >= 2 * half:  # with an odd number of ranks the last one has no partner
        return lambda seconds: lambda: None
    partner = dist.get_global_rank(group, (me + half) % (2 * half))
    link = topology.between if topology.ranks_per_node else topology.inside

    buffers: list[torch.Tensor] = []

    def start(seconds: float) -> Callable[[], None]:
        """Starts one message in each direction that takes about `seconds`. Returns a function that waits for both."""
        size = min(max(int(seconds * _PS / link.ps_per_kib) * 1024, 1 << 16), _MAX_TRAFFIC_BYTES)
        if not buffers or buffers[0].shape[1] < size:
            buffers[:] = [torch.zeros(2, size, dtype=torch.uint8)]
        sent, received = buffers[0]
        return _start_messages(group, [partner], [sent[:size]], [received[:size]])

    return start


# ---- the report


def _report(job: Job, fits: dict[str, LinkFit], points: dict[str, _Points], copy_seconds: float) -> list[str]:
    """Returns lines of text: the fitted values of each link, and the rate of copies."""
    backend = dist.get_backend(job.ranks.group)
    lines = [f"calibrated {len(job.members)} ranks on {job.device.type} over {backend}"]
    for where, taken in points.items():
        fit = fits[where]
        teams = ", ".join(str(peers + 1) for peers in sorted({peers for peers, *_ in taken}))
        lines.append(
            f"  {where}: step {fit.step * 1e6:.1f} us, message {fit.message * 1e6:.1f} us, {_rate(fit.byte)}; "
            f"off by {fit.error:.0%} on average over {len(taken)} points (teams of {teams})"
        )
    return [*lines, f"  memory: {_rate(copy_seconds / _MEMORY_BYTES)}, all ranks at once"]


def _rate(seconds_per_byte: float) -> str:
    """Returns a rate as text in GB/s."""
    return f"{1e-9 / seconds_per_byte:.2f} GB/s" if seconds_per_byte > 0 else "too fast to measure"
