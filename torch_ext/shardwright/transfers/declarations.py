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
from .declared import DTENSOR, PAIR, Declared, Description, Layouts

_MAX_SHOWN = 40


class Agreed(NamedTuple):
    """The tensors of both sides, by name, the same on all ranks."""

    source: dict[str, _planner.Layout]
    destination: dict[str, _planner.Layout]
    # Names that some rank passes and for which no layout could be read. An error was reported for each.
    unread_source: set[str]
    unread_destination: set[str]


def refuse(problems: Sequence[str]) -> None:
    """Raises ValueError with all problems, if there are any."""
    if not problems:
        return
    lines = _by_kind(_joined_over_ranks(problems))
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


def _by_kind(lines: list[str]) -> list[str]:
    """Reorders too many lines: the first of each kind, then the second of each, ...

    Lines are of one kind if they differ only in the name and in numbers.
    """
    if len(lines) <= _MAX_SHOWN:
        return lines
    seen: Counter[str] = Counter()
    turns = []
    for line in lines:
        kind = re.sub(r"\d+", "", line.partition(": ")[2])
        turns.append(seen[kind])
        seen[kind] += 1
    return [line for _, line in sorted(zip(turns, lines), key=lambda pair: pair[0])]


def digest(value: Any) -> str:
    """Returns a hash of the value's repr, equal on all ranks."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def agree(
    mine: Declared, options: dict[str, Any], problems: Sequence[str], group: dist.ProcessGroup | None
) -> tuple[Agreed, list[str]]:
    """Returns the tensors that all ranks declare, and the problems of all ranks, which include differing options.

    All ranks of the group must call this.
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
    """Raises ValueError on all ranks if some rank has problems, or if their results differ."""
    ranks = groups.ranks_in_meshes(group)
    given = _gather((result, list(problems), uuid.uuid4().hex), group)
    found = [problem for _, rank_problems, _ in given for problem in rank_problems]
    found += _differing("map", {rank: f"a result with digest {text[:12]}" for rank, (text, _, _) in zip(ranks, given)})
    refuse(found)
    return Starts(given[0][-1], group)


class Starts:
    """Makes all ranks start a planned transfer, or all raise.

    Each rank checks its own tensors at each start. Ranks exchange their problems by the store of the group, so that no
    collective runs and no device waits.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None) -> None:
        self._name = name  # unique to this transfer, equal on all ranks
        self._group = groups.weakly(group)
        self._texts: StoreTexts | None = None

    def agree(self, problems: Sequence[str], note: Any = None) -> list[Any]:
        """Waits for all ranks of the group. Raises ValueError on all of them if some have problems.

        Returns the notes of all ranks, which JSON must have types for.
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
            texts = self._texts.exchange(call, mine, ranks, rank, groups.default_timeout())
            told = [json.loads(text) for text in texts.values()]
            problems, notes = [problem for some, _ in told for problem in some], [each for _, each in told]
        refuse(problems)
        return notes


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns the value of each rank of the group. All ranks must call."""
    all_given: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(all_given, value, group=group)
    return all_given


def _broadcast(value: Any, index: int, group: dist.ProcessGroup | None) -> Any:
    """Returns the value of the rank with index `index` in the group."""
    box = [value]
    dist.broadcast_object_list(box, group_src=index, group=group)
    return box[0]


def _differing(name: str, values: dict[int, str]) -> list[str]:
    """Returns a problem if an option differs between ranks. `values` has its text by rank."""
    return [f"{name} must be equal on all ranks, got {values_text(values)}"] if len(set(values.values())) > 1 else []


def _merged(
    side: str, declarations: Sequence[tuple[list[int], Declared]], problems: list[str]
) -> tuple[dict[str, _planner.Layout], set[str]]:
    """Returns the layouts of one side, by name, and the names of other tensors that some ranks pass.

    Appends a problem for each tensor that ranks declare differently.
    """
    layouts_by_name: dict[str, list[tuple[_planner.Layout, list[int]]]] = {}  # (layout, ranks that declare it), by name
    kinds: dict[str, set[str]] = {}  # kinds of tensors that ranks pass, by name
    unread: dict[str, list[int]] = {}  # ranks whose layout could not be read, by name
    everywhere = _ranks_of_plain_tensors(side, declarations)
    for ranks, declared in declarations:
        known: dict[tuple[int, ...], Layouts] = {}
        for name in getattr(declared, f"unread_{side}"):
            unread.setdefault(name, []).extend(ranks)
        for name, description in getattr(declared, side).items():
            on = everywhere.get((name, description), tuple(ranks))
            if on not in known:
                known[on] = Layouts(declared, on)
            try:
                read: _planner.Layout = known[on].of(description)
            except ValueError as error:  # an unsupported dtype
                problems += (f"{side} {name}: {error} (on rank {rank})" for rank in ranks)
                unread.setdefault(name, []).extend(ranks)
                continue
            _add(layouts_by_name.setdefault(name, []), read, ranks)
            kinds.setdefault(name, set()).add(description[-1] if len(description) > 2 else "plain tensor")
    merged: dict[str, _planner.Layout] = {}
    missing: dict[tuple[_planner.Layout, tuple[int, ...]], list[int]] = {}
    known_slices: dict[tuple[_planner.Layout, ...], _planner.Layout] = {}
    for name, layouts in layouts_by_name.items():
        layout, ranks = layouts[0]
        if len(layouts) > 1:
            replicated = _over_slices([each for each, _ in layouts], known_slices) if kinds[name] == {DTENSOR} else None
            if replicated is None:
                problems.append(f"{side} {name}: the layout must be equal on all ranks, got {_who_declares(layouts)}")
                unread[name] = []
                if len({(tuple(each.shape), each.dtype) for each, _ in layouts}) == 1:
                    merged[name] = layout  # the map can be checked with it
                continue
            layout, ranks = replicated, sorted(rank for _, those in layouts for rank in those)
        merged[name] = layout
        # A rank that forgets to pass a destination to fill in place would continue with its old values.
        if side == "source" or kinds[name] & {DTENSOR, PAIR}:
            # Cached, because most tensors are declared by the same ranks.
            key = layout, tuple(ranks)
            if key not in missing:
                missing[key] = sorted(set(layout.mesh.ranks) - set(ranks))
            if lacking := [rank for rank in missing[key] if rank not in unread.get(name, ())]:
                problems.append(
                    f"{side} {name}: all ranks of the mesh of {layout} must pass it, got none on ranks {lacking}"
                )
    return merged, unread.keys() - merged.keys()


def _over_slices(
    layouts: list[_planner.Layout], known: dict[tuple[_planner.Layout, ...], _planner.Layout]
) -> _planner.Layout | None:
    """Joins layouts that differ only in their ranks, on slices of a larger mesh without common ranks.

    Returns a layout that is replicated over the slices; None for other layouts. `known` caches results.

        float32[4] on dp=2 as [S(0)], ranks 0 and 2;  the same, ranks 1 and 3
        float32[4] on slice=2, dp=2 as [R, S(0)], ranks 0, 2, 1 and 3
    """
    first, mesh = layouts[0], layouts[0].mesh
    slices = tuple(sorted(layouts, key=lambda layout: list(layout.mesh.ranks)))
    if slices not in known:
        ranks = [rank for layout in slices for rank in layout.mesh.ranks]
        if len(set(ranks)) != len(ranks) or len(set(map(_without_ranks, slices))) > 1:
            return None
        sizes = dict(zip(mesh.dim_names, mesh.shape))
        name = "slice" if "slice" not in sizes else "_".join(("slice", *sizes))
        order = {dim: [mesh_dim + 1 for mesh_dim in mesh_dims] for dim, mesh_dims in first.shard_order.items()}
        placements = ["R", *first.placements]
        joined = Mesh({name: len(slices), **sizes}, ranks)
        known[slices] = Layout(joined, first.shape, placements, first.dtype, order, "literal", first.flattened)
    return known[slices]


def _without_ranks(layout: _planner.Layout) -> str:
    """Returns everything of a layout but its ranks, as text."""
    mesh = layout.mesh.dim_names, layout.mesh.shape
    return repr((mesh, layout.shape, layout.dtype, layout.placements, layout.shard_order, layout.flattened))


def _who_declares(layouts: Sequence[tuple[_planner.Layout, list[int]]]) -> str:
    """Returns a text of several layouts and the ranks that declare each."""
    texts = [f"{layout} on ranks {sorted(those)}" for layout, those in layouts]
    if len({str(layout) for layout, _ in layouts}) == len(layouts):
        return "; ".join(texts)
    meshes = [f"{text}, whose mesh has ranks {list(layout.mesh.ranks)}" for text, (layout, _) in zip(texts, layouts)]
    return (
        f"{'; '.join(meshes)}. Declare one layout, or DTensors on slices of a mesh that have equal sizes and no "
        "rank in common, such as mesh['dp']"
    )


def _add(layouts: list[tuple[_planner.Layout, list[int]]], layout: _planner.Layout, ranks: list[int]) -> None:
    """Adds the ranks to those of an equal layout in the list, or adds the layout with these ranks."""
    for known, those in layouts:
        if known == layout:
            those += ranks
            return
    layouts.append((layout, list(ranks)))


def _ranks_of_plain_tensors(
    side: str, declarations: Sequence[tuple[list[int], Declared]]
) -> dict[tuple[str, Description], tuple[int, ...]]:
    """Returns the ranks that pass each plain tensor, whose values are equal on all of them."""
    ranks_by_tensor: dict[tuple[str, Description], list[int]] = {}
    for ranks, declared in declarations:
        for name, description in getattr(declared, side).items():
            if len(description) == 2:
                ranks_by_tensor.setdefault((name, description), []).extend(ranks)
    return {key: tuple(sorted(ranks)) for key, ranks in ranks_by_tensor.items()}
