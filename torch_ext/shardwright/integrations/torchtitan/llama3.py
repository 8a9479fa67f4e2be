"""The configurations of torchtitan's module `llama3` (Llama 3), with shardwright."""

from __future__ import annotations

from .configs import configurations

__getattr__, __dir__ = configurations("llama3")
