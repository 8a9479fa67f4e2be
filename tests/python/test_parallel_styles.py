"""Modules parallelized with PyTorch's own styles train the same with shardwright as without it."""

from __future__ import annotations

import contextlib
import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dtensors
import shardwright as sw
import shardwright.parallel as sw_parallel
from compilers import compiled
from meshes import device, get_mesh
from pool import Pool

WORLD = 4
STEPS = 10
BATCH, WIDTH, HEADS = 2, 16, 8

# The loss and the full gradients of each step.
History = list[tuple[float, dict[str, torch.Tensor]]]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Causal attention over inputs of shape (length, batch, width).

    Length comes first because PyTorch 2.11 cannot view a tensor that it gathered from uneven shards of a later dim.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes with plain local heads: the projections return local tensors."""
        length = x.shape[0]
        query, key, value = (
            projection(x).view(length, BATCH, -1, WIDTH // HEADS).permute(1, 2, 0, 3)
            for projection in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(causal, -torch.inf).softmax(-1) @ value
        return self.out(mixed.permute(2, 0, 1, 3).reshape(length, BATCH, -1))


class Block(nn.Module):
    """A transformer block: sequence parallel between its two halves, tensor parallel inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.mlp(self.second_norm(x))


def _own_styles(shares_gather: bool) -> dict[str, ParallelStyle]:
    """Returns our styles, which gather and scatter during each projection."""
    column = {"input_layouts": Shard(0), "shares_gather": shares_gather}
    return {
        "first_norm": SequenceParallel(sequence_dim=0),
        "attention.query": sw_parallel.ColwiseParallel(**column, method="ring", chunks=WORLD),
        "attention.key": sw_parallel.ColwiseParallel(**column, method="collective", chunks=2),
        "attention.value": sw_parallel.ColwiseParallel(**column, save="gathered"),
        "attention.out": sw_parallel.RowwiseParallel(output_layouts=Shard(0), use_local_output=False, method="ring"),
        "second_norm": sw_parallel.SequenceParallel(sequence_dim=0),
        "mlp.gate": sw_parallel.ColwiseParallel(**column),
        "mlp.up": sw_parallel.ColwiseParallel(**column, method="serial"),
        "mlp.down": sw_parallel.RowwiseParallel(
            output_layouts=Shard(0), use_local_output=False, method="collective", chunks=3
        ),
    }


def _styles() -> dict[str, ParallelStyle]:
    gather = {"input_layouts": Shard(0), "desired_input_layouts": Replicate()}
    return {
        "first_norm": SequenceParallel(sequence_dim=0),
        "attention": PrepareModuleInput(**gather),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        "second_norm": SequenceParallel(sequence_dim=0),
        "mlp": PrepareModuleInput(**gather),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }


def _full(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()


def _train(
    module: nn.Module, mesh: DeviceMesh, data: torch.Tensor, src: list[str], engine: bool, mode: str = "eager"
) -> History:
    history, run = [], compiled(module, mode)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    source = dtensors.distribute(data, mesh, src)
    target = dtensors.distribute(data.flip(0), mesh, src)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with sw.enabled(strict=True) if engine else contextlib.nullcontext():
            result = run(source)
            loss = ((result - target) ** 2).sum().full_tensor() / data.numel()
            loss.backward()
        gradients = {name: _full(weight.grad) for name, weight in module.named_parameters()}
        with sw.enabled(strict=True) if engine else contextlib.nullcontext():
            optimizer.step()
        history.append((loss.item(), gradients))
    return history


def _compare(stock: History, ours: History) -> None:
    for step, ((stock_loss, stock_gradients), (our_loss, our_gradients)) in enumerate(zip(stock, ours, strict=True)):
        assert our_loss == pytest.approx(stock_loss, rel=1e-5), f"step {step}"
        for name, expected in stock_gradients.items():
            torch.testing.assert_close(
                our_gradients[name],
                expected,
                rtol=1e-4,
                atol=1e-6,
                msg=lambda text, where=f"step {step}, {name}": f"{where}: {text}",
            )


def _train_both(
    module: nn.Module,
    styles: dict[str, ParallelStyle],
    data: torch.Tensor,
    src: list[str],
    own_styles: dict[str, ParallelStyle] | None = None,
    replaced_layers: int = 0,
    mode: str = "eager",
) -> list[float]:
    """Trains twice from the same weights, compares, and returns the losses."""
    mesh = get_mesh((WORLD,))
    modules = [parallelize_module(copy.deepcopy(module), mesh, chosen) for chosen in (styles, own_styles or styles)]
    if replaced_layers:
        assert sw_parallel.replace_styles(modules[1]) == replaced_layers
    stock = _train(modules[0], mesh, data, src, engine=False)
    sw.reset_stats()
    ours = _train(modules[1], mesh, data, src, engine=True, mode=mode)
    stats = sw.stats()
    assert stats["fallbacks"] == 0, stats["fallback_reasons"]
    assert stats["calls"] > 0
    assert (stats["products"] > 0) == (own_styles is not None or replaced_layers > 0)
    _compare(stock, ours)
    return [loss for loss, _ in ours]


def _mlp(mode: str) -> list[float]:
    torch.manual_seed(1)
    styles = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)}
    return _train_both(Mlp(), styles, torch.randn(6, BATCH, WIDTH), ["R"], mode=mode)


def _block(length: int) -> list[float]:
    torch.manual_seed(2)
    return _train_both(Block(), _styles(), torch.randn(length, BATCH, WIDTH), ["S(0)"])


def _block_of_own_styles(length: int, shares_gather: bool, mode: str) -> list[float]:
    torch.manual_seed(2)
    styles = _own_styles(shares_gather)
    return _train_both(Block(), _styles(), torch.randn(length, BATCH, WIDTH), ["S(0)"], styles, mode=mode)


def _block_of_replaced_styles(length: int) -> list[float]:
    torch.manual_seed(2)
    return _train_both(Block(), _styles(), torch.randn(length, BATCH, WIDTH), ["S(0)"], replaced_layers=7)


def _assert_same_and_falling(losses: list[list[float]]) -> None:
    assert all(other == losses[0] for other in losses), "ranks disagree about the loss"
    assert len(losses[0]) == STEPS and losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("mode", ["eager", "model"])
def test_mlp_trains_as_stock(pool: Pool, mode: str) -> None:
    _assert_same_and_falling(pool.run(_mlp, WORLD, mode))


@pytest.mark.parametrize("length", [8, 10, 7], ids=["even", "3+3+3+1", "2+2+2+1"])
def test_attention_block_trains_as_stock(pool: Pool, length: int) -> None:
    """Sequence lengths that 4 ranks do not divide leave the last rank fewer positions."""
    _assert_same_and_falling(pool.run(_block, WORLD, length))


@pytest.mark.parametrize(
    ("length", "shares_gather", "mode"),
    [
        (8, False, "eager"),
        (8, True, "eager"),
        (8, True, "model"),
        (7, False, "eager"),
        (7, True, "eager"),
        pytest.param(7, True, "model", marks=pytest.mark.long),
    ],
)
def test_attention_block_trains_as_stock_under_our_styles(
    pool: Pool, length: int, shares_gather: bool, mode: str
) -> None:
    """With our styles, gathers and scatters overlap with products; PyTorch's styles cannot do that."""
    _assert_same_and_falling(pool.run(_block_of_own_styles, WORLD, length, shares_gather, mode))


@pytest.mark.parametrize("length", [8, 7], ids=["even", "2+2+2+1"])
def test_replaced_styles_train_as_stock(pool: Pool, length: int) -> None:
    _assert_same_and_falling(pool.run(_block_of_replaced_styles, WORLD, length))


class _WithKeyword(nn.Module):
    """Passes its input to two layers by keyword, beside an argument that no style prepares."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.inner.forward = lambda scale, x: scale * Mlp.forward(self.inner, x)  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(2.0, x=x)


def _replaced_gather() -> tuple[int, int, int]:
    """Returns the collectives and received bytes of a forward before and after, and the bytes of a part of `x`."""
    mesh = get_mesh((WORLD,))
    torch.manual_seed(6)
    styles = {
        "inner": PrepareModuleInput(
            input_kwarg_layouts={"x": Shard(0)},
            desired_input_kwarg_layouts={"x": Replicate()},
            input_layouts=(None,),
            desired_input_layouts=(None,),
        ),
        "inner.gate": ColwiseParallel(),
        "inner.up": ColwiseParallel(),
        "inner.down": RowwiseParallel(output_layouts=Shard(0)),
    }
    module = parallelize_module(_WithKeyword(), mesh, styles)
    state = {name: _full(weight) for name, weight in module.state_dict().items()}
    part = torch.randn(2, BATCH, WIDTH).to(device)
    received = []
    results = []
    for replaces in (False, True):
        if replaces:
            assert sw_parallel.replace_styles(module) == 3
            with pytest.raises(ValueError, match="module must be a model with linear layers under PyTorch's parallel"):
                sw_parallel.replace_styles(module)
        module(part)  # makes plans and groups
        with sw.debug.wire_meter() as meter, torch.no_grad():
            results.append(module(part))
        received.append(meter.received_bytes)
    torch.testing.assert_close(results[1], results[0])
    assert all(torch.equal(_full(weight), state[name]) for name, weight in module.state_dict().items())
    return received[0], received[1], part.nbytes


def test_replaced_styles_gather_once(pool: Pool) -> None:
    """A module's gathered input is received once, with the first layer, and sums are scattered."""
    for stock, ours, part in pool.run(_replaced_gather, WORLD):
        assert ours == 2 * (WORLD - 1) * part
        assert ours <= stock


def _bytes_of_three_layers(shares_gather: bool, plain: bool) -> tuple[int, int]:
    """Returns the bytes received in the forward and in the backward of three layers on one tensor."""
    mesh = get_mesh((WORLD,))
    torch.manual_seed(4)
    full = torch.randint(-2, 3, (8, WIDTH)).float()
    layers = [nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(3)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.randint(-2, 3, layer.weight.shape))
    expected = full.clone().requires_grad_()
    sum(layer(expected).square().sum() for layer in layers).backward()
    style = sw_parallel.ColwiseParallel(input_layouts=Shard(0), use_local_output=False, shares_gather=shares_gather)
    sharded = [parallelize_module(copy.deepcopy(layer), mesh, style) for layer in layers]
    leaf = dtensors.distribute(full, mesh, ["S(0)"]).requires_grad_()
    with torch.inference_mode():
        x = leaf * 1
        for layer, whole in zip(sharded, layers, strict=True):
            assert torch.equal(layer(x.to_local() if plain else x).full_tensor(), whole(full))
    for _ in range(2):  # the first iteration makes plans and groups
        leaf.grad = None
        x = (leaf * 1).to_local() if plain else leaf * 1
        with sw.debug.wire_meter() as forward:
            results = [layer(x) for layer in sharded]
        for result, layer in zip(results, layers, strict=True):
            assert torch.equal(result.full_tensor(), layer(full))
        loss = sum(result.square().sum() for result in results)
        loss = loss.redistribute(mesh, [Replicate()])
        with sw.debug.wire_meter() as backward:
            loss.backward()
        assert torch.equal(leaf.grad.full_tensor(), expected.grad)
    x = leaf.detach().to_local() if plain else leaf.detach()
    for factor in (1, 1, 0):  # each pass gathers the input as it is then, also after writes that no version shows
        (x if plain else x.to_local()).data.mul_(factor)
        results = [layer(x) for layer in sharded]
        for result, layer in zip(results, layers, strict=True):
            assert torch.equal(result.full_tensor(), layer(full * factor))
            result.redistribute(mesh, [Replicate()]).square().sum().backward()
    return forward.received_bytes, backward.received_bytes


@pytest.mark.parametrize("plain", [False, True], ids=["DTensor", "local tensor"])
def test_layers_share_a_gather(pool: Pool, plain: bool) -> None:
    part = 8 * WIDTH * 4 // WORLD
    for alone, shared in zip(
        pool.run(_bytes_of_three_layers, WORLD, False, plain),
        pool.run(_bytes_of_three_layers, WORLD, True, plain),
        strict=True,
    ):
        assert alone[0] == 3 * 3 * part and shared[0] == 3 * part
        # The backward moves the operand's gradient. Without sharing, each layer gathers again for its weight gradient.
        assert alone[1] == 2 * 3 * 3 * part and shared[1] == 3 * part


def _deepcopy_and_autocast() -> None:
    mesh = get_mesh((WORLD,))
    layer = parallelize_module(nn.Linear(WIDTH, 2 * WIDTH), mesh, sw_parallel.ColwiseParallel(input_layouts=Shard(0)))
    twin = copy.deepcopy(layer)
    assert list(layer.state_dict()) == ["weight", "bias"]
    with torch.no_grad():
        twin.weight.zero_()
    x = torch.randn(2, WIDTH)
    assert torch.equal(twin(x), twin.bias.to_local().expand(WORLD * 2, -1))  # its own weight, not the first one's
    assert not torch.equal(layer(x), twin(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    embedding = nn.Embedding(8, WIDTH)
    parallelize_module(embedding, mesh, sw_parallel.RowwiseParallel())
    assert isinstance(embedding.weight, DTensor)


@pytest.mark.cpu_only("autocast is per kind of device")
def test_our_styles_support_deepcopy_and_autocast(pool: Pool) -> None:
    pool.run(_deepcopy_and_autocast, WORLD)


def _uneven_features(local: bool) -> None:
    """Splits a hidden size of 5 over 4 ranks: 2, 2, 1 and none. Plain tensors between layers lack that size."""
    mesh = get_mesh((WORLD,))
    torch.manual_seed(5)
    unsharded = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4)).to(device)
    x = torch.randn(2, 3, 4).to(device)
    styles = {"0": sw_parallel.ColwiseParallel(use_local_output=local), "2": sw_parallel.RowwiseParallel()}
    cut = parallelize_module(copy.deepcopy(unsharded), mesh, styles)
    expected, actual = unsharded(x), cut(x)
    torch.testing.assert_close(actual, expected)
    expected.square().sum().backward()
    actual.square().sum().backward()
    for parameter, cut_parameter in zip(unsharded.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(_full(cut_parameter.grad), parameter.grad)


@pytest.mark.parametrize("local", [True, False])
def test_row_parallel_layers_take_uneven_features(pool: Pool, local: bool) -> None:
    pool.run(_uneven_features, WORLD, local)
