"""Context parallelism of torchtitan, with our attention: the same losses as without context parallelism."""

# ruff: noqa: E402  (imports follow importorskip)

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

if torch.__version__ < "2.14":
    pytest.skip(
        "torchtitan 0.3 trains with torch 2.14 and newer: older FSDP2 refuses its plain weights",
        allow_module_level=True,
    )
pytest.importorskip("torchtitan")

from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder

from pool import Pool
from shardwright.integrations.torchtitan import attention
from titan import make_assets, train

CP = "--parallelism.context_parallel_degree"
OURS = "shardwright.integrations.torchtitan."
STEPS = 12
LAYERS = 2


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchtitan")
    make_assets(folder, characters=120)  # several documents in each sequence
    return folder


@functools.cache
def _without_context_parallelism(assets: Path, ranks: int, override: str) -> dict[str, Any]:
    """Trains with torchtitan alone. `ranks` is the number of parts of the batch."""
    return train(assets, "llama3", "llama3_debugmodel", steps=STEPS, layers=LAYERS, ranks=ranks, attention=override)


def _compare(assets: Path, batch_parts: int, override: str, ours: dict[str, Any]) -> None:
    """Compares losses, and counts calls: one forward and one backward in each layer of each step."""
    stock = _without_context_parallelism(assets, batch_parts, override)
    assert len(ours["losses"]) == STEPS
    torch.testing.assert_close(ours["losses"], stock["losses"], rtol=1e-5, atol=0)
    torch.testing.assert_close(ours["norms"], stock["norms"], rtol=1e-3, atol=0)
    expected = [LAYERS * step for step in range(1, STEPS + 1)]
    assert ours["attended"] == expected
    assert ours["attended_backward"] == expected
    assert not any(stock["attended"])


def _train(assets: Path, ranks: int, degree: int, *arguments: str, override: str | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {"steps": STEPS, "layers": LAYERS, "ranks": ranks, "attention": override}
    return train(assets, f"{OURS}llama3", "llama3_debugmodel", CP, str(degree), *arguments, **options)


@pytest.mark.release
@pytest.mark.parametrize("degree", [2, 4])
def test_llama_with_documents(assets: Path, degree: int) -> None:
    _compare(assets, 1, "dense_attention", _train(assets, degree, degree))


@pytest.mark.release
def test_llama_with_sharded_weights(assets: Path) -> None:
    _compare(assets, 2, "dense_attention", _train(assets, 4, 2))


@pytest.mark.release
def test_llama_with_causal_attention_and_no_load_balancer(assets: Path) -> None:
    ours = _train(assets, 2, 2, "--parallelism.context_parallel_load_balancer", "None", override="attention")
    _compare(assets, 1, "attention", ours)


@pytest.mark.release
def test_against_gathered_keys(assets: Path) -> None:
    """torchtitan's context parallelism runs on CPU if dense attention takes the place of FlexAttention's kernel."""
    length = ["--training.seq_len", "256"]
    options: dict[str, Any] = {"steps": 5, "layers": LAYERS, "ranks": 2}
    name = "llama3", "llama3_debugmodel", CP, "2"
    stock = train(assets, *name, *length, attention="dense_attention", **options)
    ours = train(assets, OURS + name[0], *name[1:], *length, attention=None, **options)
    torch.testing.assert_close(ours["losses"], stock["losses"], rtol=1e-5, atol=0)
    torch.testing.assert_close(ours["norms"], stock["norms"], rtol=1e-5, atol=0)
    assert ours["attended"][-1] == ours["attended_backward"][-1] == 5 * LAYERS


# ---- one layer


def _positions(rows: int, length: int) -> torch.Tensor:
    """Returns positions in documents: of different lengths, also of one token. Row 1 begins within a document."""
    lengths = torch.tensor([[1, 5, 2, length - 8], [length // 2, 1, 1, length - length // 2 - 2]])
    starts = [torch.cat([torch.arange(n) for n in row.tolist()]) for row in lengths[torch.arange(rows) % 2]]
    positions = torch.stack(starts)
    positions[1, : length // 2] += 3
    return positions


def _compare_layer(load_balancer: str | None, rows: int = 3, length: int = 48) -> None:
    """Compares our attention with dense attention on the full sequence, and the gradients."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("cp",))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, length, heads, 8, generator=generator) for heads in (4, 2, 2))
    up = torch.randn(q.shape, generator=generator)
    positions = _positions(rows, length)
    document = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(1)
    seen = (document[:, :, None] == document[:, None, :]).tril().unsqueeze(1)
    full = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in full), attn_mask=seen, enable_gqa=True
    ).transpose(1, 2)
    expected.backward(up)

    kwargs = {"positions": positions, "attention_masks": attention.documents_of(positions)}
    index = torch.arange(length).expand(rows, -1)
    own, _, kwargs = attention.shard_inputs(index, index, kwargs, mesh, torch.device("cpu"), load_balancer)
    at = own[0]
    assert torch.equal(kwargs["positions"], positions[:, at])
    local = [t[:, at].clone().requires_grad_() for t in (q, k, v)]
    layer = attention.Attention(mesh.get_group())
    out = layer(*local, attention_masks=kwargs["attention_masks"], enable_gqa=True, score_mod=None)
    out.backward(up[:, at])
    torch.testing.assert_close(out, expected[:, at])
    for ours, reference in zip(local, full):
        assert ours.grad is not None and reference.grad is not None
        torch.testing.assert_close(ours.grad, reference.grad[:, at])


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("load_balancer", ["headtail", None])
def test_layer(pool: Pool, ranks: int, load_balancer: str | None) -> None:
    pool.run(_compare_layer, ranks, load_balancer)


def _other_order() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    attention.LAYOUTS["headtail"] = "contiguous"
    try:
        with pytest.raises(RuntimeError, match="load balancer 'headtail' must give rank . of 2 the positions"):
            attention.shard_inputs(
                torch.zeros(2, 16), torch.zeros(2, 16), {"positions": torch.zeros(2, 16)}, mesh, torch.device("cpu")
            )
    finally:
        attention.LAYOUTS["headtail"] = "zigzag"


def test_other_order_of_the_sequence(pool: Pool) -> None:
    pool.run(_other_order, 2)


# ---- refusals


class Model(Decoder):
    """A decoder of one attention module."""

    def __init__(self, inner: nn.Module) -> None:
        nn.Module.__init__(self)
        self.inner_attention = inner


class WithOwnMasks(Model):
    def get_attention_masks(self, positions: torch.Tensor) -> Any:
        return None


class OwnAttention(FlexAttention):
    pass


def _replace(model: nn.Module, **options: Any) -> None:
    chosen = {
        "spmd_backend": "spmd_types",
        "context_parallel_load_balancer": "headtail",
        "enable": False,
        "components": ["model", "loss"],
        **options,
    }
    every = SimpleNamespace(**chosen)
    dims = SimpleNamespace(get_mesh=lambda name: SimpleNamespace(get_group=lambda: None))
    attention.replace_attention(model, parallel_dims=dims, parallelism=every, compile_config=every)


def _flex() -> nn.Module:
    return Model(FlexAttention(FlexAttention.Config()))


REFUSED: dict[str, Callable[[], None]] = {
    "spmd_backend must be 'spmd_types'": lambda: _replace(_flex(), spmd_backend="full_dtensor"),
    "load_balancer must be 'headtail' or None": lambda: _replace(_flex(), context_parallel_load_balancer="ptrr"),
    "components must be without 'model'": lambda: _replace(_flex(), enable=True),
    "model must be one with the attention masks": lambda: _replace(WithOwnMasks(nn.Identity())),
    "got a VarlenAttention": lambda: _replace(Model(VarlenAttention(VarlenAttention.Config()))),
    "got a OwnAttention": lambda: _replace(Model(OwnAttention(FlexAttention.Config()))),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_options(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_refused_arguments() -> None:
    layer = attention.Attention(None)
    q = torch.zeros(1, 4, 2, 8)
    batch = attention.Batch(1, 8, "zigzag", (8,))
    with pytest.raises(ValueError, match="attention_masks must be a Batch, .* got a NoneType"):
        layer(q, q, q)
    for name, value in {"is_causal": False, "score_mod": abs, "out_transform": abs}.items():
        with pytest.raises(ValueError, match=f"{name} must be (True|None) with context"):
            layer(q, q, q, attention_masks=batch, **{name: value})
    with pytest.raises(ValueError, match="attention_masks must be a Mask, made by .*, got a dict"):
        attention.shard_inputs(q, q, {"attention_masks": {}}, None, torch.device("cpu"))
