"""The extension of vLLM's workers that receives weights: vLLM's argument ``worker_extension_cls``.

Follows verl/workers/rollout/vllm_rollout/utils.py of verl 0.9.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from ...layouts.errors import argument_error
from .checkpoint_engine import ADDRESS, Receiver


class WorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension. Where it would load a bucket of full tensors, it receives all weights from the trainer."""

    shardwright_receiver: Receiver | None = None
    shardwright_received = False  # by the last update

    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> None:
        """Receives all weights if the bucket has the trainer's address. Other buckets are verl's.

        Raises ValueError if vLLM has a drafter that gets the trainer's weights too.
        """
        self.shardwright_received = [name for name, _ in weights] == [ADDRESS]
        if not self.shardwright_received:
            super()._update_weights(weights, *args, **kwargs)
            return
        models = list(self._iter_all_models())
        if len(models) > 1:
            raise argument_error("vLLM's models", "one: weights of a drafter are not supported", f"{len(models)}")
        if self.shardwright_receiver is None:
            self.shardwright_receiver = Receiver(models[0], self.model_runner.vllm_config, self.device)
        self.shardwright_receiver.receive(weights[0][1])

    def _iter_all_models_with_config(self) -> Iterator[tuple[torch.nn.Module, Any]]:
        """Yields the models whose weights verl converts after an update: none if the receiver has converted them."""
        return iter(()) if self.shardwright_received else super()._iter_all_models_with_config()
