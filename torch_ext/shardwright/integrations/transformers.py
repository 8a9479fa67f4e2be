"""shardwright in Hugging Face transformers, version 5.24 or newer.

    from shardwright.integrations.transformers import tp_plan  # registers the names below

    DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="shardwright")  # tokens to experts
    DistributedConfig(tp_size=4, tp_plan=tp_plan(LlamaForCausalLM, config))  # products that hide communication
    with fully_sharded():  # `shardwright.fully_shard` in place of FSDP2
        model = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=4))

Redistributes need no import: ``with sw.enabled():`` around transformers' calls covers training with tensor parallelism
and checkpoints of FSDP with tensor parallelism. docs/integrations.md has the measurements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from transformers.distributed import fsdp
from transformers.distributed import tensor_parallel as stock
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

from .. import parallel
from ..experts import combine, dispatch
from ..fsdp import fully_shard

__all__ = ["ColwiseParallel", "EmbeddingParallel", "ExpertParallel", "RowwiseParallel", "fully_sharded", "tp_plan"]

NAME = "shardwright"
SEQUENCE = Shard(1)  # of activations ``[batch, sequence, hidden]``


class ExpertParallel(EPImplementation):
    """Sends tokens by `shardwright.experts`, for ``DistributedConfig(ep_implementation="shardwright")``.

    A token is sent once to each rank that has any of its experts, and that rank returns one weighted sum.
    transformers' ``"all_to_all"`` sends a token, and returns its result, once per expert. The ranks of a
    tensor-parallel group hold the same tokens; each of them dispatches a part.
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        count = self.num_local_experts
        self._placement = [list(range(rank * count, (rank + 1) * count)) for rank in range(ep_mesh.size())]

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns the weighted sums ``[tokens, hidden]`` of the experts' outputs for this rank's tokens.

        Args:
            hidden_states: ``[tokens, hidden]``.
            top_k_index: ``[tokens, top-k]``, ids of experts among those of all ranks.
            top_k_weights: ``[tokens, top-k]``.
        """
        x, ids, scores = (self._own_part(tensor) for tensor in (hidden_states, top_k_index, top_k_weights))
        rows, tokens_per_expert, handle = dispatch(x, ids, scores, self._placement, group=self.ep_mesh.get_group())
        y = combine(self._experts(rows, tokens_per_expert), handle)
        if self.tp_mesh.size() == 1:
            return y
        shape = hidden_states.shape
        parts = DTensor.from_local(y, self.tp_mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
        return parts.full_tensor()

    def _own_part(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the rows of `x` that this rank dispatches, out of those that its tensor-parallel group shares."""
        if self.tp_mesh.size() == 1:
            return x
        shared = DTensor.from_local(x, self.tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(placements=[Shard(0)]).to_local()

    def _experts(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """Returns this rank's experts' outputs, one row per row. `combine` multiplies them by the scores."""
        ids = torch.arange(self.num_local_experts, device=rows.device)
        ids = ids.repeat_interleave(tokens_per_expert, output_size=len(rows))
        # Experts without rows run on a row of zeros, so that their weights get gradients, which FSDP reduces.
        tokens = rows if len(rows) else rows.sum(0, keepdim=True)
        ids = ids if len(rows) else ids.new_zeros(1)
        y: torch.Tensor = self.experts_forward(tokens, ids.unsqueeze(1), tokens.new_ones(len(tokens), 1))
        return y[: len(rows)]


class _Overlapped:
    """A transformers style for linear layers that uses the product of `_style`, shardwright's style of this name."""

    _style: Any

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        **options: Any,
    ) -> None:
        layouts = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        super().__init__(**layouts, use_local_output=use_local_output)  # type: ignore[call-arg]
        self._applied = self._style(**layouts, use_local_output=use_local_output, **options)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Replaces the forward of a layer whose weights transformers has sharded."""
        if type(module) is not nn.Linear or getattr(module, "_hf_quantized_needs_local_tp", False):
            raise ValueError(f"module must be an nn.Linear that is not quantized, got a {type(module).__name__}")
        layer: nn.Module = self._applied._apply(module, mesh)
        return layer


class ColwiseParallel(_Overlapped, stock.ColwiseParallel):
    """transformers' style of this name. Takes the arguments of `shardwright.parallel.ColwiseParallel`."""

    _style = parallel.ColwiseParallel


class RowwiseParallel(_Overlapped, stock.RowwiseParallel):
    """transformers' style of this name. Takes the arguments of `shardwright.parallel.RowwiseParallel`."""

    _style = parallel.RowwiseParallel


class EmbeddingParallel(stock.EmbeddingParallel):
    """transformers' style of this name, with an output that is sharded over the sequence.

    The output is a DTensor of the full shape, so the model derives positions and masks from the full sequence.
    """

    def transform_output_post_forward(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> DTensor:
        return output.redistribute(placements=[SEQUENCE])


# Overlapped styles by the names of the styles that they replace: for replicated activations between layers, and for
# activations that are sharded over the sequence.
_REPLICATED = {
    "colwise": ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
}
_SEQUENCE = {
    "embedding_rowwise": EmbeddingParallel(),
    "norm": stock.SequenceParallel(use_local_output=False),
    "colwise": ColwiseParallel(input_layouts=SEQUENCE, shares_gather=True),
    "colwise_gather_output": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Replicate()),
    "rowwise": RowwiseParallel(output_layouts=SEQUENCE, use_local_output=False),
    "replicated_with_grad_allreduce": stock.ReplicatedWithGradAllReduce(),
}


def tp_plan(model_class: type[nn.Module], config: Any, *, sequence_parallel: bool = False) -> dict[str, str]:
    """Returns the tensor-parallel plan of a model, with our styles in place of transformers' own.

    Args:
        model_class, config: class and config of the model, such as ``LlamaForCausalLM`` and a ``LlamaConfig``.
        sequence_parallel: shard activations between layers over the sequence. Column-parallel layers then gather their
            input, layers with the same input gather it once, and row-parallel layers scatter their sums. Norms over
            ``config.hidden_size`` features run on shards.

    Returns:
        The argument ``tp_plan`` of ``DistributedConfig``.

    Raises:
        ValueError: with `sequence_parallel`, the plan has a style that needs full sequences, such as that of experts.
    """
    with torch.device("meta"):
        model: Any = model_class(config)
    plan: dict[str, str] = model.tp_plan
    if not sequence_parallel:
        return {name: f"{NAME}_{style}" if style in _REPLICATED else style for name, style in plan.items()}
    if others := sorted(set(plan.values()) - set(_SEQUENCE)):
        raise ValueError(f"the styles of the plan must be {', '.join(_SEQUENCE)}, got {', '.join(others)}")
    norms = {
        replace_layer_number_by_wildcard(name.removesuffix(".weight")): "norm"
        for name, weight in model.named_parameters()
        if name.endswith("norm.weight") and weight.shape == (config.hidden_size,)
    }
    return {name: f"{NAME}_sequence_{style}" for name, style in (norms | plan).items()}


@contextlib.contextmanager
def fully_sharded() -> Iterator[None]:
    """A block in which transformers shards models by `shardwright.fully_shard` instead of FSDP2, in all threads."""
    stock_fully_shard = fsdp.fully_shard
    fsdp.fully_shard = fully_shard
    try:
        yield
    finally:
        fsdp.fully_shard = stock_fully_shard


EPImplementationInterface.register(NAME, ExpertParallel)
for _prefix, _styles in ((NAME, _REPLICATED), (f"{NAME}_sequence", _SEQUENCE)):
    for _name, _style in _styles.items():
        ALL_PARALLEL_STYLES.register(f"{_prefix}_{_name}", _style)
