"""PyTorch's on-disk cache of compiled code, and graphs captured by tools other than torch.compile."""

from __future__ import annotations

import contextlib
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors, aot_function
from torch._guards import TracingContext, tracing
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

import shardwright as sw
from meshes import get_mesh
from pool import Pool, run_isolated


def _compile_and_count(folder: str) -> dict[str, int]:
    """Compiles with a cache folder that ranks share. Dynamo's graph is equal on all ranks, the compiled code is not."""
    mesh = get_mesh((2,))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    with sw.enabled(strict=True):
        compiled = torch.compile(lambda x: x.redistribute(placements=[Shard(0)]), fullgraph=True)
        local = torch.arange(15.0).view(3, 5)
        x = DTensor.from_local(local, mesh, [Partial()], run_check=False)
        result = compiled(x).to_local()
    assert torch.equal(result, local.chunk(2)[dist.get_rank()] * 2)
    return dict(counters["aot_autograd"])


def test_ranks_do_not_share_graphs_cached_on_disk(tmp_path: pathlib.Path) -> None:
    for run in range(2):
        for outcome in run_isolated(_compile_and_count, 2, str(tmp_path), timeout_seconds=300):
            assert outcome.ok, outcome.error
            if not outcome.value.get("autograd_cache_bypass"):  # torch 2.11 does not cache graphs with DTensors
                assert outcome.value.get("autograd_cache_hit", 0) == run


def test_cache_tag_is_restored() -> None:
    before = torch.compiler.config.cache_key_tag
    with sw.enabled(), sw.enabled():
        assert torch.compiler.config.cache_key_tag.count("shardwright rank") == 1
    assert torch.compiler.config.cache_key_tag == before


def test_cache_tag_with_two_threads() -> None:
    """One thread enables, another disables. In torch 2.15 each thread has its own tag."""

    def tag_when_enabled() -> str:
        sw.enable()
        return str(torch.compiler.config.cache_key_tag)

    with ThreadPoolExecutor(1) as other:
        for _ in range(2):
            assert other.submit(tag_when_enabled).result(60).count("shardwright rank") == 1
            sw.disable()


def _captured() -> None:
    """Users of captured graphs expect PyTorch's collectives in them."""
    mesh = get_mesh((4,))
    graphs: list[str] = []

    def function(local: torch.Tensor) -> torch.Tensor:
        x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        return x.redistribute(placements=[Replicate()]).to_local()

    def keep(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(str(module.graph))
        return module

    local = torch.full((2, 3), float(dist.get_rank()))
    sw.reset_stats()
    with sw.enabled(strict=True):
        graphs.append(str(make_fx(function, tracing_mode="fake")(local).graph))
        result = aot_function(function, keep)(local)
        exported = dynamo_graph_capture_for_export(function)(local)
        with contextlib.ExitStack() as stack, tracing(TracingContext(exported.meta["fake_mode"])):
            joint = aot_export_joint_with_descriptors(stack, exported, (local,))
            graphs.append(str(joint.graph_module.graph))
    assert torch.equal(result[::2, 0], torch.arange(4.0))
    for graph in graphs:
        assert "_c10d_functional.all_gather_into_tensor" in graph and "shardwright" not in graph, graph
    assert len(graphs) == 3 and sw.stats()["fallbacks"] == 0


def test_captured_graphs_hold_torch_collectives(pool: Pool) -> None:
    pool.run(_captured, 4)
