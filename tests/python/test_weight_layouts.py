"""Tests of weight layouts under `sw.fully_shard`: tensor parallelism, kept copies, stores, dims with equal data."""

from __future__ import annotations

import contextlib
import pathlib
import re
import types
import unittest.mock as mock
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.placement_types import _StridedShard

import meshes
import shardwright as sw
import shardwright.parallel as sw_styles
from fsdp_models import agreement_bytes, flat_fully_shard
from meshes import get_mesh
from pool import Pool
from shardwright.fsdp.moves import Moves

WIDTH, HIDDEN, ROWS = 18, 30, 4  # uneven over 4 ranks, and over 2 data-parallel by 2 tensor-parallel ranks


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.inner(x)


class Model(nn.Module):
    """A model of three layers, one of them called twice, with a tied weight and an unused module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.unused = nn.Linear(3, 2)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.to(meshes.device)
        self.last.weight = self.first.weight
        self.freeze()

    def freeze(self) -> None:
        self.layers[1].inner.norm.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in [*self.layers, self.layers[0]]:
            x = layer(x)
        return self.last(x)


def batch_of(step: int, data_rank: int) -> torch.Tensor:
    values = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + data_rank))
    return values.to(meshes.device)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


Named = dict[str, torch.Tensor]


def train(model: nn.Module, steps: int, data_ranks: list[int], foreach: bool = False) -> Named:
    """Returns losses, gradients and evaluations by step, and parameters. The loss is the mean over `data_ranks`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=foreach)
    results = {}
    for step in range(steps):
        losses = [model(batch_of(step, rank)).square().mean() for rank in data_ranks]
        loss = torch.stack(losses).mean()
        loss.backward()
        results[f"{step} loss"] = loss.detach()
        for name, p in model.named_parameters():
            if p.grad is not None:
                results[f"{step} {name}"] = p.grad.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            results[f"{step} evaluation"] = model(batch_of(99, 0))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return results | {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_close(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")


def assert_equals_unsharded(actual: Named, num_data_ranks: int, steps: int = 3) -> None:
    expected = train(Model(), steps, list(range(num_data_ranks)))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if "loss" not in name:  # losses are of this rank's batch
            assert_close(name, full(actual[name]), value)


def wrapped(
    model: Model, wrap: Callable[..., Any] = flat_fully_shard, outermost: dict[str, Any] | None = None, **options: Any
) -> Model:
    for layer in model.layers:
        wrap(layer, **options)
    wrap(model, **options, **(outermost or {}))
    return model


# Tensor parallelism


def tensor_parallel(styles: Any, mesh: Any) -> Model:
    """Shards rows between norms and products, and features between the products. Other modules stay plain."""
    model = Model()
    for layer in model.layers:
        plan = {
            "inner": torch_styles.PrepareModuleInputOutput(
                input_layouts=Replicate(),
                desired_input_layouts=Shard(0),
                use_local_input=True,
                output_layouts=Shard(0),
                desired_output_layouts=Replicate(),
            ),
            "inner.norm": styles.SequenceParallel(sequence_dim=0, use_local_output=True),
            "inner.up": styles.ColwiseParallel(input_layouts=Shard(0)),
            "inner.down": styles.RowwiseParallel(output_layouts=Shard(0)),
        }
        torch_styles.parallelize_module(layer, mesh, plan)
    model.freeze()  # styles make new parameters
    return model


def data_parallel(model: Model, mesh: Any, wrap: Callable[..., Any] = flat_fully_shard, **options: Any) -> Model:
    return wrapped(model, wrap, mesh=mesh, **options)


def _over_tensor_parallelism(shape: tuple[int, ...], own: bool) -> None:
    """Compares PyTorch's styles or ours with stock FSDP2 and with the unsharded model."""
    mesh = get_mesh(shape)
    names = mesh.mesh_dim_names
    dp, tp = (mesh[names[:-1]] if len(shape) > 2 else mesh[names[0]]), mesh[names[-1]]
    rank = dp.get_local_rank() if dp.ndim == 1 else dist.get_rank() // shape[-1]
    num_data_ranks = torch.Size(shape[:-1]).numel()
    styles = sw_styles if own else torch_styles
    model = data_parallel(tensor_parallel(styles, tp), dp)
    stock = data_parallel(tensor_parallel(torch_styles, tp), dp, stock_fully_shard)
    for (name, a), b in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert a.placements == b.placements and a.device_mesh == b.device_mesh, name
        assert a.to_local().shape == b.to_local().shape and torch.equal(a.to_local(), b.to_local()), name
    up = model.layers[0].inner.up.weight  # type: ignore[union-attr]
    assert up.to_local().numel() <= 8 * WIDTH if shape[0] > 1 else up.to_local().numel() == HIDDEN // 2 * WIDTH
    actual = train(model, 3, [rank])
    expected = train(stock, 3, [rank])
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert local(actual[name]).shape == local(value).shape
        assert_close(name, local(actual[name]), local(value))
    assert_equals_unsharded(actual, num_data_ranks)


@pytest.mark.cpu_only("compared with stock FSDP2 on Gloo")
@pytest.mark.parametrize("shape, own", [((2, 2), True), ((2, 2), False), ((1, 2), True), ((2, 2, 2), True)], ids=str)
def test_weights_over_tensor_parallelism_equal_stock(pool: Pool, shape: tuple[int, ...], own: bool) -> None:
    pool.run(_over_tensor_parallelism, torch.Size(shape).numel(), shape, own)


def _checkpoints(folder: str) -> None:
    """Stock FSDP2 and ours load each other's checkpoints, also on another mesh."""
    mesh, other = get_mesh((2, 2)), get_mesh((4, 1))
    grid = [mesh[name] for name in mesh.mesh_dim_names]
    makers = [
        lambda: data_parallel(tensor_parallel(torch_styles, grid[1]), grid[0]),
        lambda: data_parallel(tensor_parallel(torch_styles, grid[1]), grid[0], stock_fully_shard),
        lambda: data_parallel(tensor_parallel(torch_styles, other["b"]), other["a"]),
    ]
    for i, (save, load) in enumerate([(0, 1), (1, 0), (0, 2)]):
        saved, loaded = makers[save](), makers[load]()
        train(saved, 1, [0])
        path = pathlib.Path(folder) / str(i)
        dcp.save(saved.state_dict(), checkpoint_id=path)
        state = loaded.state_dict()
        dcp.load(state, checkpoint_id=path)
        loaded.load_state_dict(state)
        for (name, a), b in zip(saved.named_parameters(), loaded.parameters(), strict=True):
            assert torch.equal(full(a), full(b)), name
        with torch.no_grad():
            torch.testing.assert_close(saved(batch_of(5, 0)), loaded(batch_of(5, 0)))


@pytest.mark.cpu_only("compared with stock FSDP2 on Gloo")
def test_checkpoints_over_tensor_parallelism(pool: Pool, tmp_path: pathlib.Path) -> None:
    pool.run(_checkpoints, 4, str(tmp_path))


def on_whole_mesh(mesh: Any, is_cut: bool) -> Model:
    """Returns a model whose parameters are DTensors on both dims of a mesh."""
    model = Model()
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and not isinstance(p, DTensor):
                own = [Replicate(), Shard(0) if is_cut and p.ndim == 2 else Replicate()]
                parameter = nn.Parameter(distribute_tensor(p.detach(), mesh, own), p.requires_grad)
                module._parameters[name] = parameter
    model.last.weight = model.first.weight
    return model


def _named_dims(stock_dims: bool) -> None:
    """Compares parameters on a whole mesh, whose data-parallel dims `dp_mesh_dims` names, with those of FSDP2.

    As in FSDP2, gradients are averaged over these dims, also if DTensor has computed a share of a sum on each rank.
    """
    # A new mesh, because flattened dims of a shared mesh make PyTorch's full_tensor() wrong for uneven parts.
    mesh = init_device_mesh(meshes.device, (2, 2), mesh_dim_names=("x", "y"))
    x = distribute_tensor(batch_of(0, 0), mesh, [Replicate(), Replicate()])
    for shard, replicate in (("x", None), (("x", "y"), None), ("y", "x"), (None, ("x", "y"))):
        dims: Any = types.SimpleNamespace(shard=shard, replicate=replicate)
        if stock_dims:
            dims = torch.distributed.fsdp.DataParallelMeshDims(shard=shard, replicate=replicate)
        models = [
            wrapped(on_whole_mesh(mesh, shard == "x"), wrap, mesh=mesh, dp_mesh_dims=dims)
            for wrap in [flat_fully_shard] + ([stock_fully_shard] if stock_dims else [])
        ]
        models.append(on_whole_mesh(mesh, shard == "x"))
        for model in models:
            for _ in range(2):
                model.zero_grad()
                model(x).square().mean().backward()
        ours, *stock = models[0].parameters(), *(model.parameters() for model in models[1:-1])
        for a, b in zip(ours, *stock) if stock else ():
            assert a.placements == b.placements and a.device_mesh.shape == b.device_mesh.shape
            assert torch.equal(a.to_local(), b.to_local())
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                assert_close("gradient", a.grad.to_local(), b.grad.to_local())
        for (name, a), b in zip(models[-1].named_parameters(), models[0].parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                data_dims = 1 if shard == "x" else 2
                shares = 2 ** sum(placement.is_partial() for placement in a.grad.placements[:data_dims])
                expected = full(a.grad) / shares
                assert_close(name, full(b.grad), expected)


@pytest.mark.cpu_only("compared with stock FSDP2 on Gloo")
def test_dp_mesh_dims_equal_stock(pool: Pool) -> None:
    pool.run(_named_dims, 4, hasattr(torch.distributed.fsdp, "DataParallelMeshDims"))


# Kept copies


def received_bytes(model: nn.Module, step: int = 0) -> int:
    with sw.debug.wire_meter() as meter:
        model(batch_of(step, dist.get_rank())).square().mean().backward()
    model.zero_grad()
    return int(meter.received_bytes)


def model_with_schedule(model_of: Callable[[int | None], Model], wanted: Callable[[Any], bool]) -> Model:
    """Lowers the memory limit until the schedule after one step is as wanted, and returns that model."""
    model = model_of(None)
    train(model, 1, [dist.get_rank()])
    limit = sw.fsdp.schedules(model)[0].peak_bytes
    while True:
        model = model_of(limit)
        train(model, 1, [dist.get_rank()])
        if wanted(sw.fsdp.schedules(model)[0]):
            return model
        limit -= 512


def _kept_copies() -> None:
    """A copy stays between two uses, and the ranks that share it gather again. Nothing else changes."""
    one_dim, two_dims = get_mesh((4,)), get_mesh((2, 2))
    by_number = {"mesh": one_dim, "reshard_after_forward": 2}
    by_layout = {
        "mesh": two_dims,
        "placements": lambda p: [Shard(0), Shard(p.ndim - 1)],
        "kept_placements": lambda p: [Replicate(), Shard(p.ndim - 1)],
    }
    for options in (by_number, by_layout):

        def model_of(limit: int | None, options: dict[str, Any] = options) -> Model:
            return wrapped(Model(), **options, outermost={"memory_limit": limit, "prefetch": 0})

        model = model_with_schedule(model_of, lambda s: sum(from_copy for *_, from_copy in s.gathers) >= 3)
        assert_equals_unsharded(train(model_of(sw.fsdp.schedules(model)[0].peak_bytes), 3, [dist.get_rank()]), 4)
        schedule = sw.fsdp.schedules(model)[0]
        units = [[*layer.parameters()] for layer in model.layers]
        of_layers = {id(p) for unit in units for p in unit}
        units.insert(0, [p for p in model.parameters() if id(p) not in of_layers])

        def kept_numel(p: DTensor, options: dict[str, Any] = options) -> int:
            """Returns the number of elements that this rank keeps: its `torch.chunk` half of dim 0 or the last."""
            dim = 0 if options is by_number else p.ndim - 1
            chunks = p.full_tensor().chunk(2, dim)
            index = dist.get_rank() % 2
            return chunks[index].numel() if index < len(chunks) else 0

        missing = [sum(p.numel() - p.to_local().numel() for p in unit) * 4 for unit in units]
        missing_of_copy = [sum(p.numel() - kept_numel(p) for p in unit) * 4 for unit in units]
        assert all(a > b > 0 for a, b in zip(missing, missing_of_copy))
        gathered = sum((missing_of_copy if from_copy else missing)[unit] for unit, *_, from_copy in schedule.gathers)
        total = received_bytes(model)
        reductions = total - gathered
        # The reductions are those of a model that keeps no copies.
        plain = wrapped(
            Model(), mesh=options["mesh"], placements=options.get("placements"), outermost={"memory_limit": 1 << 20}
        )
        train(plain, 1, [dist.get_rank()])
        simple = sw.fsdp.schedules(plain)[0]
        assert len(simple.reductions) == len(schedule.reductions)
        assert reductions == received_bytes(plain) - sum(missing[unit] for unit, *_ in simple.gathers)


def test_kept_copies_save_gathered_bytes(pool: Pool) -> None:
    pool.run(_kept_copies, 4)


def _kept_over_tensor_parallelism() -> None:
    """With least memory, the first layer is gathered again from a copy that two of four data-parallel ranks share."""
    mesh = get_mesh((4, 2))

    def model_of(limit: int) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)).to(meshes.device)
        plan = {"0": torch_styles.ColwiseParallel(), "1": torch_styles.RowwiseParallel()}
        torch_styles.parallelize_module(model, mesh["b"], plan)
        for layer in model:
            sw.fully_shard(layer, mesh=mesh["a"], reshard_after_forward=2)
        return sw.fully_shard(model, mesh=mesh["a"], options=sw.fsdp.Options(memory_limit=limit, prefetch=0))

    x = [batch_of(0, rank) for rank in range(4)]
    with pytest.raises(ValueError) as refusal:
        model_of(0)(x[mesh.get_local_rank("a")]).sum().backward()
    model = model_of(int(re.findall(r"at least (\d+)", str(refusal.value))[0]))
    torch.manual_seed(0)
    unsharded = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)).to(meshes.device)
    for _ in range(2):
        model.zero_grad()
        model(x[mesh.get_local_rank("a")]).square().mean().backward()
    torch.stack([unsharded(each).square().mean() for each in x]).mean().backward()
    for (name, p), q in zip(model.named_parameters(), unsharded.parameters(), strict=True):
        assert_close(name, full(p.grad), q.grad)
    gathers = sw.fsdp.schedules(model)[0].gathers
    assert [from_copy for unit, _, _, _, from_copy in gathers if unit > 0] == [False, False, True]


def test_kept_copies_over_tensor_parallelism(pool: Pool) -> None:
    pool.run(_kept_over_tensor_parallelism, 8)


# Stores for optimizers, and mesh dims with equal data


@contextlib.contextmanager
def logged_moves() -> Iterator[list[str]]:
    """Lists the moves of weights that start in the block."""
    moves: list[str] = []
    start = Moves.__call__

    def log(each: Moves, src: sw.Layout, dst: sw.Layout, *tensors: torch.Tensor) -> Any:
        is_refresh = src == each.layouts.store and dst == each.layouts.shards
        moves.append("refresh" if is_refresh else "gather" if dst == each.layouts.use else "reduce")
        return start(each, src, dst, *tensors)

    with mock.patch.object(Moves, "__call__", log):
        yield moves


def _stores() -> None:
    """ZeRO-1 and other stores: gradients are reduced to the store, which refreshes the weights once per step."""
    one_dim, two_dims = get_mesh((4,)), get_mesh((2, 2))
    cases: list[tuple[Any, Callable[[Any], list[Any]], Callable[[Any], list[Any]]]] = [
        (one_dim, lambda p: [Replicate()], lambda p: [Shard(0)]),
        (two_dims, lambda p: [Replicate(), Shard(0)], lambda p: [_StridedShard(0, split_factor=2), Shard(0)]),
        (two_dims, lambda p: [Replicate(), Replicate()], lambda p: [Replicate(), Shard(p.ndim - 1)]),
    ]
    for mesh, rest, store in cases:
        model = wrapped(Model(), mesh=mesh, placements=rest, store_placements=store)
        weight = model.layers[0].inner.up.weight
        assert list(weight.placements) == store(weight)
        assert_equals_unsharded(train(model, 3, [dist.get_rank()], foreach=True), 4)
        schedule = sw.fsdp.schedules(model)[0]
        assert (schedule.arena_bytes == 0) == (rest(weight)[-1] == Replicate()), "what is whole at rest is not copied"
        received_bytes(model)
        without = received_bytes(model, 1)  # no weight was written in between
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        own = [
            distribute_tensor(p.detach().full_tensor(), mesh, rest(p)).to_local().numel() for p in model.parameters()
        ]
        lacking = sum(own) - sum(p.to_local().numel() for p in model.parameters())
        with logged_moves() as moves:
            assert received_bytes(model, 1) - without == 4 * lacking, store(weight)
        if "gather" in moves and "refresh" in moves:
            first_gather = moves.index("gather")
            assert "refresh" in moves[:first_gather] and "refresh" in moves[first_gather:], "gathers wait for no other"


def _stores_over_tensor_parallelism() -> None:
    """ZeRO-1 of tensor-parallel parts: modules compute with the parts, optimizers see shards of them."""
    mesh = get_mesh((2, 2))
    model = tensor_parallel(sw_styles, mesh["b"])
    wrapped(model, mesh=mesh["a"], placements=lambda p: [Replicate()], store_placements=lambda p: [Shard(0)])
    up = model.layers[0].inner.up.weight  # type: ignore[union-attr]
    assert isinstance(up, DTensor) and up.to_local().numel() <= 8 * WIDTH
    assert_equals_unsharded(train(model, 3, [mesh.get_local_rank("a")]), 2)
    assert sw.fsdp.schedules(model)[0].arena_bytes == 0


def test_stores_of_tensor_parallel_parts(pool: Pool) -> None:
    pool.run(_stores_over_tensor_parallelism, 4)


def test_stores_refresh_weights_once_per_step(pool: Pool) -> None:
    pool.run(_stores, 4)


def _same_data() -> None:
    """Gradients are sliced along a mesh dim with equal data. Only the reduction over the other dims is sent."""
    mesh = get_mesh((2, 2))
    options: dict[str, Any] = {"mesh": mesh, "same_data_dims": ["b"]}
    rank = mesh.get_local_rank("a")
    for cuts in ([Shard(0), Shard(0)], [Shard(0), Replicate()], [Replicate(), Shard(0)]):
        model = wrapped(Model(), **options, placements=lambda p, cuts=cuts: cuts)
        assert_equals_unsharded(train(model, 3, [rank]), 2)
    linear = nn.Linear(4, 8, bias=False, device=meshes.device)
    flat_fully_shard(
        linear, **options, options=sw.fsdp.Options(placements=lambda p: [Replicate(), Shard(0)], prefetch=0)
    )
    for step in range(3):
        with sw.debug.wire_meter() as meter:
            linear(torch.ones(1, 4, device=meshes.device) * rank).sum().backward()
        # The gather over b of half the weight; the sum over a of the half that this rank holds.
        if step > 1:  # the first step gathers for the backward again, the second one is timed
            assert meter.received_bytes == 4 * 16 + 4 * 16 + agreement_bytes(linear)
    alone = nn.Linear(4, 8, bias=False, device=meshes.device)
    sw.fully_shard(alone, mesh=mesh["b"], options=sw.fsdp.Options(same_data_dims=["b"]))
    for _ in range(3):
        alone.zero_grad()
        with sw.debug.wire_meter() as meter:
            alone(torch.ones(1, 4, device=meshes.device)).sum().backward()
    assert meter.received_bytes == 4 * 16 + agreement_bytes(alone), "nothing for the gradient"
    assert torch.equal(alone.weight.grad.full_tensor().cpu(), torch.ones(8, 4))


def test_same_data_dims_reduce_nothing(pool: Pool) -> None:
    pool.run(_same_data, 4)


class Odd(nn.Module):
    """A module with weights without dims, without elements, and with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.row = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.factor * x, x @ self.nothing.T, x @ self.row.T], 1)


def _odd_weights() -> None:
    mesh = get_mesh((3,))
    rank = dist.get_rank()
    kept = {
        "placements": lambda p: [Shard(p.ndim - 1) if p.ndim else Replicate()],
        "kept_placements": lambda p: [Replicate()],
    }
    stored = {
        "placements": lambda p: [Replicate()],
        "store_placements": lambda p: [Shard(0) if p.ndim else Replicate()],
    }
    for options in ({}, kept, stored, {"reshard_after_forward": 1}):
        model = flat_fully_shard(Odd().to(meshes.device), mesh=mesh, **options)
        unsharded = Odd().to(meshes.device)
        for _ in range(3):
            for each, ranks in ((model, [rank]), (unsharded, range(3))):
                each.zero_grad()
                torch.stack([each(batch_of(0, r)).square().mean() for r in ranks]).mean().backward()
                torch.optim.SGD(each.parameters(), lr=0.1).step()
        for (name, p), q in zip(model.named_parameters(), unsharded.parameters(), strict=True):
            assert_close(name, full(p), q)
            assert_close(name, full(p.grad), q.grad)


def test_scalar_empty_and_single_row_weights(pool: Pool) -> None:
    pool.run(_odd_weights, 3)


def _empty_parts_and_replaced_weights() -> None:
    """Covers cases that FSDP2 does not test: empty parts, several graphs, replaced and written weights."""
    mesh = get_mesh((3,))
    rank = dist.get_rank()
    zero_one = {"placements": lambda p: [Replicate()], "store_placements": lambda p: [Shard(0)]}
    for options in ({"reshard_after_forward": 3}, {"reshard_after_forward": 1}, zero_one):
        model = wrapped(Model(), mesh=mesh, **options)
        assert_equals_unsharded(train(model, 2, [rank]), 3, 2)
        unsharded = Model()
        unsharded.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
        for each in (model, unsharded):
            losses = []
            for r in range(3) if each is unsharded else [rank]:
                x = batch_of(7, r)
                first, second = each(x), each(x * 2)  # two graphs
                losses.append(first.square().mean() + second.square().mean())
            loss = torch.stack(losses).mean()
            loss.backward(retain_graph=True)
            loss.backward()
        for (name, p), q in zip(model.named_parameters(), unsharded.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                assert_close(name, full(p.grad), q.grad)
        # Replaced and written weights are used.
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)
        unsharded.load_state_dict({name: value * 0.5 for name, value in unsharded.state_dict().items()})
        with torch.no_grad():
            torch.testing.assert_close(model(batch_of(8, 0)), unsharded(batch_of(8, 0)))
            for each in (model, unsharded):
                for p in each.parameters():
                    p.add_(0.1)
            torch.testing.assert_close(model(batch_of(8, 0)), unsharded(batch_of(8, 0)))


def test_layouts_with_empty_parts_and_replaced_weights(pool: Pool) -> None:
    pool.run(_empty_parts_and_replaced_weights, 3)


def _wrong_layouts() -> None:
    mesh, one_dim = get_mesh((2, 2)), get_mesh((4,))

    def refuses(text: str, module: nn.Module, **options: Any) -> None:
        with pytest.raises(ValueError, match=text):
            flat_fully_shard(module, **{"mesh": one_dim, **options})

    def over(placement: Any, on: Any) -> nn.Module:
        linear = nn.Linear(4, 4, bias=False)
        local = torch.ones(4 // (2 if placement.is_shard() else 1), 4)
        linear.weight = nn.Parameter(DTensor.from_local(local, on, [placement], run_check=False))
        return linear

    refuses("weight must be on other dims", over(Shard(0), mesh["b"]))
    refuses("weight must be on other dims", over(Shard(0), mesh["b"]), mesh=mesh)
    refuses("weight must be a DTensor without pending reductions, got", over(Partial(), mesh["b"]), mesh=mesh["a"])
    linear = nn.Linear(2, 2)
    refuses("reshard_after_forward must be .* a divisor of 4.*, got 3", linear, reshard_after_forward=3)
    refuses("reshard_after_forward must be .*, got '2'", linear, reshard_after_forward="2")
    rest = {"placements": lambda p: [Shard(0)]}
    refuses("reshard_after_forward must be .*, got 2", linear, reshard_after_forward=2, **rest)
    for name in ("store_placements", "kept_placements"):
        refuses(f"{name} must not return Partial, got .* for weight", linear, **{name: lambda p: [Partial()]})
        refuses("placements must be a list of 1, .*, got 2", linear, **{name: lambda p: [Shard(0), Shard(0)]})
    refuses("same_data_dims: mesh dim must be one of .*, got 'c'", linear, same_data_dims=["c"])
    refuses("dp_mesh_dims must be .*, got a str", linear, dp_mesh_dims="a")

    def dims(shard: Any, replicate: Any = None) -> Any:
        return types.SimpleNamespace(shard=shard, replicate=replicate)

    refuses("dp_mesh_dims must be .*, got shard='c'", linear, mesh=mesh, dp_mesh_dims=dims("c"))
    refuses("dp_mesh_dims must be .*, got shard=None and replicate=None", linear, mesh=mesh, dp_mesh_dims=dims(None))
    refuses("adjacent dims", linear, mesh=mesh, dp_mesh_dims=dims(("b", "a")))
    refuses("weight must be a DTensor on .* with dp_mesh_dims, got", linear, mesh=mesh, dp_mesh_dims=dims("a"))
    assert not isinstance(linear.weight, DTensor), "a refused module is left as it was"


@pytest.mark.cpu_only("refusals are the same everywhere")
def test_wrong_layouts_raise(pool: Pool) -> None:
    pool.run(_wrong_layouts, 4)
