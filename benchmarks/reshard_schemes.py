"""Schemes of other libraries that move a tensor between two layouts, simulated from their public sources.

Each scheme is a function from a `Problem` to a `Schedule`: the messages of each step in an executable order, and the
memory of buffers. A scheme that does not support a problem raises `CannotDo` with the reason.
docs/resharding_cases.md names the source of every rule here. Messages are boxes of the global tensor, so that tests can
execute them element by element.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import shardwright as sw

Box = tuple[tuple[int, int], ...]  # begin and end of each tensor dim


class CannotDo(Exception):
    """The scheme does not support this problem; the text is the reason."""


@dataclass(frozen=True)
class End:
    """A mesh, and the tensor's placements on it."""

    sizes: tuple[int, ...]
    placements: tuple[str, ...]
    ranks: tuple[int, ...]

    def layout(self, shape: tuple[int, ...], dtype: str) -> sw.Layout:
        mesh = sw.Mesh(dict(zip("abcdef", self.sizes, strict=False)), self.ranks)
        return sw.Layout(mesh, shape, self.placements, dtype)

    def coordinates(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yields ranks and their coordinates, row-major."""
        return zip(self.ranks, itertools.product(*map(range, self.sizes)), strict=True)

    def cut_by(self) -> list[tuple[int, int]]:
        """Returns (mesh dim, tensor dim) for each mesh dim of more than one rank that cuts."""
        pairs = enumerate(zip(self.sizes, self.placements, strict=True))
        return [(d, int(text[2:-1])) for d, (size, text) in pairs if size > 1 and text.startswith("S(")]


@dataclass(frozen=True)
class Problem:
    shape: tuple[int, ...]
    src: End
    dst: End
    item_bytes: int = 2
    ranks_per_node: int = 8
    experts: bool = False  # tensor dim 0 counts experts, which frameworks store as separate tensors

    def boxes(self, end: End) -> dict[int, Box]:
        """Returns the box of each rank. Only for plain shards and replicas, whose parts are one box."""
        for text in end.placements:
            if text != "R" and not text.startswith("S("):
                raise CannotDo(f"no {text.partition('(')[0]} placements")
        layout = end.layout(self.shape, "float32")
        return {rank: tuple(_only(intervals) for intervals in layout.region(rank)) for rank in end.ranks}


@dataclass(frozen=True)
class Message:
    """A box goes from one rank to another; with sender and receiver equal, it is a copy and costs no message."""

    sender: int
    receiver: int
    box: Box
    forwarded: bool = False  # the sender reads received data instead of the source
    wire_elements: int | None = None  # if more than the box is sent

    @property
    def elements(self) -> int:
        return volume(self.box) if self.wire_elements is None else self.wire_elements


@dataclass
class Step:
    messages: list[Message]
    hops: int = 1  # number of sequential messages until the last rank has its first piece
    is_pipelined: bool = False  # links within nodes and between them are busy at the same time


@dataclass
class Schedule:
    steps: list[Step]
    extra_elements: dict[int, int] = field(default_factory=dict)  # buffers besides source and destination, by rank


def volume(box: Box) -> int:
    return math.prod(max(0, end - begin) for begin, end in box)


def overlap(a: Box, b: Box) -> Box | None:
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(begin < end for begin, end in both) else None


def is_one_run(box: Box, part: Box) -> bool:
    """Returns whether a box lies in one run of memory within the part that contains it, stored row-major."""
    lengths = [end - begin for begin, end in box]
    first = next((d for d, length in enumerate(lengths) if length != 1), len(lengths))
    return all(box[d] == part[d] for d in range(first + 1, len(lengths)))


def figures(problem: Problem, schedule: Schedule, topology: sw.Topology) -> dict[str, float]:
    """Returns the costs of the schedule for the worst rank, by shardwright's cost formula.

    A step costs its latency, the latency of each message that a rank receives or sends (whichever are more), the bytes
    that the busiest rank receives or sends over their links, and a copy of the worst rank's data after the step.
    """
    received: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    messages: Counter[int] = Counter()
    written: Counter[int] = Counter()
    picoseconds, steps = 0, 0
    for step in schedule.steps:
        moves = [message for message in step.messages if message.sender != message.receiver]
        for message in step.messages:
            written[message.receiver] += volume(message.box) * problem.item_bytes
        picoseconds += max(written.values(), default=0) * topology.memory_ps_per_kib // 1024
        if not moves:
            continue
        steps += 1
        picoseconds += topology.step_ps + _wire_picoseconds(problem, step, moves, topology)
        for move in moves:
            received[move.receiver] += move.elements * problem.item_bytes
            sent[move.sender] += move.elements * problem.item_bytes
            messages[move.receiver] += 1
    return {
        "received_max": max(received.values(), default=0),
        "received_sum": sum(received.values()),
        "sent_max": max(sent.values(), default=0),
        "steps": steps,
        "messages_max": max(messages.values(), default=0),
        "extra_bytes": max(schedule.extra_elements.values(), default=0) * problem.item_bytes,
        "predicted_us": picoseconds / 1e6,
    }


def _wire_picoseconds(problem: Problem, step: Step, moves: list[Message], topology: sw.Topology) -> int:
    def node(rank: int) -> int:
        return rank // problem.ranks_per_node

    count = Counter(("in", move.receiver) for move in moves) + Counter(("out", move.sender) for move in moves)
    load: dict[bool, Counter[tuple[str, int]]] = defaultdict(Counter)
    for move in moves:
        is_between = node(move.sender) != node(move.receiver)
        load[is_between][("out", move.sender)] += move.elements * problem.item_bytes
        load[is_between][("in", move.receiver)] += move.elements * problem.item_bytes
    slowest = topology.between if load[True] else topology.inside
    latency = (max(count.values()) + step.hops - 1) * slowest.message_ps
    if step.is_pipelined:
        times = [max(load[b].values(), default=0) * link.ps_per_kib // 1024 for b, link in _links(topology)]
        return latency + max(times)
    ranks = {*load[True], *load[False]}
    return latency + max(sum(load[b][rank] * link.ps_per_kib for b, link in _links(topology)) for rank in ranks) // 1024


def _links(topology: sw.Topology) -> list[tuple[bool, sw.planning.Link]]:
    return [(False, topology.inside), (True, topology.between)]


# ---- NCCL m2n


def m2n_direct(problem: Problem) -> Schedule:
    """Each source rank puts into each destination rank that it serves; ranks are divided evenly."""
    src, dst = _m2n_side(problem, problem.src), _m2n_side(problem, problem.dst)
    messages = []
    for (replica, _), (receiver, need) in dst.items():
        server = _m2n_even(replica, _replicas(dst), _replicas(src))
        messages += _m2n_puts(src, server, receiver, need)
    _m2n_limits(problem, messages, fan_in=32, fan_out=64)
    return Schedule([Step(messages)])


def m2n_ring(problem: Problem) -> Schedule:
    """A source replica serves some nodes: the first rank of each destination part on the first node receives, passes on
    to the next node, and copies to the others of its node."""
    src, dst = _m2n_side(problem, problem.src), _m2n_side(problem, problem.dst)
    by_shard: dict[int, list[tuple[int, Box]]] = defaultdict(list)
    for (_, shard), held in sorted(dst.items()):
        by_shard[shard].append(held)
    messages, hops = [], 1
    for replicas in by_shard.values():
        nodes: dict[int, list[tuple[int, Box]]] = defaultdict(list)
        for rank, box in replicas:
            nodes[rank // problem.ranks_per_node].append((rank, box))
        on_nodes = list(nodes.values())
        for server, first, last in _m2n_node_ranges(len(on_nodes), _replicas(src)):
            (head, need) = on_nodes[first][0]
            messages += _m2n_puts(src, server, head, need)
            for left, right in itertools.pairwise(on_nodes[first:last]):
                messages.append(Message(left[0][0], right[0][0], need, forwarded=True))
            for followers in on_nodes[first:last]:
                messages += [Message(followers[0][0], rank, need, forwarded=True) for rank, _ in followers[1:]]
            hops = max(hops, last - first + any(len(followers) > 1 for followers in on_nodes[first:last]))
    _m2n_limits(problem, messages, fan_in=16, fan_out=128)
    return Schedule([Step(messages, hops, is_pipelined=True)])


def _m2n_side(problem: Problem, end: End) -> dict[tuple[int, int], tuple[int, Box]]:
    """Returns {(replica, shard): (rank, box)} after checking the library's requirements."""
    boxes = problem.boxes(end)
    if set(problem.src.ranks) & set(problem.dst.ranks):
        raise CannotDo("meshes must be disjoint")
    if list(end.ranks) != list(range(end.ranks[0], end.ranks[0] + len(end.ranks))):
        raise CannotDo("ranks of a mesh must be consecutive")
    if problem.src.ranks[0] > problem.dst.ranks[0]:
        raise CannotDo("source ranks must come first")
    if len(problem.shape) > 3:
        raise CannotDo("at most three tensor dims")
    cuts = end.cut_by()
    are_one_axis = len({t for _, t in cuts}) == 1 and len(cuts) == sum(size > 1 for size in end.sizes)
    if len(cuts) > 1 and not are_one_axis:
        raise CannotDo("one mesh dim of a side may cut")
    if sum(size > 1 for size in end.sizes) > 2:
        raise CannotDo("at most two mesh dims")
    shards = math.prod(end.sizes[d] for d, _ in cuts)
    if cuts and problem.shape[cuts[0][1]] % shards:
        raise CannotDo("parts must be equal")
    by_box: dict[Box, list[int]] = defaultdict(list)
    for rank in end.ranks:
        by_box[boxes[rank]].append(rank)
    return {
        (replica, shard): (rank, box)
        for shard, (box, ranks) in enumerate(by_box.items())
        for replica, rank in enumerate(ranks)
    }


def _replicas(side: dict[tuple[int, int], tuple[int, Box]]) -> int:
    return 1 + max(replica for replica, _ in side)


def _m2n_even(replica: int, of: int, servers: int) -> int:
    """Returns the source replica that serves a destination replica."""
    few, many = min(of, servers), max(of, servers)
    each, more = divmod(many, few)
    if servers >= of:
        return replica * each + min(replica, more)
    return replica // (each + 1) if replica < more * (each + 1) else more + (replica - more * (each + 1)) // each


def _m2n_node_ranges(nodes: int, servers: int) -> Iterator[tuple[int, int, int]]:
    """Yields (replica of the source, first node, end of its nodes)."""
    if servers >= nodes:
        yield from ((node, node, node + 1) for node in range(nodes))
        return
    each, more = divmod(nodes, servers)
    first = 0
    for server in range(servers):
        last = first + each + (server < more)
        yield server, first, last
        first = last


def _m2n_puts(src: dict[tuple[int, int], tuple[int, Box]], server: int, receiver: int, need: Box) -> list[Message]:
    found = ((rank, overlap(box, need)) for (replica, _), (rank, box) in src.items() if replica == server)
    return [Message(rank, receiver, both) for rank, both in found if both]


def _m2n_limits(problem: Problem, messages: list[Message], fan_in: int, fan_out: int) -> None:
    sources = Counter(message.receiver for message in messages if not message.forwarded)
    targets = Counter(message.sender for message in messages)
    if max(sources.values(), default=0) > fan_in or max(targets.values(), default=0) > fan_out:
        raise CannotDo(f"at most {fan_in} sources and {fan_out} targets a rank")


# ---- NeMo-RL


def nemo(problem: Problem) -> Schedule:
    """Stripes to the replicas and an all-gather if dim 0 divides, else everything to one replica and a broadcast."""
    src, dst = problem.boxes(problem.src), problem.boxes(problem.dst)
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank in problem.src.ranks:
        if volume(src[rank]):
            holders[src[rank]].append(rank)
    groups: dict[Box, list[int]] = defaultdict(list)
    for rank in problem.dst.ranks:
        if volume(dst[rank]):
            groups[dst[rank]].append(rank)
    striped = _nemo_striped(src, dst, holders, groups)
    if striped is not None:
        return striped
    messages, broadcasts = [], []
    for need, members in groups.items():
        for box, ranks in holders.items():
            both = overlap(box, need)
            if both:
                messages.append(Message(members[0] if members[0] in ranks else ranks[0], members[0], both))
        broadcasts += [Message(a, b, need, forwarded=True) for a, b in itertools.pairwise(members)]
    depth = max(len(members) - 1 for members in groups.values()) if groups else 0
    steps = [Step(messages)] + ([Step(broadcasts, hops=depth)] if broadcasts else [])
    return Schedule(steps, _packing(messages, src, dst))


def _nemo_striped(
    src: dict[int, Box], dst: dict[int, Box], holders: dict[Box, list[int]], groups: dict[Box, list[int]]
) -> Schedule | None:
    targets: list[tuple[int, Box]] = []
    for need, members in groups.items():
        if len(members) == 1:
            targets.append((members[0], need))
            continue
        if not need or (need[0][1] - need[0][0]) % len(members):
            return None
        rows = (need[0][1] - need[0][0]) // len(members)
        for i, member in enumerate(members):
            begin = need[0][0] + i * rows
            targets.append((member, ((begin, begin + rows), *need[1:])))
    if all(len(members) == 1 for members in groups.values()):
        return None
    messages, uses = [], Counter[Box]()
    for receiver, stripe in targets:
        for box, ranks in holders.items():
            both = overlap(box, stripe)
            if not both:
                continue
            sender = receiver
            if receiver not in ranks:
                sender = ranks[uses[box] % len(ranks)]
                uses[box] += 1
            messages.append(Message(sender, receiver, both))
    for message in messages:
        is_direct = is_one_run(message.box, src[message.sender]) or is_one_run(message.box, dst[message.receiver])
        if message.sender != message.receiver and not is_direct:
            return None
    stripes = dict(targets)
    gathered = [
        Message(a, b, stripes[a], forwarded=True)
        for members in groups.values()
        for a, b in itertools.permutations(members, 2)
    ]
    return Schedule([Step(messages), Step(gathered)], _packing(messages, src, dst))


def _packing(messages: Iterable[Message], src: dict[int, Box], dst: dict[int, Box]) -> dict[int, int]:
    """Returns the bytes of buffers for boxes that are not one run in the source, or in the destination."""
    extra: Counter[int] = Counter()
    for message in messages:
        if message.sender == message.receiver:
            continue
        if not is_one_run(message.box, src[message.sender]):
            extra[message.sender] += volume(message.box)
        if not is_one_run(message.box, dst[message.receiver]):
            extra[message.receiver] += volume(message.box)
    return extra


# ---- Megatron


def megatron(problem: Problem) -> Schedule:
    """Each destination rank picks a source replica and receives everything from its ranks at once."""
    src, dst = problem.boxes(problem.src), problem.boxes(problem.dst)
    pieces = _megatron_pieces(problem)
    replicas = _megatron_replicas(problem.src, problem.experts)
    messages = []
    for receiver in problem.dst.ranks:
        for piece in pieces:
            need = overlap(dst[receiver], piece)
            if need is None:
                continue
            able = [group for group in replicas if any(overlap(src[rank], need) for rank in group)]
            own = [group for group in able if receiver in group and overlap(src[receiver], need)]
            for sender in own[0] if own else _megatron_choice(able, receiver):
                both = overlap(src[sender], need)
                if both:
                    messages.append(Message(sender, receiver, both))
    extra: Counter[int] = Counter()
    for message in messages:
        if message.sender != message.receiver:
            extra[message.receiver] += volume(message.box)
            if not is_one_run(message.box, src[message.sender]):
                extra[message.sender] += volume(message.box)
    return Schedule([Step(messages)], extra)


def _megatron_cuts(end: End, experts: bool) -> list[tuple[int, int]]:
    return [(d, t) for d, t in end.cut_by() if not (experts and t == 0)]


def _megatron_pieces(problem: Problem) -> list[Box]:
    """Returns the boxes of single messages: experts, and tiles of the least common multiple of both cuts."""
    src, dst = (_megatron_cuts(end, problem.experts) for end in (problem.src, problem.dst))
    for end in (problem.src, problem.dst):
        for d, t in _megatron_cuts(end, problem.experts):
            if problem.shape[t] % end.sizes[d]:
                raise CannotDo("parts must be equal")
    bounds = [[0, n] for n in problem.shape]
    if problem.experts:
        bounds[0] = list(range(problem.shape[0] + 1))
    if max(len(src), len(dst)) > 1:
        for cuts in (src, dst):
            if len(cuts) > 2 or (len(cuts) == 2 and cuts[1][1] != 0 and cuts[0][1] != 0):
                raise CannotDo("one mesh dim for tensor parallelism, and one that cuts dim 0")
    elif src and dst and src[0][1] != dst[0][1]:
        raise CannotDo("both sides must cut the same tensor dim")
    elif src or dst:
        t = (dst or src)[0][1]
        parts = [end.sizes[cuts[0][0]] for end, cuts in ((problem.src, src), (problem.dst, dst)) if cuts]
        tiles = math.lcm(*parts)
        if problem.shape[t] % tiles:
            raise CannotDo("the dim must be divisible by the least common multiple of both cuts")
        bounds[t] = list(range(0, problem.shape[t] + 1, problem.shape[t] // tiles))
    return list(itertools.product(*(itertools.pairwise(b) for b in bounds)))


def _megatron_replicas(end: End, experts: bool) -> list[list[int]]:
    """Returns the ranks of each replica of the source; with experts, of each expert's weights."""
    cut = {d for d, t in end.cut_by() if not (experts and t == 0)}
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, where in end.coordinates():
        groups[tuple(x for d, x in enumerate(where) if d not in cut)].append(rank)
    return list(groups.values())


def _megatron_choice(groups: list[list[int]], receiver: int) -> list[int]:
    """Returns a source replica, round robin; always the first if a replica is a single rank."""
    shards = len(groups[0])
    return groups[0] if shards == 1 else groups[receiver // shards % len(groups)]


# ---- TorchStore


def torchstore(problem: Problem) -> Schedule:
    """Each destination rank reads overlapping source parts in full, from the first rank that holds each."""
    src, dst = problem.boxes(problem.src), problem.boxes(problem.dst)
    messages, extra = [], Counter[int]()
    for receiver in problem.dst.ranks:
        seen = set()
        for sender in sorted(problem.src.ranks):
            both = overlap(src[sender], dst[receiver])
            if both is None or both in seen:
                continue
            seen.add(both)
            messages.append(Message(sender, receiver, both, wire_elements=volume(src[sender])))
            if src[sender] != dst[receiver]:
                extra[receiver] += volume(src[sender])
    return Schedule([Step(messages)], extra)


SCHEMES: dict[str, Callable[[Problem], Schedule]] = {
    "NCCL m2n, ring": m2n_ring,
    "NCCL m2n, direct": m2n_direct,
    "NeMo-RL": nemo,
    "Megatron": megatron,
    "TorchStore": torchstore,
}


def _only(intervals: list[tuple[int, int]]) -> tuple[int, int]:
    return intervals[0] if intervals else (0, 0)
