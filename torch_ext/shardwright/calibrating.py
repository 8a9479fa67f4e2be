"""Measures on a live job what plans are chosen by: the latencies and bandwidths of a `Topology`, times of products.

Each part of the table comes from its own measurement. Whatever is measured, all ranks are busy with it at the same
time, because in a redistribute the groups of a mesh dim all move at once and share network, memory and cores.

    inside, step       all-to-alls in teams of neighbours on a node: 2, ..., all ranks of the node
    between            all-to-alls in teams across nodes, of the ranks that have the same place on their nodes
    a mesh dim         all-to-alls in the mesh dim's own groups, with the fixed cost of `inside`; where these are as
                       fast as `inside` or `between` says, within noise, it is one of those, lest noise decide on plans
    memory             copies of a large tensor into new memory, as a result is made
    products           large and tiny ones, alone and beside transfers (calibrating_gemm.py)

A measured point is (peers, bytes to each, time on the slowest rank); a line `step + peers * message + bytes * rate` is
laid through the points by least squares of relative errors, points far off counting less and less.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import _arguments, _convert, _engine, groups, tables
from ._planner import GemmModel
from .calibrating_fit import ALONG, BETWEEN, INSIDE, PS, Fit, Point, figures_of, link_of
from .calibrating_gemm import Traffic, check_dtype, measure_gemm
from .topology import Topology, load_topology

logger = logging.getLogger(__name__)

# Bytes that a rank sends in all, to its peers together, from what latency decides to what bandwidth decides.
_SIZES_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
_SIZES_BYTES_QUICK = (1 << 10, 1 << 16, 1 << 20)
_MEMORY_BYTES = 1 << 23

# From this size on, exchanges over Gloo are messages (kMinMessageBytes in csrc/program/builder.h).
_MIN_MESSAGE_BYTES = 1 << 18

# Larger teams tell nothing new about what one more peer costs.
_MAX_TEAM = 16

_MAX_TRAFFIC_BYTES = 1 << 27

# Of a team size and number of bytes: short batches that take turns with all others, so that what else the machine does
# falls on all alike. The low quantile of the batches counts, for disturbances only ever add.
_ROUNDS, _ROUNDS_QUICK = 24, 6
_BATCH_SECONDS, _BATCH_SECONDS_QUICK = 0.006, 0.002
_MAX_CALLS = 32
_LOW_QUANTILE = 0.1


class _Job(NamedTuple):
    group: dist.ProcessGroup
    ranks: list[int]  # global ranks of the group
    device: torch.device
    backend: str  # that plans are for
    quick: bool


class _Series(NamedTuple):
    """Something to measure: this rank's team in it, if it has one, and the bytes to send."""

    name: str
    team: dist.ProcessGroup | None
    peers: int
    sent_bytes: int


def calibrate(
    group: dist.ProcessGroup | Any | None = None,
    *,
    device: torch.device | str | None = None,
    ranks_per_node: int | None = None,
    name: str = "calibrated",
    mesh: Any | None = None,
    quick: bool = False,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    apply: bool | None = None,
) -> Topology:
    """Measures links and products on a job, in a few seconds; what is planned later goes by what was measured.

    To be called by all ranks of the group at the same point, while they do nothing else: once, after
    ``init_process_group``. Process groups that it makes are kept for redistributes, as those of `prepare` are. Logs
    what was measured, on the first rank, at level INFO.

    Later redistributes and products of this job over the same backend go by it, unless they are given a topology (or
    their mesh has one) or a ``gemm_model``, until `forget_calibration` or the end of the default process group.

    Args:
        group: whose ranks to measure; default, the default group. Or a mesh, as `mesh`.
        device: where the tensors are that shall be redistributed, ``"cpu"`` or ``"cuda"``: it decides the backend.
            Default: that of the mesh, else CUDA if the group has NCCL, else CPU.
        ranks_per_node: how many consecutive ranks are on a node, 0 for all. Default: what torchrun says
            (``LOCAL_WORLD_SIZE``), else as the host names of the ranks are.
        name: of the topology, for plans to say what they were chosen by.
        mesh: a torch ``DeviceMesh`` within the group; each of its mesh dims gets a link of its own, by name.
        quick: fewer sizes and repeats, for figures that are only about right.
        dtypes: of products to measure, floating, of 16 bits and more. Others go by these, scaled by size. Empty: none.
        apply: whether later plans and products go by it. Default: where all ranks of the job were measured, since
            tables have to be the same on all of them.

    Returns:
        A `Topology`, equal on all ranks, with times in picoseconds, per collective, per message, per KiB. On one node
        `between` is `inside`. Rates are at least 1; latencies may be 0, where none can be told from noise.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: fewer than 2 ranks, a rank outside the group, a mesh that reaches beyond it or is no DeviceMesh,
            nodes that do not hold the same number of consecutive ranks each, a dtype without products, `apply` for a
            part of the job.
    """
    if _convert.is_device_mesh(group) and mesh is None:
        group, mesh = None, group
    job = _make_job(group, device, mesh, quick)
    is_whole = len(job.ranks) == dist.get_world_size()
    if apply and not is_whole:
        raise ValueError(
            f"apply: True for {len(job.ranks)} of {dist.get_world_size()} ranks, whose plans would differ from the "
            "others'; allowed is all ranks of the job, or False and sw.Mesh(..., topology=) for plans on some"
        )
    wanted = _dtypes_of(dtypes)
    topology, report = _measure(job, ranks_per_node, name, mesh)
    gemm_models = {}
    for dtype in wanted:
        model = measure_gemm(job.device, dtype, job.group, _traffic(job, topology), quick)
        gemm_models[job.device.type, str(dtype).removeprefix("torch.")] = model
        report.append(_report_gemm(dtype, model))
    if apply or (apply is None and is_whole):
        tables.set_measured(job.backend, topology, gemm_models)
    if dist.get_rank(job.group) == 0:
        logger.info("\n".join(report))
    return topology


def forget_calibration() -> None:
    """Plans and products go by the default tables again. To be called by all ranks at the same point."""
    tables.forget_measured()


groups.when_gone.append(tables.forget_measured)


def main(argv: Sequence[str] | None = None) -> int:
    """``torchrun --nproc-per-node 4 -m shardwright calibrate --out topology.json``; the exit status.

    It is 2 with a sentence on stderr for arguments or an environment that will not do.
    """
    parser = argparse.ArgumentParser(
        prog="shardwright calibrate",
        description="Measures latencies and bandwidths between the ranks that torchrun started, for plans to go by.",
    )
    parser.add_argument("--out", metavar="FILE", help="JSON to write, for sw.load_topology and SHARDWRIGHT_TOPOLOGY")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where it is available")
    parser.add_argument("--ranks-per-node", type=int, help="0: all; default: as torchrun says")
    parser.add_argument("--mesh", help="names and sizes, dp=2,tp=4: also measure each mesh dim")
    parser.add_argument("--name", default="calibrated", help="of the topology (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    arguments = parser.parse_args(argv)
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    try:
        if missing and not dist.is_initialized():
            raise ValueError(
                f"{', '.join(missing)} not in the environment; "
                "start it as: torchrun --nproc-per-node 4 -m shardwright calibrate"
            )
        _calibrate_job(arguments)
    except (ValueError, OSError) as error:
        print(f"shardwright calibrate: {error}", file=sys.stderr)
        return 2
    return 0


def _calibrate_job(arguments: argparse.Namespace) -> None:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        mesh = _make_mesh(arguments.mesh, device)
        topology, report = measure(None, device, arguments.ranks_per_node, arguments.name, mesh, arguments.quick)
        if dist.get_rank() == 0:
            print("\n".join(report))
            if arguments.out:
                _write(Path(arguments.out), topology)
                print(f"written to {arguments.out}")
            else:
                print(topology.to_json())
    finally:
        if ours:
            dist.destroy_process_group()


def _write(path: Path, topology: Topology) -> None:
    try:
        path.write_text(topology.to_json() + "\n")
    except OSError as error:
        print(topology.to_json())
        raise ValueError(f"--out: {path} cannot be written: {error.strerror}; the table is printed instead") from None


def _make_mesh(text: str | None, device: str) -> Any | None:
    if text is None:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    from .cli import parse_mesh

    dims = parse_mesh(text)
    size = math.prod(dims.values())
    if size != dist.get_world_size():
        raise ValueError(
            f"--mesh: {text!r} has {size} ranks; allowed is as many as the job has, {dist.get_world_size()}"
        )
    return init_device_mesh(device, tuple(dims.values()), mesh_dim_names=tuple(dims))


def measure(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    ranks_per_node: int | None = None,
    name: str = "calibrated",
    mesh: Any | None = None,
    quick: bool = False,
) -> tuple[Topology, list[str]]:
    """The topology that `calibrate` finds, with lines that say what was measured. Changes nothing."""
    return _measure(_make_job(group, device, mesh, quick), ranks_per_node, name, mesh)


def _measure(job: _Job, ranks_per_node: int | None, name: str, mesh: Any | None) -> tuple[Topology, list[str]]:
    if not isinstance(name, str):
        raise ValueError(f"name: got {name!r}; allowed is text")
    if ranks_per_node is not None:
        ranks_per_node = _convert.integer(ranks_per_node, "ranks_per_node")
    per_node = _ranks_per_node(job, ranks_per_node)
    nodes = _by_node(job.ranks, per_node)
    series = _inside(job, nodes) + _between(job, nodes) + _along(job, mesh)
    points, copy_seconds = _take_points(job, series)
    fits = figures_of(points, _crossing(mesh, per_node))
    table = {
        "version": 1,
        "name": name,
        "ranks_per_node": per_node,
        "step_ps": round(fits[INSIDE].step * PS),
        "memory_ps_per_kib": max(1, round(copy_seconds / _MEMORY_BYTES * 1024 * PS)),
        "inside": link_of(fits[INSIDE]),
        "between": link_of(fits[BETWEEN]),
        "mesh_dims": {w.removeprefix(ALONG): link_of(found) for w, found in fits.items() if w.startswith(ALONG)},
    }
    # Clocks differ from rank to rank; what the first one has is used by all.
    agreed = [(table, _report(job, fits, points, copy_seconds))]
    dist.broadcast_object_list(agreed, src=job.ranks[0], group=job.group, device=job.device)
    table, report = agreed[0]
    return load_topology(table), report


# ---- who measures


def _make_job(
    group: dist.ProcessGroup | None, device: torch.device | str | None, mesh: Any | None, quick: bool
) -> _Job:
    groups.check_initialised()
    _arguments.check_group(group)
    carrier = group if group is not None else dist.group.WORLD
    assert carrier is not None
    if dist.get_rank(carrier) < 0:
        raise ValueError(f"group: rank {dist.get_rank()} is not in it; allowed is to call this on its ranks only")
    ranks = dist.get_process_group_ranks(carrier)
    if len(ranks) < 2:
        raise ValueError(f"group: it has {len(ranks)} rank; there is something to measure between at least 2 ranks")
    kinds = sorted(kind.type for kind in carrier._device_types)
    if device is None:
        device = getattr(mesh, "device_type", None) or _default_device(carrier, kinds)
    where = _arguments.device_of("device", device)
    if where.type not in kinds:
        raise ValueError(f"device: the group has no backend for {where.type}; allowed are {', '.join(kinds)}")
    return _Job(carrier, ranks, where, _engine.lowering(where.type, carrier), quick)


def _default_device(carrier: dist.ProcessGroup, kinds: list[str]) -> str:
    # Gloo takes tensors on CUDA too, but nobody redistributes those by it who has NCCL.
    has_cuda = "cuda" in kinds and torch.cuda.is_available()
    if has_cuda and carrier._get_backend(torch.device("cuda")).name().lower() != "gloo":
        return "cuda"
    return "cpu" if "cpu" in kinds else kinds[0]


def _ranks_per_node(job: _Job, given: int | None) -> int:
    """0 where all ranks of the group are on one node."""
    if given is not None and given < 0:
        raise ValueError(f"ranks_per_node: {given}; allowed is 0, for all, or more")
    mine = (given, os.environ.get("LOCAL_WORLD_SIZE"), socket.gethostname())
    everyone: list[Any] = [None] * len(job.ranks)
    dist.all_gather_object(everyone, mine, group=job.group)
    if len({one[0] for one in everyone}) > 1:
        raise ValueError(f"ranks_per_node: ranks gave {[one[0] for one in everyone]}; allowed is one value for all")
    if given is None and mine[1] is not None and len({one[1] for one in everyone}) == 1:
        given = int(mine[1])
    if given is None:
        given = _nodes_of_hosts(job.ranks, [one[2] for one in everyone])
    return 0 if len(_by_node(job.ranks, given)) == 1 else given


def _nodes_of_hosts(ranks: list[int], hosts: list[str]) -> int:
    if len(set(hosts)) == 1:
        return 0
    largest = max(hosts.count(host) for host in hosts)
    nodes = [rank // largest for rank in ranks]
    if not len(set(zip(hosts, nodes))) == len(set(hosts)) == len(set(nodes)):
        raise ValueError(
            f"ranks_per_node: ranks {ranks} are on the hosts {hosts}; allowed are nodes of equally many consecutive "
            "ranks. Start the job so, or give ranks_per_node"
        )
    return largest


def _by_node(ranks: list[int], ranks_per_node: int) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(rank // ranks_per_node if ranks_per_node else 0, []).append(rank)
    return list(nodes.values())


def _inside(job: _Job, nodes: list[list[int]]) -> list[_Series]:
    return _teams_in(job, INSIDE, nodes)


def _between(job: _Job, nodes: list[list[int]]) -> list[_Series]:
    places = itertools.zip_longest(*nodes)
    lines = [[rank for rank in place if rank is not None] for place in places]
    return _teams_in(job, BETWEEN, lines)


def _teams_in(job: _Job, name: str, lines: list[list[int]]) -> list[_Series]:
    """Teams of 2, 4, 8, ... ranks that follow each other in a line, and of the whole line; who is left over idles."""
    longest = min(max(map(len, lines)), _MAX_TEAM)
    series = []
    for size in sorted({*(1 << n for n in range(1, longest.bit_length())), longest} - {1}):
        team = None
        for line in lines:
            for begin in range(0, len(line) - size + 1, size):
                if dist.get_rank() in line[begin : begin + size]:
                    team = groups.find_or_make(line[begin : begin + size], (), None)
        series += _at_all_sizes(job, name, team, size - 1)
    return series


def _along(job: _Job, mesh: Any | None) -> list[_Series]:
    if mesh is None:
        return []
    if not _convert.is_device_mesh(mesh):
        raise ValueError(f"mesh: got a {type(mesh).__name__}; allowed is a DeviceMesh")
    names, sizes, ranks = _convert.device_mesh_parts(mesh)
    if outside := sorted(set(ranks) - set(job.ranks)):
        raise ValueError(f"mesh: its ranks {outside} are not in the group; allowed is a mesh of the ranks {job.ranks}")
    series = []
    for mesh_dim, (name, size) in enumerate(zip(names, sizes)):
        if size > 1:
            team = mesh.get_group(mesh_dim) if dist.get_rank() in ranks else None
            series += _at_all_sizes(job, ALONG + name, team, size - 1)
    return series


def _crossing(mesh: Any | None, ranks_per_node: int) -> set[str]:
    """Series of mesh dims along which ranks are on different nodes."""
    if mesh is None or ranks_per_node == 0:
        return set()
    names, sizes, ranks = _convert.device_mesh_parts(mesh)
    nodes = (torch.tensor(ranks) // ranks_per_node).view(tuple(sizes))
    return {ALONG + name for d, name in enumerate(names) if bool((nodes != nodes.narrow(d, 0, 1)).any())}


def _at_all_sizes(job: _Job, name: str, team: dist.ProcessGroup | None, peers: int) -> list[_Series]:
    sizes = _SIZES_BYTES_QUICK if job.quick else _SIZES_BYTES
    return [_Series(name, team, peers, size // peers * peers) for size in sizes]


# ---- measuring


def _take_points(job: _Job, series: list[_Series]) -> tuple[dict[str, list[Point]], float]:
    """Points by the name of their series, and the seconds that a copy of `_MEMORY_BYTES` takes."""
    large = torch.zeros(_MEMORY_BYTES, dtype=torch.uint8, device=job.device)
    calls = [_all_to_all(job, one) for one in series] + [large.clone]
    for call in calls:
        _batch(job, call, 1)  # connects and warms up
    once = _slowest(job, [[_batch(job, call, 2) for call in calls]])[0]
    budget = _BATCH_SECONDS_QUICK if job.quick else _BATCH_SECONDS
    repeats = [min(max(round(budget / seconds), 1), _MAX_CALLS) for seconds in once]
    rounds = range(_ROUNDS_QUICK if job.quick else _ROUNDS)
    seconds = _slowest(job, [[_batch(job, *one) for one in zip(calls, repeats)] for _ in rounds])
    low = [sorted(column)[int(_LOW_QUANTILE * (len(column) - 1))] for column in zip(*seconds)]
    points: dict[str, list[Point]] = {}
    for one, measured in zip(series, low):
        points.setdefault(one.name, []).append(Point(one.peers, one.sent_bytes, measured))
    return points, low[-1]


def _all_to_all(job: _Job, one: _Series) -> Callable[[], Any]:
    """As the runtime carries it out: nothing is sent to oneself. Idle ranks do nothing."""
    if one.team is None:
        return lambda: None
    team = one.team
    sent, received = torch.zeros(2, one.sent_bytes, dtype=torch.uint8, device=job.device)
    if job.backend == "gloo" and one.sent_bytes // one.peers >= _MIN_MESSAGE_BYTES:
        peers = [rank for rank in dist.get_process_group_ranks(team) if rank != dist.get_rank()]
        return _messages(team, peers, sent.chunk(one.peers), received.chunk(one.peers))
    splits = [one.sent_bytes // one.peers] * (one.peers + 1)
    splits[dist.get_rank(team)] = 0
    return lambda: dist.all_to_all_single(received, sent, splits, splits, group=team)


def _messages(
    team: dist.ProcessGroup, peers: Sequence[int], sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
) -> Callable[[], Any]:
    """One to each of these global ranks and one from it; receives first, so that data goes both ways at once."""

    def call() -> None:
        for work in _start_messages(team, peers, sent, received):
            work.wait()

    return call


def _start_messages(
    team: dist.ProcessGroup, peers: Sequence[int], sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
) -> list[Any]:
    works = [dist.irecv(part, peer, group=team) for part, peer in zip(received, peers)]
    return works + [dist.isend(part, peer, group=team) for part, peer in zip(sent, peers)]


def _traffic(job: _Job, topology: Topology) -> Traffic | None:
    """Messages to the rank half the job away, as long as asked for, for products to be measured beside. None on a GPU,
    where what a product loses to transfers has not been measured."""
    if job.device.type != "cpu":
        return None
    half = len(job.ranks) // 2
    me = dist.get_rank(job.group)
    if me >= 2 * half:  # of an odd number the last one has no partner
        return lambda seconds: lambda: None
    partner = dist.get_global_rank(job.group, (me + half) % (2 * half))
    link = topology.between if topology.ranks_per_node else topology.inside

    def start(seconds: float) -> Callable[[], None]:
        size = min(max(int(seconds * PS / link.ps_per_kib) * 1024, 1 << 16), _MAX_TRAFFIC_BYTES)
        sent, received = torch.zeros(2, size, dtype=torch.uint8)
        works = _start_messages(job.group, [partner], [sent], [received])

        def finish() -> None:
            for work in works:
                work.wait()

        return finish

    return start


def _batch(job: _Job, call: Callable[[], Any], repeats: int) -> float:
    """Seconds per call on this rank."""
    dist.barrier(job.group)
    _synchronise(job)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _synchronise(job)
    return (time.perf_counter() - start) / repeats


def _synchronise(job: _Job) -> None:
    if job.device.type == "cuda":
        torch.cuda.synchronize()


def _slowest(job: _Job, seconds: list[list[float]]) -> list[list[float]]:
    """Each of the times as it was on the rank where it was longest."""
    table = torch.tensor(seconds, dtype=torch.float64).to(job.device)
    dist.all_reduce(table, dist.ReduceOp.MAX, group=job.group)
    return [[float(value) for value in row] for row in table.tolist()]


# ---- what to say


def _report(job: _Job, fits: dict[str, Fit], points: dict[str, list[Point]], copy_seconds: float) -> list[str]:
    backend = dist.get_backend(job.group)
    lines = [f"calibrated {len(job.ranks)} ranks on {job.device.type} over {backend}"]
    for where in points:
        found = fits[where]
        teams = ", ".join(str(peers + 1) for peers in sorted({point.peers for point in points[where]}))
        lines.append(
            f"  {where}: step {found.step * 1e6:.1f} us, message {found.message * 1e6:.1f} us, {_rate(found.byte)}; "
            f"off by {found.error:.0%} on average over {len(points[where])} points (teams of {teams})"
        )
    lines.append(f"  memory: {_rate(copy_seconds / _MEMORY_BYTES)}, all ranks at once")
    return lines


def _report_gemm(dtype: torch.dtype, model: GemmModel) -> str:
    rate = 1e-3 * model.num_processors * model.flops_per_us * 2 / dtype.itemsize
    return (
        f"  products of {dtype}: {rate:.1f} GFlop/s, {model.launch_ps * 1e-6:.1f} us each, "
        f"{model.contention_percent}% longer beside transfers"
    )


def _dtypes_of(given: Any) -> list[torch.dtype]:
    wanted = _convert.items(given, "dtypes", "a list of dtypes, such as [torch.float32]")
    for dtype in wanted:
        check_dtype("dtypes", dtype)
    return wanted


def _rate(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.2f} GB/s" if seconds_per_byte > 0 else "more GB/s than can be told"


if __name__ == "__main__":
    sys.exit(main())
