"""`sw.fully_shard` trains as stock FSDP2 and as the unsharded model do, and receives the bytes of its schedule."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import meshes
import shardwright as sw
from fsdp_models import agreement_bytes, flat_fully_shard
from meshes import IS_BEFORE_2_14, get_mesh
from pool import Pool
from shardwright._native import _runtime

WIDTH = 6


class Block(nn.Module):
    """A layer with uneven weights. `scale` has one element, so all ranks but one have none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """A model with its own weights around those of its layers; two of them are tied."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embedding = nn.Embedding(13, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.unused = nn.Linear(2, 3)
        self.head = nn.Linear(WIDTH, 13, bias=False)
        self.to(meshes.device)
        self.head.weight = self.embedding.weight
        if kind == "frozen":
            self.layers[1].up.weight.requires_grad_(False)
            self.layers[2].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in [*self.layers, *([self.layers[0]] * 2 if self.kind == "repeated" else [])]:
            if self.kind.startswith("checkpointed"):
                x = checkpoint(layer, x, use_reentrant=self.kind == "checkpointed reentrant")
            else:
                x = layer(x)
        return self.head(x)


def tokens_of(step: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randint(0, 13, (3, 5), generator=torch.Generator().manual_seed(1000 * step + rank)).to(meshes.device)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def shard(model: Model, wrap: Callable[..., Any], mesh: Any, **outermost: Any) -> Model:
    for layer in model.layers:
        wrap(layer, mesh=mesh)
    wrap(model, mesh=mesh, **outermost)
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model: nn.Module, steps: int, evaluate: bool = False) -> list[torch.Tensor]:
    """Returns losses, gradients of each step, and parameters at the end; DTensors if the model is sharded."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    results = []
    for step in range(steps):
        loss = loss_of(model, tokens_of(step))
        loss.backward()
        results.append(loss.detach())
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            with torch.no_grad():
                results.append(loss_of(model, tokens_of(100 + step)))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # stock leaves the outermost module unsharded after an evaluation
    return [*results, *(p.detach().clone() for p in model.parameters())]


def parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def train_whole(kind: str, steps: int, evaluate: bool) -> list[torch.Tensor]:
    """Trains as `train`, without parallelism: gradients are averages over the batches of all ranks."""
    model = Model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    results: list[torch.Tensor] = []
    world, me = dist.get_world_size(), dist.get_rank()
    for step in range(steps):
        losses = [loss_of(model, tokens_of(step, rank)) for rank in range(world)]
        (sum(losses) / world).backward()  # type: ignore[union-attr]
        results.append(losses[me].detach())
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            with torch.no_grad():
                results.append(loss_of(model, tokens_of(100 + step)))
    return [*results, *(p.detach().clone() for p in model.parameters())]


def _as_stock_and_whole(mesh_shape: tuple[int, ...], kind: str) -> None:
    mesh = get_mesh(mesh_shape)
    sw.reset_stats()
    # CommDebugMode of torch before 2.14 miscounts or fails if modules keep its hooks.
    with contextlib.nullcontext() if mesh.size() > 1 or IS_BEFORE_2_14 else CommDebugMode() as collectives:
        ours = train(shard(Model(kind), flat_fully_shard, mesh), 4, evaluate=True)
    assert collectives is None or collectives.get_total_counts() == 0
    assert sw.stats()["unplanned_steps"] == 0
    unsharded = train_whole(kind, 4, evaluate=True)
    assert len(ours) == len(unsharded)
    for a, b in zip(ours, unsharded, strict=True):
        torch.testing.assert_close(full(a), b, rtol=1e-4, atol=1e-5)
    if kind == "checkpointed reentrant":
        return  # stock FSDP2 has already resharded this model's weights when the recomputation needs them
    stock = train(shard(Model(kind), stock_fully_shard, mesh), 4, evaluate=True)
    for a, b in zip(parts(ours), parts(stock), strict=True):
        assert a.shape == b.shape
        # On one or two ranks the order of sums does not matter.
        assert torch.equal(a, b) if mesh_shape in [(1,), (2,)] else torch.allclose(a, b, rtol=1e-4, atol=1e-5)


KINDS = ["plain", "repeated", "frozen", "checkpointed", "checkpointed reentrant"]


@pytest.mark.cpu_only("compared with stock FSDP2 on Gloo")
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_stock_on_two_ranks(pool: Pool, kind: str) -> None:
    pool.run(_as_stock_and_whole, 2, (2,), kind)


@pytest.mark.cpu_only("compared with stock FSDP2 on Gloo")
@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (2, 2)], ids=str)
def test_trains_as_stock_on_other_meshes(pool: Pool, mesh_shape: tuple[int, ...]) -> None:
    pool.run(_as_stock_and_whole, torch.Size(mesh_shape).numel(), mesh_shape, "repeated")


def _layouts() -> None:
    """Trains with sharded layouts that FSDP2 rejects: an uneven dim that is not the first, and two dims."""
    one_dim, two_dims = get_mesh((4,)), get_mesh((2, 2))

    def by_columns(mesh: Any) -> Model:
        model = Model()
        for module in [*model.layers, model]:
            sw.fully_shard(module, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        return model

    def by_both(mesh: Any) -> Model:
        model = Model()
        for module in [*model.layers, model]:
            sw.fully_shard(
                module, mesh=mesh, options=sw.fsdp.Options(placements=lambda p: [Shard(0), Shard(p.ndim - 1)])
            )
        return model

    unsharded = train_whole("plain", 3, False)
    for model in (by_columns(one_dim), by_both(two_dims)):
        weight = model.layers[0].up.weight
        assert isinstance(weight, DTensor) and weight.to_local().numel() < weight.numel() / 2
        for a, b in zip(train(model, 3), unsharded, strict=True):
            torch.testing.assert_close(full(a), b, rtol=1e-4, atol=1e-5)


def test_trains_with_sharded_layouts_that_fsdp2_rejects(pool: Pool) -> None:
    pool.run(_layouts, 4)


def _bytes_of(model: Model, schedule: Any) -> int:
    """Returns the bytes that a step receives: missing elements of gathers, one shard per other rank of reductions."""
    world = dist.get_world_size()
    units = [[*layer.parameters()] for layer in model.layers]
    of_layers = {id(p) for unit in units for p in unit}
    units.insert(0, [p for p in model.parameters() if id(p) not in of_layers])  # in the order of modules()

    def own(p: torch.Tensor) -> int:
        return p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes

    gather = [sum(p.numel() * p.element_size() - own(p) for p in unit) for unit in units]
    used = [[p for p in unit if not any(p is q for q in model.unused.parameters())] for unit in units]
    reduction = [sum((world - 1) * own(p) for p in unit) for unit in used]
    gathers, reductions = schedule.gathers, schedule.reductions
    received = agreement_bytes(model, 3 if reductions else 2)
    return received + sum(gather[unit] for unit, *_ in gathers) + sum(reduction[unit] for unit, *_ in reductions)


def _follows_its_schedule() -> None:
    mesh = get_mesh((3,))
    peaks = []
    for options in ({}, {"memory_limit": 1 << 20}, {"memory_limit": 6600, "prefetch": 0}, {"prefetch": 2}):
        model = shard(Model("repeated"), flat_fully_shard, mesh, **options)
        train(model, 2)  # one step is recorded, one timed
        (schedule,) = sw.fsdp.schedules(model)
        addresses = []
        for step in range(3):
            seen: list[int] = []
            hooks = [
                layer.up.register_forward_pre_hook(lambda m, _, seen=seen: seen.append(m.weight.data_ptr()))
                for layer in model.layers
            ]
            with sw.debug.wire_meter() as meter:
                loss_of(model, tokens_of(step)).backward()
            assert meter.received_bytes == _bytes_of(model, schedule), options
            for hook in hooks:
                hook.remove()
            addresses.append(seen)
        assert addresses[0] == addresses[1] == addresses[2] and len(addresses[0]) == 5
        limit = options.get("memory_limit")
        assert limit is None or schedule.peak_bytes <= limit
        peaks.append((len(schedule.gathers), schedule.peak_bytes))
        for _, _, start, needed, _ in schedule.gathers:
            assert start == needed if options.get("prefetch") == 0 else start < needed or needed == 0 or limit == 6600
    assert peaks[1][0] == 4, "with much memory each unit is gathered once"
    assert peaks[2][0] > peaks[0][0] >= peaks[1][0] and peaks[2][1] < peaks[0][1] <= peaks[1][1], peaks
    model = shard(Model(), flat_fully_shard, mesh, memory_limit=1000)
    with pytest.raises(ValueError, match=r"budget_bytes must be at least \d+, got 1000"):
        train(model, 1)


def test_bytes_and_addresses_follow_the_schedule(pool: Pool) -> None:
    pool.run(_follows_its_schedule, 3)


def _steps_off_the_recorded_sequence() -> None:
    """Runs steps that differ from the recorded sequence, and steps that raise."""
    mesh = get_mesh((2,))
    ours, stock = shard(Model(), flat_fully_shard, mesh), shard(Model(), stock_fully_shard, mesh)

    def step(number: int, change: Callable[[Model], None] = lambda model: None) -> None:
        for model in (ours, stock):
            change(model)
            loss_of(model, tokens_of(number)).backward()
        for p, q in zip(ours.parameters(), stock.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                assert torch.equal(p.grad.to_local(), q.grad.to_local())

    sw.reset_stats()
    step(0)
    step(1)  # gradients accumulate
    assert sw.stats()["unplanned_steps"] == 0
    step(2, lambda model: setattr(model, "kind", "repeated"))
    assert sw.stats()["unplanned_steps"] == 1
    step(3)
    assert sw.stats()["unplanned_steps"] == 1, "the longer sequence was recorded"
    step(4, lambda model: setattr(model, "kind", "plain"))
    assert sw.stats()["unplanned_steps"] == 2
    loss_of(ours, tokens_of(5))  # no backward
    step(5)

    class Stop(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    for where in ("forward", "backward"):
        before = [p.grad.to_local().clone() for p in ours.parameters() if p.grad is not None]
        layer = ours.layers[1]
        if where == "forward":
            handle = layer.down.register_forward_hook(stop)
        else:
            handle = layer.down.register_full_backward_hook(stop)
        with pytest.raises(Stop):
            loss_of(ours, tokens_of(6)).backward()
        handle.remove()
        assert all(isinstance(p, DTensor) for p in ours.parameters())
        if where == "backward":  # drops gradients that were reduced before the exception
            ours.zero_grad()
            stock.zero_grad()
        else:
            after = [p.grad.to_local() for p in ours.parameters() if p.grad is not None]
            assert all(map(torch.equal, before, after))
        step(7)
    with torch.no_grad():
        assert torch.equal(loss_of(ours, tokens_of(8)), loss_of(stock, tokens_of(8)))
        assert torch.equal(ours.layers[0](torch.ones(2, WIDTH)), stock.layers[0](torch.ones(2, WIDTH)))
    step(9)
    with torch.inference_mode():
        assert torch.equal(loss_of(ours, tokens_of(8)), loss_of(stock, tokens_of(8)))
    step(10)


@pytest.mark.cpu_only("compared with stock FSDP2 on Gloo")
def test_steps_off_the_recorded_sequence(pool: Pool) -> None:
    pool.run(_steps_off_the_recorded_sequence, 2)


def _several_graphs() -> None:
    """Runs two forwards before their backwards, one graph twice, and one weight in two graphs."""
    mesh = get_mesh((2,))
    models = [shard(Model(), wrap, mesh) for wrap in (flat_fully_shard, stock_fully_shard)]
    gradients = []
    for model in models:
        for _ in range(3):
            (loss_of(model, tokens_of(0)) + loss_of(model, tokens_of(1))).backward()
        first, second = loss_of(model, tokens_of(2)), loss_of(model, tokens_of(3))
        second.backward()
        first.backward()
        again = loss_of(model, tokens_of(4))
        again.backward(retain_graph=True)
        again.backward()
        gradients.append([p.grad.to_local() for p in model.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.cpu_only("compared with stock FSDP2 on Gloo")
def test_several_graphs_train_as_stock(pool: Pool) -> None:
    pool.run(_several_graphs, 2)


class Branches(nn.Module):
    """A model with keyword arguments, nested outputs, and two modules that form one unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, *, x: torch.Tensor) -> dict[str, Any]:
        return {"y": [self.one(x)], "z": self.two(x)}


def _one_unit_of_two_modules() -> None:
    sharded, unsharded = Branches().to(meshes.device), Branches().to(meshes.device)
    assert sw.fully_shard([sharded.one, sharded.two], reshard_after_forward=False) == [sharded.one, sharded.two]
    sw.fully_shard(sharded, options=sw.fsdp.Options(prefetch=0))
    for step in range(3):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).to(meshes.device)  # equal on all ranks
        gradients = []
        for model in (sharded, unsharded):
            given = x.clone().requires_grad_()
            out = model(x=given)
            (out["y"][0].sum() * 2 + out["z"].square().sum()).backward()
            gradients += [given.grad]
        torch.testing.assert_close(*gradients)
        for a, b in zip(sharded.parameters(), unsharded.parameters(), strict=True):
            torch.testing.assert_close(full(a.grad), b.grad)
    (schedule,) = sw.fsdp.schedules(sharded)
    assert [unit for unit, *_ in schedule.gathers] == [0, 1], "what stays is gathered once"


def test_one_unit_of_two_modules(pool: Pool) -> None:
    pool.run(_one_unit_of_two_modules, 2)


def _state() -> None:
    """State dicts equal those of FSDP2 and load in both directions. Parameter hooks see averaged gradients."""
    mesh = get_mesh((2,))
    ours, stock = shard(Model(), flat_fully_shard, mesh), shard(Model(), stock_fully_shard, mesh)
    train(ours, 2)
    saved = {name: value.clone() for name, value in ours.state_dict().items()}
    stock.load_state_dict(saved)
    for (name, a), (other, b) in zip(ours.state_dict().items(), stock.state_dict().items(), strict=True):
        assert name == other and a.placements == b.placements and torch.equal(a.to_local(), b.to_local())
    fresh = shard(Model(), flat_fully_shard, mesh)
    train(fresh, 1)
    fresh.load_state_dict(stock.state_dict())
    with torch.no_grad():
        assert torch.equal(loss_of(fresh, tokens_of(0)), loss_of(ours, tokens_of(0)))
    # Replaced parameters take effect at once, also in units that the schedule prefetches.
    train(ours, 1)
    with torch.no_grad():
        assert not torch.equal(loss_of(fresh, tokens_of(0)), loss_of(ours, tokens_of(0)))
        fresh.load_state_dict(ours.state_dict(), assign=True)
        assert torch.equal(loss_of(fresh, tokens_of(0)), loss_of(ours, tokens_of(0)))
    seen = []
    weight = fresh.layers[0].up.weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    loss_of(fresh, tokens_of(0)).backward()
    assert len(seen) == 1 and torch.equal(seen[0], weight.grad.to_local())
    torch.nn.utils.clip_grad_norm_(fresh.parameters(), 0.1)


def test_state_dicts_and_hooks(pool: Pool) -> None:
    pool.run(_state, 2)


def _invalid_arguments() -> None:
    mesh = get_mesh((2,))

    def refuses(text: str, module: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=text):
            flat_fully_shard(module, **{"mesh": mesh, **options})

    linear = nn.Linear(2, 2)
    of_fsdp2 = "module must not be or contain a module under FSDP2, got a FSDPLinear"
    refuses(of_fsdp2, stock_fully_shard(nn.Linear(2, 2), mesh=mesh))
    refuses(of_fsdp2, nn.Sequential(stock_fully_shard(nn.Linear(2, 2), mesh=mesh)))
    refuses("module must be a module with a forward, got a ModuleList", nn.ModuleList([linear]))
    refuses("module must be a module or a list of at least one module, got a str", "model")
    refuses("module must be passed to sw.fully_shard once, got a Linear", sw.fully_shard(nn.Linear(2, 2), mesh=mesh))
    refuses("reshard_after_forward must be .* a divisor of 2, .*, got 3", linear, reshard_after_forward=3)
    refuses("memory_limit must be .*, got -1", linear, memory_limit=-1)
    refuses("prefetch must be .*, got 'all'", linear, prefetch="all")
    refuses(
        "placements must be None with shard_placement_fn",
        linear,
        placements=lambda p: None,
        shard_placement_fn=lambda p: None,
    )
    refuses("placements must be a list of .*, got 2", linear, placements=lambda p: [Shard(0), Replicate()])
    refuses(r"shard_placement_fn must return .* in \[-2, 1\] .*, got", linear, shard_placement_fn=lambda p: Shard(2))
    refuses("mesh must be a torch DeviceMesh, got a str", linear, mesh="mesh")
    assert not isinstance(linear.weight, DTensor), "a refused module is left as it was"
    tied = Model()
    sw.fully_shard(tied.head, mesh=mesh)
    refuses("embedding.weight must belong to one unit, got", tied)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(sw.fully_shard(nn.Linear(2, 2), mesh=mesh))
    with pytest.raises(ValueError, match="module must be a module under sw.fully_shard, got a Linear"):
        sw.fsdp.schedules(linear)
    inner = nn.Sequential(sw.fully_shard(nn.Linear(2, 2), mesh=mesh, options=sw.fsdp.Options(memory_limit=5)))
    with pytest.raises(ValueError, match="memory_limit must be set in the outermost call only, got 5 for 0"):
        sw.fully_shard(inner, mesh=mesh)(torch.ones(1, 2))


@pytest.mark.cpu_only("refusals are the same everywhere")
def test_invalid_arguments_raise(pool: Pool) -> None:
    pool.run(_invalid_arguments, 2)


def test_arena_views() -> None:
    """Views follow their tensor to another place in the arena, which lives as long as the tensor refers to it."""
    arena = torch.arange(64, dtype=torch.uint8)
    tensor = torch.empty(4)
    view, version = tensor[1:], tensor._version
    for offset in (16, 0, 48):
        _runtime.view_arena(tensor, arena, offset)
        assert torch.equal(tensor.view(torch.uint8), arena[offset : offset + 16])
        assert view.data_ptr() == tensor.data_ptr() + 4 == arena.data_ptr() + offset + 4
    assert tensor._version == version
    for offset, text in ((-4, r"\[0, 48\], .*, got -4"), (52, "the arena 64, got 52"), (2, "a multiple of 4, got 2")):
        with pytest.raises(ValueError, match=text):
            _runtime.view_arena(tensor, arena, offset)
    with pytest.raises(ValueError, match="tensor must be contiguous and begin its storage, got strides"):
        _runtime.view_arena(view, arena, 0)
    with pytest.raises(ValueError, match="arena must be contiguous, of dtype Byte .* got strides"):
        _runtime.view_arena(tensor, arena[::2], 0)
    expected = arena[48:].clone()
    del arena
    assert torch.equal(tensor.view(torch.uint8), expected)
    _runtime.release_memory(tensor, "it was released")
    with pytest.raises(RuntimeError, match="it was released"):
        tensor.sum()
    with pytest.raises(RuntimeError, match="it was released"):
        tensor[1:].add(1)
