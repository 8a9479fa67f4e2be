"""transformers' FSDP, tensor and expert parallelism, and its checkpoints, have stock's results with shardwright."""
# ruff: noqa: E402 (imports follow the check that transformers is installed)

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", minversion="5.24")

from safetensors.torch import load_file
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig, load_optimizer_distributed, save_optimizer_distributed

import shardwright as sw
from allocations import allocated_peak
from pool import Pool
from shardwright.integrations.transformers import fully_sharded, tp_plan
from transformers_models import MODELS, batch, full, local, loss_of, mean_gradients, sharded, unsharded

WORLD = 4
FSDP_AND_TP = {"fsdp_size": 2, "tp_size": 2}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
STEPS = 3
SMALL = 1 << 16  # bytes of tensors that are not weights


def _train(model: Any, batches: list[torch.Tensor]) -> tuple[list[float], torch.optim.Optimizer]:
    """Trains with the mean loss over batches. Returns the losses of this rank and the optimizer."""
    # Weights on meshes of one dim and of two cannot share a list, as `foreach` needs.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(STEPS):
        loss = torch.stack([loss_of(model, ids) for ids in batches]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


def _mean_over_data(values: list[float]) -> torch.Tensor:
    """Returns the mean of each value over all ranks."""
    mean = torch.tensor(values)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def _train_both(folder: pathlib.Path) -> int:
    whole = unsharded("llama", folder)
    ids = batch(dist.get_rank() // 2)
    stock = sharded("llama", folder, **FSDP_AND_TP)
    stock_losses, _ = _train(stock, [ids])
    sw.reset_stats()
    with sw.enabled(strict=True):
        ours = sharded("llama", folder, **FSDP_AND_TP)
        losses, _ = _train(ours, [ids])
    assert_close(losses, stock_losses, **TOLERANCE)
    for weight, other in zip(ours.parameters(), stock.parameters(), strict=True):
        assert weight.placements == other.placements
        assert_close(local(weight), local(other), **TOLERANCE)
    expected, _ = _train(whole, [batch(0), batch(1)])
    assert_close(_mean_over_data(losses), torch.tensor(expected), **TOLERANCE)
    assert sw.stats()["fallbacks"] == 0
    return int(sw.stats()["calls"])


def test_training_with_fsdp_and_tensor_parallelism(pool: Pool, tmp_path: pathlib.Path) -> None:
    """Losses and weights equal stock's and those of the unsharded model, and every redistribute is ours."""
    assert min(pool.run(_train_both, WORLD, tmp_path)) > 0


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [local(x) for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x)]


def _save_and_load(name: str, folder: pathlib.Path) -> None:
    """Saves and loads a model and its optimizer, in all combinations of stock's path and ours."""
    unsharded(name, folder)
    model = sharded(name, folder, **FSDP_AND_TP)
    _, optimizer = _train(model, [batch(dist.get_rank() // 2)])
    ways = {"stock": contextlib.nullcontext, "ours": lambda: sw.enabled(strict=True)}
    for way, enabled in ways.items():
        with enabled():
            model.save_pretrained(folder / way, distributed_checkpoint=True)
            save_optimizer_distributed(model, optimizer, str(folder / f"{way}-optimizer"))
            model.save_pretrained(folder / f"{way}-full")
    for kind in ("", "-full"):
        files, others = (sorted((folder / f"{way}{kind}").glob("*.safetensors")) for way in ways)
        assert [file.name for file in files] == [file.name for file in others]
        for file, other in zip(files, others, strict=True):
            tensors, expected = load_file(file), load_file(other)
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[key], expected[key]) for key in tensors)
    for way, enabled in ways.items():
        for saved in ways:
            with enabled():
                loaded = sharded(name, folder / saved, **FSDP_AND_TP)
                trained = sharded(name, folder, **FSDP_AND_TP)
                _, other = _train(trained, [batch(7)])
                load_optimizer_distributed(trained, other, str(folder / f"{saved}-optimizer"))
            for weight, expected in zip(loaded.parameters(), model.parameters(), strict=True):
                assert weight.placements == expected.placements, way
                assert torch.equal(local(weight), local(expected)), way
            pairs = zip(_state_of(other), _state_of(optimizer), strict=True)
            assert all(torch.equal(state, expected) for state, expected in pairs), way


@pytest.mark.parametrize("name", ["llama", "tied llama"])
def test_checkpoints_are_stock_checkpoints(pool: Pool, tmp_path: pathlib.Path, name: str) -> None:
    """The files hold the same tensors as stock's. Each path loads the other's, with equal weights and states."""
    pool.run(_save_and_load, WORLD, name, tmp_path)


def _saving_peaks(folder: pathlib.Path) -> tuple[int, int, int, int]:
    """Returns the peaks of stock and ours, the bytes of strided shards here, and those of the largest full tensor."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    if dist.get_rank() == 0:
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**FSDP_AND_TP))
    peaks = []
    for enabled in (contextlib.nullcontext, lambda: sw.enabled(strict=True)):
        with enabled():  # once before, so that nothing is cached for the first time
            model.save_pretrained(folder / "warm", distributed_checkpoint=True)
            peaks.append(allocated_peak(model.save_pretrained, folder / "saved", distributed_checkpoint=True)[1])
    weights = list(model.parameters())
    strided = [x for x in weights if any(isinstance(placement, _StridedShard) for placement in x.placements)]
    return peaks[0], peaks[1], sum(local(x).nbytes for x in strided), max(x.nbytes for x in weights)


def test_saving_allocates_no_full_tensor(pool: Pool, tmp_path: pathlib.Path) -> None:
    """Saving allocates the new shards of the weights that are redistributed; stock also allocates full weights."""
    for stock, ours, strided, largest in pool.run(_saving_peaks, WORLD, tmp_path):
        assert ours <= strided + SMALL < largest + SMALL < stock


def _check_gradients(
    model: Any, name: str, folder: pathlib.Path, batches: list[torch.Tensor], ids: torch.Tensor
) -> None:
    """Compares one step on this rank's batch with the unsharded model's mean over batches, in loss and gradients."""
    expected_loss, expected = mean_gradients(unsharded(name, folder), batches)
    loss = loss_of(model, ids)
    loss.backward()
    assert_close(_mean_over_data([loss.item()]).item(), expected_loss, **TOLERANCE)
    for key, weight in model.named_parameters():
        assert_close(full(weight.grad), expected[key], msg=lambda text, key=key: f"{key}: {text}", **TOLERANCE)


def _experts(name: str, folder: pathlib.Path, sizes: dict[str, int]) -> int:
    unsharded(name, folder)
    model = sharded(name, folder, ep_implementation="shardwright", **sizes)
    batches = [batch(index, 5 + index) for index in range(sizes.get("fsdp_size", 1))]
    sw.reset_stats()
    _check_gradients(model, name, folder, batches, batches[dist.get_rank() // sizes.get("tp_size", 1)])
    return int(sw.stats()["dispatches"])


LAYOUTS_OF_EXPERTS = [
    {"fsdp_size": 4, "ep_size": 4},
    {"fsdp_size": 4, "ep_size": 2},
    {"tp_size": 4, "ep_size": 4},
    {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
]


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe"])
@pytest.mark.parametrize("sizes", LAYOUTS_OF_EXPERTS, ids=str)
def test_experts(pool: Pool, tmp_path: pathlib.Path, name: str, sizes: dict[str, int]) -> None:
    """Loss and gradients are those of the unsharded model, with batches of different sizes, and our dispatch runs."""
    assert pool.run(_experts, WORLD, name, tmp_path, sizes) == [2] * WORLD  # one for each layer


def _one_expert(folder: pathlib.Path, sizes: dict[str, int], dtype: torch.dtype) -> None:
    """Sends all tokens to expert 0, so that most ranks have no rows."""
    whole = unsharded("mixtral", folder).model.layers[0].mlp.experts.to(dtype)
    x = torch.randn(6, 32, dtype=dtype)
    ids = torch.tensor([[0, 1]] * 6)
    scores = torch.rand(6, 2)  # float32, as routers make them
    results, gradients = [], []
    for options in (None, "all_to_all", "shardwright"):
        experts = whole
        if options is not None:
            model = sharded("mixtral", folder, ep_implementation=options, **sizes).to(dtype)
            experts = model.model.layers[0].mlp.experts
        leaves = [x.clone().requires_grad_(), scores.clone().requires_grad_()]
        y = experts(leaves[0], ids, leaves[1])
        y.square().sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves)])
        if options is not None:
            gradients.append({name: weight.grad for name, weight in experts.named_parameters()})
            assert all(gradient is not None for gradient in gradients[-1].values())
    tolerance = TOLERANCE if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-4}
    for name, gradient in gradients[1].items():
        assert_close(local(gradient), local(gradients[0][name]), **tolerance)
        assert dist.get_rank() == 0 or not local(gradient).any()  # the first rank has the experts in use
    for actual, stock, expected in zip(results[2], results[1], results[0], strict=True):
        assert actual.dtype == stock.dtype
        assert_close(actual, expected, check_dtype=False, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", LAYOUTS_OF_EXPERTS[:3:2], ids=str)
def test_experts_without_tokens(pool: Pool, tmp_path: pathlib.Path, sizes: dict[str, int], dtype: torch.dtype) -> None:
    """Ranks whose experts get no token take part, and their weights get gradients."""
    pool.run(_one_expert, WORLD, tmp_path, sizes, dtype)


def _styles(name: str, folder: pathlib.Path, sizes: dict[str, int], sequence_parallel: bool) -> None:
    unsharded(name, folder)
    model = sharded(name, folder, tp_plan=tp_plan(*MODELS[name], sequence_parallel=sequence_parallel), **sizes)
    batches = [batch(index) for index in range(sizes.get("fsdp_size", 1))]
    ids = batches[dist.get_rank() // sizes["tp_size"]]
    lengths = []
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: lengths.append(local(output).shape[1]))
    sw.reset_stats()
    with sw.enabled(strict=True):
        _check_gradients(model, name, folder, batches, ids)
    rank_in_group = dist.get_rank() % sizes["tp_size"]
    part = len(torch.arange(ids.shape[1]).chunk(sizes["tp_size"])[rank_in_group])
    assert lengths == [part if sequence_parallel else ids.shape[1]]
    assert sw.stats()["products"] >= 15  # seven linear layers in each of two blocks, and the head
    with torch.no_grad():
        assert_close(model(input_ids=ids).logits, unsharded(name, folder)(input_ids=ids).logits, **TOLERANCE)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
@pytest.mark.parametrize("sizes", [{"tp_size": 4}, FSDP_AND_TP], ids=str)
@pytest.mark.parametrize("name", ["llama", "tied llama", "qwen3"])
def test_styles(pool: Pool, tmp_path: pathlib.Path, name: str, sizes: dict[str, int], sequence_parallel: bool) -> None:
    """Losses, gradients and logits are those of the unsharded model, also for sequences of uneven parts."""
    pool.run(_styles, WORLD, name, tmp_path, sizes, sequence_parallel)


def test_sequence_parallel_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="got moe_tp_experts, packed_colwise"):
        tp_plan(*MODELS["mixtral"], sequence_parallel=True)


def _fully_sharded(name: str, folder: pathlib.Path, sizes: dict[str, int]) -> None:
    unsharded(name, folder)
    with fully_sharded():
        model = sharded(name, folder, **sizes)
    assert type(model).__name__.startswith("Sharded")
    batches = [batch(index) for index in range(sizes["fsdp_size"])]
    ids = batches[dist.get_rank() // sizes.get("tp_size", 1)]
    for _ in range(2):  # a recorded step, and a scheduled one
        loss_of(model, ids).backward()
        model.zero_grad()
    _check_gradients(model, name, folder, batches, ids)
    _train(model, [ids])
    with sw.enabled(strict=True):
        model.save_pretrained(folder / "saved", distributed_checkpoint=True)
        loaded = sharded(name, folder / "saved", **sizes)
    assert type(loaded).__name__.startswith("FSDP")
    for weight, expected in zip(loaded.parameters(), model.parameters(), strict=True):
        assert weight.placements == expected.placements
        assert torch.equal(local(weight), local(expected))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"fsdp_size": 4}),
        ("tied llama", FSDP_AND_TP),
        ("mixtral", {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}),
        ("mixtral", {"fsdp_size": 4, "ep_size": 2}),
    ],
    ids=str,
)
def test_fully_sharded(pool: Pool, tmp_path: pathlib.Path, name: str, sizes: dict[str, int]) -> None:
    """Models sharded by sw.fully_shard have the unsharded model's gradients. Their checkpoints load under FSDP2."""
    pool.run(_fully_sharded, WORLD, name, tmp_path, sizes)
