"""Tests of ordered and repeated pieces, flattened dims, units, the nearest layout and other libraries' placements."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oracle
import shardwright as sw
from pool import Pool
from shardwright.placements import of_partition

WORLD_SIZE = 4
# Groups of ranks, in mesh order.
MESHES: tuple[tuple[int, ...], ...] = ((0, 1, 2), (2, 0, 3, 1), (3, 1))


def _mesh(ranks: tuple[int, ...]) -> sw.Mesh:
    return sw.Mesh({"x": len(ranks)}, ranks)


def _random_pieces(chance: random.Random, size: int, count: int) -> sw.placements.Pieces:
    """Returns pieces in random order. Most of them are held by one coordinate."""
    cuts = sorted({0, size, *(chance.randint(0, size) for _ in range(5))})
    pieces = list(zip(cuts, cuts[1:], strict=False))
    chance.shuffle(pieces)
    lists: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for piece in pieces:
        owner = chance.randrange(count)
        for which, pieces_of_owner in enumerate(lists):
            if which == owner or chance.random() < 0.25:
                pieces_of_owner.append(piece)
    return sw.placements.Pieces(0, lists)


def _held(tensor: torch.Tensor, ranks: tuple[int, ...], placement: Any, rank: int) -> torch.Tensor:
    """Returns the part of a tensor that a rank holds, taken row by row."""
    if rank not in ranks:
        return tensor.new_empty(0)
    which = ranks.index(rank)
    if isinstance(placement, sw.placements.Pieces):
        rows = [row for begin, end in placement.lists[which] for row in range(begin, end)]
        return tensor[rows]
    if isinstance(placement, sw.placements.Ragged):  # flattens dims 0 and 1
        flat = tensor.flatten(0, 1)
        unit = flat.shape[0] // sum(placement.units or ())
        begin = sum(placement.units[:which]) * unit  # type: ignore[index]
        return flat[begin : begin + placement.units[which] * unit]  # type: ignore[index]
    return oracle.local(tensor, (len(ranks),), (placement,), (which,))


def _pairs(count: int) -> list[Any]:
    """Returns random pairs of layouts, the same on every rank."""
    chance = random.Random(11)
    pairs = []
    for _ in range(count):
        shape = (chance.choice((1, 4, 9)), chance.choice((2, 3)), 2)
        ends = []
        for _ in range(2):
            ranks = chance.choice(MESHES)
            units = [chance.randint(0, 1) for _ in ranks]
            units[0] += shape[0] * shape[1] - sum(units)
            kinds = ["R", "S(0)", "S(1)", _random_pieces(chance, shape[0], len(ranks))]
            if all(unit >= 0 for unit in units):
                kinds.append(sw.placements.Ragged(dims=(0, 1), units=units))
            ends.append((ranks, chance.choice(kinds)))
        pairs.append((shape, *ends))
    return pairs


def _move_all(count: int) -> list[int]:
    rank = dist.get_rank()
    received = []
    for shape, (src_ranks, src), (dst_ranks, dst) in _pairs(count):
        tensor = oracle.global_tensor(shape, torch.float32, 1)
        layouts = sw.Layout(_mesh(src_ranks), shape, [src]), sw.Layout(_mesh(dst_ranks), shape, [dst])
        if rank not in src_ranks + dst_ranks:
            received.append(0)
            continue
        local = _held(tensor, src_ranks, src, rank) if rank in src_ranks else None
        with sw.debug.wire_meter() as meter:
            result = sw.redistribute_local(local, *layouts)
        expected = _held(tensor, dst_ranks, dst, rank)
        assert oracle.difference(result, expected) is None, f"{shape} {src_ranks} {src} -> {dst_ranks} {dst}"
        strided = None if local is None else local.repeat_interleave(2, dim=-1)[..., ::2]
        out = torch.full_like(expected, 7)
        assert sw.redistribute_local(strided, *layouts, out=out) is out
        assert oracle.difference(out, expected) is None
        received.append(meter.received_bytes)
    return received


def test_values_and_bytes_of_pieces_on_real_ranks(pool: Pool) -> None:
    count = 60
    by_rank = pool.run(_move_all, WORLD_SIZE, count)
    for index, (shape, (src_ranks, src), (dst_ranks, dst)) in enumerate(_pairs(count)):
        tensor = torch.arange(math.prod(shape)).view(shape)
        plan = sw.plan(
            *(sw.Layout(_mesh(r), shape, [p]) for r, p in ((src_ranks, src), (dst_ranks, dst))), backend="gloo"
        )
        received = [rank[index] for rank in by_rank]
        assert sum(received) == plan.wire_bytes_sum
        assert max(received) == plan.wire_bytes_max
        if not isinstance(src, str) or not isinstance(dst, str):
            held = [set(_held(tensor, src_ranks, src, rank).flatten().tolist()) for rank in range(WORLD_SIZE)]
            needed = [set(_held(tensor, dst_ranks, dst, rank).flatten().tolist()) for rank in range(WORLD_SIZE)]
            assert received == [4 * len(needed[rank] - held[rank]) for rank in range(WORLD_SIZE)]


def _reductions() -> None:
    rank = dist.get_rank()
    tensor = oracle.global_tensor((9, 2), torch.float32, 4, reducible=True)
    mesh = sw.Mesh({"x": 2, "y": 2})
    pieces = sw.placements.Pieces(0, [[(5, 9), (0, 2)], [(2, 6)]])
    whole = [sw.Layout(mesh, (9, 2), p) for p in (["P", "P"], ["R", "R"])]
    for placements in (["P", pieces], [pieces, "P"], [pieces, "S(0)"]):
        layout = sw.Layout(mesh, (9, 2), placements)
        contribution = oracle.contribution(tensor, (2, 2), ("P(sum)", "P(sum)"), (rank // 2, rank % 2))
        moved = sw.redistribute_local(contribution, whole[0], layout)
        # The second move sums pending contributions; each piece must be in its place.
        assert oracle.difference(sw.redistribute_local(moved, layout, whole[1]), tensor) is None, str(placements)
    gradient = oracle.global_tensor((9, 2), torch.float32, 5)
    local = tensor.clone().requires_grad_()
    result = sw.redistribute_local(local, whole[1], sw.Layout(mesh, (9, 2), [pieces, "R"]))
    rows = [5, 6, 7, 8, 0, 1] if rank < 2 else [2, 3, 4, 5]
    assert torch.equal(result, tensor[rows])
    result.backward(gradient[rows])
    assert local.grad is not None and oracle.difference(local.grad, gradient) is None


def test_reductions_and_gradients_of_pieces(pool: Pool) -> None:
    pool.run(_reductions, WORLD_SIZE)


def _empty_result_of_part() -> None:
    """Rank 1 holds a part of the last dim and needs nothing, but the last dim of its empty part is longer."""
    mesh, rank = _mesh((0, 1)), dist.get_rank()
    src = sw.Layout(mesh, [8, 1, 8], [sw.placements.Pieces(2, [[(0, 8)], [(0, 4)]])], "float32")
    dst = sw.Layout(mesh, [8, 1, 8], [sw.placements.Blocks(1, 2)], "float32")
    full = torch.arange(64.0).view(8, 1, 8)
    local = full[:, :, : 8 if rank == 0 else 4].transpose(0, 2).contiguous().transpose(0, 2)
    assert not local.is_contiguous()
    found = sw.redistribute_local(local, src, dst)
    assert torch.equal(found, full if rank == 0 else full[:, :0])


def test_empty_result_of_a_transposed_part(pool: Pool) -> None:
    pool.run(_empty_result_of_part, 2)


def test_zigzag_and_items_make_pieces() -> None:
    zigzag = sw.placements.Pieces.zigzag(0, 16, 2)
    assert zigzag.lists == (((0, 4), (12, 16)), ((4, 8), (8, 12)))
    layout = sw.Layout(sw.Mesh({"cp": 2}), (16, 3), [zigzag])
    assert layout.is_partition
    assert [layout.region(rank)[0] for rank in range(2)] == [[(0, 4), (12, 16)], [(4, 12)]]
    assert sw.Layout(sw.Mesh({"cp": 3}), (7,), [sw.placements.Pieces.zigzag(0, 7, 3)]).local_shape(0) == (2,)
    experts = sw.placements.Pieces.items(0, [[3, 0], [1, 2, 3]], 5)
    assert experts == sw.placements.Pieces(0, [[(15, 20), (0, 5)], [(5, 10), (10, 15), (15, 20)]], 5)
    assert not sw.Layout(sw.Mesh({"ep": 2}), (20, 3), [experts]).is_partition
    assert str(experts) == "Pieces(0,15-20+0-5:5-10+10-15+15-20)"
    layout = sw.Layout(sw.Mesh({"ep": 2}), (20, 3), [experts])
    assert layout.placements == ("Pieces(0,15-20+0-5:5-20)",)
    assert sw.Layout(layout.mesh, (20, 3), layout.placements) == layout


def _over_one_coordinate() -> None:
    """Moves pieces over a mesh dim of size one, which cuts nothing but changes the order."""
    for dims, others in (({"ep": 1}, []), ({"ep": 1, "tp": 2}, ["S(1)"]), ({"tp": 2, "ep": 1}, ["S(1)"])):
        mesh = sw.Mesh(dims)
        experts = sw.placements.Pieces.items(0, [[3, 0, 2, 1]], 2)
        placements = [experts, *others] if next(iter(dims)) == "ep" else [*others, experts]
        for order in ({}, {0: []}):
            layout = sw.Layout(mesh, (8, 6), placements, shard_order=order)
            assert not layout.is_partition and layout.placements != ("R",) * len(dims)
            whole = sw.Layout(sw.Mesh({"a": 2}), (8, 6), ["S(0)"])
            rank, tensor = dist.get_rank(), torch.arange(48.0).view(8, 6)
            moved = sw.redistribute_local(tensor[4 * rank : 4 * rank + 4], whole, layout)
            if rank in mesh.ranks:
                expected = tensor[[6, 7, 0, 1, 4, 5, 2, 3]]
                expected = expected[:, 3 * rank : 3 * rank + 3] if others else expected
                assert torch.equal(moved, expected)
            back = sw.redistribute_local(moved, layout, whole)
            assert torch.equal(back, tensor[4 * rank : 4 * rank + 4])
            many = sw.redistribute_many([(back, whole, layout)])[0]
            assert torch.equal(many, moved)
            in_order = sw.Layout(mesh, (8, 6), ["R", *others] if placements[0] is experts else [*others, "R"])
            assert in_order != layout
            if rank in mesh.ranks:
                expected = expected[[2, 3, 6, 7, 4, 5, 0, 1]]
            assert torch.equal(
                sw.redistribute_local(moved, layout, in_order), expected if rank in mesh.ranks else moved
            )


def test_pieces_over_one_coordinate_keep_their_order(pool: Pool) -> None:
    pool.run(_over_one_coordinate, 2)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (sw.placements.Ragged(0, [9]), "placements: sum of the sizes of .* must be 8, .*got 9"),
        (sw.placements.Packed(0, [1, 1]), "placements: sum of the sizes of .* must be 8, .*got 2"),
        (sw.placements.Pieces(0, [[(0, 2)]]), r"placements: lists of .* all 8 elements .*got none for \[2, 8\)"),
    ],
    ids=str,
)
def test_cuts_over_one_coordinate_are_checked(cut: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sw.Layout(sw.Mesh({"x": 1}), (8,), [cut])
    assert sw.Layout(sw.Mesh({"x": 1}), (1 << 21,), [sw.placements.Cyclic(0, 1)]).local_shape(0) == (1 << 21,)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[(0, 2)], [(3, 8)]], r"placements: lists of Pieces must contain all elements, got none for \[2, 3\)"),
        ([[(0, 2)], [(2, 7)]], r"placements: lists of .* all 8 elements .*got none for \[7, 8\)"),
        ([[(0, 9)], [(2, 7)]], "placements: largest end of .* must be 8, .*got 9"),
        ([[(4, 8), (0, 5)], []], "placements: lists of Pieces .* at most once, got element 4 twice for coordinate 0"),
        ([[(0, 8)]], "placements: number of lists of .* must be 2, .*got 1"),
        (
            [[(0, 8, 2)], []],
            re.escape("lists must be a list of (begin, end) for each coordinate, got [[(0, 8, 2)], []]"),
        ),
    ],
    ids=str,
)
def test_pieces_that_do_not_fit_are_refused(lists: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sw.Layout(sw.Mesh({"x": 2}), (8, 4), [sw.placements.Pieces(0, lists)])


def test_flattened_layouts_accept_dims_of_the_tensor() -> None:
    mesh = sw.Mesh({"x": 2, "y": 2})
    layout = sw.Layout(mesh, (4, 6, 8), [sw.placements.Ragged(dims=(0, 1), units=(1, 2)), "S(2)"])
    assert (layout.shape, layout.flattened, layout.flattened_shape) == ((4, 6, 8), 2, (24, 8))
    assert layout.placements == ("Ragged(0,8:16)", "S(1)")
    assert [layout.local_shape(rank) for rank in range(4)] == [(8, 4), (8, 4), (16, 4), (16, 4)]
    again = sw.Layout(mesh, layout.shape, layout.placements, flattened=2)
    assert again == layout != sw.Layout(mesh, (24, 8), layout.placements)
    assert (
        sw.Layout(mesh, (4, 6, 8), [sw.placements.Ragged(dims=(0, 1), sizes=(10, 14)), "S(-1)"]).placements[1] == "S(1)"
    )
    plan = sw.plan(layout, sw.Layout(mesh, (4, 6, 8), ["S(1)", "R"]))
    read = sw.planning.plan_from_json(plan.to_json())
    assert (read.src, read.dst, str(read)) == (plan.src, plan.dst, str(plan))
    assert json.loads(plan.to_json())["source"]["flattened"] == 2
    assert "rearrange on x=2,y=2" in plan.to_svg()
    plan.simulate()


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([sw.placements.Ragged(dims=(0, 1), units=(1, 4))], "integer sizes, got (1, 4), whose sum is 5"),
        ([sw.placements.Ragged(dims=(0, 1, 2, 3), units=(1, 1))], "flattened must be in [1, 3], got 4"),
        (
            [sw.placements.Ragged(dims=(0, 1), units=(1, 1)), "S(1)"],
            "tensor dim of S(1) must be at least 2 next to a Ragged that flattens dims 0 to 1, got 1",
        ),
    ],
    ids=str,
)
def test_flattened_dims_that_do_not_fit_are_refused(placements: list[Any], message: str) -> None:
    mesh = sw.Mesh(dict.fromkeys("xy"[: len(placements)], 2))
    with pytest.raises(ValueError, match=re.escape(message)):
        sw.Layout(mesh, (4, 6, 8), placements)


def test_dims_units_and_sizes_exclude_each_other() -> None:
    for wrong, message in (
        ({"dims": (1,), "units": (1, 1)}, "dims must be the leading tensor dims, such as (0,) or (0, 1), got (1,)"),
        ({"dim": 0}, "one of sizes and units must be given, got None and None"),
        ({"dim": 1, "dims": (0,), "units": (1, 1)}, "dim must be left out if dims is given, got 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            sw.placements.Ragged(**wrong)  # type: ignore[arg-type]


def _cuts(layout: sw.Layout) -> set[int]:
    return {end for rank in layout.mesh.ranks for interval in layout.region(rank)[0] for end in interval}


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 640, 1000])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_scales_are_placed_with_their_weights(rows: int, count: int) -> None:
    mesh = sw.Mesh({"x": count})
    blocks = -(-rows // 128)
    fused = [0, 256, 128, rows - 384] if rows >= 640 else [rows]
    pairs: list[tuple[Any, Any]] = [
        (sw.placements.Shard(0, unit=128), sw.placements.Shard(0)),
        (sw.placements.Packed(0, fused, unit=128), sw.placements.Packed(0, [-(-size // 128) for size in fused])),
        (sw.placements.Cyclic(0, 256, unit=128), sw.placements.Cyclic(0, 2)),
        (sw.placements.Blocks(0, 256, unit=128), sw.placements.Blocks(0, 2)),
    ]
    for of_weight, of_scales in pairs:
        weight = sw.Layout(mesh, (rows, 4), [of_weight], "float8_e4m3fn")
        scales = sw.Layout(mesh, (blocks, 1), [of_scales], "float32")
        for rank in range(count):
            held = [row for begin, end in weight.region(rank)[0] for row in range(begin, end)]
            of_blocks = [block for begin, end in scales.region(rank)[0] for block in range(begin, end)]
            assert held == [row for block in of_blocks for row in range(block * 128, min(rows, block * 128 + 128))]


def test_cuts_within_a_unit_are_refused() -> None:
    sw.placements.Ragged(0, (128, 256, 5), unit=128)
    sw.placements.Pieces(0, [[(128, 200), (0, 128)]], unit=128)
    for make, message in (
        (lambda: sw.placements.Ragged(0, (100, 28), unit=128), "must be at multiples of unit=128 or at 128, got 100"),
        (lambda: sw.placements.Packed(0, (100, 156), unit=128), "must be at multiples of unit=128 or at 256, got 100"),
        (lambda: sw.placements.Pieces(0, [[(0, 5), (5, 12)]], unit=4), "at multiples of unit=4 or at 12, got 5"),
        (lambda: sw.placements.Cyclic(0, 6, unit=4), "block of Cyclic must be a multiple of unit=4, got 6"),
        (lambda: sw.placements.Pieces.zigzag(0, 8, 1 << 62), "count must be at most 2^20, the maximum"),
        (lambda: sw.placements.Pieces.items(0, 3), "lists must be a list of item numbers for each coordinate, got 3"),  # type: ignore[arg-type]
        (lambda: sw.placements.Shard(0, unit=0), "unit of Shard must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make()


def _moved(src: sw.Layout, dst: sw.Layout) -> int:
    """Returns the number of elements that ranks need and do not hold."""
    total = 0
    for rank in dst.mesh.ranks:
        cells = [
            set(itertools.product(*([i for b, e in dim for i in range(b, e)] for dim in layout.region(rank))))
            if rank in layout.mesh.ranks
            else set()
            for layout in (src, dst)
        ]
        total += len(cells[1] - cells[0])
    return total


def test_nearest_layout_is_optimal_in_its_family() -> None:
    chance = random.Random(5)
    for _ in range(25):
        shape = (chance.randint(1, 6), chance.randint(1, 3))
        sizes = chance.choice(((2,), (3,), (2, 2)))
        ranks = chance.sample(range(6), math.prod(sizes))
        kinds = ["R", "S(0)", "S(1)", "Cyclic(0,1)", "Owned(0,1)"]
        mesh = sw.Mesh(dict(zip("ab", sizes, strict=False)), ranks)
        src = sw.Layout(mesh, shape, [chance.choice(kinds) for _ in sizes])
        on = chance.sample(range(6), chance.randint(1, 3))
        found = sw.Layout.nearest(src, on)
        assert found.mesh.ranks == on
        least = None
        for dim, size in enumerate(shape):
            most = -(-size // len(on))
            for owners in itertools.product(range(len(on)), repeat=size):
                if max(owners.count(which) for which in range(len(on))) > most:
                    continue
                lists = [[(row, row + 1) for row in range(size) if owners[row] == which] for which in range(len(on))]
                moved = _moved(src, sw.Layout(found.mesh, shape, [sw.placements.Pieces(dim, lists)]))
                least = moved if least is None else min(least, moved)
        assert _moved(src, found) == least, f"{src} on {on}: {found}"
        assert sw.plan(src, found).wire_bytes_sum == 4 * _moved(src, found)


def test_nearest_layout_of_many_blocks() -> None:
    """The search must treat rows with the same holders together, or it would not end in time."""
    src = sw.Layout(sw.Mesh({"a": 8}), (200_000, 2), ["Cyclic(0,1)"])
    found = sw.Layout.nearest(src, range(6))
    assert max(found.local_shape(rank)[0] for rank in range(6)) <= -(-200_000 // 6)
    assert sw.plan(src, found).wire_bytes_sum == 2 * 25_000 * 2 * 4, "the rows of the two ranks that left"


def test_nearest_layout_when_ranks_leave() -> None:
    src = sw.Layout(sw.Mesh({"dp": 4}), (1024, 8), ["S(0)"])
    found = sw.Layout.nearest(src, [0, 1, 3])
    assert _moved(src, found) == 256 * 8
    assert max(found.local_shape(rank)[0] for rank in (0, 1, 3)) == 342
    with pytest.raises(ValueError, match="src must be a layout without pending reductions, got"):
        sw.Layout.nearest(sw.Layout(src.mesh, (4,), ["P"]), [0])
    without_dims = sw.Layout.nearest(sw.Layout(src.mesh, (), ["R"]), [5, 2])
    assert (without_dims.placements, without_dims.mesh.ranks) == (("R",), [5, 2])
    with pytest.raises(ValueError, match="src must be a Layout, got a NoneType"):
        sw.Layout.nearest(None, [0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks must be a list of at least one rank, got none"):
        sw.Layout.nearest(src, [])
    with pytest.raises(ValueError, match="ranks must be a list of ranks, got None"):
        sw.Layout.nearest(src, None)  # type: ignore[arg-type]


class RaggedShard:
    """RaggedShard as veScale and flex_shard define it."""

    def __init__(self, dims: tuple[int, ...], local_units: tuple[int, ...]) -> None:
        self.dims, self.local_units = dims, local_units


class _StridedRaggedShard(RaggedShard):
    """_StridedRaggedShard as veScale defines it."""

    def __init__(self, dims: tuple[int, ...], local_units: tuple[int, ...], split_factor: int) -> None:
        super().__init__(dims, local_units)
        self.split_factor = split_factor


class BlockShard:
    """BlockShard as flex_shard defines it."""

    def __init__(self, blocks_per_rank: tuple[int, ...], dim: int = 0) -> None:
        self.blocks_per_rank, self.dim = blocks_per_rank, dim


class Owned:
    """Owned as flex_shard defines it."""

    def __init__(self, owner_rank: int) -> None:
        self.owner_rank = owner_rank


@dataclasses.dataclass
class Parameter:
    """The attributes that Megatron sets on a parameter."""

    tensor_model_parallel: bool = True
    partition_dim: int = 0
    partition_stride: int = 1


def test_placements_of_other_libraries() -> None:
    mesh = sw.Mesh({"x": 4})

    def layout(placement: Any, shape: tuple[int, ...] = (8, 3)) -> sw.Layout:
        return sw.Layout(mesh, shape, [placement])

    # The example of flex_shard's own documentation: 2, 4, 2 and 0 of 8 rows.
    ragged = layout(RaggedShard((0,), (1, 2, 1, 0)))
    assert [ragged.local_shape(rank) for rank in range(4)] == [(2, 3), (4, 3), (2, 3), (0, 3)]
    assert layout(RaggedShard((0, 1), (1, 1, 2, 0)), (2, 6, 5)).local_shape(2) == (6, 5)
    assert layout(BlockShard((2, 0, 1, 1), 0)) == layout(sw.placements.Ragged(0, (4, 0, 2, 2)))
    assert layout(BlockShard((1, 0, 1, 1), 1)) == layout(sw.placements.Ragged(1, (1, 0, 1, 1)))
    assert layout(BlockShard((1, 0, 1, 1), -1)) == layout(sw.placements.Ragged(1, (1, 0, 1, 1)))
    assert layout(Owned(2)) == layout(sw.placements.Owned(2))
    assert of_partition(Parameter(), 4) == sw.placements.Shard(0)
    assert of_partition(Parameter(partition_stride=2), 4) == "SS(0,2)"
    assert of_partition(Parameter(tensor_model_parallel=False), 4) == "R"
    fused = Parameter()
    fused.partition_sizes = [2, 1, 1]  # type: ignore[attr-defined]
    assert of_partition(fused, 4) == sw.placements.Packed(0, [8, 4, 4])


def _as_vescale_cuts(tensor: torch.Tensor, dims: tuple[int, ...], units: tuple[int, ...], chunk: int) -> torch.Tensor:
    """Returns the part that veScale's tests expect on "fsdp" coordinate 1: its units of the chunk's flat elements."""
    flat = tensor.chunk(2)[chunk].flatten()
    unit = flat.numel() // sum(units)
    local = flat[units[0] * unit : (units[0] + units[1]) * unit]
    return local.view(-1, *tensor.shape[len(dims) :])


@pytest.mark.parametrize(
    ("shape", "dims", "units"),
    [
        ((8, 3), (0,), (1, 2, 1)),
        ((8, 3), (0, 1), (1, 3, 8)),
        ((4, 6, 5), (0, 1), (1, 3, 0)),
        ((4, 6, 5), (0, 1, 2), (2, 1, 3)),
        ((6, 4), (0,), (4, 8, 0)),  # a unit is one element here, and shares are whole rows
        ((8,), (0,), (0, 1, 0)),
    ],
    ids=str,
)
def test_strided_ragged_shard_cuts_as_vescale(
    shape: tuple[int, ...], dims: tuple[int, ...], units: tuple[int, ...]
) -> None:
    mesh = sw.Mesh({"fsdp": 3, "ep": 2})
    tensor = torch.arange(math.prod(shape)).view(shape)
    strided = sw.Layout(mesh, shape, [_StridedRaggedShard(dims, units, 2), torch.distributed.tensor.Shard(0)])
    said = sw.Layout(mesh, shape, [RaggedShard(dims, units), "S(0)"], shard_order={0: ["ep", "fsdp"]})
    assert strided == said
    for chunk in range(2):
        expected = _as_vescale_cuts(tensor, dims, units, chunk)
        region = strided.region(2 + chunk)
        rows = [row for begin, end in region[0] for row in range(begin, end)]
        assert torch.equal(tensor.flatten(0, len(dims) - 1)[rows], expected)
        assert strided.local_shape(2 + chunk) == tuple(expected.shape)
    sw.plan(strided, sw.Layout(mesh, shape, ["R", "R"])).simulate()


def _refused(message: str, placements: list[Any], shape: tuple[int, ...] = (4, 6), **options: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        sw.Layout(sw.Mesh({"x": 2, "y": 2}), shape, placements, **options)


def test_ragged_shards_in_ambiguous_order_are_refused() -> None:
    plain, strided = RaggedShard((0,), (1, 1)), _StridedRaggedShard((0,), (1, 1), 2)
    in_order = "{0: ['y', 'x']}"
    _refused("the placement of mesh dim 'x' must be a RaggedShard with a shard_order", [plain, "S(0)"])
    _refused(in_order, [plain, "S(0)"])
    _refused(in_order, [_StridedRaggedShard((0,), (1, 1), 4), "S(0)"])
    _refused("split factor 1", [strided, "S(1)"])
    _refused(in_order, [strided, "S(0)"], shard_order={0: ["x", "y"]})
    mesh = sw.Mesh({"x": 2, "y": 2})
    assert sw.Layout(mesh, (4, 6), ["S(0)", plain]).shard_order[0] == [0, 1], "the order of veScale and of the list"
    assert sw.Layout(mesh, (4, 6), [plain, "S(1)"]).placements == ("Ragged(0,2:2)", "S(1)")
    assert sw.Layout(mesh, (4, 6), [plain, "S(0)"], shard_order={0: ["x", "y"]}).shard_order[0] == [0, 1]


def test_layouts_that_split_a_unit_are_refused() -> None:
    mesh = sw.Mesh({"a": 2, "b": 2})
    short_first = sw.placements.Pieces(0, [[(128, 200), (0, 128)]] * 2, unit=128)
    for shape, placements, message in (
        (
            (200,),
            [short_first, sw.placements.Shard(0, unit=128)],
            r"unit: parts of dim 0 must .* multiples of 128, got \[0, 56\) on rank 0",
        ),
        (
            (1000,),
            ["S(0)", sw.placements.Shard(0, unit=128)],
            r"unit: parts of dim 0 must .* multiples of 128, got \[(0|256), 500\)",
        ),
        (
            (4, 12),
            ["S(1)", sw.placements.Ragged(1, [4, 2], unit=4)],
            r"unit: parts of dim 1 must .* multiples of 4, got \[4, 6\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            sw.Layout(mesh, shape, placements)
    for placements in (
        [sw.placements.Shard(0, unit=128), sw.placements.Shard(0, unit=128)],
        [sw.placements.Shard(0, unit=128), sw.placements.Cyclic(0, 128, unit=128)],
        [sw.placements.Ragged(0, [384, 616], unit=128), "R"],
    ):
        layout = sw.Layout(mesh, (1000,), placements)
        for rank in mesh.ranks:
            assert all(begin % 128 == 0 and (end % 128 == 0 or end == 1000) for begin, end in layout.region(rank)[0])
