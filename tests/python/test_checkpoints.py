"""Checkpoints that were saved in one layout and are read into another: every element, and the bytes read."""

from __future__ import annotations

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
    """With PyTorch's own planner, which asks for slices; only the reader is ours."""
    _save(folder)
    mesh = get_mesh((2, 2))
    wholes = _globals()
    state: dict[str, Any] = {}
    for name, x in wholes.items():
        kind = "S(1)" if x.ndim > 1 else "S(0)"
        state[name] = distribute(torch.zeros_like(x), mesh, _placements(kind, tuple(x.shape), 2))
    state["step"] = 0
    state["turned"] = torch.zeros(40, 12)
    reader = sw.CheckpointReader(folder, max_gap_bytes=0)
    dcp.load(state, storage_reader=reader)
    assert state["step"] == 3
    assert torch.equal(state["turned"], oracle.global_tensor((12, 40), torch.float32, 9).t())
    for name, x in wholes.items():
        check(state[name], x, _placements("S(1)" if x.ndim > 1 else "S(0)", tuple(x.shape), 2))
    needed = sum(x.to_local().nbytes for name, x in state.items() if name in wholes) + state["turned"].nbytes
    assert reader.bytes_read == needed
    return needed


def test_reader_reads_slices_alone(pool: Pool, folder: str) -> None:
    needed = pool.run(_load_dtensors, WORLD_SIZE, folder)
    assert max(needed) < 4 * (64 * 96 + 7 * 5 * 3 + 10 + 1 + 12 * 40)


def _load_conjugated(folder: str) -> None:
    whole = oracle.global_tensor((6, 5), torch.complex64, 3)
    imaginary = whole.conj().imag  # negated
    dcp.save({"conj": whole.conj(), "neg": imaginary, "plain": whole}, checkpoint_id=folder)
    expected = {"conj": whole.conj().resolve_conj(), "neg": imaginary.resolve_neg(), "plain": whole}
    loaded = {name: torch.zeros_like(x) for name, x in expected.items()}
    dcp.load(loaded, storage_reader=sw.CheckpointReader(folder))
    for name, x in expected.items():
        assert torch.equal(loaded[name], x), name
    again = {name: torch.zeros_like(x) for name, x in expected.items()}
    sw.load_checkpoint(folder, again)
    for name, x in expected.items():
        assert torch.equal(again[name], x), name
    both = torch.zeros(7, 5, dtype=torch.complex64)
    with pytest.raises(dcp.CheckpointException, match="conj: shares memory with plain; allowed is memory of its own"):
        sw.load_checkpoint(folder, {"conj": both[:6], "plain": both[1:]})


def test_conjugated_tensors(pool: Pool, folder: str) -> None:
    pool.run(_load_conjugated, 1, folder)


def _load_layouts(folder: str) -> None:
    _save(folder, torch.bfloat16)
    rank = dist.get_rank()
    mesh = sw.Mesh({"a": 3}, [3, 1, 0])
    wholes = _globals(torch.bfloat16)
    layouts = {
        "w": sw.Layout(mesh, (64, 96), [sw.Cyclic(1, 8)], "bfloat16"),
        "odd": sw.Layout(mesh, (7, 5, 3), ["S(1)"], "bfloat16"),
        "v": sw.Layout(mesh, (10,), [sw.Ragged(0, [0, 7, 3])], "bfloat16"),
        "turned": sw.Layout(mesh, (40, 12), ["S(1)"], "bfloat16"),
        "flat": sw.Layout(mesh, (7, 5, 3), [sw.Ragged(dims=(0, 1), units=[3, 15, 17])], "bfloat16"),
        "flatter": sw.Layout(mesh, (7, 5, 3), [sw.Ragged(dims=(0, 1, 2), units=[50, 1, 54])], "bfloat16"),
    }
    whole = oracle.global_tensor((7, 5, 3), torch.bfloat16, 4)
    wholes |= {"flat": whole.flatten(0, 1), "flatter": whole.flatten()}
    wholes["turned"] = oracle.global_tensor((12, 40), torch.bfloat16, 9).t()
    to: dict[str, Any] | None = None
    if rank in mesh.ranks:
        # Into every other row of a larger tensor, and cast.
        to = {
            name: (torch.zeros(layout.local_shape(rank), dtype=torch.bfloat16), layout)
            for name, layout in layouts.items()
        }
        to["w"] = (torch.zeros(128, *to["w"][0].shape[1:], dtype=torch.bfloat16)[::2], layouts["w"])
        to["one"] = torch.zeros((), dtype=torch.float64)
    with_gaps = sw.load_checkpoint(folder, to)
    read = sw.load_checkpoint(folder, to, max_gap_bytes=0)
    assert with_gaps >= read
    if to is None:
        assert read == 0
        return
    for name, layout in layouts.items():
        assert oracle.difference(to[name][0], part_of(wholes[name], layout, rank)) is None, name
    assert to["one"].item() == wholes["one"].item()
    assert read == 2 + sum(to[name][0].nbytes for name in layouts)


def test_any_layouts(pool: Pool, folder: str) -> None:
    pool.run(_load_layouts, WORLD_SIZE, folder)


def _refusals(folder: str) -> str:
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
        sw.load_checkpoint(folder, to)
    assert torch.equal(to["v"], torch.zeros_like(to["v"]))
    return str(raised.value)


def test_errors_are_raised_on_all_ranks(pool: Pool, folder: str) -> None:
    said = pool.run(_refusals, WORLD_SIZE, folder)
    for text in said:
        assert "missing: the checkpoint has no such tensor (on rank 2)" in text
        assert "step: the checkpoint has no tensor (on rank 2)" in text
        assert "v: has shape (11,), and in the checkpoint (10,) (on rank 2)" in text
        assert "destination w: the local tensor has shape (3,), where" in text
        assert "odd: got no tensor; allowed is one that is filled in place" in text
