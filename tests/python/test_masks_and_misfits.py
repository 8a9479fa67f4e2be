"""Unusual DTensors that PyTorch makes: `_MaskPartial`, subclasses of Partial, tensors that contradict their spec."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

import oracle
import shardwright as sw
from meshes import get_mesh
from pool import Pool

WORLD = 4
VOCABULARY = 10  # uneven on four ranks


def _embedding(
    mesh_shape: tuple[int, ...], ids: tuple[str, ...], dst: tuple[str, ...], is_compiled: bool
) -> tuple[int, dict[str, int]]:
    """Runs an embedding whose table is sharded by rows over the last mesh dim, and its backward. Returns fallbacks."""
    mesh = get_mesh(mesh_shape)
    table = oracle.global_tensor((VOCABULARY, 6), torch.float32, seed=1)
    indices = torch.randint(0, VOCABULARY, (8, 5), generator=torch.Generator().manual_seed(2))
    gradient = oracle.global_tensor((8, 5, 6), torch.float32, seed=3, reducible=True)
    plain = table.clone().requires_grad_()
    expected = torch.nn.functional.embedding(indices, plain)
    expected.backward(gradient)
    before, after = ([Shard(int(p[2])) if p.startswith("S") else Replicate() for p in ps] for ps in (ids, dst))
    rows = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    sw.reset_stats()

    def embed(cut: Any, weight: Any) -> Any:
        masked: Any = torch.nn.functional.embedding(cut, weight)
        return masked.redistribute(mesh, after)

    torch._dynamo.reset()
    run = torch.compile(embed, backend="aot_eager") if is_compiled else embed
    with sw.enabled(strict=True):
        weight = distribute_tensor(table, mesh, rows, src_data_rank=None).requires_grad_()
        cut = distribute_tensor(indices, mesh, before, src_data_rank=None)
        moved = run(cut, weight)
        masked: Any = torch.nn.functional.embedding(cut, weight)
        assert any(hasattr(p, "mask_buffer") for p in masked.placements)
        masked.redistribute(mesh, after)  # releases the mask; torch 2.11 keeps it in a cache and cannot compile then
        moved.backward(distribute_tensor(gradient, mesh, after, src_data_rank=None))
        assert oracle.difference(moved.full_tensor().detach(), expected.detach()) is None
        assert weight.grad is not None and plain.grad is not None
        assert oracle.difference(weight.grad.full_tensor(), plain.grad) is None
    return sw.stats()["fallbacks"], sw.stats()["fallback_reasons"]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("mesh_shape", "ids", "dst"),
    [
        ((4,), ("R",), ("R",)),
        ((4,), ("R",), ("S(0)",)),
        ((4,), ("R",), ("S(1)",)),
        ((4,), ("R",), ("S(2)",)),
        ((2, 2), ("S(0)", "R"), ("S(0)", "R")),
        ((2, 2), ("S(0)", "R"), ("S(0)", "S(1)")),
        ((2, 2), ("S(0)", "R"), ("R", "R")),
    ],
    ids=str,
)
def test_sharded_embedding(
    pool: Pool, mesh_shape: tuple[int, ...], ids: tuple[str, ...], dst: tuple[str, ...], is_compiled: bool
) -> None:
    assert pool.run(_embedding, WORLD, mesh_shape, ids, dst, is_compiled) == [(0, {})] * WORLD


def _loss() -> None:
    mesh = get_mesh((WORLD,))
    logits = oracle.global_tensor((6, VOCABULARY), torch.float32, seed=4).div(7)
    labels = torch.randint(0, VOCABULARY, (6,), generator=torch.Generator().manual_seed(5))
    plain = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(plain, labels)
    expected.backward()
    with sw.enabled(strict=True), loss_parallel():
        cut = distribute_tensor(logits, mesh, [Shard(1)], src_data_rank=None).requires_grad_()
        loss = torch.nn.functional.cross_entropy(
            cut, distribute_tensor(labels, mesh, [Replicate()], src_data_rank=None)
        )
        loss.backward()
        assert cut.grad is not None and plain.grad is not None
        torch.testing.assert_close(loss.full_tensor().detach().cpu(), expected.detach())
        torch.testing.assert_close(cut.grad.full_tensor().cpu(), plain.grad)


def test_loss_parallel(pool: Pool) -> None:
    pool.run(_loss, WORLD)


class _NamedPartial(Partial):
    """A subclass that reduces as Partial does."""


class _HalvedPartial(Partial):
    """A subclass that halves sums, and so equals no other placement."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HalvedPartial)

    def __hash__(self) -> int:
        return hash("halved")

    def _reduce_value(self, tensor: torch.Tensor, mesh: object, mesh_dim: int) -> torch.Tensor:
        return super()._reduce_value(tensor, mesh, mesh_dim) / 2


def _subclasses() -> list[int]:
    mesh = get_mesh((WORLD,))
    fallbacks = []
    for placement, expected in ((_NamedPartial(), 4.0), (_HalvedPartial(), 2.0)):
        sw.reset_stats()
        with sw.enabled():
            pending = DTensor.from_local(torch.ones(3), mesh, [placement], run_check=False)
            result = pending.redistribute(mesh, [Replicate()]).to_local()
        wrong = oracle.difference(result, torch.full((3,), expected))
        assert wrong is None, f"{placement}: {wrong}"
        fallbacks.append(sw.stats()["fallbacks"])
    return fallbacks


def test_subclasses_of_partial_fall_back_unless_they_are_equal(pool: Pool) -> None:
    assert pool.run(_subclasses, WORLD) == [[0, 1]] * WORLD


def _gradient(function: str, with_ours: bool) -> tuple[torch.Tensor, int]:
    mesh = get_mesh((2, 2))
    values = oracle.global_tensor((4, 6), torch.float32, seed=6)
    values[3, 5] = 100.0
    source = distribute_tensor(values, mesh, [Shard(0), Shard(1)], src_data_rank=None).requires_grad_()
    sw.reset_stats()
    if with_ours:
        sw.enable(strict=True)
    try:
        result = source.amax() if function == "amax" else torch.linalg.vector_norm(source, float("inf"))
        result.full_tensor().backward()
        assert source.grad is not None
        return source.grad.full_tensor().cpu(), sw.stats()["misfits"]
    finally:
        if with_ours:
            sw.disable()


@pytest.mark.parametrize("function", ["amax", "vector_norm"])
def test_local_tensors_that_contradict_their_spec(pool: Pool, function: str) -> None:
    """PyTorch's backward makes [1, 1] parts on all ranks under the spec S(0)S(1). All ranks continue, as in stock."""
    stock = pool.run(_gradient, WORLD, function, False)
    ours = pool.run(_gradient, WORLD, function, True)
    for (expected, _), (actual, _) in zip(stock, ours, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert [misfits for _, misfits in ours] == [0, 1, 1, 1]


def _cut_and_filled() -> int:
    """Rank 1 has one row too many, rank 2 one too few. Other ranks follow the spec."""
    mesh = get_mesh((WORLD,))
    rank = mesh.get_rank()
    rows = {1: 3, 2: 1}.get(rank, 2)
    local = torch.full((rows, 3), float(rank))
    wrong = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 3)), stride=(3, 1))
    sw.reset_stats()
    with sw.enabled(strict=True):
        for async_op in (False, True):
            result = wrong.redistribute(mesh, [Replicate()], async_op=async_op).to_local() + 0
            assert result[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 0.0, 3.0, 3.0]
    return sw.stats()["misfits"]


def test_misfits_are_cut_or_padded_and_counted(pool: Pool) -> None:
    assert pool.run(_cut_and_filled, WORLD) == [0, 2, 2, 0]


def _products_of_a_vector() -> None:
    """torch 2.15 ends them with `squeeze_(0)` of the local tensor only: shape (3,), but the DTensor has (1, 3)."""
    mesh = get_mesh((WORLD,))
    x, w = torch.arange(8.0), torch.arange(24.0).view(3, 8)
    cut, columns = (distribute_tensor(t, mesh, [Shard(t.ndim - 1)], src_data_rank=None) for t in (x, w))
    expected = x @ w.t()
    for run in (lambda: torch.nn.functional.linear(cut, columns), lambda: cut @ columns.t()):
        for checks in (False, True):
            sw.debug.check_ranks(checks)
            try:
                with sw.enabled(strict=True):
                    y = run()
                    assert torch.equal(y.full_tensor(), expected)
                    assert torch.equal((y + 1).to_local(), expected + 1)
                    assert torch.equal(y.redistribute(mesh, [Replicate()], async_op=True).to_local() + 0, expected)
                    pieces = y.redistribute(mesh, [Shard(y.ndim - 1)])
                    assert torch.equal(pieces.full_tensor().flatten(), expected)
            finally:
                sw.debug.check_ranks(False)


def test_products_of_a_vector(pool: Pool) -> None:
    pool.run(_products_of_a_vector, WORLD)


def _sparse() -> None:
    mesh = get_mesh((WORLD, 1))
    dense = DTensor.from_local(torch.eye(4), mesh, [Replicate(), Shard(0)], run_check=False)
    sparse = DTensor(torch.eye(4).to_sparse(), dense._spec, requires_grad=False)  # type: ignore[call-arg]
    with sw.enabled():
        for _ in range(2):
            dense.redistribute(mesh, [Replicate(), Replicate()])  # its executable is cached under the same specs
            sw.reset_stats()
            assert sparse.redistribute(mesh, [Replicate(), Replicate()])._local_tensor.layout is torch.sparse_coo
            assert sw.stats()["fallback_reasons"] == {"local tensor is torch.sparse_coo": 1}


def test_sparse_tensors_fall_back_to_pytorch(pool: Pool) -> None:
    pool.run(_sparse, WORLD)
