"""Errors of `sw.attention` about invalid arguments are the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import shardwright as sw
from meshes import device, get_mesh
from pool import Pool
from shardwright.attention import scaled_dot_product_attention

SIZE = 12


def _entered(mesh: Any, **arguments: Any) -> None:
    with sw.attention.context_parallel(mesh, **arguments):
        pass


def _invalid_arguments() -> None:
    mesh = get_mesh((2,))
    local = torch.zeros(1, 2, SIZE // 2, 4, device=device)
    buffer = torch.arange(SIZE, device=device)
    layouts = "must be 'contiguous', 'zigzag' or a placement of dim 2, got"

    def attend(**arguments: Any) -> None:
        scaled_dot_product_attention(local, local, local, size=SIZE, **arguments)

    def move(*ends: Any, tensor: Any = local, dim: Any = 2, size: Any = SIZE) -> None:
        sw.attention.redistribute_sequence(tensor, *ends, dim=dim, size=size)

    cases: list[tuple[Callable[[], None], str]] = [
        (lambda: attend(layout="S(1)"), f"layout {layouts} 'S.1.'"),
        (lambda: attend(layout=Shard(1)), f"layout {layouts} Shard.dim=1."),
        (lambda: attend(layout="R"), f"layout {layouts} 'R'"),
        (lambda: attend(dropout_p=0.1), "dropout_p must be 0, got 0.1"),
        (lambda: sw.attention.explain(local, local, local, size=SIZE, dropout_p=1), "dropout_p must be 0, got 1"),
        (lambda: move("zag", "zigzag"), f"src {layouts} 'zag'"),
        (lambda: move("zigzag", Shard(0)), f"dst {layouts} Shard.dim=0."),
        (lambda: move("zigzag", "whole", dim=4), r"dim must be in \[-4, 3\], got 4"),
        (lambda: move("zigzag", "whole", dim=2.0), "dim must be an integer, got 2.0"),
        (lambda: move("zigzag", "whole", size=None), "size must be an integer, got None"),
        (lambda: move("zigzag", "whole", tensor=[1.0]), "local must be a plain torch.Tensor, got a list"),
        (lambda: _entered(dist.group.WORLD), "mesh must be a DeviceMesh of one dim, got a ProcessGroup"),
        (lambda: _entered(mesh, size=SIZE, method="rings"), "method must be one of auto, ring, .*, got 'rings'"),
        (lambda: _entered(mesh, buffers=[buffer], buffer_seq_dims=1), "buffer_seq_dims must be a list of dims, got 1"),
        (lambda: _entered(mesh, buffers=[buffer], buffer_seq_dims=[1]), r"buffer_seq_dims must be in \[-1, 0\], got 1"),
        (
            lambda: sw.attention.context_parallel_unshard(mesh, [local], [2, 2], size=SIZE),  # type: ignore[arg-type, return-value]
            "seq_dims must be of length 1, one dim per buffer, got 2",
        ),
    ]
    for call, match in cases:
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match=r"explain\(\) got an unexpected keyword argument 'methods'"):
        sw.attention.explain(local, local, local, size=SIZE, methods="ring")
    assert torch.equal(buffer, torch.arange(SIZE, device=device))


def test_invalid_arguments_raise_on_every_rank(pool: Pool) -> None:
    pool.run(_invalid_arguments, 2)


def _layouts_as_strings() -> None:
    """A layout may be a placement of dim 2 or its string, and applies to the sequence dim if that is another dim."""
    full = torch.arange(SIZE * 3, device=device).view(SIZE, 3)
    rank = dist.get_rank()
    local = full.chunk(2)[rank]
    for layout in ("Pieces(2,0-2+9-12:2-9)", sw.placements.Pieces(2, [[(0, 2), (9, 12)], [(2, 9)]])):
        there = sw.attention.redistribute_sequence(local, "contiguous", layout, dim=0, size=SIZE)
        assert torch.equal(there, torch.cat([full[:2], full[9:]]) if rank == 0 else full[2:9])
        assert torch.equal(sw.attention.redistribute_sequence(there, layout, "whole", dim=-2, size=SIZE), full)


def test_layouts_given_as_strings(pool: Pool) -> None:
    pool.run(_layouts_as_strings, 2)
