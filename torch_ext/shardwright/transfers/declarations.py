"""Agreement of the ranks of a transfer: all ranks get the same tensors, and raise the same errors.

    1. Ranks exchange digests of their declarations, their options, and the problems with their arguments.
    2. Each distinct declaration is broadcast once. Ranks of one mesh mostly declare the same.
    3. After the map, ranks exchange digests of its result, and its problems.
    4. At each start, ranks exchange the problems with their current tensors (`Starts`).

A rank with invalid arguments takes part in all steps, and all ranks raise the same error.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .._native import _planner
from ..layouts.layout import Layout, Mesh
from ..runtime import groups
from ..runtime.agreement import StoreTexts, ranks_by_value, values_text
from .declared import DTENSOR, PAIR, Declaration, Description, Layouts

_MAX_SHOWN = 40  # lines of an error


class Agreed(NamedTuple):
    """The tensors of both sides, by name, the same on all ranks."""

    source: dict[str, _planner.Layout]
    destination: dict[str, _planner.Layout]
    # Names that some rank passes, but whose layout could not be read. A problem was reported for each.
    unread_source: set[str]
    unread_destination: set[str]


def raise_problems(problems: Sequence[str]) -> None:
    """Raises ValueError with the texts of all problems, if there are any."""
    if not problems:
        return
    lines = _first_of_each_kind(_joined_over_ranks(problems))
    if len(lines) > _MAX_SHOWN:
        lines[_MAX_SHOWN:] = [f"and {len(lines) - _MAX_SHOWN} more"]
    raise ValueError("transfer: nothing was moved, because\n" + "\n".join(f"  {line}" for line in lines))


def _joined_over_ranks(problems: Sequence[str]) -> list[str]:
    """Merges the equal problems of several ranks into one, such as "... (on ranks 0, 1)"."""
    ranks: dict[str, list[str]] = {}
    for problem in dict.fromkeys(problems):
        text, _, rank = problem.removesuffix(")").partition(" (on rank ")
        ranks.setdefault(text if rank.isdigit() else problem, []).append(rank)
    return [
        text if not on[0].isdigit() else f"{text} (on rank{'s' * (len(on) > 1)} {', '.join(on)})"
        for text, on in ranks.items()
    ]


def _first_of_each_kind(lines: list[str]) -> list[str]:
    """Returns the lines, reordered if there are more than _MAX_SHOWN, so that every kind of line is among the first.

    Lines are of one kind if they differ only in the name before ": " and in numbers. The first line of each kind comes
    first, then the second of each kind, and so on: a1 a2 a3 b1 b2 becomes a1 b1 a2 b2 a3.
    """
    if len(lines) <= _MAX_SHOWN:
        return lines
    seen: Counter[str] = Counter()
    ordinals = []
    for line in lines:
        kind = re.sub(r"\d+", "", line.partition(": ")[2])
        ordinals.append(seen[kind])
        seen[kind] += 1
    return [line for _, line in sorted(zip(ordinals, lines), key=lambda pair: pair[0])]


def digest(value: Any) -> str:
    """Returns the SHA-256 digest of a value's repr, in hexadecimal."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def agree(
    mine: Declaration, options: dict[str, Any], problems: Sequence[str], group: dist.ProcessGroup | None
) -> tuple[Agreed, list[str]]:
    """Returns the tensors that all ranks declare, and the problems of all ranks. All ranks of the group must call.

    Args:
        mine: the declaration of this rank.
        options: arguments that must be equal on all ranks. Differences are problems.
        problems: the problems that this rank found.
        group: the process group.
    """
    ranks = groups.ranks_in_meshes(group)
    given = _gather((digest(mine), {name: str(value) for name, value in options.items()}, list(problems)), group)
    found = [problem for _, _, rank_problems in given for problem in rank_problems]
    for name in dict.fromkeys(name for _, values, _ in given for name in values):
        found += _differing(name, {rank: values[name] for rank, (_, values, _) in zip(ranks, given) if name in values})
    ranks_by_digest = ranks_by_value({rank: their_digest for rank, (their_digest, _, _) in zip(ranks, given)})
    declarations = [
        (their_ranks, _broadcast(mine, ranks.index(their_ranks[0]), group)) for their_ranks in ranks_by_digest.values()
    ]
    source, unread_source = _merged("source", declarations, found)
    destination, unread_destination = _merged("destination", declarations, found)
    return Agreed(source, destination, unread_source, unread_destination), found


def check_result(result: str, problems: Sequence[str], group: dist.ProcessGroup | None) -> Starts:
    """Raises ValueError on all ranks if some rank has problems, or if ranks' digests of the mapped tensors differ.

    All ranks of the group must call.
    """
    ranks = groups.ranks_in_meshes(group)
    given = _gather((result, list(problems), uuid.uuid4().hex), group)
    found = [problem for _, rank_problems, _ in given for problem in rank_problems]
    found += _differing("map", {rank: f"a result with digest {text[:12]}" for rank, (text, _, _) in zip(ranks, given)})
    raise_problems(found)
    return Starts(given[0][-1], group)


class Starts:
    """The agreement of all ranks at each start of a planned transfer: either all start, or all raise.

    Each rank checks its own tensors. Ranks exchange their problems through the group's store, which needs no collective
    and no wait for a device.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None) -> None:
        self._name = name  # unique to this transfer, equal on all ranks
        self._group = groups.weakly(group)
        self._texts: StoreTexts | None = None

    def agree(self, problems: Sequence[str], note: Any = None) -> list[Any]:
        """Waits for all ranks of the group. Raises ValueError on all of them if some rank has problems.

        Returns the note of each rank, a value of JSON's types.
        """
        group = self._group.get()
        notes = [note]
        if dist.get_world_size(group) > 1:
            if self._texts is None:
                store = distributed_c10d._world.pg_map[group if group is not None else dist.group.WORLD][1]
                self._texts = StoreTexts(dist.PrefixStore(f"shardwright/transfer/{self._name}", store))
            ranks, rank = tuple(groups.ranks_in_meshes(group)), groups.rank_in_meshes(group)
            call = "the start of a transfer (nothing was moved; all ranks of the group must call start() or receive())"
            mine = json.dumps([list(problems), note])
            texts = self._texts.exchange(call, mine, ranks, rank, groups.timeout_of(group))
            received = [json.loads(text) for text in texts.values()]
            problems, notes = [problem for some, _ in received for problem in some], [note for _, note in received]
        raise_problems(problems)
        return notes


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns the value of each rank of the group. All ranks must call."""
    given: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(given, value, group=group)
    return given


def _broadcast(value: Any, index: int, group: dist.ProcessGroup | None) -> Any:
    """Returns the value of the rank with index `index` in the group."""
    box = [value]
    dist.broadcast_object_list(box, group_src=index, group=group)
    return box[0]


def _differing(name: str, values: dict[int, str]) -> list[str]:
    """Returns a list with one problem if an option differs between ranks, else []. `values` has its text by rank."""
    return [f"{name} must be equal on all ranks, got {values_text(values)}"] if len(set(values.values())) > 1 else []


def _merged(
    side: str, declarations: Sequence[tuple[list[int], Declaration]], problems: list[str]
) -> tuple[dict[str, _planner.Layout], set[str]]:
    """Merges the declarations of one side. Returns the layouts by name, and the names without a layout.

    Appends a problem for each tensor that ranks declare differently.

    Args:
        side: "source" or "destination".
        declarations: each distinct declaration, with the ranks that made it.
        problems: receives the problems.
    """
    layouts_by_name: dict[str, list[tuple[_planner.Layout, list[int]]]] = {}  # layouts and the ranks that declare each
    kinds: dict[str, set[str]] = {}  # kinds of tensors that ranks pass, by name
    unread: dict[str, list[int]] = {}  # ranks whose layout could not be read, by name
    plain_ranks = _ranks_of_plain_tensors(side, declarations)
    for ranks, declared in declarations:
        cached: dict[tuple[int, ...], Layouts] = {}
        for name in getattr(declared, f"unread_{side}"):
            unread.setdefault(name, []).extend(ranks)
        for name, description in getattr(declared, side).items():
            passing = plain_ranks.get((name, description), tuple(ranks))  # ranks that pass this tensor
            if passing not in cached:
                cached[passing] = Layouts(declared, passing)
            try:
                layout_read: _planner.Layout = cached[passing].of(description)
            except ValueError as error:  # an unsupported dtype
                problems += (f"{side} {name}: {error} (on rank {rank})" for rank in ranks)
                unread.setdefault(name, []).extend(ranks)
                continue
            _add_ranks(layouts_by_name.setdefault(name, []), layout_read, ranks)
            kinds.setdefault(name, set()).add(description[-1] if len(description) > 2 else "plain tensor")
    merged: dict[str, _planner.Layout] = {}
    missing: dict[tuple[_planner.Layout, tuple[int, ...]], list[int]] = {}
    joined: dict[tuple[_planner.Layout, ...], _planner.Layout] = {}
    for name, layouts in layouts_by_name.items():
        layout, ranks = layouts[0]
        if len(layouts) > 1:
            replicated = _join_slices([layout for layout, _ in layouts], joined) if kinds[name] == {DTENSOR} else None
            if replicated is None:
                problems.append(f"{side} {name}: the layout must be equal on all ranks, got {_layouts_text(layouts)}")
                unread[name] = []
                if len({(tuple(layout.shape), layout.dtype) for layout, _ in layouts}) == 1:
                    merged[name] = layout  # the map can be checked with it
                continue
            layout, ranks = replicated, sorted(rank for _, declarers in layouts for rank in declarers)
        merged[name] = layout
        # A rank that forgets to pass a destination to fill in place would continue with its old values.
        if side == "source" or kinds[name] & {DTENSOR, PAIR}:
            # Cached, because most tensors are declared by the same ranks.
            key = layout, tuple(ranks)
            if key not in missing:
                missing[key] = sorted(set(layout.mesh.ranks) - set(ranks))
            if missing_ranks := [rank for rank in missing[key] if rank not in unread.get(name, ())]:
                problems.append(
                    f"{side} {name}: all ranks of the mesh of {layout} must pass it, got none on ranks {missing_ranks}"
                )
    return merged, unread.keys() - merged.keys()


def _join_slices(
    layouts: list[_planner.Layout], cached: dict[tuple[_planner.Layout, ...], _planner.Layout]
) -> _planner.Layout | None:
    """Joins layouts on slices of a larger mesh, such as those of ``mesh["dp"]`` on all ranks.

    Returns a layout that is replicated over the slices. Returns None if the layouts differ in more than their ranks, or
    have common ranks. `cached` caches results. Example of two layouts and the result:

        float32[4] on dp=2 as [S(0)], ranks 0 and 2
        float32[4] on dp=2 as [S(0)], ranks 1 and 3
        float32[4] on slice=2, dp=2 as [R, S(0)], ranks 0, 2, 1 and 3
    """
    first, mesh = layouts[0], layouts[0].mesh
    slices = tuple(sorted(layouts, key=lambda layout: list(layout.mesh.ranks)))
    if slices not in cached:
        ranks = [rank for layout in slices for rank in layout.mesh.ranks]
        if len(set(ranks)) != len(ranks) or len(set(map(_without_ranks, slices))) > 1:
            return None
        sizes = dict(zip(mesh.dim_names, mesh.shape))
        name = "slice" if "slice" not in sizes else "_".join(("slice", *sizes))
        order = {dim: [mesh_dim + 1 for mesh_dim in mesh_dims] for dim, mesh_dims in first.shard_order.items()}
        placements = ["R", *first.placements]
        joined = Mesh({name: len(slices), **sizes}, ranks)
        cached[slices] = Layout(joined, first.shape, placements, first.dtype, order, "literal", first.flattened)
    return cached[slices]


def _without_ranks(layout: _planner.Layout) -> str:
    """Returns a text with all properties of a layout except its ranks."""
    mesh = layout.mesh.dim_names, layout.mesh.shape
    return repr((mesh, layout.shape, layout.dtype, layout.placements, layout.shard_order, layout.flattened))


def _layouts_text(layouts: Sequence[tuple[_planner.Layout, list[int]]]) -> str:
    """Returns a text with the layouts that ranks declare for one tensor, and the ranks that declare each."""
    texts = [f"{layout} on ranks {sorted(declarers)}" for layout, declarers in layouts]
    if len({str(layout) for layout, _ in layouts}) == len(layouts):
        return "; ".join(texts)
    meshes = [f"{text}, whose mesh has ranks {list(layout.mesh.ranks)}" for text, (layout, _) in zip(texts, layouts)]
    return (
        f"{'; '.join(meshes)}. Declare one layout, or DTensors on slices of a mesh that have equal sizes and no "
        "rank in common, such as mesh['dp']"
    )


def _add_ranks(layouts: list[tuple[_planner.Layout, list[int]]], layout: _planner.Layout, ranks: list[int]) -> None:
    """Adds the ranks of a declared layout to a list of layouts and their ranks, in which equal layouts are merged."""
    for cached, declarers in layouts:
        if cached == layout:
            declarers += ranks
            return
    layouts.append((layout, list(ranks)))


def _ranks_of_plain_tensors(
    side: str, declarations: Sequence[tuple[list[int], Declaration]]
) -> dict[tuple[str, Description], tuple[int, ...]]:
    """Returns the ranks that pass each plain tensor, whose values are equal on all of them."""
    ranks_by_tensor: dict[tuple[str, Description], list[int]] = {}
    for ranks, declared in declarations:
        for name, description in getattr(declared, side).items():
            if len(description) == 2:
                ranks_by_tensor.setdefault((name, description), []).extend(ranks)
    return {key: tuple(sorted(ranks)) for key, ranks in ranks_by_tensor.items()}
