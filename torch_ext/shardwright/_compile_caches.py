"""What PyTorch keeps of compiled code on disk, told apart by rank while the drop-in is on.

It is kept under what Dynamo saw, in which a redistribute is a method of a DTensor: nothing says that it becomes an
operator of ours, nor for which rank. All ranks of a machine share the folder.
"""

from __future__ import annotations

import os

import torch.compiler.config as config
import torch.distributed as dist

_before: str | None = None  # the tag to go back to


def tell_apart(on: bool) -> None:
    """Puts this rank into the tag of what is kept from now on, or takes it out again."""
    global _before
    if _before is not None:
        config.cache_key_tag = _before
        _before = None
    if on:
        _before = config.cache_key_tag
        config.cache_key_tag = f"{_before} shardwright rank {_rank()}".lstrip()


def _rank() -> str:
    if dist.is_available() and dist.is_initialized():
        return str(dist.get_rank())
    return os.environ.get("RANK", f"of process {os.getpid()}")
