"""torchtitan's context parallelism, with `sw.attention` in place of attention that gathers all keys."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan import trainer
from torchtitan.components import validate
from torchtitan.distributed import activation_checkpoint
from torchtitan.distributed.context_parallel import cp_shard, prepare_context_parallel_input
from torchtitan.distributed.parallel_dims import MeshAxisName, ParallelDims
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from ...attention import Mask, scaled_dot_product_attention
from ...attention.problem import SEQUENCE_DIM, parts_of
from ...layouts.errors import argument_error
from ...placements import Pieces

LAYOUTS = {"headtail": "zigzag", None: "contiguous"}  # of the sequence, by torchtitan's load balancer

_default_save_ops = activation_checkpoint._get_default_save_ops


@dataclasses.dataclass(frozen=True)
class Batch:
    """Positions and documents of a batch on the ranks of context parallelism. Layers get it as `attention_masks`.

    The batch is one sequence of `rows * length` positions, row after row. Each rank has its part of each row, by
    `layout`. `documents` are the lengths of the documents.
    """

    rows: int
    length: int
    layout: str
    documents: tuple[int, ...]


class Attention(Module):
    """Causal attention within documents, over the ranks of context parallelism."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        **others: Any,
    ) -> torch.Tensor:
        """Returns the results for this rank's queries, [batch, sequence, heads, depth].

        Raises:
            ValueError: the batch was not sharded by `shard_inputs`, or an argument is not supported.
        """
        if not isinstance(attention_masks, Batch):
            kind = type(attention_masks).__name__
            raise argument_error("attention_masks", "a Batch, made by the trainer's shard_inputs", f"a {kind}")
        if not is_causal:
            raise argument_error("is_causal", "True with context parallelism", is_causal)
        for name, value in others.items():
            if value is not None:
                raise argument_error(name, "None with context parallelism", value)
        batch = attention_masks
        as_one_row = (t.flatten(0, 1).unsqueeze(0).transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        out: torch.Tensor = scaled_dot_product_attention(
            *as_one_row,
            is_causal=True,
            mask=Mask(documents=batch.documents),
            scale=scale,
            enable_gqa=enable_gqa,
            size=batch.rows * batch.length,
            layout=_rows_placed(batch.rows, batch.length, batch.layout, dist.get_world_size(self.group)),
            group=self.group,
        )
        return out.transpose(1, 2).squeeze(0).unflatten(0, (batch.rows, -1))


@functools.lru_cache(maxsize=16)
def _rows_placed(rows: int, length: int, layout: str, count: int) -> Pieces:
    """Returns the placement of a batch as one sequence on `count` ranks, each row placed by `layout`."""
    lists = [
        [(row * length + begin, row * length + end) for row in range(rows) for begin, end in part]
        for part in parts_of(layout, length, count)
    ]
    return Pieces(SEQUENCE_DIM, lists)


def replace_attention(
    model: nn.Module, *, parallel_dims: ParallelDims, parallelism: Any, compile_config: Any, **_: Any
) -> None:
    """Replaces the model's attention over the ranks of context parallelism, before the model is parallelized.

    It replaces modules, not configurations, because the degree and further overrides are on the command line. The other
    functions are replaced for the rest of the process.

    Raises:
        ValueError: the model's attention, or an option, is not supported.
    """
    if parallelism.spmd_backend != "spmd_types":
        raise argument_error("parallelism.spmd_backend", "'spmd_types'", repr(parallelism.spmd_backend))
    _layout_of(parallelism.context_parallel_load_balancer)
    if compile_config.enable and "model" in compile_config.components:
        allowed = "without 'model' with context parallelism, because each batch has other documents"
        raise argument_error("compile.components", allowed, compile_config.components)
    if getattr(type(model), "get_attention_masks", None) is not Decoder.get_attention_masks:
        allowed = "one with the attention masks of torchtitan's Decoder (causal, within documents)"
        raise argument_error("model", f"{allowed} with context parallelism", f"a {type(model).__name__}")
    group = parallel_dims.get_mesh("cp").get_group()
    kinds = (FlexAttention, ScaledDotProductAttention, VarlenAttention)
    for name, module in list(model.named_modules()):
        if isinstance(module, kinds):
            model.set_submodule(name, _replaced(name, module, group))
    model.get_attention_masks = documents_of  # type: ignore[assignment]
    trainer.prepare_context_parallel_input = validate.prepare_context_parallel_input = shard_inputs
    activation_checkpoint._get_default_save_ops = _save_ops


def _replaced(name: str, module: Module, group: dist.ProcessGroup) -> Attention:
    """Returns our attention for torchtitan's. Raises ValueError if it is of another kind or gathers over other axes."""
    if type(module) not in (FlexAttention, ScaledDotProductAttention):
        allowed = "a FlexAttention or ScaledDotProductAttention with context parallelism"
        raise argument_error(name, allowed, f"a {type(module).__name__}")
    ours = Attention(group)
    config = module._sharding_config
    if config is not None:
        _check_gathers(name, config)
        ours._sharding_config = dataclasses.replace(config, in_dst_shardings=config.in_src_shardings, local_map=None)
    return ours


def _check_gathers(name: str, config: ShardingConfig) -> None:
    """Raises ValueError if inputs of an attention change along other axes than that of context parallelism."""
    for argument, dst in (config.in_dst_shardings or {}).items():
        src = (config.in_src_shardings or {})[argument].per_axis_spmd_types()
        changed = [axis for axis, after in dst.per_axis_spmd_types().items() if src.get(axis) != after]
        if changed not in ([], [MeshAxisName.CP]):
            raise argument_error(f"redistribute of {argument} of {name}", "along cp only", f"along {changed}")


def _save_ops() -> set[Any]:
    """Returns the operators whose results selective checkpointing saves. Replaces torchtitan's function."""
    return {*_default_save_ops(), torch.ops.shardwright.attention.default}


# ---- inputs


def documents_of(positions: torch.Tensor) -> Mask:
    """Returns the documents of a batch, row after row. Replaces `Decoder.get_attention_masks`.

    A document begins at position 0 and at the start of a row. The host waits for `positions`.
    """
    begins = positions == 0
    begins[:, 0] = True
    at = [*begins.flatten().nonzero().flatten().tolist(), positions.numel()]
    return Mask(documents=tuple(end - begin for begin, end in zip(at, at[1:])))


def shard_inputs(
    inputs: torch.Tensor,
    labels: torch.Tensor,
    extra_kwargs: dict[str, Any],
    cp_mesh: DeviceMesh,
    device: torch.device,
    load_balancer_type: str | None = "headtail",
    ptrr_mask_key: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Shards a batch by torchtitan's function `prepare_context_parallel_input`, which it replaces.

    Raises:
        ValueError: the load balancer, or the kind of the attention masks, is not supported.
        RuntimeError: torchtitan's order of the sequence is not the one that `Attention` expects.
    """
    rows, length = inputs.shape[:2]
    mask = extra_kwargs.pop("attention_masks", None)
    if mask is None:  # ScaledDotProductAttention: attention within rows
        mask = Mask(documents=(length,) * rows)
    if not isinstance(mask, Mask):
        raise argument_error("attention_masks", "a Mask, made by get_attention_masks", f"a {type(mask).__name__}")
    layout = _layout_of(load_balancer_type)
    _check_order(cp_mesh, length, load_balancer_type, inputs.device)
    inputs, labels, extra_kwargs = prepare_context_parallel_input(
        inputs, labels, extra_kwargs, cp_mesh, device, load_balancer_type, ptrr_mask_key
    )
    extra_kwargs["attention_masks"] = Batch(rows, length, layout, tuple(mask.documents or ()))
    return inputs, labels, extra_kwargs


def _layout_of(load_balancer: str | None) -> str:
    """Returns the layout of a sequence that torchtitan has sharded. Raises ValueError if we do not have it."""
    if load_balancer not in LAYOUTS:
        allowed = "'headtail' or None with shardwright"
        raise argument_error("parallelism.context_parallel_load_balancer", allowed, repr(load_balancer))
    return LAYOUTS[load_balancer]


@functools.lru_cache(maxsize=16)
def _check_order(mesh: DeviceMesh, length: int, load_balancer: str | None, device: torch.device) -> None:
    """Raises RuntimeError unless torchtitan gives this rank the positions of our layout, in the same order."""
    positions = torch.arange(length, device=device).unsqueeze(0)
    (found,), _ = cp_shard(mesh, (positions,), None, load_balancer)
    part = parts_of(_layout_of(load_balancer), length, mesh.size())[mesh.get_local_rank()]
    expected = [position for begin, end in part for position in range(begin, end)]
    if found[0].tolist() != expected:
        raise RuntimeError(
            f"torchtitan's load balancer {load_balancer!r} must give rank {mesh.get_local_rank()} of {mesh.size()} the "
            f"positions {expected} of {length}, got {found[0].tolist()}. Set "
            "parallelism.context_parallel_load_balancer to the other of 'headtail' and None"
        )
