"""The token dispatcher of torchtitan's mixture-of-experts layers, by `shardwright.experts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config.override import derive, override
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from ...experts import combine, dispatch
from ...layouts.layout import Layout


class TokenDispatcher(AllToAllTokenDispatcher):
    """Sends each token once to each rank that has any of its experts, instead of once for each expert."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Returns the rows for this rank's experts, the number of rows of each expert, and the record for `combine`."""
        if self.ep_mesh is None:  # all experts are on this rank
            return super().dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
        placement = Layout(self.ep_mesh, (self.num_experts,), ["S(0)"])
        return dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK, placement, group=self.ep_mesh)

    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor) -> torch.Tensor:
        """Returns the sums of the experts' rows, weighted by the scores, on the ranks of the tokens."""
        if self.ep_mesh is None:
            return super().combine(routed_output_RD, metadata, x_TD)
        return combine(routed_output_RD, metadata)


@override(target=AllToAllTokenDispatcher.Config, exact=True, description="shardwright.experts")
def token_dispatcher(config: AllToAllTokenDispatcher.Config) -> TokenDispatcher.Config:
    """Returns the configuration of a `TokenDispatcher` for that of an `AllToAllTokenDispatcher`."""
    return derive(config, TokenDispatcher.Config)
