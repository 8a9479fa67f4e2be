"""shardwright in Hugging Face transformers, version 5.24 or newer.

    import shardwright.integrations.transformers  # registers the name below

    DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="shardwright")  # tokens to experts

Redistributes need no import: ``with sw.enabled():`` around transformers' calls covers training with tensor parallelism
and checkpoints of FSDP with tensor parallelism. docs/integrations.md has the measurements.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from ..experts import combine, dispatch

__all__ = ["ExpertParallel"]

NAME = "shardwright"


class ExpertParallel(EPImplementation):
    """Tokens to experts and back by `shardwright.experts`: ``DistributedConfig(ep_implementation="shardwright")``.

    A token is sent once to each rank that has any of its experts, and one weighted sum comes back from there.
    transformers' ``"all_to_all"`` sends a token once per expert, and so does every way back. The ranks of a
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


EPImplementationInterface.register(NAME, ExpertParallel)
