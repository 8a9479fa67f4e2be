"""Checkpoints that were saved in one layout are read into another: every element, and the bytes read."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import oracle
import shardwright as sw
from dtensors import check, distribute
from meshes import get_mesh
from parts import part_of
from pool import Pool
from shardwright import checkpoints

WORLD_SIZE = 4
SHAPES = {"w": (64, 96), "odd": (7, 5, 3), "v": (10,), "one": ()}


@pytest.fixture
def folder() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="shardwright_checkpoint_")
    yield path
    shutil.rmtree(path)


def _globals(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: oracle.global_tensor(shape, dtype, i) for i, (name, shape) in enumerate(SHAPES.items())}


def _placements(kind: str, shape: tuple[int, ...], ndim: int) -> tuple[str, ...]:
    return (kind if shape else "R",) + ("R",) * (ndim - 1)


def _save(folder: str, dtype: torch.dtype = torch.float32) -> None:
    mesh = get_mesh((4,))
    state: dict[str, Any] = {
        name: distribute(x, mesh, _placements("S(0)", tuple(x.shape), 1)) for name, x in _globals(dtype).items()
    }
    state["turned"] = oracle.global_tensor((12, 40), dtype, 9).t()
    for name in ("flat", "flatter"):
        state[name] = oracle.global_tensor((7, 5, 3), dtype, 4)
    state["step"] = 3
    dcp.save(state, checkpoint_id=folder)


def _load_dtensors(folder: str) -> int:
    """Loads with PyTorch's planner, which requests slices, and our reader. Returns the bytes that this rank needs."""
    _save(folder)
    mesh = get_mesh((2, 2))
    wholes = _globals()
    state: dict[str, Any] = {}
    for name, x in wholes.items():
        kind = "S(1)" if x.ndim > 1 else "S(0)"
        state[name] = distribute(torch.zeros_like(x), mesh, _placements(kind, tuple(x.shape), 2))
    state["step"] = 0
    state["turned"] = torch.zeros(40, 12)
    reader = sw.checkpoints.CheckpointReader(folder, max_gap_bytes=0)
    dcp.load(state, storage_reader=reader)
    assert state["step"] == 3
    assert torch.equal(state["turned"], oracle.global_tensor((12, 40), torch.float32, 9).t())
    for name, x in wholes.items():
        check(state[name], x, _placements("S(1)" if x.ndim > 1 else "S(0)", tuple(x.shape), 2))
    needed = sum(x.to_local().nbytes for name, x in state.items() if name in wholes) + state["turned"].nbytes
    assert reader.bytes_read == needed
    return needed


def test_reader_reads_only_requested_slices(pool: Pool, folder: str) -> None:
    needed = pool.run(_load_dtensors, WORLD_SIZE, folder)
    assert max(needed) < 4 * (64 * 96 + 7 * 5 * 3 + 10 + 1 + 12 * 40)


def _load_conjugated(folder: str) -> None:
    full = oracle.global_tensor((6, 5), torch.complex64, 3)
    imaginary = full.conj().imag  # a view with the negative bit
    negated = torch._neg_view(torch.arange(6.0))  # the whole of its storage
    dcp.save({"conj": full.conj(), "neg": imaginary, "negated": negated, "plain": full}, checkpoint_id=folder)
    expected = {"conj": full.conj().resolve_conj(), "neg": imaginary.resolve_neg(), "plain": full}
    expected["negated"] = -torch.arange(6.0)
    loaded = {name: torch.zeros_like(x) for name, x in expected.items()}
    dcp.load(loaded, storage_reader=sw.checkpoints.CheckpointReader(folder))
    for name, x in expected.items():
        assert torch.equal(loaded[name], x), name
    again = {name: torch.zeros_like(x) for name, x in expected.items()}
    sw.checkpoints.load_checkpoint(folder, again)
    for name, x in expected.items():
        assert torch.equal(again[name], x), name
    both = torch.zeros(7, 5, dtype=torch.complex64)
    with pytest.raises(dcp.CheckpointException, match="conj: .* must not be shared, got memory shared with plain"):
        sw.checkpoints.load_checkpoint(folder, {"conj": both[:6], "plain": both[1:]})


def test_loads_conjugated_tensors(pool: Pool, folder: str) -> None:
    pool.run(_load_conjugated, 1, folder)


def _load_layouts(folder: str) -> None:
    _save(folder, torch.bfloat16)
    rank = dist.get_rank()
    mesh = sw.Mesh({"a": 3}, [3, 1, 0])
    wholes = _globals(torch.bfloat16)
    layouts = {
        "w": sw.Layout(mesh, (64, 96), [sw.placements.Cyclic(1, 8)], "bfloat16"),
        "odd": sw.Layout(mesh, (7, 5, 3), ["S(1)"], "bfloat16"),
        "v": sw.Layout(mesh, (10,), [sw.placements.Ragged(0, [0, 7, 3])], "bfloat16"),
        "turned": sw.Layout(mesh, (40, 12), ["S(1)"], "bfloat16"),
        "flat": sw.Layout(mesh, (7, 5, 3), [sw.placements.Ragged(dims=(0, 1), units=[3, 15, 17])], "bfloat16"),
        "flatter": sw.Layout(mesh, (7, 5, 3), [sw.placements.Ragged(dims=(0, 1, 2), units=[50, 1, 54])], "bfloat16"),
    }
    full = oracle.global_tensor((7, 5, 3), torch.bfloat16, 4)
    wholes |= {"flat": full.flatten(0, 1), "flatter": full.flatten()}
    wholes["turned"] = oracle.global_tensor((12, 40), torch.bfloat16, 9).t()
    to: dict[str, Any] | None = None
    if rank in mesh.ranks:
        # Targets: every other row of a larger tensor, and a tensor of another dtype.
        to = {
            name: (torch.zeros(layout.local_shape(rank), dtype=torch.bfloat16), layout)
            for name, layout in layouts.items()
        }
        to["w"] = (torch.zeros(128, *to["w"][0].shape[1:], dtype=torch.bfloat16)[::2], layouts["w"])
        to["one"] = torch.zeros((), dtype=torch.float64)
    with_gaps = sw.checkpoints.load_checkpoint(folder, to)
    read = sw.checkpoints.load_checkpoint(folder, to, max_gap_bytes=0)
    assert with_gaps >= read
    if to is None:
        assert read == 0
        return
    for name, layout in layouts.items():
        assert oracle.difference(to[name][0], part_of(wholes[name], layout, rank)) is None, name
    assert to["one"].item() == wholes["one"].item()
    assert read == 2 + sum(to[name][0].nbytes for name in layouts)


def test_loads_into_any_layout(pool: Pool, folder: str) -> None:
    pool.run(_load_layouts, WORLD_SIZE, folder)


def _load_many_runs(folder: str) -> None:
    """Each rank has many runs of these layouts. Some runs begin in one saved part and end in another."""
    rank = dist.get_rank()
    wholes = {
        name: oracle.global_tensor(shape, torch.float32, i)
        for i, (name, shape) in enumerate(
            {"rows": (4000, 6), "both": (90, 70), "moved": (44, 6), "turned": (9, 8)}.items()
        )
    }
    saved: dict[str, Any] = {n: distribute(x, get_mesh((4,)), ("S(0)",)) for n, x in wholes.items() if n != "turned"}
    dcp.save({**saved, "turned": wholes["turned"].t().contiguous().t()}, checkpoint_id=folder)
    mesh, square = sw.Mesh({"a": 4}), sw.Mesh({"a": 2, "b": 2})
    pieces = [[(12, 24), (0, 11)], [(30, 32), (11, 12), (40, 44)], [], [(24, 30), (32, 40)]]
    layouts = {
        "rows": sw.Layout(mesh, (4000, 6), [sw.placements.Cyclic(0, 1)]),
        "both": sw.Layout(
            square, (90, 70), [sw.placements.Cyclic(0, 1), sw.placements.Cyclic(1, 2)], "float64"
        ),  # cast
        "moved": sw.Layout(mesh, (44, 6), [sw.placements.Pieces(0, pieces)]),
        "turned": sw.Layout(mesh, (9, 8), [sw.placements.Cyclic(0, 1)]),
    }
    items: list[int] = []
    reads: list[int] = []
    read_data, preadv = sw.checkpoints.CheckpointReader.read_data, os.preadv

    def noted_plan(self: sw.checkpoints.CheckpointReader, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Any:
        items.append(len(plan.items))
        return read_data(self, plan, planner)

    def noted_read(file: int, buffers: Any, at: int) -> int:
        reads.append(at)
        return preadv(file, buffers, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sw.checkpoints.CheckpointReader, "read_data", noted_plan)
        patch.setattr(os, "preadv", noted_read)
        for max_gap_bytes, max_span_bytes in ((0, 1 << 20), (4096, 1 << 20), (4096, 500)):
            patch.setattr(checkpoints, "_MAX_SPAN_BYTES", max_span_bytes)
            to: dict[str, Any] = {
                name: (torch.zeros(layout.local_shape(rank), dtype=getattr(torch, layout.dtype)), layout)
                for name, layout in layouts.items()
            }
            reads.clear()
            read = sw.checkpoints.load_checkpoint(folder, to, max_gap_bytes=max_gap_bytes)
            for name, (x, layout) in to.items():
                assert oracle.difference(x, part_of(wholes[name], layout, rank).to(x.dtype)) is None, name
            assert items.pop() <= 4 + 4 + 4 + 1  # one per saved part
            if max_gap_bytes == 0:
                assert read == 4 * sum(x.numel() for x, _ in to.values())
            elif max_span_bytes > 500:
                assert len(reads) <= 4 + 4 + 5 + 1  # one per item, and one more because `moved` goes back in the file
    # PyTorch's reader accepts the compressed plan too.
    again: dict[str, Any] = {name: (torch.zeros_like(x), layout) for name, (x, layout) in to.items()}
    dcp.load({"": again}, storage_reader=dcp.FileSystemReader(folder), planner=checkpoints._Planner(again, None))
    for name, (x, _) in to.items():
        assert torch.equal(again[name][0], x), name


def test_loads_layouts_of_many_runs(pool: Pool, folder: str) -> None:
    pool.run(_load_many_runs, WORLD_SIZE, folder)


def _count_versions(folder: str) -> None:
    """Both ways to write bump version counters: bytes read in place, and copies after a cast."""
    _save(folder)
    mesh = get_mesh((4,))
    for load in (
        sw.checkpoints.load_checkpoint,
        lambda path, to: dcp.load(to, storage_reader=sw.checkpoints.CheckpointReader(path)),
    ):
        spread = distribute(torch.zeros(64, 96), mesh, ("S(1)",))
        plain, cast = torch.nn.Parameter(torch.zeros(10)), torch.nn.Parameter(torch.zeros(7, 5, 3, dtype=torch.float64))
        written = [plain, cast, spread.to_local()] + [spread] * (load is sw.checkpoints.load_checkpoint)
        before = [x._version for x in written]
        load(folder, {"v": plain, "odd": cast, "w": spread})
        assert all(x._version > version for x, version in zip(written, before))
        assert torch.equal(plain, _globals()["v"])


def test_loading_bumps_version_counters(pool: Pool, folder: str) -> None:
    pool.run(_count_versions, WORLD_SIZE, folder)


def _invalid_loads(folder: str) -> str:
    _save(folder)
    rank = dist.get_rank()
    mesh = sw.Mesh({"a": 4})
    to: dict[str, Any] = {"v": torch.zeros(10)}
    if rank == 2:
        to = {
            "missing": torch.zeros(3),
            "step": torch.zeros(3),
            "v": torch.zeros(11),
            "w": (torch.zeros(3), sw.Layout(mesh, (64, 96), ["R"])),
            "odd": sw.Layout(mesh, (7, 5, 3), ["R"]),
        }
    with pytest.raises(dcp.CheckpointException) as raised:
        sw.checkpoints.load_checkpoint(folder, to)
    assert torch.equal(to["v"], torch.zeros_like(to["v"]))
    return str(raised.value)


def test_errors_are_raised_on_all_ranks(pool: Pool, folder: str) -> None:
    said = pool.run(_invalid_loads, WORLD_SIZE, folder)
    for text in said:
        assert "missing: is not in the checkpoint (on rank 2)" in text
        assert "step: is not a tensor in the checkpoint (on rank 2)" in text
        assert "v: shape must be (10,), as in the checkpoint, got (11,) (on rank 2)" in text
        assert "destination w: the local tensor must have shape" in text
        assert "odd: the local tensor to fill must be given, got none" in text
