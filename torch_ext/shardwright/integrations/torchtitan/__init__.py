"""torchtitan's own trainer with shardwright, by one flag, and without CUDA graphs (docs/integrations.md).

    torchrun ... -m torchtitan.train --module shardwright.integrations.torchtitan.llama3 --config llama3_debugmodel \\
        --training.disable_cuda_graphs

`llama3`, `qwen3` and `deepseek_v3` have the configurations of torchtitan's modules of the same names. For other
configurations, call `with_shardwright(config)`.
"""

from __future__ import annotations

from .configs import with_shardwright

__all__ = ["with_shardwright"]
