"""The configurations of torchtitan's module `deepseek_v3` (DeepSeek-V3), with shardwright."""

from __future__ import annotations

from .configs import configurations

__getattr__, __dir__ = configurations("deepseek_v3")
