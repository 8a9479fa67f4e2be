"""verl's FSDP2 engine, which passes DTensors to the checkpoint engine instead of full tensors.

Follows verl/workers/engine/fsdp of verl 0.9. Importing this module registers the engine in place of verl's for language
models with ``strategy=fsdp2``. verl imports it before it makes the engine if ``model.external_lib`` names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from verl.utils.device import get_device_name, get_vendor
from verl.utils.model import convert_weight_keys
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from ...rules import split, unstack
from ...rules.kinds import Rule
from .checkpoint_engine import Shards

EXPERTS = "**.mlp.experts."


def expert_rules(names: Iterable[str], model_type: str) -> list[Rule]:
    """Returns rules from transformers' stacks of experts to one weight for each expert, as in `unfuse_moe_params`."""
    if model_type == "gpt_oss" or not any(name.endswith(".mlp.experts.gate_up_proj") for name in names):
        return []
    matrices = ("gate_proj", "up_proj", "down_proj")
    halves = split(EXPERTS + "gate_up_proj", [EXPERTS + name for name in matrices[:2]], dim=1)
    return [halves, *(unstack(EXPERTS + name, f"{EXPERTS}{{}}.{name}.weight") for name in matrices)]


# A registration for the vendor has precedence over verl's own, which is for all vendors.
@EngineRegistry.register("language_model", "fsdp2", get_device_name(), get_vendor())
class FSDPEngine(FSDPEngineWithLMHead):
    """verl's engine. Its weights are `Shards`, except with LoRA, quantization-aware training, or offloaded weights."""

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any] | None]:
        """Returns the weights, and the configuration of LoRA, if it is in use."""
        offloaded = self._is_offload_param or self._uses_fsdp2_cpu_offload_policy
        if offloaded or self._qat_enabled or hasattr(self.module, "peft_config"):
            return super().get_per_tensor_param(*args, **kwargs)
        model_type = self.model_config.hf_config.model_type

        def state_dict() -> Mapping[str, torch.Tensor]:
            return convert_weight_keys(self.module.state_dict(), self.module)

        def full() -> Iterable[tuple[str, torch.Tensor]]:
            return super(FSDPEngine, self).get_per_tensor_param(*args, **kwargs)[0]

        metas = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in state_dict().items()}
        weights = {name: (tuple(x.shape), x.dtype) for name, x in unfuse_moe_params(metas.items(), model_type)}
        return Shards(state_dict, weights, expert_rules(metas, model_type), full), None
