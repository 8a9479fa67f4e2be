"""Tests of destinations that are found by recording a loader: against what the loader itself writes."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import jobs
import shardwright as sw
from pool import Pool
from shardwright.loaders import recorded_destination
from shardwright.loaders.recording import record

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))

import weight_sync_jobs

Pair = tuple[str, torch.Tensor]
SHAPE = (6, 4, 10)


def _narrow(x: torch.Tensor, w: torch.Tensor) -> None:
    x.narrow(2, 3, 4).copy_(w.narrow(2, 6, 4).narrow(0, 1, 5)[:, 1:3])


def _transposed(x: torch.Tensor, w: torch.Tensor) -> None:
    x.copy_(w.permute(2, 0, 1)[2:5])


def _copied(x: torch.Tensor, w: torch.Tensor) -> None:
    x.copy_(w.permute(2, 0, 1)[2:8].contiguous().to(torch.float32)[1:4].clone())


def _indexed(x: torch.Tensor, w: torch.Tensor) -> None:
    x[1:3, :, 2] = w[:2, 1:2].squeeze(1)


def _flat(x: torch.Tensor, w: torch.Tensor) -> None:
    x.copy_(w[2:4].reshape(2, 40))


def _unflattened(x: torch.Tensor, w: torch.Tensor) -> None:
    x.copy_(w[:, :2].permute(1, 0, 2).reshape(2, 3, 2, 10).unsqueeze(0))


def _parts(x: torch.Tensor, w: torch.Tensor) -> None:
    """Intervals [0, 2), [4, 6) of dim 0, then [2, 4) of it."""
    for to, begin in enumerate((0, 4, 2)):
        x.narrow(1, 2 * to, 2).copy_(w.narrow(0, begin, 2).transpose(0, 1))


def _rows(x: torch.Tensor, w: torch.Tensor) -> None:
    """Single rows, in another order, each to every second row."""
    for to, row in enumerate((3, 1, 5)):
        x[2 * to].copy_(w[row])


def _experts(x: torch.Tensor, w: torch.Tensor) -> None:
    """The loader copies the first half of each gate, then that of each up. They alternate in the parameter."""
    for half, of_experts in enumerate(w.chunk(2, 1)):
        for to, expert in zip(x, of_experts.unbind()):
            to.narrow(0, half, 1).copy_(expert[:1])


def _one(x: torch.Tensor, w: torch.Tensor) -> None:
    x[0] = w[5, 3, 9]


def _padded(x: torch.Tensor, w: torch.Tensor) -> None:
    """Fills with zeros before the copy, and then elements between those to which it has copied."""
    x.zero_()
    x[1:3, 1:11].copy_(w[0, :2])
    x.data[:, :1] = x.data[:, 11:] = torch.tensor([1, 0]).mul_(2)[1].item()


LOADERS: list[tuple[Callable[[torch.Tensor, torch.Tensor], None], tuple[int, ...]]] = [
    (_narrow, (5, 2, 12)),
    (_transposed, (3, 6, 4)),
    (_copied, (3, 6, 4)),
    (_indexed, (4, 10, 3)),
    (_flat, (2, 40)),
    (_unflattened, (1, 2, 3, 2, 10)),
    (_parts, (4, 6, 10)),
    (_rows, (6, 4, 10)),
    (_experts, (6, 2, 10)),
    (_one, (3,)),
    (_padded, (4, 12)),
]


@pytest.mark.parametrize("write, shape", LOADERS, ids=lambda value: getattr(value, "__name__", ""))
def test_recorded_writes_are_those_of_the_loader(write: Callable[..., None], shape: tuple[int, ...]) -> None:
    weight = torch.arange(240.0).view(SHAPE) + 1
    expected, found = torch.zeros(shape), torch.zeros(shape)
    write(expected, weight)
    assert expected.any()
    write(found, -weight)
    before = found.clone()

    def load(weights: Iterable[Pair]) -> None:
        for name, w in weights:
            assert name == "w"
            write(found, w)

    ((name, recorded),) = record(load, {"w": (SHAPE, weight.dtype)}).items()
    assert torch.equal(found, before)  # nothing was written
    part = weight
    for dim, intervals in enumerate(recorded.region):
        part = torch.cat([part.narrow(dim, begin, end - begin) for begin, end in intervals], dim)
    recorded.into.copy_(part)
    assert torch.equal(found, expected)


def _twice(x: torch.Tensor, w: torch.Tensor) -> None:
    x[:2].copy_(w[0, :2])
    x[2:].copy_(w[0, :2])


REFUSED: list[tuple[Callable[[torch.Tensor, torch.Tensor], object], str]] = [
    (lambda x, w: x.copy_(w[0] * 2), "got aten.mul.Tensor of w"),
    (lambda x, w: x.add_(w[0]), "got aten.add_.Tensor of w"),
    (lambda x, w: x.copy_(w[torch.tensor([1])][0]), "of w"),
    (lambda x, w: x.copy_(w.to(torch.bfloat16)[0]), "must cast w at most once, .* got torch.bfloat16$"),
    (lambda x, w: x.copy_(w.int().float()[0]), "got torch.int32, then torch.float32"),
    (lambda x, w: x.copy_(torch._neg_view(w[0])), "negated view"),
    (lambda x, w: torch.zeros(4, 10).copy_(w[0]), "a tensor that load has made"),
    (lambda x, w: x[:2].copy_(w[0, ::2]), "not adjacent"),
    (lambda x, w: x.copy_(w[0, :1]), "repeats its elements"),
    (lambda x, w: x.copy_(w.permute(1, 0, 2).reshape(24, 10)[4:8]), "reshapes a copy"),
    (_twice, "writes it to several places"),
    (lambda x, w: x.copy_(w[0]).copy_(-x.exp()), r"got aten.copy_.default of .* \(4, 10\) that has w$"),
    (lambda x, w: x.copy_(w[0])[1:].fill_(1), "got aten.fill_.Scalar of .* that has w$"),
    (lambda x, w: x[:2].copy_(w[0, :2]) + x[2:].copy_(x[:2]), r"got aten.copy_.default of .* \(2, 10\)$"),
    (lambda x, w: x.add_(1), r"got aten.add_.Tensor of .* \(4, 10\)$"),
]


@pytest.mark.parametrize("write, message", REFUSED, ids=[message for _, message in REFUSED])
def test_other_loaders_are_errors(write: Callable[..., object], message: str) -> None:
    x = torch.zeros(4, 10)

    def load(weights: Iterable[Pair]) -> None:
        for _, w in weights:
            write(x, w)

    with pytest.raises(ValueError, match=message):
        record(load, {"w": (SHAPE, torch.float32)})
    assert not x.any()


def _grid() -> None:
    """Experts over two ranks, and each of them cut over two: the loader of each rank writes a cell of a grid."""
    rank = dist.get_rank()
    group, part = divmod(rank, 2)
    stacked, norm = torch.zeros(3, 10, 4), torch.zeros(10)

    def load(weights: Iterable[Pair]) -> None:
        for name, w in weights:
            if name == "norm":
                norm.copy_(w)
            elif name == "experts":
                stacked.copy_(w.chunk(2)[group].chunk(2, 1)[part].transpose(1, 2))
            elif int(name.removeprefix("single.")) == rank:
                stacked[2, :, 0].copy_(w)

    weights: dict[str, Any] = {"experts": ((6, 8, 10), torch.float32), "norm": ((10,), torch.float32)}
    to = recorded_destination(load, weights, range(4), parameters=[("stacked", stacked), ("norm", norm)])
    state = {
        name: torch.rand(shape, generator=torch.Generator().manual_seed(1)) for name, (shape, _) in weights.items()
    }
    t = sw.transfer({name: x for name, x in state.items() if rank < 2}, to, only_changed=True)
    for change in range(3):
        for x in state.values():
            x.view(-1)[change] += 1
        t.start().wait()
        found = stacked.clone(), norm.clone()
        load(state.items())
        assert torch.equal(found[0], stacked) and torch.equal(found[1], norm)

    weights["single.1"] = ((10,), torch.float32)
    names = ("norm", "single.1")
    to = recorded_destination(load, {name: weights[name] for name in names}, range(4))
    assert to.keys() == ({"norm", "single.1"} if rank == 1 else {"norm"})
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({**weights, "single.9": ((10,), torch.float32)}, {}, "single.9: the loader writes it on no rank"),
        ({"norm": weights["norm"]}, {"parameters": [("s", stacked)]}, "writes 0 of the 120 elements of parameter s"),
        ({**weights, "norm": ((1,), torch.float32)}, {}, "repeats its elements.*on rank 3 of the server"),
        ({"experts": ((6, 8, 10), torch.float32), "norm": ((4,), torch.float32)}, {}, "RuntimeError"),
    ]
    for given, options, message in cases:
        with pytest.raises(ValueError) as raised:
            recorded_destination(load, given, range(4), **options)
        assert "the loader cannot be recorded" in str(raised.value)
        assert any(all(part in line for part in message.split(".*")) for line in str(raised.value).splitlines())
    for argument in ("unused", "unwritten"):
        wrong: dict[str, Any] = {argument: "single.*"}
        with pytest.raises(ValueError, match=f"{argument} must be a list of patterns of names, got 'single"):
            recorded_destination(load, cases[0][0], range(4), **wrong)
    recorded_destination(load, cases[0][0], range(4), unused=["single.9"])
    recorded_destination(load, cases[1][0], range(4), parameters=[("s", stacked)], unwritten=["s"])

    def skip(weights: Iterable[Pair]) -> None:
        for _, w in weights:
            norm[: 9 - rank].copy_(w[: 9 - rank])

    _write_elements_twice()

    with pytest.raises(ValueError, match=r"norm: the written part of dim 0 must be \[0, 10\), got \[\(0, 9\)\]"):
        recorded_destination(skip, {"norm": weights["norm"]}, range(4))


def _write_elements_twice() -> None:
    """Two weights write some elements twice, as many as no weight writes, or one more."""
    stacked, norm = torch.zeros(3, 10, 4), torch.zeros(10)
    targets = {"a": norm[:6], "b": norm[3:8], "left": stacked[:, :, :3], "right": stacked[:, :, 2:]}

    def load(weights: Iterable[Pair]) -> None:
        for name, w in weights:
            targets[name].copy_(w)

    def recorded(*names: str, of: torch.Tensor) -> object:
        weights = {name: (tuple(targets[name].shape), torch.float32) for name in names}
        return recorded_destination(load, weights, range(4), parameters=[("x", of)])

    with pytest.raises(ValueError, match="writes 8 of the 10 elements of parameter x"):
        recorded("a", "b", of=norm)
    recorded("a", "b", of=norm[:8])
    with pytest.raises(ValueError, match="writes 60 of the 120 elements of parameter x"):
        targets["left"] = stacked[:, :, 2:]
        recorded("left", "right", of=stacked)
    targets["left"] = stacked[:, :, :3]
    recorded("left", "right", of=stacked)


@pytest.mark.cpu_only("loads tensors on the CPU")
def test_layouts_are_grids_of_recorded_parts(pool: Pool) -> None:
    pool.run(_grid, 4)


def _sync(shared: Any, role: str, rank: int) -> None:
    link = sw.connect(shared, role, 4)
    (weight_sync_jobs.train if role == "trainer" else weight_sync_jobs.serve)(link)
    changed, full = sw.stats()["changed_starts"], sw.stats()["full_starts"]
    assert (changed, full) == (weight_sync_jobs.SYNCS - 1, 1)
    link.close()


def test_jobs_of_the_example_sync_all_bits(tmp_path: pathlib.Path) -> None:
    """The server compares all bits of its parameters after each sync."""
    jobs.launch(tmp_path, _sync, dict.fromkeys(("trainer", "server"), weight_sync_jobs.RANKS))
