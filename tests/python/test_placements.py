"""Tests of cuts that torch does not have, on real process groups: every element and all bytes."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fuzz
import oracle
import shardwright as sw
from meshes import coordinates
from pool import Pool

NAMES = ("x", "y", "z")


def _mesh(shape: tuple[int, ...]) -> sw.Mesh:
    return sw.Mesh(dict(zip(NAMES, shape, strict=False)))


def _part(placement: Any, indices: list[int], count: int, which: int) -> list[int]:
    """Returns the elements of a list that a coordinate holds, cut one element at a time."""
    if isinstance(placement, sw.placements.Ragged):
        units = placement.units
        sizes = placement.sizes or [len(indices) * share // sum(units) for share in units]
        owners = [c for c, size in enumerate(sizes) for _ in range(size)]
        return [index for index, owner in zip(indices, owners, strict=True) if owner == which]
    if isinstance(placement, sw.placements.Packed):
        components = [i for i, size in enumerate(placement.sizes) for _ in range(size)]
        held = []
        for i in range(len(placement.sizes)):
            of_component = [index for index, component in zip(indices, components, strict=True) if component == i]
            held += oracle.chunk(of_component, count, which)
        return held
    if isinstance(placement, sw.placements.Blocks | sw.placements.Cyclic):
        blocks = [indices[at : at + placement.block] for at in range(0, len(indices), placement.block)]
        numbers = list(range(len(blocks)))
        mine = (
            oracle.chunk(numbers, count, which)
            if isinstance(placement, sw.placements.Blocks)
            else numbers[which::count]
        )
        return [index for number in mine for index in blocks[number]]
    if isinstance(placement, sw.placements.Pieces):
        return [indices[at] for begin, end in placement.lists[which] for at in range(begin, end)]
    if isinstance(placement, sw.placements.Owned):
        return indices if which == placement.coordinate else []
    factor = oracle.split_factor(placement)
    return oracle.strided_chunk(indices, factor, count, which)


def _dim(placement: Any) -> int | None:
    return oracle.shard_dim(placement) if isinstance(placement, str) else placement.dim


def _local(tensor: torch.Tensor, mesh_shape: tuple[int, ...], placements: tuple[Any, ...], rank: int) -> torch.Tensor:
    where = coordinates(mesh_shape, rank)
    texts = [p if isinstance(p, str) else "R" for p in placements]
    summand = oracle.contribution(tensor, mesh_shape, texts, where)
    indices = [list(range(extent)) for extent in tensor.shape]
    for placement, count, which in zip(placements, mesh_shape, where, strict=True):
        dim = _dim(placement)
        if dim is not None:
            indices[dim] = _part(placement, indices[dim], count, which)
    return oracle.take(summand, indices)


def _random_sizes(chance: random.Random, total: int, count: int) -> list[int]:
    ends = sorted(chance.randint(0, total) for _ in range(count - 1))
    return [end - begin for begin, end in zip([0, *ends], [*ends, total], strict=True)]


def _random_lists(chance: random.Random, total: int, count: int) -> list[list[tuple[int, int]]]:
    """Returns pieces in random order. Some of them are held more than once."""
    ends = sorted({0, total, *(chance.randint(0, total) for _ in range(4))})
    pieces = list(zip(ends, ends[1:], strict=False))
    chance.shuffle(pieces)
    owners = [{chance.randrange(count), chance.choice((0, chance.randrange(count)))} for _ in pieces]
    return [[piece for piece, own in zip(pieces, owners, strict=True) if which in own] for which in range(count)]


def _random_placement(chance: random.Random, shape: tuple[int, ...], count: int) -> Any:
    dim = chance.randrange(len(shape))
    return chance.choice(
        (
            "R",
            f"S({dim})",
            f"SS({dim},2)",
            "P(sum)",
            sw.placements.Ragged(dim, _random_sizes(chance, shape[dim], count)),
            sw.placements.Blocks(dim, chance.randint(1, 3)),
            sw.placements.Cyclic(dim, chance.randint(1, 3)),
            sw.placements.Owned(chance.randrange(count), dim),
            sw.placements.Packed(dim, _random_sizes(chance, shape[dim], chance.randint(1, 3))),
            sw.placements.Pieces(dim, _random_lists(chance, shape[dim], count)),
        )
    )


def _random_layouts(
    chance: random.Random, mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[Any, ...], sw.Layout]:
    while True:
        placements = tuple(_random_placement(chance, shape, count) for count in mesh_shape)
        try:
            return placements, sw.Layout(_mesh(mesh_shape), shape, placements, strided="literal")
        except ValueError as error:  # sizes that do not fit after another cut
            assert re.search("sum of the sizes|must contain all|largest end", str(error))


def _pairs(mesh_shape: tuple[int, ...], count: int) -> list[Any]:
    """Returns random pairs of layouts, the same on every rank."""
    chance = random.Random(f"{fuzz.seed_from_environment()} {mesh_shape}")
    pairs: list[Any] = []
    while len(pairs) < count:
        shape = tuple(chance.choice((0, 1, 3, 5, 8, 9, 12)) for _ in range(chance.randint(1, 2)))
        src, dst = (_random_layouts(chance, mesh_shape, shape) for _ in range(2))
        becomes_partial = any(b == "P(sum)" and a != "P(sum)" for a, b in zip(src[0], dst[0], strict=True))
        if not becomes_partial or chance.random() < 0.3:
            pairs.append((shape, src, dst))
    return pairs


def _move_all(mesh_shape: tuple[int, ...], count: int) -> list[tuple[int, int]]:
    rank = dist.get_rank()
    bytes_of = []
    for shape, (src, src_layout), (dst, dst_layout) in _pairs(mesh_shape, count):
        tensor = oracle.global_tensor(shape, torch.float32, 1, reducible=True)
        local = _local(tensor, mesh_shape, src, rank)
        with sw.debug.wire_meter() as meter:
            result = sw.redistribute_local(local, src_layout, dst_layout)
        bytes_of.append((meter.received_bytes, meter.sent_bytes))
        if "P(sum)" in dst:
            # Any contributions that sum to the value are right, so values are compared after a reduction.
            reduced = ["R" if p == "P(sum)" else p for p in dst]
            result = sw.redistribute_local(
                result, dst_layout, sw.Layout(_mesh(mesh_shape), shape, reduced, strided="literal")
            )
            dst = tuple(reduced)
        wrong = oracle.difference(result, _local(tensor, mesh_shape, dst, rank))
        assert wrong is None, f"{src} -> {dst} of {shape}: {wrong}"
    return bytes_of


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2), (2, 3)], ids=str)
def test_values_and_bytes_of_random_layouts(pool: Pool, mesh_shape: tuple[int, ...]) -> None:
    count = 60
    by_rank = pool.run(_move_all, torch.Size(mesh_shape).numel(), mesh_shape, count)
    kinds = set()
    for index, (_, (src, src_layout), (dst, dst_layout)) in enumerate(_pairs(mesh_shape, count)):
        plan = sw.plan(src_layout, dst_layout, backend="gloo")
        plan.simulate()
        received = [rank[index][0] for rank in by_rank]
        assert sum(received) == plan.wire_bytes_sum == sum(rank[index][1] for rank in by_rank)
        assert max(received) == plan.wire_bytes_max
        if "P(sum)" not in src + dst:
            assert sw.plan(src_layout, dst_layout, objective="bytes").wire_bytes_sum == _needed_bytes(
                src_layout, dst_layout
            )
        kinds |= {type(p) for p in src + dst}
    assert kinds >= {
        str,
        sw.placements.Ragged,
        sw.placements.Blocks,
        sw.placements.Cyclic,
        sw.placements.Owned,
        sw.placements.Packed,
        sw.placements.Pieces,
    }


def _needed_bytes(src: sw.Layout, dst: sw.Layout) -> int:
    total = 0
    for rank in range(src.mesh.size):
        held, needed = (
            set(itertools.product(*([i for b, e in dim for i in range(b, e)] for dim in layout.region(rank))))
            for layout in (src, dst)
        )
        total += 4 * len(needed - held)
    return total


def _gradients() -> None:
    rank = dist.get_rank()
    tensor = oracle.global_tensor((8, 5), torch.float32, 4, reducible=True)
    gradient = oracle.global_tensor((8, 5), torch.float32, 5)
    packed, ragged = (sw.placements.Packed(0, (4, 2, 2)),), (sw.placements.Ragged(0, (1, 0, 7)),)
    for src, dst, back in ((packed, ragged, packed), (ragged, ("R",), ragged), (("P(sum)",), packed, ("R",))):
        local = _local(tensor, (3,), src, rank).requires_grad_()
        result = sw.redistribute_local(local, *(sw.Layout(_mesh((3,)), (8, 5), p) for p in (src, dst)))
        result.backward(_local(gradient, (3,), dst, rank))
        assert local.grad is not None
        assert oracle.difference(local.grad, _local(gradient, (3,), back, rank)) is None, f"{src} -> {dst}"


def test_gradients_return_to_source_layout(pool: Pool) -> None:
    pool.run(_gradients, 3)


def test_str_and_repr_of_placements() -> None:
    shown = {
        sw.placements.Ragged(0, [3, 1]): ("Ragged(0,3:1)", "Ragged(dim=0, sizes=(3, 1))"),
        sw.placements.Blocks(1, 4): ("Blocks(1,4)", "Blocks(dim=1, block=4)"),
        sw.placements.Cyclic(0, 2): ("Cyclic(0,2)", "Cyclic(dim=0, block=2)"),
        sw.placements.Owned(1): ("Owned(0,1)", "Owned(coordinate=1, dim=0)"),
        sw.placements.Packed(-1, (2, 2)): ("Packed(-1,2:2)", "Packed(dim=-1, sizes=(2, 2))"),
    }
    for placement, (text, represented) in shown.items():
        assert str(placement) == text
        assert repr(placement) == represented
        layout = sw.Layout(_mesh((2,)), (4, 4), [placement])
        assert layout == sw.Layout(_mesh((2,)), (4, 4), [text])
        assert layout.placements == (text.replace("-1", "1"),)
        assert sw.Layout(_mesh((2,)), (4, 4), layout.placements) == layout
    assert sw.placements.Ragged(0, [3, 1]) == sw.placements.Ragged(0, (3, 1)) != sw.placements.Packed(0, (3, 1))


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (sw.placements.Ragged(0, (3, 2)), r"placements: .*Ragged\(0,3:2\) on mesh dim 'x' must be 4, .*got 5"),
        (sw.placements.Ragged(0, (2, 1, 1)), r"placements: number of sizes of Ragged.* must be 2, .*got 3"),
        (sw.placements.Ragged(0, (5, -1)), "placements: sizes of Ragged must be at least 0, got -1"),
        (sw.placements.Ragged(2, (2, 2)), r"placements: tensor dim of Ragged.* must be in \[-2, 1\], got 2"),
        (sw.placements.Blocks(0, 0), r"placements: block of Blocks must be in \[1, 2\^31\], got 0"),
        ("Cyclic(0,1.5)", r"placements must be one of R, S\(dim\).*, got 'Cyclic\(0,1\.5\)'"),
        (sw.placements.Owned(2), r"placements: .*Owned\(0,2\) on mesh dim 'x' must be in \[0, 1\], got 2"),
        (sw.placements.Packed(0, (8, 4)), r"placements: .*Packed\(0,8:4\) on mesh dim 'x' must be 4, .*got 12"),
    ],
    ids=str,
)
def test_placements_that_do_not_fit_are_refused(placement: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sw.Layout(_mesh((2,)), (4, 4), [placement])


def test_non_integer_arguments_are_refused() -> None:
    wrong: Any = None
    for make, message in (
        (lambda: sw.placements.Cyclic(0, 1.5), "block of Cyclic must be an integer, got 1.5"),  # type: ignore[arg-type]
        (lambda: sw.placements.Blocks(0, wrong), "block of Blocks must be an integer, got None"),
        (lambda: sw.placements.Owned("0"), "coordinate of Owned must be an integer, got '0'"),  # type: ignore[arg-type]
        (lambda: sw.placements.Shard(wrong), "dim of Shard must be an integer, got None"),
        (lambda: sw.placements.Pieces(0.0, [[(0, 4)]]), "dim of Pieces must be an integer, got 0.0"),  # type: ignore[arg-type]
        (lambda: sw.placements.Packed(0, [4], unit=wrong), "unit of Packed must be an integer, got None"),
        (lambda: sw.placements.Packed(0, []), "sizes must be a list of at least one integer, got none"),
        (lambda: sw.placements.Ragged(0, ()), "sizes must be a list of at least one integer, got none"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make()
    with pytest.raises(ValueError, match=r"placements must be R or P .*, got Owned\(0,0\) on mesh dim 'x'"):
        sw.Layout(_mesh((2,)), (), [sw.placements.Owned(0)])


def test_error_names_part_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"placements: .*Ragged\(0,1:3\) on mesh dim 'y' must be 3, .*got 4") as caught:
        sw.Layout(_mesh((2, 2)), (7, 4), ["S(0)", sw.placements.Ragged(0, (1, 3))])
    assert "the part at x=1" in str(caught.value)
    units = sw.placements.Ragged(0, units=(1, 3))
    for first, parts in ((sw.placements.Shard(0, unit=8), "4 to 8"), (sw.placements.Ragged(0, (3, 9)), "3 to 9")):
        _refused(f"units=(1, 3)) on mesh dim 'y' must be of one length, got {parts}", [first, units], (12, 4))
    with pytest.raises(ValueError, match="sizes must be a list of integers, got 4"):
        sw.placements.Ragged(0, 4)  # type: ignore[arg-type]


SIXTEEN_IN_TWO: list[Any] = [
    "S(0)",
    "SS(0,4)",
    sw.placements.Blocks(0, 4),
    sw.placements.Ragged(0, (8, 8)),
    sw.placements.Ragged(0, units=(1, 1)),
    sw.placements.Packed(0, (4, 12)),
    sw.placements.Cyclic(0, 2),
    sw.placements.Pieces(0, [[(12, 16), (0, 4)], [(4, 12)]]),
]


@pytest.mark.parametrize("first", SIXTEEN_IN_TWO, ids=str)
def test_units_divide_parts_of_earlier_cuts(first: Any) -> None:
    units = sw.placements.Ragged(0, units=(1, 0, 3))
    in_mesh_order = sw.Layout(sw.Mesh({"x": 2, "y": 3}), (16, 4), [first, units])
    otherwise = sw.Layout(sw.Mesh({"x": 3, "y": 2}), (16, 4), [units, first], shard_order={0: ["y", "x"]})
    for a, b in itertools.product(range(2), range(3)):
        expected = _part(units, _part(first, list(range(16)), 2, a), 3, b)
        for layout, rank in ((in_mesh_order, 3 * a + b), (otherwise, 2 * b + a)):
            assert [i for begin, end in layout.region(rank)[0] for i in range(begin, end)] == expected
    sw.plan(otherwise, sw.Layout(otherwise.mesh, (16, 4), ["R", "R"])).simulate()


def test_units_of_flattened_dims_nest() -> None:
    outer, inner = (2, 1, 0), (1, 3)
    mesh = sw.Mesh({"x": 3, "y": 2})
    by_dims = [sw.placements.Ragged(dims=(0, 1), units=(1, 1, 2)), sw.placements.Ragged(dims=(0, 1), units=inner)]
    with pytest.raises(ValueError, match=re.escape("units=(1, 3)) on mesh dim 'y' must be of one length, got 6 to 12")):
        sw.Layout(mesh, (4, 6, 5), by_dims)
    with pytest.raises(ValueError, match="must be of one length, got 0 to 16"):
        sw.Layout(
            mesh, (4, 6, 5), [sw.placements.Ragged(0, units=outer), sw.placements.Ragged(0, units=inner)], flattened=2
        )
    for dims in ({"dims": (0, 1)}, {"dim": 0}):
        placements = [sw.placements.Ragged(units=(1, 1, 1), **dims), sw.placements.Ragged(units=inner, **dims)]  # type: ignore[arg-type]
        layout = sw.Layout(mesh, (4, 6, 5), placements, flattened=2)
        for a, b in itertools.product(range(3), range(2)):
            expected = _part(placements[1], _part(placements[0], list(range(24)), 3, a), 2, b)
            assert layout.region(2 * a + b) == [[(expected[0], expected[-1] + 1)], [(0, 5)]]
    assert sw.Layout(_mesh((2,)), (4, 6, 2), [sw.placements.Ragged(1, units=(1, 1))], flattened=2).local_shape(0) == (
        24,
        1,
    )


def _refused(message: str, placements: list[Any], shape: tuple[int, ...] = (4, 6), **options: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        sw.Layout(_mesh((2, 2)), shape, placements, **options)


def test_placements_beside_flattened_dims() -> None:
    mesh = sw.Mesh({"x": 2, "y": 2})
    sizes, halves = sw.placements.Ragged(dims=(0, 1), sizes=(3, 9)), sw.placements.Ragged(dims=(0, 1), units=(1, 1))
    layout = sw.Layout(mesh, (4, 6), [sizes, "S(0)"], shard_order={0: ["y", "x"]})
    as_text = sw.Layout(mesh, (4, 6), ["Ragged(0,3:9)", "S(0)"], shard_order={0: ["y", "x"]}, flattened=2)
    assert layout == as_text
    assert [layout.region(rank)[0] for rank in range(4)] == [[(0, 3)], [(12, 15)], [(3, 12)], [(15, 24)]]
    for owned in ("Owned(1)", "Owned(0,1)", sw.placements.Owned(1), sw.placements.Owned(1, dim=1)):
        held = sw.Layout(mesh, (4, 6, 2), [sw.placements.Ragged(dims=(0, 1), units=(1, 3)), owned])
        assert [held.local_shape(rank)[0] for rank in range(4)] == [0, 6, 0, 18]
    # Rows 0 to 1 and 2 to 5 of 6. Chunks of elements are chunks of rows only if they have an even number of elements.
    in_rows = sw.Layout(mesh, (6, 2), [sw.placements.Ragged(dims=(0, 1), sizes=(4, 8)), "S(0)"])
    assert [in_rows.local_shape(rank) for rank in range(4)] == [(2,), (2,), (4,), (4,)]
    ambiguous = "S(0) on mesh dim 'y' cuts must be multiples of 2 rows of 6 elements in dims 0 to 1, got 3 to 21"
    _refused(ambiguous, [sw.placements.Ragged(dims=(0, 1), sizes=(3, 21)), "S(0)"])
    _refused("'Blocks(0,2)' for chunks of rows", [sw.placements.Ragged(dims=(0, 1), sizes=(2, 10)), "S(0)"], (6, 2))
    _refused("rows of 6 elements in dims 0 to 1, got 18 to 18", [halves, "S(0)"], (3, 6), shard_order={0: ["y", "x"]})
    for other in (
        sw.placements.Cyclic(0, 2),
        "SS(0,2)",
        sw.placements.Shard(0, unit=2),
        sw.placements.Ragged(0, (2, 2)),
        "S(-1)",
    ):
        _refused("must be at least 2 next to a Ragged that flattens dims 0 to 1, got", [sizes, other])
    _refused("each Ragged must be equal: the first 2 dims", [sizes, sw.placements.Ragged(dims=(0,), sizes=(2, 2))])
    _refused("each Ragged must be equal: the first 3 dims", [sizes, "R"], (4, 6, 2), flattened=3)


def test_shard_order_uses_dims_of_the_shape() -> None:
    mesh = sw.Mesh({"x": 2, "y": 2, "z": 2})
    ragged = sw.placements.Ragged(dims=(0, 1), units=(1, 1))
    layout = sw.Layout(mesh, (4, 6, 8), [ragged, "S(2)", "S(2)"], shard_order={2: ["z", "y"]})
    assert layout.region(2)[1] == [(2, 4)], "y=1 has the second half of z's first half"
    with pytest.raises(ValueError, match="shard_order: tensor dim must be 0 or at least 2 .*, got 1"):
        sw.Layout(mesh, (4, 6, 8), [ragged, "S(2)", "S(2)"], shard_order={1: ["z", "y"]})


def test_units_must_divide_the_dim() -> None:
    def local_rows(units: tuple[int, int]) -> list[int]:
        layout = sw.Layout(_mesh((2,)), (3, 4), [sw.placements.Ragged(0, units=units)])
        return [layout.local_shape(rank)[0] for rank in range(2)]

    assert local_rows((2, 4)) == [1, 2]
    assert local_rows((0, 7)) == [0, 3]
    for units in ((1, 1), (0, 0), (-1, 4)):
        with pytest.raises(ValueError, match=re.escape(f"got {units}, whose sum is {sum(units)}")):
            local_rows(units)
    for dim in (2, -3):
        with pytest.raises(ValueError, match=rf"placements: tensor dim of .* must be in \[-2, 1\], got {dim}"):
            sw.Layout(_mesh((2,)), (3, 4), [sw.placements.Ragged(dim, units=(1, 1))])
    with pytest.raises(ValueError, match="placements must have one item per mesh dim, 2 .*, got 1"):
        sw.Layout(_mesh((2, 2)), (3, 4), [sw.placements.Ragged(0, units=(1, 2))])
    with pytest.raises(ValueError, match="placements: number of sizes of .* must be 3, .*got 2"):
        sw.Layout(_mesh((3,)), (3, 4), [sw.placements.Ragged(0, units=(1, 2))])


def test_layouts_of_different_cuts_are_unequal_even_with_equal_regions() -> None:
    """Checks the statements of docs/api/layouts.md about `==` and about plans without steps."""
    mesh = _mesh((2,))
    plain = sw.Layout(mesh, (8,), ["S(0)"])
    cuts = [
        sw.placements.Blocks(0, 1),
        sw.placements.Ragged(0, [4, 4]),
        sw.placements.Packed(0, [8]),
        sw.placements.Pieces(0, [[(0, 4)], [(4, 8)]]),
    ]
    for cut in (*cuts, sw.placements.Ragged(0, [3, 5])):
        layout = sw.Layout(mesh, (8,), [cut])
        holds_the_same = [layout.region(rank) for rank in range(2)] == [plain.region(rank) for rank in range(2)]
        assert layout != plain
        assert holds_the_same == (cut in cuts)
        assert bool(sw.plan(layout, plain).steps) != holds_the_same
    assert sw.Layout(mesh, (8,), ["S(0)"]) == plain != sw.Layout(mesh, (8,), ["S(0)"], "bfloat16")
    layouts = [plain, *(sw.Layout(mesh, (8,), [cut]) for cut in cuts)]
    assert all(a != b for a, b in itertools.combinations(layouts, 2))
    with_one_more = [sw.Layout(sw.Mesh({"x": 2, "y": 1}), (8,), ["S(0)", placement]) for placement in ("R", "S(0)")]
    assert with_one_more[0] == with_one_more[1] != plain


def test_plans_are_printed_and_read_back() -> None:
    mesh = _mesh((2, 3))
    src = sw.Layout(mesh, (9, 4), [sw.placements.Ragged(0, (2, 7)), sw.placements.Cyclic(1, 1)])
    plan = sw.plan(src, sw.Layout(mesh, (9, 4), [sw.placements.Owned(1), "S(0)"]))
    assert "[Ragged(0,2:7), Cyclic(1,1)]" in str(plan)
    assert json.loads(plan.to_json())["source"]["placements"] == ["Ragged(0,2:7)", "Cyclic(1,1)"]
    assert sw.planning.plan_from_json(plan.to_json()).src == src
    assert "Ragged(0,2:7)" in plan.to_svg()


def test_command_line_plans_cuts() -> None:
    command = [sys.executable, "-m", "shardwright", "plan", "--mesh", "tp=2", "--shape", "16,4", "--simulate"]
    command += ["--src", "Packed(0,8:4:4)", "--dst", "Ragged(0,13:3)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "[Packed(0,8:4:4)] -> [Ragged(0,13:3)]" in done.stdout
