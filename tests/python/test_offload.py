"""Tests of `offload_policy` of `sw.fully_shard`, which keeps sharded parts in host memory and gathers from there.

On CPU the parts are in host memory anyway. The copies are tested on the asynchronous device: a stream reads and writes
pinned memory when it reaches the copy, unwritten memory is NaN, and streams are delayed at random.
"""

from __future__ import annotations

import unittest.mock as mock
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import meshes
import shardwright as sw
import shardwright.parallel as sw_styles
from meshes import get_mesh
from pool import Pool
from test_weight_layouts import Model, Named, assert_equals_unsharded, local, tensor_parallel, train, wrapped

pytestmark = pytest.mark.on_device

PINNED, PAGED = CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)
WIDTH = 16
LATE_MS = 30


def _equals_stock() -> None:
    """Compares state dicts and results on CPU with those of stock FSDP2, bit for bit."""
    mesh = get_mesh((2,))
    stock = wrapped(Model(), stock_fully_shard, mesh=mesh, offload_policy=PAGED)
    expected = train(stock, 3, [dist.get_rank()])
    for policy in (PINNED, PAGED, OffloadPolicy()):
        ours = wrapped(Model(), mesh=mesh, offload_policy=policy)
        found = train(ours, 3, [dist.get_rank()])
        assert found.keys() == expected.keys()
        assert all(torch.equal(local(found[name]), local(expected[name])) for name in expected)
        for (name, a), (other, b) in zip(ours.state_dict().items(), stock.state_dict().items(), strict=True):
            assert name == other and a.placements == b.placements and torch.equal(a.to_local(), b.to_local())
    with pytest.raises(ValueError, match=r"offload_policy must be None, or OffloadPolicy\(\) or .*, got a bool"):
        sw.fully_shard(nn.Linear(2, 2), mesh=mesh, offload_policy=True)  # type: ignore[arg-type]


@pytest.mark.cpu_only("compared with stock FSDP2 on Gloo")
def test_offload_on_cpu_equals_stock(pool: Pool) -> None:
    pool.run(_equals_stock, 2)


def _model(offloads: bool, given: Model | None = None, **options: Any) -> Model:
    return wrapped(given or Model(), **options, **({"offload_policy": PINNED} if offloads else {}))


def _is_on_host(model: nn.Module) -> bool:
    parts = [p.to_local() for p in model.parameters()]  # type: ignore[operator]
    return all(part.device.type == "cpu" and (part.is_pinned() or part.numel() == 0) for part in parts)


def _accumulated(model: Any, mesh: Any) -> Named:
    """Returns gradients accumulated without reductions, then gradients added to existing ones."""
    found = {}
    for step in range(2):
        for micro_step in range(2):
            model.set_requires_gradient_sync(micro_step == 1)
            results = train(model, 1, [dist.get_rank()]) if micro_step else None
            if results is None:
                model(torch.ones(2, 18, device=meshes.device)).sum().backward()
            else:
                found |= {f"{step} {name}": value for name, value in results.items()}
    for _ in range(2):
        model(torch.ones(2, 18, device=meshes.device)).sum().backward()
    return found | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _combined_options() -> None:
    """Compares each offloaded model bit for bit with the same model whose parts are on the device."""
    mesh = get_mesh((2,))
    cases: list[dict[str, Any]] = [
        {},
        {"offload_policy": PAGED},
        {"message_format": "float8"},
        {"message_format": torch.bfloat16, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"placements": lambda p: [Replicate()], "store_placements": lambda p: [Shard(0)]},
        {"shard_placement_fn": lambda p: Shard(p.ndim - 1), "reshard_after_forward": False},
    ]
    for options in cases:
        results = []
        for offloads in (False, True):
            policy = {"offload_policy": options.get("offload_policy", PINNED) if offloads else OffloadPolicy()}
            given = Model()
            if "mp_policy" in options:  # the backward of LayerNorm has these dtypes on CPU only
                for layer in given.layers:
                    layer.inner.norm = nn.Identity()
            model = wrapped(given, mesh=mesh, **{**options, **policy})
            results.append(train(model, 2, [dist.get_rank()]))
        assert options == cases[1] or _is_on_host(model)
        _assert_same(*results)
    results = [_accumulated(_model(offloads, mesh=mesh), mesh) for offloads in (False, True)]
    _assert_same(*results)


def _assert_same(on_device: Named, on_host: Named) -> None:
    assert on_device.keys() == on_host.keys()
    for name, value in on_device.items():
        assert torch.equal(local(value).cpu(), local(on_host[name]).cpu()), name


def test_offload_with_other_options(async_pool: Pool) -> None:
    async_pool.run(_combined_options, 2)


def _tensor_parallel_and_kept_copies() -> None:
    mesh = get_mesh((2, 2))
    results = []
    for offloads in (False, True):
        model = tensor_parallel(sw_styles, mesh["b"])
        results.append(train(_model(offloads, model, mesh=mesh["a"]), 2, [mesh.get_local_rank("a")]))
    _assert_same(*results)
    # Kept copies stay on the device. Parameters may be created in host memory.
    with mock.patch.object(meshes, "device", "cpu"):
        given = Model()
    model = _model(True, given, mesh=mesh, reshard_after_forward=2, outermost={"prefetch": 0})
    assert _is_on_host(model)
    assert_equals_unsharded(train(model, 2, [dist.get_rank()]), 4, 2)


def test_offload_with_tensor_parallelism_and_kept_copies(async_pool: Pool) -> None:
    async_pool.run(_tensor_parallel_and_kept_copies, 4)


def _copies_in_lanes() -> None:
    """Checks that copies are timed once, together with the units' uses, and that all ranks agree on the schedule."""
    world = dist.get_world_size()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=meshes.device) for _ in range(3)))
    for layer in [*model, model]:
        sw.fully_shard(layer, mesh=get_mesh((world,)), offload_policy=PINNED)
    x = torch.ones(2, WIDTH, device=meshes.device)

    def step() -> None:
        model(x).square().sum().backward()

    step()
    assert sw.fsdp.schedule(model).lanes is None
    step()
    schedule = sw.fsdp.schedule(model)
    lanes = schedule.lanes
    assert lanes is not None
    for key, transfers in (("fetches", schedule.gathers), ("sends", schedule.reductions)):
        assert len(lanes[key]) == len(transfers)
        for (weight, *_), (begin, end) in zip(transfers, lanes[key]):
            assert begin < end or weight == 0, "only the outermost module has no weights"
    for (begin, _), (_, copied) in zip(lanes["gathers"], lanes["fetches"], strict=True):
        assert copied <= begin, "a part is gathered when it is there"
    copies = [span for key in ("fetches", "sends") for span in lanes[key]]
    assert lanes["copy_ps"] == sum(end - begin for begin, end in copies)
    assert lanes["total_ps"] >= max(end for _, end in copies)
    assert "|\n  from the host        |" in str(schedule) and "to the host" in schedule.to_svg()
    texts: list[str] = [""] * world
    dist.all_gather_object(texts, str(schedule))
    assert len(set(texts)) == 1, "ranks follow different schedules"
    (explained,) = sw.explain(step)
    for trace in (explained.predicted, explained.measured):
        for lane in ("from the host", "to the host"):
            found = [event for event in trace if event.lane == lane]
            assert len(found) >= 3 and all(event.start < event.end for event in found), lane
    assert str(sw.explain(step)).count("from the host |") == 2


@pytest.mark.parametrize("world", [1, 2, 4])
def test_predicted_lanes_contain_copies(async_pool: Pool, world: int) -> None:
    async_pool.run(_copies_in_lanes, world)


class Late(nn.Module):
    """A linear layer whose stream lags behind the host, in forwards and in backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False, device=meshes.device)
        self.is_late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sleep()
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(self.sleep)
        return y

    def sleep(self, *_: Any) -> None:
        if self.is_late:
            import async_device

            async_device.native().sleep(LATE_MS)


def _host_access_in_order() -> None:
    """Writes parts and reads gradients on the host as early as possible."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Late() for _ in range(3))
    full = [layer.linear.weight.detach().cpu().clone().requires_grad_() for layer in layers]
    for layer in layers:
        sw.fully_shard(layer, mesh=get_mesh((dist.get_world_size(),)), offload_policy=PINNED)
    model = nn.Sequential(*layers)
    sw.fully_shard(
        model, mesh=get_mesh((dist.get_world_size(),)), offload_policy=PINNED, options=sw.fsdp.Options(prefetch=0)
    )
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    on_device = x.to(meshes.device)

    def expected() -> torch.Tensor:
        y = x
        for weight in full:
            y = y @ weight.t()
        return y

    def write() -> None:
        with torch.no_grad():
            for p, weight in zip(model.parameters(), full, strict=True):
                p.to_local().mul_(1.5)  # type: ignore[operator]
                weight.mul_(1.5)

    for step in range(4):
        for layer in layers:
            layer.is_late = step > 1
        with torch.no_grad():
            found, right = model(on_device), expected()
            write()
            torch.testing.assert_close(found.cpu(), right)
        for _ in range(2):
            model(on_device).square().mean().backward()
            expected().square().mean().backward()
            for p, weight in zip(model.parameters(), full, strict=True):
                assert isinstance(p.grad, DTensor) and p.grad.device.type == "cpu"
                part = p.grad.to_local().clone()  # before anything else waits for the device
                rows = weight.grad.chunk(dist.get_world_size())  # type: ignore[union-attr]
                torch.testing.assert_close(part, rows[dist.get_rank()])
            write()
        model.zero_grad()
        for weight in full:
            weight.grad = None

    # An optimizer that steps between a forward and its backward waits for the forward's copies.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    found, right = model(on_device), expected()
    optimizer.step()
    torch.testing.assert_close(found.detach().cpu(), right.detach())


@pytest.mark.parametrize("world", [1, 2])
def test_host_access_is_ordered_with_streams(async_pool: Pool, world: int) -> None:
    async_pool.run(_host_access_in_order, world)


def _hooks_and_errors() -> None:
    mesh, rank = get_mesh((2,)), dist.get_rank()
    layer = nn.Linear(4, 6, device=meshes.device)
    sw.fully_shard(layer, mesh=mesh, offload_policy=PINNED)
    seen: list[torch.Tensor] = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    for count in (1, 2):
        layer(torch.full((1, 4), 2.0, device=meshes.device)).sum().backward()
        assert torch.equal(seen[-1], torch.full((3, 4), 2.0 * count)), "the sum, on the host"
    layer.to(meshes.device)
    with pytest.raises(RuntimeError, match=f"weight must stay on cpu with offload_policy .*, got {meshes.device}:0"):
        layer(torch.ones(1, 4, device=meshes.device))
    layer.to("cpu")
    layer(torch.ones(1, 4, device=meshes.device)).sum().backward()
    assert _is_on_host(layer)
    with pytest.raises(ValueError, match="must be on the device type of mesh .*, got cpu"):
        sw.fully_shard(nn.Linear(2, 2), mesh=mesh)
    other = nn.Linear(4, 4, device=meshes.device)
    sw.fully_shard(other, mesh=mesh, offload_policy=PINNED if rank else None)
    with pytest.raises(ValueError, match="the ranks have different modules or arguments"):
        other(torch.ones(1, 4, device=meshes.device))


def test_offload_hooks_and_errors(async_pool: Pool) -> None:
    async_pool.run(_hooks_and_errors, 2)


def _copies_during_products() -> None:
    """Checks that the next layer's part is copied to the device while the stream is still before a product."""
    layers = [nn.Linear(WIDTH, WIDTH, device=meshes.device) for _ in range(3)]
    model = nn.Sequential(*layers)
    for layer in [*layers, model]:
        sw.fully_shard(layer, mesh=get_mesh((1,)), offload_policy=PINNED)
    x = torch.ones(2, WIDTH, device=meshes.device)
    seen: list[bool] = []

    def look(module: Any, _: Any) -> None:
        import async_device

        copies = layers[layers.index(module) + 1]._shardwright_unit.unit.host_copies
        late = torch.Event(meshes.device)
        async_device.native().sleep(800)
        late.record()
        copies._h2d_end.synchronize()
        seen.append(not late.query())

    with torch.no_grad():
        for _ in range(2):
            model(x)
        handles = [layer.register_forward_pre_hook(look) for layer in layers[:-1]]
        model(x)
    for handle in handles:
        handle.remove()
    assert seen == [True, True]


def test_copies_overlap_with_products(async_pool: Pool) -> None:
    async_pool.run(_copies_during_products, 1)
