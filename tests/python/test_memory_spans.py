"""Tensors that have bytes in common, compared with the sets of their addresses."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from shardwright.runtime import memory_spans


def _addresses(tensor: torch.Tensor) -> set[int]:
    places = {0}
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = {place + i * stride for place in places for i in range(size)}
    first = tensor.data_ptr()
    return {first + place * tensor.itemsize + byte for place in places for byte in range(tensor.itemsize)}


def _any_view(base: torch.Tensor, rng: random.Random) -> torch.Tensor:
    view = base.view(rng.choice([torch.uint8, torch.int16, torch.float32]))
    if rng.random() < 0.2:
        sizes = [rng.randint(1, 4) for _ in range(2)]
        strides = [rng.randint(0, 12) for _ in range(2)]
        return view.as_strided(sizes, strides, rng.randint(0, 20))
    if rng.random() < 0.8:
        view = view.unflatten(0, (-1, rng.choice([8, 16])))
    for dim, size in enumerate(view.shape):
        first = rng.randrange(size)
        view = view.narrow(dim, first, rng.randint(1, size - first))[(slice(None),) * dim + (slice(None, None, 2),)]
    return view.transpose(0, -1) if rng.random() < 0.3 else view


def test_shared_memory_equals_shared_addresses() -> None:
    rng = random.Random(3)
    base = torch.zeros(512, dtype=torch.uint8)
    by_strides = sharing = 0
    for _ in range(3000):
        a, b = _any_view(base, rng), _any_view(base, rng)
        wanted = bool(_addresses(a) & _addresses(b))
        found = memory_spans.shared_memory({"a": a}, {"b": b})
        assert bool(found) == wanted, (a.shape, a.stride(), b.shape, b.stride(), a.data_ptr() - b.data_ptr())
        spans = [memory_spans._span(name, tensor, False) for name, tensor in (("a", a), ("b", b))]
        by_strides += memory_spans._coordinates_overlap(*spans) is not None
        sharing += wanted
    assert 500 < sharing < 2500 and by_strides > 1000, (sharing, by_strides)


def test_strides_separate_columns_of_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> bool:
        raise AssertionError("strides alone tell")

    monkeypatch.setattr(memory_spans, "_marked_bytes_overlap", never)
    full = torch.zeros(1000, 64, dtype=torch.bfloat16)
    columns = {str(i): full[i:, 3 * i : 3 * i + 3] for i in range(20)}
    assert memory_spans.shared_memory({}, columns, among_written=True) == []
    pairs = memory_spans.shared_memory({"row": full[30]}, columns)
    assert sorted(int(pair[1]) for pair in pairs) == list(range(20))
    blocks = [full[i : i + 10, j : j + 8] for i, j in itertools.product((0, 5, 20), (0, 8))]
    shared = memory_spans.shared_memory({}, {str(i): block for i, block in enumerate(blocks)}, among_written=True)
    assert {frozenset(pair[:2]) for pair in shared} == {frozenset("02"), frozenset("13")}
