"""`sw.fully_shard` as a replacement of FSDP2: PyTorch's own functions, registered forward methods, the meta device,
conversions, and all-gather extensions of weights."""

from __future__ import annotations

import dataclasses
import functools
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

import shardwright as sw
from compilers import MODES, compiled
from fsdp_models import Mlp, batch, flat_fully_shard, full, loss_of, shard, whole_loss
from meshes import device, get_mesh
from pool import Pool


def test_every_method_of_fsdp2_exists() -> None:
    names = {name for name, value in vars(FSDPModule).items() if callable(value)}
    assert "reshard" in names and names <= set(vars(sw.fsdp.ShardedModule)), names - set(vars(sw.fsdp.ShardedModule))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(10, 10)
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))

    def encode(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        x = self.embed(x)
        if fails:
            raise ValueError("asked for")
        return self.layers[0](x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x) + self(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.embed(x).tanh())


def _registered_methods(mode: str) -> None:
    mesh = get_mesh((2,))
    unsharded: Any = Encoder()
    sharded: Any = Encoder()
    for layer in sharded.layers:
        sw.fully_shard(layer, mesh=mesh)
    sw.fully_shard(sharded, mesh=mesh)
    assert isinstance(sharded, FSDPModule) and isinstance(sharded.layers[0], FSDPModule)
    for method in ("encode", "score"):
        register_fsdp_forward_method(sharded, method)
    run = compiled(sharded, mode, sharded.layers)
    for step, method in enumerate(["encode", "score", "forward", "encode", "encode", "score", "score"]):
        if step in (2, 5):
            with pytest.raises(ValueError, match="asked for"):
                run.encode(batch(step), fails=True)
        loss = (run if method == "forward" else getattr(run, method))(batch(step)).square().mean()
        losses = [getattr(unsharded, method)(batch(step, rank)).square().mean() for rank in range(2)]
        torch.testing.assert_close(loss, losses[dist.get_rank()])
        loss.backward()
        torch.stack(losses).mean().backward()
        for p, q in zip(sharded.parameters(), unsharded.parameters(), strict=True):
            assert isinstance(p, DTensor) and (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                torch.testing.assert_close(full(p.grad), q.grad)
            p.grad = q.grad = None


@MODES
def test_registered_methods_train_and_may_fail(pool: Pool, mode: str) -> None:
    pool.run(_registered_methods, 2, mode)


def _sharded_within_replicate() -> None:
    """torch's `replicate` leaves sharded modules alone. Stock FSDP2 rejects models that contain them."""
    mesh = get_mesh((2,))
    unsharded, sharded = (nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10)) for _ in range(2))
    sharded.load_state_dict(unsharded.state_dict())
    for p in (*sharded.parameters(), *unsharded.parameters()):
        dist.broadcast(p.detach(), 0)
    sw.fully_shard(sharded[2], mesh=mesh)
    replicate(sharded)
    for step in range(2):
        loss_of(sharded, batch(step)).backward()
        whole_loss(unsharded, step).backward()
        for p, q in zip(sharded.parameters(), unsharded.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad)
            p.grad = q.grad = None
    model: Any = nn.Sequential(replicate(nn.Linear(2, 2)), nn.Linear(2, 2))
    sw.fully_shard(model, mesh=mesh)
    assert not isinstance(model[0].weight, DTensor) and isinstance(model[1].weight, DTensor)
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        stock_fully_shard(nn.Sequential(sw.fully_shard(nn.Linear(2, 2), mesh=mesh), nn.Linear(2, 2)), mesh=mesh)


@pytest.mark.cpu_only("torch's replicate on Gloo")
def test_replicate_leaves_sharded_modules_alone(pool: Pool) -> None:
    pool.run(_sharded_within_replicate, 2)


class Layers(nn.ModuleList):
    """A container that has a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x).tanh()
        return x


def _unsharded_weights_are_read_after_the_forward() -> None:
    """The loss multiplies by the last weight itself, as fused losses do."""
    unsharded, sharded = (Layers(nn.Linear(10, 10) for _ in range(3)) for _ in range(2))
    sharded.load_state_dict(unsharded.state_dict())
    for p in (*sharded.parameters(), *unsharded.parameters()):
        dist.broadcast(p.detach(), 0)
    sw.fully_shard(sharded[0], mesh=get_mesh((2,)))
    sw.fully_shard(sharded, mesh=get_mesh((2,)), reshard_after_forward=False)
    for step in range(3):
        with torch.no_grad():
            sharded(batch(step))
        assert all(isinstance(p, DTensor) for p in sharded.parameters())
        x = sharded(batch(step))
        assert not isinstance(sharded[2].weight, DTensor) and isinstance(sharded[0].weight, DTensor)
        (x @ sharded[2].weight).square().mean().backward()
        torch.stack(
            [(unsharded(batch(step, r)) @ unsharded[2].weight).square().mean() for r in range(2)]
        ).mean().backward()
        for p, q in zip(sharded.parameters(), unsharded.parameters(), strict=True):
            assert isinstance(p, DTensor)
            torch.testing.assert_close(full(p.grad), q.grad)
            p.grad = q.grad = None
    for restore in (sharded.state_dict, sharded.reshard, lambda: loss_of(sharded, batch(0)).backward()):
        sharded(batch(0))
        assert not isinstance(sharded[2].weight, DTensor)
        restore()
        assert isinstance(sharded[2].weight, DTensor)


def test_unsharded_weights_are_read_after_the_forward(pool: Pool) -> None:
    pool.run(_unsharded_weights_are_read_after_the_forward, 2)


def _reduces_on_request(mode: str) -> None:
    """Reduces on request, as pipeline schedules of torch 2.15 do. A hook receives each reduced gradient."""
    mesh = get_mesh((2,))
    sharded: Any = shard(Mlp(), flat_fully_shard, mesh)
    run = compiled(sharded, mode, sharded.layers)
    unsharded, seen = Mlp(), []
    sharded.set_manual_backward_finalization(True)
    sharded.set_post_optim_event(None)  # CPU streams record None
    sharded.layers[0].set_all_reduce_hook(lambda gradient: seen.append(gradient.mul_(2).shape))
    for step in range(3):
        sharded.set_requires_gradient_sync(False)
        sharded.set_reshard_after_backward(False)
        for micro_step in range(2):
            loss_of(run, batch(10 * step + micro_step)).backward()
            whole_loss(unsharded, 10 * step + micro_step).backward()
        assert all(p.grad is None for p in sharded.parameters())
        sharded.set_requires_gradient_sync(True)
        sharded.set_reshard_after_backward(True)
        sharded.finalize_backward(async_op=True).wait()
        assert (
            seen == [p.to_local().shape for p in sharded.layers[0].parameters()] and sharded.finalize_backward() is None
        )
        for (name, p), q in zip(sharded.named_parameters(), unsharded.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad * (2 if name.startswith("layers.0") else 1))
            p.grad = q.grad = None
        seen.clear()


@MODES
def test_finalize_backward_reduces_accumulated_gradients(pool: Pool, mode: str) -> None:
    pool.run(_reduces_on_request, 2, mode)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"placements": lambda p: [Replicate()], "store_placements": lambda p: [Shard(0)]},
    {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
]


def _from_the_meta_device(mode: str) -> None:
    mesh = get_mesh((2,))
    torch.manual_seed(1)
    expected = {name: 0.3 * torch.randn_like(value) for name, value in Mlp().state_dict().items()}
    expected["leave.weight"] = expected["enter.weight"]
    for number, options in enumerate(OPTIONS):
        with torch.device("meta"):
            sharded: Any = Mlp()
        shard(sharded, flat_fully_shard, mesh, **options)
        for weight in (w for m in (sharded, *sharded.layers) for w in m._get_fsdp_state().unit.weights):
            assert weight.part.is_meta and weight.unsharded.untyped_storage().data_ptr() == 0
        run = compiled(sharded, mode, sharded.layers)
        error = r"materialized from meta device .*\['enter.weight', 'enter.bias'"
        # Compilers find two devices while they trace.
        for call, text in (
            (functools.partial(run, batch(0)), "meta" if mode == "model" else error),
            (sharded.unshard, error),
        ):
            with pytest.raises(RuntimeError, match=text):
                call()
        torch._dynamo.reset()
        for _ in range(2):  # frees the fakes of the failed compilation, whose weak references prevent conversions
            gc.collect()
        parts = {}
        for name, p in sharded.state_dict().items():
            local = nn.Parameter(distribute_tensor(expected[name], mesh, p.placements)) if number else None
            parts[name] = local
        if number == 0:
            sharded.to_empty(device=mesh.device_type)
            with torch.no_grad():
                for name, p in sharded.named_parameters():
                    p.copy_(DTensor.from_local(expected[name].to(mesh.device_type), mesh, [Replicate()]))
        else:
            sharded.load_state_dict(parts, assign=True)
            sharded.leave.weight = sharded.enter.weight
        reference: Any = Mlp()
        reference.load_state_dict(expected)
        assert_same_gradients(sharded, reference, options, run)


def assert_same_gradients(sharded: Any, unsharded: Any, options: dict[str, Any], run: Any) -> None:
    """Asserts that gradients are close, with larger tolerances in bfloat16."""
    tolerance = {"rtol": 0.1, "atol": 0.05} if "mp_policy" in options else {"rtol": 1.3e-6, "atol": 1e-5}
    for step in range(2):
        loss_of(run, batch(step)).backward()
        whole_loss(unsharded, step).backward()
        for p, q in zip(sharded.parameters(), unsharded.parameters(), strict=True):
            assert p.grad.dtype == p.dtype
            torch.testing.assert_close(full(p.grad).to(q.dtype), q.grad, **tolerance)
            p.grad = q.grad = None


@pytest.mark.cpu_only("the whole model is on CPU")
@MODES
def test_models_from_the_meta_device_train(pool: Pool, mode: str) -> None:
    pool.run(_from_the_meta_device, 2, mode)


def _converted_between_steps(mode: str) -> None:
    mesh = get_mesh((2,))
    for options in OPTIONS:
        for foreach in (False, True) if mode == "eager" else (True,):
            sharded: Any = shard(Mlp(), flat_fully_shard, mesh, **options)
            unsharded, run = Mlp(), compiled(sharded, mode, sharded.layers)
            use = options["mp_policy"].param_dtype if "mp_policy" in options else None
            for dtype in (torch.float64, torch.float32, torch.float64):
                assert sharded.to(dtype).enter.weight.dtype == dtype and unsharded.to(dtype) is unsharded
                for _ in range(2):
                    x = batch(0).to(dtype)
                    assert run(x).dtype == (use or dtype)
                    run(x).float().square().mean().backward()
                    unsharded(x).float().square().mean().backward()  # for this rank's batch; averaged over ranks below
                    for p, q in zip(sharded.parameters(), unsharded.parameters(), strict=True):
                        dist.all_reduce(q.grad)
                        q.grad /= 2
                        tolerance = {"rtol": 0.1, "atol": 0.1} if use else {"rtol": 1e-4, "atol": 1e-5}
                        torch.testing.assert_close(full(p.grad), q.grad, **tolerance)
                        assert p.grad.dtype == dtype
                    for model in (sharded, unsharded):
                        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=foreach)
                        optimizer.step()
                        optimizer.zero_grad()
    sharded.set_requires_gradient_sync(False)
    loss_of(sharded, batch(0).double()).backward()
    with pytest.raises(RuntimeError, match="converted while the gradient of .* waits for a reduction"):
        sharded.float()(batch(0))


@pytest.mark.cpu_only("float64 and the whole model are on CPU")
@MODES
def test_dtype_conversions_between_steps(pool: Pool, mode: str) -> None:
    pool.run(_converted_between_steps, 2, mode)


def _converted_before_the_first_step(mode: str) -> None:
    """The mesh's device, the dtype, or both, also after a visit to the CPU."""
    mesh, bfloat16 = get_mesh((2,)), torch.bfloat16
    for conversions in (
        ({"device": device},),
        ({"device": "cpu"}, {"device": device}),
        ({"device": device, "dtype": bfloat16},),
    ):
        sharded: Any = shard(Mlp().to(device), flat_fully_shard, mesh)
        run, unsharded = compiled(sharded, mode, sharded.layers), Mlp()
        for conversion in conversions:
            assert sharded.to(**conversion) is sharded
            unsharded.to(conversion.get("dtype"))
        dtype = unsharded.enter.weight.dtype
        assert all(p.dtype == dtype and p.device.type == device for p in sharded.parameters())
        tolerance = {} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.05}
        for step in range(2):
            run(batch(step).to(device, dtype)).float().square().mean().backward()
            losses = [unsharded(batch(step, rank).to(dtype)).float().square().mean() for rank in range(2)]
            torch.stack(losses).mean().backward()
            for p, q in zip(sharded.parameters(), unsharded.parameters(), strict=True):
                torch.testing.assert_close(full(p.grad).cpu(), q.grad, **tolerance)
                p.grad = q.grad = None


@MODES
def test_conversions_before_the_first_step(pool: Pool, mode: str) -> None:
    pool.run(_converted_before_the_first_step, 2, mode)


@dataclasses.dataclass
class Boxed:
    x: torch.Tensor


class Items(dict):
    pass


class ContainerLinear(nn.Linear):
    def forward(self, given: Any) -> Any:
        x = given.x if isinstance(given, Boxed) else given["x"]
        y = super().forward(x)
        return Boxed(y) if isinstance(given, Boxed) else Items(x=y, dtype=x.dtype)


def _casts_in_containers(mode: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    sharded = sw.fully_shard(ContainerLinear(4, 4), mesh=get_mesh((1,)), mp_policy=policy)
    model = compiled(sharded, mode, [sharded])
    x = torch.randn(2, 4)
    assert model(Boxed(x)).x.dtype == torch.float64
    found = model(Items(x=x))
    assert type(found) is Items and (found["x"].dtype, found["dtype"]) == (torch.float64, torch.bfloat16)


@MODES
def test_casts_reach_tensors_in_containers(pool: Pool, mode: str) -> None:
    pool.run(_casts_in_containers, 1, mode)


class SentInHalf(torch.Tensor):
    """A float32 weight that is gathered in bfloat16, together with a second tensor of another dtype."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self.data_ = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.data_ if isinstance(x, cls) else x, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, func(*args, **kwargs))

    def __tensor_flatten__(self) -> Any:
        return ["data_"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, metadata: Any, outer_size: Any, outer_stride: Any) -> Any:
        return SentInHalf(inner["data_"])

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        assert mesh.ndim == 1 and isinstance(module, nn.Linear) and isinstance(mp_policy, MixedPrecisionPolicy)
        rows = -(-outer_size[0] // mesh.size())
        padded = torch.zeros(rows, *outer_size[1:], dtype=torch.bfloat16)
        padded[: self.data_.size(0)] = self.data_
        return (padded, torch.full((3,), mesh.get_local_rank(), dtype=torch.int64)), outer_size

    def fsdp_post_all_gather(self, gathered: Any, size: Any, param_dtype: Any, *, out: Any = None) -> Any:
        weight, ranks = gathered
        assert ranks.unique().tolist() == list(range(ranks.numel() // 3))
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(weight[: size[0]])
            return None
        global_weight = weight[: size[0]].to(param_dtype)
        return global_weight, (*gathered, global_weight)


class Chain(nn.Sequential):
    def __init__(self, width: int, wraps: bool) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(width, width) for _ in range(4)))
        for layer in self if wraps else []:
            layer.weight = nn.Parameter(SentInHalf(layer.weight.detach()))


def _all_gather_extensions(mesh_shape: tuple[int, ...], width: int) -> None:
    """Trains as a model whose weights are rounded to bfloat16 in use, and as FSDP2 if shards are even. FSDP2 rejects
    uneven shards if an extension gathers tensors of other sizes beside the weight."""
    mesh, rounded = get_mesh(mesh_shape), Chain(width, wraps=False)
    sw.reset_stats()
    models: list[Any] = []
    for wrap in (flat_fully_shard, stock_fully_shard) if width % 2 == 0 else (flat_fully_shard,):
        model = Chain(width, wraps=True)
        for layer in model:
            wrap(layer, mesh=mesh)
        models.append(wrap(model, mesh=mesh))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, foreach=False) for model in (*models, rounded)]
    for step in range(4):
        for model in models:
            model(batch(step, width=width)).square().mean().backward()
        masters = [p.detach().clone() for p in rounded.parameters()]
        with torch.no_grad():
            for p in rounded.parameters():
                p.copy_(p.bfloat16() if p.ndim == 2 else p)
        losses = [rounded(batch(step, rank, width=width)).square().mean() for rank in range(mesh.size())]
        torch.stack(losses).mean().backward()
        with torch.no_grad():
            for p, master in zip(rounded.parameters(), masters, strict=True):
                p.copy_(master)
        for model in models:
            for p, q in zip(model.parameters(), rounded.parameters(), strict=True):
                torch.testing.assert_close(full(p.grad), q.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(sw.fsdp.schedule(models[0]).gathers) >= 4 and sw.stats()["unplanned_steps"] == 0


@pytest.mark.cpu_only("compared with stock FSDP2 on Gloo")
@pytest.mark.parametrize(("mesh_shape", "width"), [((2,), 6), ((2, 2), 6), ((2,), 5)])
def test_all_gather_extensions_train_as_stock(pool: Pool, mesh_shape: tuple[int, ...], width: int) -> None:
    pool.run(_all_gather_extensions, 2 * len(mesh_shape), mesh_shape, width)


def give_methods(part: Any) -> None:
    """Gives the extension methods to a shard that is a TwoTensor."""

    def post_all_gather(gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (TwoTensor(*gathered), gathered)

    part.fsdp_pre_all_gather = functools.partial(lambda part, mesh: ((part.a, part.b), None), part)
    part.fsdp_post_all_gather = post_all_gather


def _extensions_of_shards() -> None:
    """The shards, not their subclass, get the extension methods. Gathered weights have the subclass, too."""
    plain, sharded = Chain(6, wraps=False), Chain(6, wraps=False)
    for layer in sharded:
        layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach().clone()))
        layer.bias = None
    sw.fully_shard(sharded, mesh=get_mesh((2,)), reshard_after_forward=False)
    with pytest.raises(RuntimeError, match="must have the methods fsdp_pre_all_gather and .*, got a TwoTensor"):
        sharded(batch(0, width=6))
    for layer in sharded:
        give_methods(layer.weight._local_tensor)
    for layer in plain:
        layer.bias = None
    for step in range(3):
        loss_of(sharded, batch(step, width=6)).backward()
        torch.stack([loss_of(plain, batch(step, rank, width=6)) for rank in range(2)]).mean().backward()
        for p, q in zip(sharded.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad)
            p.grad = q.grad = None


def test_all_gather_extensions_of_shards(pool: Pool) -> None:
    pool.run(_extensions_of_shards, 2)


def _options_with_extensions() -> None:
    mesh = get_mesh((1,))
    for options in (
        {"message_format": torch.bfloat16},
        {"reshard_after_forward": 1},
        {"store_placements": lambda p: [Replicate()]},
        {"shard_placement_fn": lambda p: Shard(1) if p.ndim > 1 else None},
    ):
        model = Chain(4, wraps=True)
        text = (
            "must be None for .* whose fsdp_pre_all_gather|must be sharded along one mesh dim|"
            "0.weight must be sharded along dim 0, because .*, got dim 1"
        )
        with pytest.raises(ValueError, match=text):
            flat_fully_shard(model, mesh=mesh, **options)
        assert not isinstance(model[0].weight, DTensor)


def test_all_gather_extensions_reject_options_for_plain_tensors(pool: Pool) -> None:
    pool.run(_options_with_extensions, 1)
