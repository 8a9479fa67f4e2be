"""Runs verl on CPU: actors with FSDP2, a vLLM server, and the manager that updates its weights by our engine.

Usage: python verl_job.py MODEL FOLDER. Writes FOLDER/answers.json. test_verl.py sets the variables that it needs.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import shutil
import sys
from typing import Any

import hydra
import ray
import safetensors.torch
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

TRAINERS, WORKERS = 2, 2
UPDATES = 3
AWAKE = 2  # the update before which vLLM does not sleep
PROMPT = list(range(1, 40))


class Trainer(ActorRolloutRefWorker):
    """verl's worker, which can also step with made-up gradients and save its weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        dist.init_process_group("cpu:gloo")  # verl would name CPU twice: as the host and as the accelerator
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self, seed: int) -> None:
        """Updates the weights by verl's optimizer. Gradients are random in a part of each weight, else zero."""
        engine = self.actor.engine
        torch.manual_seed(seed)
        for parameter in engine.module.parameters():
            gradient = torch.zeros_like(parameter)
            local = gradient.to_local()
            local[: local.shape[0] // 4].normal_()
            parameter.grad = gradient
        engine.optimizer_step()
        engine.optimizer_zero_grad()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, model: str, folder: str) -> None:
        """Saves a checkpoint like `model` with verl's full tensors, in bfloat16."""
        weights, _ = self.actor.engine.get_per_tensor_param()
        full = {name: weight.bfloat16() for name, weight in weights}
        if self.rank == 0:
            shutil.copytree(model, folder)
            safetensors.torch.save_file(full, f"{folder}/model.safetensors", {"format": "pt"})


def _config(model: str) -> Any:
    """Returns verl's configuration of a trainer and a server."""
    options = "{only_changed: true, unwritten: [model.embed_tokens.weight, lm_head.weight]}"  # vLLM pads the vocabulary
    given = {
        "model.path": model,
        "model.external_lib": "shardwright.integrations.verl.trainer",
        "model.override_config.attn_implementation": "eager",
        "model.use_remove_padding": "false",
        "model.enable_gradient_checkpointing": "false",
        "actor.strategy": "fsdp2",
        "actor.fsdp_config.use_torch_compile": "false",
        "actor.use_dynamic_bsz": "true",
        "actor.ppo_mini_batch_size": "2",
        "actor.optim.lr": "1e-2",
        "actor.optim.total_training_steps": "10",
        "rollout.name": "vllm",
        "rollout.load_format": "auto",
        "rollout.tensor_model_parallel_size": str(WORKERS),
        "rollout.max_model_len": "128",
        "rollout.enforce_eager": "true",
        "rollout.enable_sleep_mode": "false",
        "rollout.checkpoint_engine.backend": "shardwright",
        "rollout.checkpoint_engine.update_weights_bucket_megabytes": "1",
        "rollout.checkpoint_engine.custom_backend_module": "shardwright.integrations.verl.checkpoint_engine",
        "rollout.checkpoint_engine.engine_kwargs.shardwright": options,
        "rollout.engine_kwargs.vllm.worker_extension_cls": "shardwright.integrations.verl.worker.WorkerExtension",
    }
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        lines = [f"++actor_rollout_ref.{name}={value}" for name, value in given.items()]
        return hydra.compose("ppo_trainer", lines).actor_rollout_ref


def _answer(server: Any, name: str) -> Any:
    """Returns the log probabilities of the prompt's tokens and of the tokens that the server generates."""
    options = {"temperature": 0, "max_tokens": 8, "logprobs": True, "prompt_logprobs": 5}
    output = ray.get(server.generate.remote(PROMPT, options, name))
    return output.extra_fields["prompt_logprobs"], output.token_ids, output.log_probs


def _reload(server: Any, folder: str) -> None:
    """Lets vLLM load a checkpoint."""
    ray.get(server.collective_rpc.remote("reload_weights", kwargs={"weights_path": folder}))
    ray.get(server.clear_kv_cache.remote())


def main(model: str, folder: pathlib.Path) -> dict[str, Any]:
    """Returns the server's answers: of `model`, after each update, and after vLLM has loaded each saved checkpoint.

    "sent" has what verl's metrics say of each update.
    """
    config = _config(model)
    ray.init(num_cpus=16, num_gpus=TRAINERS + WORKERS, include_dashboard=False)  # Ray does not look for GPUs
    worker = RayClassWithInitArgs(ray.remote(Trainer), config=config, role="actor")
    trainer = RayWorkerGroup(RayResourcePool([TRAINERS], max_colocate_count=1), worker, device_name="cpu")
    trainer.init_model()
    replica = vLLMReplica(0, config.rollout, omega_conf_to_dataclass(config.model), gpus_per_node=WORKERS)
    asyncio.run(replica.init_standalone())
    server = replica.server_handle
    manager = CheckpointEngineManager(omega_conf_to_dataclass(config.rollout.checkpoint_engine), trainer, [replica])
    manager.abort_replicas = (
        _nothing  # verl 0.9.1's call has an argument that vLLM 0.32 does not; no request is running
    )
    told = {"before": _answer(server, "before"), "sent": [], "synced": [], "loaded": []}
    for update in range(UPDATES):
        trainer.step(update)
        if update == AWAKE:
            manager.release_kv_cache_replicas = _nothing  # in place of sleep at level 2, which discards weights on GPUs
        told["sent"].append(manager.update_weights(global_steps=update))
        told["synced"].append(_answer(server, f"synced {update}"))
        trainer.save(model, str(folder / f"{update}"))
    for update in range(UPDATES):
        _reload(server, str(folder / f"{update}"))
        told["loaded"].append(_answer(server, f"loaded {update}"))
    _reload(server, model)
    return {**told, "again": _answer(server, "again")}


async def _nothing() -> None:
    """Takes the place of a method of verl's manager."""


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[2])
    (folder / "answers.json").write_text(json.dumps(main(sys.argv[1], folder)))
