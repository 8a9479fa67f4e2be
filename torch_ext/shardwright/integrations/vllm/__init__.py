"""Weight transfer engines for vLLM: `register` adds the backend "shardwright".

Importing this module does not import vLLM. Each worker of vLLM must call `register`: vLLM's option
``--worker-extension-cls shardwright.integrations.vllm.worker.WorkerExtension`` does, or a plugin, an entry point
``shardwright.integrations.vllm:register`` in the group ``vllm.general_plugins``.
"""

from __future__ import annotations

BACKEND = "shardwright"


def register() -> None:
    """Registers the engines of both sides with vLLM's factories, if they are not registered yet."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, engine in (
        (WeightTransferEngineFactory, "ServerEngine"),
        (WeightTransferTrainerFactory, "TrainerEngine"),
    ):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, f"{__name__}.engines", engine)
