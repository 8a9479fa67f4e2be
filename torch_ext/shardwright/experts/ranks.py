"""The ranks of each expert, and the routes of tokens to them.

A replica is one expert on one rank; replicas are numbered by rank, then in the rank's order of experts. A code selects
the replica for one expert of a token: the replica's number plus 1, or 0 for no expert (csrc/runtime/experts.h).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._native import _planner, _runtime
from ..layouts import argument_values
from ..layouts.errors import argument_error
from ..layouts.topology import Topology, named_topology
from ..runtime import executables, groups
from ..runtime.agreement import GroupWords

Group = Any  # a ProcessGroup, a DeviceMesh, or None for the default group
_MAX_EXPERTS = 1 << 20  # of a Layout
_ALLOWED = "a Layout with experts in dim 0, or a list of expert ids for each rank of the group"


# Tables that captured graphs read at every replay, even after the placement is gone. They are never freed.
_used_by_graphs: set[_runtime.DevicePlacement] = set()


class ExpertGroup:
    """The process group that sends tokens, and the device from which it sends them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group_name: str = group.group_name
        self._group = groups.weakly(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))  # global ranks
        self.rank = dist.get_rank(group)  # this rank in the group
        self.size = len(self.ranks)
        self._wire_devices: dict[torch.device, torch.device] = {}
        self._words: GroupWords | None = None

    @property
    def words(self) -> GroupWords:
        """Returns the exchange for comparisons and counts."""
        if self._words is None:
            group = self._group.get()
            self._check_backend(group)
            self._words = GroupWords(groups.default_if_none(group))
        return self._words

    def check_device(self, device: torch.device) -> None:
        """Raises ValueError if the group has no backend for tensors on this device."""
        if not executables.communicates_on(device.type, self._group.get()):
            raise argument_error("x", "on a device for which the group has a backend", device)

    def owner(self) -> groups.Owner:
        """Returns the owner of groups of some of this group's ranks."""
        return groups.owner_of(None, self._group.get())

    @staticmethod
    def _check_backend(group: dist.ProcessGroup) -> None:
        """Raises RuntimeError if the group has the backend for dry runs."""
        if groups.moves_nothing(group):
            raise RuntimeError("group must have a backend that moves data, got the fake backend")

    def wire(self, device: torch.device) -> torch.device:
        """Returns the device from which tensors of `device` are sent: the same, or the host."""
        if device not in self._wire_devices:
            group = self._group.get()
            self._check_backend(group)
            self._wire_devices[device] = executables.wire(device, group)
        return self._wire_devices[device]


class ExpertRanks(ExpertGroup):
    """A placement of experts on a process group. Equal on all ranks, except for the fields about this rank."""

    def __init__(self, experts_of_rank: Sequence[Sequence[int]], num_experts: int, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.placement = _runtime.ExpertPlacement(num_experts, [list(experts) for experts in experts_of_rank])
        self.experts = tuple(experts_of_rank[self.rank])
        self._expert_of_replica = [expert for experts in experts_of_rank for expert in experts]
        self.first_replica = self.placement.first_replica[self.rank]
        # For each replica: the rank to which its rows are sent if nodes are not known.
        self.targets: list[int] = list(self.placement.rank_of_replica)
        self.nodes: Nodes | None = None  # None if nodes are not known, or make no difference
        self._on_device: dict[torch.device, _runtime.DevicePlacement] = {}

    @property
    def node_of_rank(self) -> list[int]:
        """Returns the node of each rank of the group; [] if nodes are not known."""
        return [] if self.nodes is None else self.nodes.node_of_rank

    def expert_of(self, replica: int) -> int:
        """Returns the expert of a replica."""
        return self._expert_of_replica[replica]

    def on_device(self, device: torch.device) -> _runtime.DevicePlacement:
        """Returns the placement's tables on a device, from a cache."""
        if device not in self._on_device:
            self._on_device[device] = _runtime.DevicePlacement(self.placement, str(device))
        tables = self._on_device[device]
        if _runtime.is_capturing(str(device)):
            _used_by_graphs.add(tables)
        return tables


class Nodes:
    """The routes of rows if nodes are known.

    A row is sent once to each node with experts for it: to the relay there, which forwards it to the ranks of its node.
    The relay is the rank that has the same index in its node as the sender has in its own. Example with nodes of ranks
    0 to 3 and 4 to 7: rows of rank 1 for experts on ranks 4 and 6 go once to relay 5, which forwards them.

    `connect` makes the group of this rank's node. Call it after all ranks have agreed on the nodes, because a rank
    without nodes would not take part.
    """

    def __init__(self, ranks: ExpertRanks, ranks_per_node: int) -> None:
        nodes = [rank // ranks_per_node for rank in ranks.ranks]
        node_numbers = sorted(set(nodes))
        self.ranks_per_node = ranks_per_node
        self.node_of_rank = [node_numbers.index(node) for node in nodes]
        members = [[r for r in range(ranks.size) if self.node_of_rank[r] == node] for node in range(len(node_numbers))]
        self._own_node = own_node = self.node_of_rank[ranks.rank]
        own_index = members[own_node].index(ranks.rank)
        relays = [node[own_index % len(node)] for node in members]
        self._ranks_inside = sorted(ranks.ranks[r] for r in members[own_node])
        self._ranks = ranks.ranks
        self._owner = ranks.owner()
        self._rank_of_replica = ranks.placement.rank_of_replica
        # For each replica: the relay to which this rank sends its rows, as a rank in the group.
        self.relay_of_replica = [relays[self.node_of_rank[rank]] for rank in self._rank_of_replica]
        self.inside_name = ""  # name of the node's process group
        self.size_inside = len(self._ranks_inside)
        self.target_inside: list[int] = []  # by replica: its rank in the node's group, -1 on other nodes

    def connect(self) -> None:
        """Finds or makes the group of this rank's node. Collective on the ranks of the node at the first call."""
        if self.inside_name:
            return
        inside = groups.find_or_make(self._ranks_inside, self._owner)
        ranks_inside = dist.get_process_group_ranks(inside)
        self.target_inside = [
            ranks_inside.index(self._ranks[rank]) if self.node_of_rank[rank] == self._own_node else -1
            for rank in self._rank_of_replica
        ]
        self.inside_name = inside.group_name


_ranks_by_key: executables.PlanningCache[ExpertRanks] = executables.PlanningCache()


def expert_ranks(placement: Any, group: Group, topology: Topology | str | None) -> ExpertRanks:
    """Returns the `ExpertRanks` of these arguments, from a cache.

    Collective if the group of a Layout's ranks must be made. Raises ValueError for invalid arguments.
    """
    groups.check_initialized()
    topology = named_topology(topology)
    if topology is None and isinstance(placement, _planner.Layout):
        topology = placement.mesh.topology
    key = (_placement_key(placement), _group_key(group), topology)
    try:
        hash(key)
    except TypeError:
        raise argument_error("placement", _ALLOWED, repr(placement)) from None
    return _ranks_by_key.get_or_make(key, lambda: _make_ranks(placement, group, topology))


def group_for_errors(placement: Any, group: Group) -> ExpertGroup | None:
    """Returns the group to which to report an error in placement or topology; None if the group is not known."""
    try:
        _group_key(group)
        members = _layout_members(placement, group) if isinstance(placement, _planner.Layout) else _members(group)
        return ExpertGroup(_process_group(members, group)) if dist.get_rank() in members else None
    except ValueError:
        return None


def _placement_key(placement: Any) -> Hashable:
    """Returns the placement in a hashable form. Raises ValueError for other types."""
    if isinstance(placement, _planner.Layout):
        return placement
    lists = argument_values.items(placement, "placement", _ALLOWED)
    return tuple(tuple(argument_values.items(experts, "placement", _ALLOWED)) for experts in lists)


def _group_key(group: Group) -> Hashable:
    """Returns a cache key for the group. Raises ValueError for other types."""
    if argument_values.is_device_mesh(group):
        return group, groups.key_of_mesh(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise argument_error("group", "a group with this rank", f"one without rank {dist.get_rank()}")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise argument_error("group", "a ProcessGroup or a DeviceMesh", f"a {type(group).__name__}")
    return groups.weakly(group)


def _make_ranks(placement: Any, group: Group, topology: Topology | None) -> ExpertRanks:
    """Returns the `ExpertRanks`, without the cache. Raises ValueError for invalid arguments."""
    if isinstance(placement, _planner.Layout):
        members, experts, num_experts = _experts_of_layout(placement, group)
    else:
        members = _members(group)
        experts, num_experts = _experts_of_lists(placement, len(members))
    if dist.get_rank() not in members:
        raise argument_error("placement", f"on ranks that include {dist.get_rank()} (this rank)", members)
    process_group = _process_group(members, group)
    by_rank = dict(zip(members, experts, strict=True))
    ordered = [by_rank[rank] for rank in dist.get_process_group_ranks(process_group)]
    ranks = ExpertRanks(ordered, num_experts, process_group)
    if topology is not None and topology.ranks_per_node > 0:
        nodes = [rank // topology.ranks_per_node for rank in members]
        if 1 < len(set(nodes)) < len(nodes):
            ranks.nodes = Nodes(ranks, topology.ranks_per_node)
    return ranks


def _members(group: Group) -> list[int]:
    """Returns the global ranks in the order in which a placement lists them."""
    if argument_values.is_device_mesh(group):
        return list(argument_values.device_mesh_parts(group)[2])
    return dist.get_process_group_ranks(groups.default_if_none(group))


def _process_group(members: Sequence[int], group: Group) -> dist.ProcessGroup:
    """Finds or makes the process group of these global ranks. Collective among them if it must be made."""
    ranks = sorted(members)
    if isinstance(group, dist.ProcessGroup) and sorted(dist.get_process_group_ranks(group)) == ranks:
        return group
    device_mesh = group if argument_values.is_device_mesh(group) else None
    owner = groups.owner_of(device_mesh, group if device_mesh is None else None)
    return groups.find_or_make(ranks, owner)


def _experts_of_lists(placement: Any, size: int) -> tuple[list[list[int]], int]:
    """Returns the experts of each rank, and the number of experts, of a placement by lists."""
    lists = list(placement)
    if len(lists) != size:
        raise argument_error("placement", f"a list for each of the group's {size} ranks", f"{len(lists)} lists")
    experts = [[argument_values.integer(expert, "placement") for expert in listed] for listed in lists]
    return experts, 1 + max((expert for listed in experts for expert in listed), default=-1)


def _experts_of_layout(layout: _planner.Layout, group: Group) -> tuple[list[int], list[list[int]], int]:
    """Returns the global ranks of a placement by Layout, the experts of each, and the number of experts."""
    if not layout.shape:
        raise argument_error("placement", "a layout with experts in dim 0", f"{layout} without dims")
    if layout.shape[0] > _MAX_EXPERTS:
        raise argument_error("placement", f"of at most {_MAX_EXPERTS} experts", f"{layout.shape[0]} in {layout}")
    experts = []
    for rank in layout.mesh.ranks:
        first, *others = layout.region(rank)
        for dim, (intervals, size) in enumerate(zip(others, layout.shape[1:], strict=True), start=1):
            if [tuple(interval) for interval in intervals] != [(0, size)] and size > 0:
                text = f"{layout}, which shards dim {dim}, so rank {rank} holds parts of experts"
                raise argument_error("placement", "a layout that shards only the first dim", text)
        experts.append([expert for begin, end in first for expert in range(begin, end)])
    if layout.has_pending:
        raise argument_error("placement", "a layout without pending reductions", layout)
    return _layout_members(layout, group), experts, layout.shape[0]


def _layout_members(layout: _planner.Layout, group: Group) -> list[int]:
    """Returns the global ranks of a layout. With a process group, it may have the group's ranks instead."""
    ranks = list(layout.mesh.ranks)
    if not isinstance(group, dist.ProcessGroup):
        return ranks
    members = dist.get_process_group_ranks(group)
    if sorted(ranks) == sorted(members):
        return ranks
    if max(ranks) >= len(members):
        raise argument_error("placement", f"on ranks 0 to {len(members) - 1} of the group, or on {members}", ranks)
    return [dist.get_global_rank(group, rank) for rank in ranks]
