"""`sw.fsdp.checkpoint_cut`: saved activations are sharded over a mesh between forward and backward."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import meshes
import shardwright as sw
from meshes import get_mesh
from pool import Pool
from shardwright.fsdp import activations
from shardwright.runtime import groups

WIDTH = 5
LAYERS = 3


class Layer(nn.Module):
    """Saves its input directly, as a view, and with other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 7), nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(x)) * self.gate(x)) + self.norm(x)
        return y * x.transpose(0, 1).contiguous().transpose(0, 1) + x[:, 1:].square().sum() * x[:1].expand_as(x)


class Model(nn.Module):
    """A stack of layers. Optionally recomputes them, and cuts their inputs over a mesh."""

    def __init__(self, mesh: Any = None, reentrant: bool | None = None, min_bytes: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS)).to(meshes.device)
        self.mesh, self.reentrant, self.min_bytes = mesh, reentrant, min_bytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.mesh is None:
                x = self.run(layer, x)
            else:
                with sw.fsdp.checkpoint_cut(self.mesh, x, min_bytes=self.min_bytes):
                    x = self.run(layer, x)
        return x

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return layer(x)
        found: torch.Tensor = checkpoint(layer, x, use_reentrant=self.reentrant)
        return found


def batch(step: int, rows: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return 0.3 * torch.randn(rows, 2, WIDTH, generator=generator, dtype=dtype).to(meshes.device)


def grads(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    found = [x.grad, *(p.grad for p in model.parameters())]
    for p in [x, *model.parameters()]:
        p.grad = None
    assert all(g is not None for g in found)
    return found  # type: ignore[return-value]


def _as_uncut(mesh_shape: tuple[int, ...], reentrant: bool | None) -> None:
    mesh = get_mesh(mesh_shape)
    cut, uncut = Model(mesh, reentrant), Model(None, reentrant)
    for step in range(4):
        results = []
        for model in (cut, uncut):
            x = batch(step).requires_grad_()
            sw.reset_stats()
            loss = model(x).square().sum()
            with sw.debug.wire_meter() as meter:
                # Step 2 runs a second backward through the same graph.
                loss.backward(retain_graph=step == 2)
                if step == 2:
                    loss.backward()
            results.append([loss.detach(), *grads(model, x)])
            times = 2 if step == 2 else 1
            if model is cut:
                assert sw.stats()["activations_cut"] == LAYERS, "three views of an input are one activation"
                assert sw.stats()["activation_gathers"] == LAYERS * times
                layout = sw.Layout(sw.Mesh(mesh), [x.numel()], ["S(0)"] * mesh.ndim)
                lacks = x.numel() - layout.local_shape(dist.get_rank())[0]
                if step > 0:  # in step 0 the ranks also compare their saved activations
                    assert meter.received_bytes == LAYERS * times * 4 * lacks
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "mesh_shape, reentrant",
    [((1,), None), ((2,), True), ((3,), None), ((4,), False), ((2, 2), None), ((7,), False)],
    ids=str,
)
def test_bits_equal_the_uncut_model(pool: Pool, mesh_shape: tuple[int, ...], reentrant: bool | None) -> None:
    pool.run(_as_uncut, torch.Size(mesh_shape).numel(), mesh_shape, reentrant)


def kept_bytes(forward: Callable[[], Any]) -> int:
    """Returns the bytes that a forward allocates and keeps, measured by the profiler."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = forward()
    events = profile.profiler.kineto_results.events()
    del result
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def _memory() -> None:
    """With recomputation a forward keeps only the inputs of the layers, or this rank's part if they are cut."""
    world = dist.get_world_size()
    rows = 1000
    found = {}
    for name, mesh in (("cut", get_mesh((world,))), ("uncut", None)):
        model = Model(mesh, False)

        def forward(model: Model = model) -> Any:
            return model(batch(0, rows).requires_grad_()).square().sum()

        forward().backward()
        found[name] = kept_bytes(forward)
    size = rows * 2 * WIDTH * 4
    assert found["uncut"] >= LAYERS * size
    # The caller keeps the model's input. The result stays too, because its square was taken.
    saved = found["uncut"] - found["cut"]
    expected = LAYERS * size * (world - 1) / world - size
    assert abs(saved - expected) < 4096, (found, size)


@pytest.mark.cpu_only("the profiler counts the host's memory")
def test_memory_between_forward_and_backward(pool: Pool) -> None:
    pool.run(_memory, 4)


def _gather_order() -> None:
    """The first backward gathers on demand and records the order. Later ones gather one activation ahead."""
    log: list[tuple[str, int]] = []

    class Logged(activations._ShardedActivation):
        def start_gather(self) -> None:
            if self._gathered is None:
                log.append(("start", self.index))
            super().start_gather()

        def unpack(self, sequence: Any) -> torch.Tensor:
            log.append(("need", self.index))
            return super().unpack(sequence)

    mesh = get_mesh((2,))
    plain = activations._ShardedActivation
    activations._ShardedActivation = Logged  # type: ignore[misc]

    def step() -> list[str]:
        log.clear()
        xs = [batch(i).requires_grad_() for i in range(4)]
        with sw.fsdp.checkpoint_cut(mesh, *xs, min_bytes=0):
            ys = [x.sin() for x in xs]
        torch.stack(ys).sum().backward()
        assert all(torch.equal(x.grad, x.detach().cos()) for x in xs if x.grad is not None)
        return [f"{what} {number}" for what, number in log]

    try:
        first = step()
        order = [int(line[-1]) for line in first if line.startswith("need")]
        assert sorted(order) == [0, 1, 2, 3]
        a, b, c, d = order
        assert first == [f"{what} {i}" for i in order for what in ("need", "start")]
        ahead = [f"need {a}", f"start {a}", f"start {b}", f"need {b}", f"start {c}", f"need {c}", f"start {d}"]
        assert step() == [*ahead, f"need {d}"]
        # A backward in another order gathers only the activations that it needs.
        log.clear()
        xs = [batch(i).requires_grad_() for i in range(4)]
        with sw.fsdp.checkpoint_cut(mesh, *xs, min_bytes=0):
            ys = [x.sin() for x in xs]
        ys[b].sum().backward()
        assert log == [("need", b), ("start", b)], "it does not begin as recorded"
        ys[a].sum().backward()
        assert torch.equal(xs[a].grad, xs[a].detach().cos()), "later ones still come when needed"
    finally:
        activations._ShardedActivation = plain  # type: ignore[misc]
    # Two forwards before their backwards, and forwards without a backward.
    model, uncut = Model(mesh), Model()
    for _ in range(3):
        results = []
        for each in (model, uncut):
            x, y, z = (batch(i).requires_grad_() for i in range(3))
            first_loss, second_loss = each(x).sum(), each(y).sum()
            first_loss.backward()
            third_loss = each(z).sum()
            each(x.detach())
            second_loss.backward()
            third_loss.backward()
            results.append([x.grad, y.grad, z.grad, *(p.grad.clone() for p in each.parameters())])
        assert all(map(torch.equal, *results))
    on = activations._meshes.get((mesh, groups.key_of_mesh(mesh)))
    assert on is not None
    for _ in range(20):
        model(batch(0).requires_grad_())
        assert len(on._current._held) <= on.longest, "forwards without backwards do not pile up"


def test_gathers_one_ahead_in_the_recorded_order(pool: Pool) -> None:
    pool.run(_gather_order, 2)


def _dtensors() -> None:
    """Replicated DTensors are cut. Parameters and tensors that differ between ranks are kept."""
    mesh = get_mesh((2, 2))
    b = mesh["b"]
    full_batch = batch(0, 4)
    weight = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(5)).to(meshes.device)
    results = []
    for is_cut in (True, False):
        x = distribute_tensor(full_batch, mesh, [Shard(0), Replicate()]).requires_grad_()
        w = nn.Parameter(distribute_tensor(weight, mesh, [Replicate(), Replicate()]))
        v = nn.Parameter(distribute_tensor(weight, mesh, [Replicate(), Shard(0)]))
        sw.reset_stats()
        if is_cut:
            with sw.fsdp.checkpoint_cut(b, min_bytes=0):
                y = F.linear(x.sin(), w).sin() * F.linear(x, v).redistribute(placements=[Shard(0), Replicate()])
        else:
            y = F.linear(x.sin(), w).sin() * F.linear(x, v).redistribute(placements=[Shard(0), Replicate()])
        cut = sw.stats()["activations_cut"]
        y.square().sum().backward()
        # Cut: x, sin(x), the first product and its sine, and the second product.
        assert cut == (5 if is_cut else 0) and sw.stats()["activation_gathers"] == cut
        results.append([g.to_local() for g in (y.detach(), x.grad, w.grad, v.grad)])
    assert all(map(torch.equal, *results))
    plain = torch.ones(3, 2, device=meshes.device, requires_grad=True)
    with sw.fsdp.checkpoint_cut(b, min_bytes=0):
        plain.sin().sum().backward()
    with sw.fsdp.checkpoint_cut(b, plain, min_bytes=25):
        plain.sin().sum().backward()
    assert sw.stats()["activations_cut"] == 0, "neither named, nor large enough"
    sharded = distribute_tensor(full_batch, mesh, [Replicate(), Shard(0)])
    assert isinstance(sharded, DTensor)
    with pytest.raises(ValueError, match=r"tensors\[1\] must be a DTensor that is replicated over .*, got"):
        sw.fsdp.checkpoint_cut(b, plain, sharded)
    with pytest.raises(ValueError, match=r"tensors\[0\] must be a plain torch.Tensor, got a list"):
        sw.fsdp.checkpoint_cut(b, [plain])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_bytes must be an integer of at least 0, got -1"):
        sw.fsdp.checkpoint_cut(b, min_bytes=-1)
    with pytest.raises(ValueError, match=r"mesh must be a mesh that contains this rank \(\d\), got None"):
        sw.fsdp.checkpoint_cut(None)  # type: ignore[arg-type]


def test_replicated_dtensors_are_cut(pool: Pool) -> None:
    pool.run(_dtensors, 4)


def _restored_memory() -> None:
    """Saved tensors keep strides, dtype and values, even if the original was overwritten since."""
    mesh = get_mesh((3,))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        base = batch(1, 4, dtype).requires_grad_()
        for view in (
            lambda t: t,
            lambda t: t.mT[1:],
            lambda t: t[:, :, ::2],
            lambda t: t[0, 0].expand(2, WIDTH),
            lambda t: t[:0],
            lambda t: t.flatten()[3],
        ):
            seen: list[torch.Tensor] = []

            class Save(torch.autograd.Function):
                @staticmethod
                def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                    ctx.save_for_backward(tensor)
                    return tensor.sum()

                @staticmethod
                def backward(ctx: Any, *gradients: torch.Tensor, seen: list[torch.Tensor] = seen) -> torch.Tensor:
                    seen.extend(ctx.saved_tensors)
                    return gradients[0].expand(ctx.saved_tensors[0].shape)

            given = view(base)
            with sw.fsdp.checkpoint_cut(mesh, given, min_bytes=0):
                loss = Save.apply(given)
            expected = given.detach().clone()
            loss.backward()
            assert torch.equal(seen[0], expected)
            assert seen[0].stride() == given.stride() and seen[0].dtype == dtype
    x = batch(2)
    scale = torch.ones_like(x, requires_grad=True)
    with sw.fsdp.checkpoint_cut(mesh, x, min_bytes=0):
        loss = (x * scale).sum()
    before = x.clone()
    x.zero_()
    loss.backward()
    assert torch.equal(scale.grad, before)


def test_strides_dtypes_and_values_are_restored(pool: Pool) -> None:
    pool.run(_restored_memory, 3)


def _written_in_the_block(is_dtensor: bool) -> None:
    """A tensor saved after an in-place write is distinct from the one saved before."""
    mesh, full_batch = get_mesh((2,)), batch(0)
    x = distribute_tensor(full_batch.clone(), mesh, [Replicate()]) if is_dtensor else full_batch.clone()
    first, second = (torch.ones_like(x).requires_grad_() for _ in range(2))
    with sw.fsdp.checkpoint_cut(mesh, *([] if is_dtensor else [x]), min_bytes=0):
        before = (first * x).sum()
        with torch.no_grad():
            x.mul_(3)
        after = (second * x).sum()
    (before + after).backward()
    found = [p.grad.to_local() if is_dtensor else p.grad for p in (first, second)]  # type: ignore[union-attr, attr-defined]
    assert torch.equal(found[0], full_batch) and torch.equal(found[1], 3 * full_batch)


@pytest.mark.parametrize("is_dtensor", [False, True])
def test_writes_inside_the_block(pool: Pool, is_dtensor: bool) -> None:
    pool.run(_written_in_the_block, 2, is_dtensor)


def _differing_activations() -> None:
    mesh = get_mesh((2, 2))
    x = batch(0, 3 + (dist.get_rank() == 2)).requires_grad_()
    with sw.fsdp.checkpoint_cut(mesh, x, min_bytes=0):
        loss = x.sin().sum()
    with pytest.raises(
        ValueError, match=r"(?s)sw.fsdp.checkpoint_cut: .* saved different .* on ranks \[0, 1, 3\]; .* on ranks \[2\]"
    ):
        loss.backward()
    if meshes.device != "cpu":
        return
    x = batch(0) + (dist.get_rank() == 3)
    sw.debug.check_ranks(timeout_seconds=20)
    try:
        cut = sw.fsdp.checkpoint_cut(mesh, x.requires_grad_(), min_bytes=0)
        with pytest.raises(RuntimeError, match="cut of an activation: the ranks differ"), cut:
            x.sin()
    finally:
        sw.debug.check_ranks(False)


def test_differing_activations_raise(pool: Pool) -> None:
    pool.run(_differing_activations, 4)


def _with_sharded_weights() -> None:
    """Weights are sharded over one mesh dim, activations over the other. Layers are recomputed."""
    mesh = get_mesh((2, 2))
    results = []
    for cut in (mesh["b"], None):
        model = Model(cut, False)
        for layer in model.layers:
            sw.fully_shard(layer, mesh=mesh["a"])
        sw.fully_shard(model, mesh=mesh["a"])
        found = []
        for step in range(4):
            x = batch(10 * step + mesh.get_local_rank("a")).requires_grad_()
            model(x).square().sum().backward()
            assert x.grad is not None
            found += [x.grad, *(p.grad.to_local().clone() for p in model.parameters())]
        results.append(found)
    assert all(map(torch.equal, *results))


def test_activations_and_weights_cut_over_different_dims(pool: Pool) -> None:
    pool.run(_with_sharded_weights, 4)


def _without_gradients() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = batch(0)
            with sw.fsdp.checkpoint_cut(get_mesh((2,)), x, min_bytes=0):
                y = x.sin()
        assert torch.equal(y, x.sin())
    with sw.fsdp.checkpoint_cut(get_mesh((2,)), x, min_bytes=0):  # an inference tensor in a block outside of the mode
        z = x.sin()
    assert torch.equal(y, z)


def test_blocks_without_gradients_compute(pool: Pool) -> None:
    pool.run(_without_gradients, 2)
