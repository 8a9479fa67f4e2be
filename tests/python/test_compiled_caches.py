"""What PyTorch keeps of compiled code on disk."""

from __future__ import annotations

import os
import pathlib

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, Partial, Shard

import shardwright as sw
from meshes import get_mesh
from pool import run_isolated


def _again(folder: str) -> dict[str, int]:
    """Ranks share the folder. What Dynamo sees is the same on all of them; what becomes of it is not."""
    mesh = get_mesh((2,))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    with sw.enabled(strict=True):
        compiled = torch.compile(lambda x: x.redistribute(placements=[Shard(0)]) * 2, fullgraph=True)
        local = torch.arange(15.0).view(3, 5)
        x = DTensor.from_local(local, mesh, [Partial()], run_check=False)
        result = compiled(x).to_local()
    assert torch.equal(result, local.chunk(2)[dist.get_rank()] * 4)
    return dict(counters["aot_autograd"])


def test_ranks_do_not_take_each_others_graphs_from_the_disk(tmp_path: pathlib.Path) -> None:
    for run in range(2):
        for outcome in run_isolated(_again, 2, str(tmp_path), timeout_seconds=300):
            assert outcome.ok, outcome.error
            assert outcome.value.get("autograd_cache_hit", 0) == run


def test_tag_is_taken_back() -> None:
    before = torch.compiler.config.cache_key_tag
    with sw.enabled(), sw.enabled():
        assert torch.compiler.config.cache_key_tag.count("shardwright rank") == 1
    assert torch.compiler.config.cache_key_tag == before
