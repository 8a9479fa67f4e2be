"""Trains torchtitan's debug models in its own trainer, with shardwright and without, on four Gloo ranks."""

# ruff: noqa: E402  (imports follow importorskip)

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

if torch.__version__ < "2.14":
    pytest.skip(
        "torchtitan 0.3 trains with torch 2.14 and newer: older FSDP2 refuses its plain weights",
        allow_module_level=True,
    )
spmd = pytest.importorskip("spmd_types")
pytest.importorskip("torchtitan")

from torchtitan.distributed.parallel_dims import MeshAxisName, SpmdLayout
from torchtitan.distributed.spmd_types import spmd_validate_redistributions
from torchtitan.protocols.sharding import ShardingConfig

import shardwright as sw
from pool import Pool
from shardwright.integrations.torchtitan import llama3
from shardwright.integrations.torchtitan.parallelize import check_redistributes, with_our_functions
from shardwright.spmd.redistributes import redistribute
from titan import make_assets, train

DP, CP, TP = MeshAxisName.DP, MeshAxisName.CP, MeshAxisName.TP
TYPES = (spmd.R, spmd.I, spmd.P, spmd.S(0), spmd.S(-1))


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchtitan")
    make_assets(folder)
    return folder


def _compare(assets: Path, name: str, config: str, *arguments: str, **options: Any) -> dict[str, Any]:
    """Trains with torchtitan alone and with shardwright, and compares losses and gradient norms. Returns ours."""
    stock = train(assets, name, config, *arguments, **options)
    ours = train(assets, f"shardwright.integrations.torchtitan.{name}", config, *arguments, **options)
    assert len(ours["losses"]) == options.get("steps", 20)
    assert set(stock["calls"]) == {0}
    torch.testing.assert_close(ours["losses"], stock["losses"], rtol=1e-5, atol=0)
    torch.testing.assert_close(ours["norms"], stock["norms"], rtol=1e-3, atol=0)
    assert ours["losses"][-1] < ours["losses"][0] - 0.2
    return ours


def _per_step(ours: dict[str, Any], counter: str) -> int:
    """Returns how often the last step counted."""
    return int(ours[counter][-1] - ours[counter][-2])


@pytest.mark.release
def test_llama_with_sharded_weights(assets: Path) -> None:
    ours = _compare(assets, "llama3", "llama3_debugmodel")
    assert _per_step(ours, "calls") > 2 * 6  # a gather and a reduction for each of six layers


@pytest.mark.release
def test_llama_with_tensor_parallelism(assets: Path) -> None:
    ours = _compare(assets, "llama3", "llama3_debugmodel", "--parallelism.tensor_parallel_degree", "2")
    # In each of six layers two gathers of the sequence and two reductions, and one of each around the layers. Each has
    # one move in the forward and one in the backward.
    assert _per_step(ours, "calls") >= 2 * (4 * 6 + 2)


@pytest.mark.release
def test_llama_without_sequence_parallelism(assets: Path) -> None:
    arguments = ["--parallelism.tensor_parallel_degree", "4", "--parallelism.no-enable-sequence-parallel"]
    _compare(assets, "llama3", "llama3_debugmodel", *arguments, steps=5, layers=2)


@pytest.mark.release
def test_fused_linears_on_cpu(assets: Path) -> None:
    """torchtitan's own fused layers need CUDA, so the comparison is with its layers that are not fused."""
    arguments = ["--parallelism.tensor_parallel_degree", "2"]
    stock = train(assets, "llama3", "llama3_debugmodel", *arguments, steps=5, layers=2)
    name = "shardwright.integrations.torchtitan.llama3"
    ours = train(assets, name, "llama3_debugmodel_dist_gemm", *arguments, steps=5, layers=2)
    torch.testing.assert_close(ours["losses"], stock["losses"], rtol=1e-5, atol=0)
    assert _per_step(ours, "products") >= 2 * 2 * 4  # in each of two layers four products, forward and backward


@pytest.mark.release
def test_qwen_experts(assets: Path) -> None:
    arguments = ["--parallelism.expert_parallel_degree", "2"]
    ours = _compare(assets, "qwen3", "qwen3_moe_debug", *arguments, steps=5, layers=2)
    assert _per_step(ours, "dispatches") == 2 * 2  # two layers, whose forward is run again in the backward


def test_deepseek_experts_and_tensor_parallelism(assets: Path) -> None:
    arguments = ["--parallelism.expert_parallel_degree", "4", "--parallelism.tensor_parallel_degree", "2"]
    ours = _compare(assets, "deepseek_v3", "deepseek_v3_debugmodel", *arguments, steps=5, layers=2)
    assert _per_step(ours, "dispatches") == 2  # one of the two layers has experts


# ---- redistributes


def _part(full: torch.Tensor, types: tuple[Any, ...], mesh: DeviceMesh) -> torch.Tensor:
    """Returns this rank's local tensor. Pending sums have a quarter on the first rank and the rest on the second."""
    for dim, each in enumerate(types):
        at = mesh.get_local_rank(dim)
        if isinstance(each, spmd.Shard):
            full = full.chunk(2, each.dim)[at]
        elif each is spmd.P:
            full = full * (0.75 if at else 0.25)
    return full.clone()


def _summed(local: torch.Tensor, types: tuple[Any, ...], mesh: DeviceMesh) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Returns the tensor without pending sums, and its types."""
    local = local.detach().clone()
    for dim, each in enumerate(types):
        if each is spmd.P:
            dist.all_reduce(local, group=mesh.get_group(dim))
    return local, tuple(spmd.R if each is spmd.P else each for each in types)


def _all_pairs() -> tuple[int, int]:
    """Compares all moves on two axes, and their gradients, with the global tensor. Returns the calls of both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(4.0 * 8, dtype=torch.float64).view(4, 8)
    gradient = full.flip(0).contiguous()
    forward = backward = 0
    for src, dst in itertools.product(itertools.product(TYPES, repeat=2), repeat=2):
        if src[1] == dst[1] and isinstance(src[1], spmd.Shard) and (src[0] == src[1]) != (dst[0] == src[1]):
            continue  # an axis changes that is not the innermost one of its tensor dim
        x = _part(full, src, mesh).requires_grad_()
        sw.reset_stats()
        y = redistribute(x, mesh, dict(zip(("dp", "tp"), src)), dict(zip(("dp", "tp"), dst)))
        forward += sw.stats()["calls"]
        found, types = _summed(y, dst, mesh)
        assert torch.equal(found, _part(full, types, mesh)), (src, dst)
        if src == dst:
            assert y is x
            continue
        of_src, of_dst = (tuple(each.backward_type() for each in types) for types in (src, dst))
        sw.reset_stats()
        y.backward(_part(gradient, of_dst, mesh))
        backward += sw.stats()["calls"]
        assert x.grad is not None
        found, types = _summed(x.grad, of_src, mesh)
        assert torch.equal(found, _part(gradient, types, mesh)), (src, dst)
    with pytest.raises(ValueError, match=r"dst must be types of mesh dims that src has too, \['tp'\], got \['tpp'\]"):
        redistribute(full, mesh, {"tp": spmd.R}, {"tpp": spmd.S(0)})
    return forward, backward


def test_redistributes_on_several_axes(pool: Pool) -> None:
    forward, backward = pool.run(_all_pairs, 4, timeout_seconds=600)[0]
    assert forward > 300 and backward > 300


def _input(src: SpmdLayout, dst: SpmdLayout) -> ShardingConfig:
    return ShardingConfig(in_src_shardings={"x": src}, in_dst_shardings={"x": dst})


SEQUENCE = SpmdLayout({DP: spmd.V, CP: spmd.V, TP: spmd.V}, (DP, (CP, TP), None))


def test_several_axes_may_change() -> None:
    config = _input(SEQUENCE, SpmdLayout({DP: spmd.S(0), CP: spmd.R, TP: spmd.R}))
    with pytest.raises(ValueError, match="multiple mesh axes"):
        spmd_validate_redistributions(config)
    check_redistributes(config)


REFUSED: dict[str, Callable[[], SpmdLayout]] = {
    "innermost": lambda: SpmdLayout({DP: spmd.V, CP: spmd.R, TP: spmd.V}, (DP, TP, None)),
    "innermost, in the order": lambda: SpmdLayout({DP: spmd.R, CP: spmd.V, TP: spmd.V}, (None, TP, CP)),
    "R, I, P or S": lambda: SpmdLayout({DP: spmd.S(0), CP: spmd.V, TP: spmd.R}),
    "those of its source": lambda: SpmdLayout({DP: spmd.S(0), CP: spmd.S(1)}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_redistributes(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_redistributes(_input(SEQUENCE, REFUSED[message]()))


# ---- parameters and configurations


def _typed_parameters() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    class Dims:
        shard, replicate = "dp", None

    def layer(**types: Any) -> nn.Module:
        made = nn.Linear(4, 4, bias=False)
        with spmd.set_current_mesh(mesh):
            spmd.assert_type(made.weight, types)
        return made

    with pytest.raises(ValueError, match="dp_mesh_dims must be given, because weight has types"):
        sw.fully_shard(layer(dp=spmd.R, tp=spmd.S(0)), mesh=mesh["dp"])
    with pytest.raises(ValueError, match="weight must be typed on mesh dim 1"):
        sw.fully_shard(layer(dp=spmd.R), mesh=mesh, dp_mesh_dims=Dims)
    with pytest.raises(ValueError, match="weight must be of type R on data-parallel axes"):
        sw.fully_shard(layer(dp=spmd.I, tp=spmd.R), mesh=mesh, dp_mesh_dims=Dims)
    sharded = sw.fully_shard(layer(dp=spmd.R, tp=spmd.S(0)), mesh=mesh, dp_mesh_dims=Dims)
    assert sharded.weight.shape == (8, 4) and sharded.weight.to_local().shape == (2, 4)
    out = sharded(torch.ones(1, 4))
    assert type(out) is torch.Tensor and out.shape == (1, 4)


def test_typed_parameters(pool: Pool) -> None:
    pool.run(_typed_parameters, 4)


def test_configurations_of_a_module() -> None:
    assert "llama3_debugmodel" in dir(llama3) and "Trainer" not in dir(llama3)
    assert llama3.llama3_debugmodel().model_spec.parallelize_fn.__name__ == "parallelize_llama"
    with pytest.raises(AttributeError, match="no function 'other'"):
        llama3.other  # noqa: B018


REFUSED_OPTIONS: dict[str, dict[str, Any]] = {
    "disable_cuda_graphs must be True": {"disable_cuda_graphs": False},
    "components must be without 'model' with tensor or expert": {"tp_enabled": True},
    r"got \['model'\]": {"ep_enabled": True},
}


@pytest.mark.parametrize("message", REFUSED_OPTIONS)
def test_refused_options(message: str) -> None:
    chosen = {"disable_cuda_graphs": True, "enable": True, "components": ["model"], "tp_enabled": False}
    every = SimpleNamespace(**{**chosen, "ep_enabled": False, "cp_enabled": False, **REFUSED_OPTIONS[message]})
    with pytest.raises(ValueError, match=message):
        with_our_functions(nn.Identity())(parallel_dims=every, training=every, compile_config=every)
