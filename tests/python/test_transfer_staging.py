"""Tests of `staging="double"`, which swaps two versions, also while a module computes with the destination."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshes
import oracle
import shardwright as sw
from parts import part_of
from pool import Pool


def _two_versions() -> None:
    rank = dist.get_rank()
    shape = (6, 4)
    train, serve = sw.Mesh({"dp": 2, "tp": 2}, [0, 1, 2, 3]), sw.Mesh({"tp": 3}, [5, 3, 4])
    src, dst = sw.Layout(train, shape, ["S(0)", "S(1)"]), sw.Layout(serve, shape, ["S(0)"])
    versions = [oracle.global_tensor(shape, torch.float32, i) for i in range(4)]
    local = part_of(versions[0], src, rank).to(meshes.device) if rank < 4 else None
    received = torch.full((2, 4), 7.0, device=meshes.device) if rank > 2 else None
    t = sw.transfer({"w": (local, src)} if rank < 4 else None, {"w": (received, dst)}, staging="double")
    expected = [part_of(x, dst, rank) for x in versions] if rank > 2 else []

    def start(version: int) -> Any:
        if local is not None:
            local.copy_(part_of(versions[version], src, rank))
        return t.start()

    def holds(x: torch.Tensor) -> None:
        assert received is None or torch.equal(received.cpu(), x)

    start(0).wait()
    holds(expected[0] if expected else torch.empty(0))
    handle = start(1)
    holds(expected[0] if expected else torch.empty(0))
    handle.wait(swap=False)
    holds(expected[0] if expected else torch.empty(0))
    t.swap()
    holds(expected[1] if expected else torch.empty(0))
    start(2)
    start(3).wait()  # waits for the previous transfer and swaps it too
    holds(expected[3] if expected else torch.empty(0))
    with pytest.raises(ValueError, match="receive: staging must be None, got 'double'"):
        t.receive()


def test_double_staging_swaps_versions(pool: Pool) -> None:
    pool.run(_two_versions, 6)


def _versions(model: nn.Module, count: int) -> list[dict[str, torch.Tensor]]:
    state = model.state_dict()
    return [
        {
            name: oracle.global_tensor(x.shape, x.dtype, 10 * version + i).abs()
            for i, (name, x) in enumerate(state.items())
        }
        for version in range(count)
    ]


def _serve(plain: nn.Module, output: Callable[[], torch.Tensor], x: torch.Tensor, to: Any) -> None:
    """Sends versions to a module, and compares what it computes at each step with a plain module of one version."""
    versions = _versions(plain, 5)
    source = copy.deepcopy(versions[0])

    def gives(version: int) -> None:
        plain.load_state_dict(versions[version])
        with torch.no_grad():
            torch.testing.assert_close(output(), plain(x))

    def start(version: int) -> Any:
        for name, tensor in source.items():
            tensor.copy_(versions[version][name])
        return t.start()

    t = sw.transfer(source, to, staging="double")
    start(0).wait()
    gives(0)
    for version in (1, 2):
        handle = start(version)
        gives(version - 1)
        handle.wait(swap=False)
        gives(version - 1)
        t.swap()
        gives(version)
    t.swap()
    gives(1)
    start(3).source_free.wait()
    handle = start(4)  # waits for the previous transfer and swaps it
    gives(3)
    handle.wait()
    gives(4)


class _Model(nn.Module):
    """A model whose weights have 7 and 4 rows, which 3 ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Linear(7, 4, bias=False))
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def _into_state_dict() -> None:
    model, x = _Model(), torch.arange(12.0).view(4, 3)
    weight, view = model.layers[0].weight, model.layers[0].weight.view(-1)[4:]
    _serve(_Model(), lambda: model(x), x, model.state_dict())
    assert torch.equal(view, weight.view(-1)[4:])


@pytest.mark.cpu_only("the module is on the CPU")
def test_module_uses_received_state_dict(pool: Pool) -> None:
    pool.run(_into_state_dict, 2)


def _into_tensor_parallel() -> None:
    torch.manual_seed(0)
    mesh = meshes.get_mesh((3,))
    model, x = nn.Linear(4, 7, bias=False), torch.arange(8.0).view(2, 4)
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(7, 4), mesh, [Shard(0)]))

    def output() -> torch.Tensor:
        result = model(DTensor.from_local(x, mesh))
        assert isinstance(result, DTensor)
        return result.full_tensor()

    _serve(nn.Linear(4, 7, bias=False), output, x, get_model_state_dict(model))
    assert model.weight.to_local().data_ptr() == get_model_state_dict(model)["weight"].to_local().data_ptr()


@pytest.mark.cpu_only("the module is on the CPU")
def test_staging_of_tensor_parallel_weights(pool: Pool) -> None:
    pool.run(_into_tensor_parallel, 3)


def _into_fsdp() -> None:
    """Parts of 7 rows are 3, 3 and 1, of 4 rows 2, 2 and none, in storages for 3 and 2: the rest is padding."""
    model, x = _Model(), torch.arange(12.0).view(4, 3)
    fully_shard(model, mesh=meshes.get_mesh((3,)))

    def output() -> torch.Tensor:
        result: torch.Tensor = model(x)
        model.reshard()  # type: ignore[operator]
        return result

    to = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, DTensor)}
    left = {name: tensor for name, tensor in model.state_dict().items() if name not in to}
    parts = [tensor.to_local() for tensor in to.values()]
    assert any(part.untyped_storage().nbytes() > part.nbytes for part in parts) or dist.get_rank() < 2
    _serve(_Model(), output, x, {**to, **left})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [part.clone() for part in parts]
    model(x).sum().backward()
    optimizer.step()
    for name, old, part in zip(to, before, parts):
        changed = model.get_parameter(name).to_local()  # type: ignore[attr-defined]
        assert torch.equal(part, changed)
        assert part.numel() == 0 or not torch.equal(part, old) or name.startswith("layers.1")


@pytest.mark.cpu_only("FSDP2 needs a device that it knows")
def test_staging_of_uneven_fsdp2_weights(pool: Pool) -> None:
    pool.run(_into_fsdp, 3)


def _into_slices(rows: int) -> None:
    """Transfers into columns and a contiguous range of larger tensors while their neighbors are written to."""
    torch.manual_seed(rows)
    base = torch.randn(rows, 5).to(meshes.device)
    line = torch.randn(rows, dtype=torch.float16).to(meshes.device)
    expected, expected_line = base.cpu(), line.cpu()
    full, column = torch.zeros(rows, 2).to(meshes.device), torch.zeros(rows).to(meshes.device)
    halves = torch.zeros(2, dtype=torch.float16).to(meshes.device)
    to = {"whole": base[:, 1:3], "column": base[:, 4], "halves": line[3:5]}
    t = sw.transfer({"whole": full, "column": column, "halves": halves}, to, staging="double")
    for version in range(1, 4):
        for source in (full, column, halves):
            source.fill_(version)
        handle = t.start()
        base[:, 0] += version
        line[5:] -= version
        expected[:, 0] += version
        expected_line[5:] -= version
        assert torch.equal(base.cpu(), expected)
        handle.wait()
        for changed in (expected[:, 1:3], expected[:, 4], expected_line[3:5]):
            changed.fill_(version)
        assert torch.equal(base.cpu(), expected)
        assert torch.equal(line.cpu(), expected_line)
    assert to["whole"].stride() == (5, 1)
    assert to["whole"].data_ptr() == base.data_ptr() + 4


@pytest.mark.parametrize("rows", [8, 200])
def test_staging_of_slices_of_larger_tensors(pool: Pool, rows: int) -> None:
    pool.run(_into_slices, 1, rows)


def _into_another_storage() -> None:
    """Transfers into a tensor that got another storage after the last transfer."""
    source, weight = torch.ones(4), nn.Parameter(torch.zeros(4))
    t = sw.transfer({"w": source}, {"w": weight}, staging="double")
    with pytest.raises(ValueError, match=r"swap: there is no second copy; .* call start\(\) first"):
        t.swap()
    t.start().wait()
    weight.data = torch.full((4,), 7.0)
    source.fill_(2)
    t.start().wait(swap=False)
    assert torch.equal(weight, torch.full((4,), 7.0))
    t.swap()
    assert torch.equal(weight, torch.full((4,), 2.0))
    handle = t.start()
    with pytest.raises(RuntimeError, match="swap: the last transfer was not waited for"):
        t.swap()
    handle.wait(swap=False)
    weight.data = torch.full((4,), 7.0)
    with pytest.raises(RuntimeError, match="swap: tensors of the destination got other storages"):
        t.swap()


@pytest.mark.cpu_only("the tensors are on the CPU")
def test_swap_after_change_of_storage(pool: Pool) -> None:
    pool.run(_into_another_storage, 1)


def _refused(to: torch.Tensor, **sources: torch.Tensor) -> str:
    with pytest.raises(ValueError) as raised:
        sw.transfer(sources, {"w": to} | {name: torch.zeros(2) for name in sources if name != "w"}, staging="double")
    return str(raised.value)


def _storages_that_cannot_be_swapped() -> None:
    both, ones = torch.zeros(4), torch.ones(2)
    assert "destination w: its storage must contain no source" in _refused(both[:2], v=both[2:], w=ones)
    assert "destination w: its memory must be private" in _refused(torch.zeros(2).share_memory_(), w=ones)
    # Parts of one storage are sources and destinations.
    parts = {"a": both[:2], "b": both[2:]}
    both.copy_(torch.arange(4.0))
    t = sw.transfer(parts, parts, sw.rules.rename({"a": "b", "b": "a"}), staging="double")
    for swapped in ([2.0, 3.0, 0.0, 1.0], [0.0, 1.0, 2.0, 3.0]):
        t.start().wait()
        assert both.tolist() == swapped


@pytest.mark.cpu_only("the tensors are on the CPU")
def test_storages_that_cannot_be_swapped(pool: Pool) -> None:
    pool.run(_storages_that_cannot_be_swapped, 1)


def _versions_of_autograd() -> None:
    mesh = meshes.get_mesh((2,))
    plain = nn.Linear(2, 2, bias=False)
    parallel = nn.Linear(2, 2, bias=False)
    parallel.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)]))
    for model, x in ((plain, torch.ones(1, 2)), (parallel, DTensor.from_local(torch.ones(1, 2), mesh))):
        t = sw.transfer({"weight": torch.ones(2, 2)}, get_model_state_dict(model), staging="double")
        loss = model(x.detach().requires_grad_()).sum()
        t.start().wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.cpu_only("versions are counted alike on all devices")
def test_swap_bumps_version_for_autograd(pool: Pool) -> None:
    pool.run(_versions_of_autograd, 2)


def _pinned() -> None:
    source, to = torch.ones(4), torch.zeros(4).pin_memory()
    t = sw.transfer({"w": source}, {"w": to}, staging="double")
    for version in range(1, 4):
        source.fill_(version)
        t.start().wait()
        assert to.is_pinned()
        assert torch.equal(to, source)


def test_pinned_memory_stays_pinned(async_pool: Pool) -> None:
    async_pool.run(_pinned, 1)
