"""Products with ``method="flags"`` on the device of tests/async_device: one product waits for a flag of each chunk.

The device's product reads a chunk as soon as the chunk's flag is set. While it waits, it occupies all multiprocessors,
which signals between ranks need too. Each test starts its own processes, because arenas live as long as their group.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import async_tests  # noqa: F401  (so that async_device is found)
import shardwright as sw

ROWS, INNER, COLUMNS = 256, 16, 8  # rows of a chunk, contracted dim, columns of a rank


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    import async_device

    async_device.build()


def _begin(rank: int, size: int, path: str, seconds: float = 20.0, arena_bytes: int = 1 << 20) -> Any:
    from async_device import ranks

    native = ranks.begin(rank, size, path, seconds, alone=True)
    native.set_delays(rank + 1, 0.2, 300)
    if arena_bytes > 0:
        sw.prepare(sw.Mesh({"a": size}), device_type="asyncdev", peer_arena_bytes=arena_bytes, peer_min_bytes=0)
    return native


class _Product:
    """A product of small integers, whose sums are exact, and a check of its result."""

    def __init__(self, seed: int, size: int, chunks: int, by_weight: bool, dims: int = 2) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = size * chunks * ROWS
        self.x = torch.randint(-2, 3, (rows, INNER), generator=generator).bfloat16()
        self.w = torch.randint(-2, 3, (INNER, size * COLUMNS), generator=generator).bfloat16()
        self.size, self.chunks, self.by_weight, self.dims = size, chunks, by_weight, dims

    def run(self, rank: int, **options: Any) -> torch.Tensor:
        rows = self.x.chunk(self.size)[rank].to("asyncdev")
        columns = self.w.chunk(self.size, 1)[rank]
        columns = columns.t().contiguous().to("asyncdev").t() if self.by_weight else columns.contiguous().to("asyncdev")
        if self.dims == 3:
            rows = rows.view(rows.shape[0] // 4, 4, INNER)
        options = {"size": self.x.shape[0] // (4 if self.dims == 3 else 1), "chunks": self.chunks, **options}
        return sw.all_gather_matmul(rows, columns, columns=self.size * COLUMNS, method="flags", **options)

    def check(self, actual: torch.Tensor, rank: int) -> None:
        expected = (self.x.float() @ self.w.chunk(self.size, 1)[rank].float()).bfloat16()
        assert torch.equal(actual.cpu().view(expected.shape), expected), f"{self.chunks} chunks, rank {rank}"


def _many_products(rank: int, size: int, path: str) -> int:
    _begin(rank, size, path)
    mesh = sw.Mesh({"a": size})
    layouts = [sw.Layout(mesh, [size * 4096], [placement], dtype="bfloat16") for placement in ("S(0)", "R")]
    products = [
        _Product(seed, size, chunks, seed % 2 == 0, dims)
        for seed, (chunks, dims) in enumerate([(1, 2), (2, 2), (1, 3), (1, 2), (3, 2)])
    ]
    for repetition in range(2):  # the second pass reuses flags and memory of the first
        found = []
        for product in products:
            found.append(product.run(rank))
            local = torch.full([4096], rank + repetition, device="asyncdev").bfloat16()
            full = sw.redistribute_local(local, *layouts, async_op=repetition == 1)  # uses the same arenas
            assert torch.equal((full + 0).cpu(), torch.arange(size).repeat_interleave(4096).bfloat16() + repetition)
        for product, result in zip(products, found):
            product.check(result, rank)
    return sw.stats()["peer_bytes"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_flag_products_equal_products_of_global_tensors(size: int) -> None:
    from async_device import ranks

    chunks, gathers = 2 * (1 + 2 + 1 + 1 + 3), 2 * 5
    for copied in ranks.run(_many_products, size):
        assert copied == (size - 1) * (chunks * ROWS * INNER + gathers * 4096) * 2


def _with_gradients(rank: int, size: int, path: str) -> None:
    _begin(rank, size, path)
    product = _Product(3, size, 1, False)
    rows = product.x.chunk(size)[rank].to("asyncdev").requires_grad_()
    weight = product.w.chunk(size, 1)[rank].contiguous().to("asyncdev").requires_grad_()
    found = sw.all_gather_matmul(rows, weight, size=size * ROWS, columns=size * COLUMNS, method="flags")
    product.check(found.detach(), rank)
    found.backward(torch.ones_like(found))
    x, w = product.x.float().requires_grad_(), product.w.float().requires_grad_()
    (x @ w).sum().backward()
    assert x.grad is not None and w.grad is not None and rows.grad is not None and weight.grad is not None
    assert torch.equal(rows.grad.float().cpu(), x.grad.chunk(size)[rank])
    assert torch.equal(weight.grad.float().cpu(), w.grad.chunk(size, 1)[rank].bfloat16().float())


def test_gradients_use_another_method() -> None:
    from async_device import ranks

    ranks.run(_with_gradients, 2)


def _errors_of_invalid_calls(rank: int, size: int, path: str) -> list[str]:
    import async_device
    from async_device import ranks

    _begin(rank, size, path, arena_bytes=0)
    good = _Product(1, size, 1, False)

    def error(function: Callable[..., Any] = sw.all_gather_matmul, **changes: Any) -> str:
        x = torch.ones(changes.pop("rows", ROWS), INNER, dtype=changes.pop("dtype", torch.bfloat16), device="asyncdev")
        weight = torch.ones(INNER, changes.pop("own_columns", COLUMNS), dtype=x.dtype, device="asyncdev")
        columns = {"columns": size * weight.shape[1]} if function is sw.all_gather_matmul else {}
        options = {"size": size * x.shape[0], **columns, "method": "flags", **changes}
        return ranks.error_of(lambda: function(x, weight, **options))

    errors = {
        "no arena": error(),
        "dtype": error(dtype=torch.float32),
        "rows": error(rows=ROWS + 8),
        "chunks": error(chunks=2),
        "columns": error(own_columns=4),
        "uneven": error(size=2 * ROWS - 1, rows=ROWS - rank),
        "scatter": error(sw.matmul_reduce_scatter, size=size * INNER),
        "depth": error(chunks=1, depth=2),
    }
    sw.prepare(sw.Mesh({"a": size}), device_type="asyncdev", peer_arena_bytes=ROWS * INNER * 2, peer_min_bytes=0)
    good.check(good.run(rank), rank)
    errors["arena"] = error(rows=2 * ROWS)
    with async_device.captured():
        errors["capture"] = error()
    good.check(good.run(rank), rank)
    return list(errors.values())


def test_invalid_calls_raise_on_every_rank() -> None:
    from async_device import ranks

    expected = [
        "prepare(peer_arena_bytes=...)",
        "operands are float32, not bfloat16",
        "multiple of 1 x 256 rows, got 264",
        "multiple of 2 x 256 rows, got 256",
        "the number of columns must be a positive multiple of 8, got 4",
        "uneven",
        "the product moves its result, not an operand",
        "depth must be 1 for method 'flags'",
        "each part has 16384 bytes, but the process group's arenas have 8192 bytes",
        "a graph is being captured",
    ]
    for errors in ranks.run(_errors_of_invalid_calls, 2):
        for error, part in zip(errors, expected, strict=True):
            assert error.startswith("ValueError: ") and part in error, (part, error)


def _with_lost_flag(rank: int, size: int, path: str, folder: str) -> None:
    native = _begin(rank, size, path, seconds=3.0)
    product = _Product(1, size, 1, False)
    product.check(product.run(rank), rank)
    from async_device import ranks

    ranks.set_key(f"first{rank}")
    ranks.wait_for_key(f"first{1 - rank}")
    if rank == 1:
        os.dup2(os.open(f"{folder}/stderr", os.O_CREAT | os.O_WRONLY), 2)
        native.lose_flag(2)  # the flag of the other rank's chunk; the first flag is of this rank's own chunk
    product.run(rank)
    if rank == 1:
        native.synchronize()  # would wait forever


def test_lost_flag_ends_the_process(tmp_path: Path) -> None:
    from async_device import ranks

    with pytest.raises(AssertionError) as error:
        ranks.run(_with_lost_flag, 2, str(tmp_path))
    assert "rank 1" in str(error.value) and "exit code -6" in str(error.value)
    text = (tmp_path / "stderr").read_text()
    assert "rank 1 waits for the flags of 2 chunks in step 1 of 1" in text, text
    assert "in the group of ranks (0, 1) of plan" in text and "S(0)" in text and "3000 ms" in text
