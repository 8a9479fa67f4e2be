"""The configurations of torchtitan's module `qwen3` (Qwen3), with shardwright."""

from __future__ import annotations

from .configs import configurations

__getattr__, __dir__ = configurations("qwen3")
