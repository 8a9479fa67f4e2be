"""Parts of a global tensor, cut by the intervals of a layout."""

from __future__ import annotations

import torch

import shardwright as sw


def part_of(whole: torch.Tensor, layout: sw.Layout, rank: int) -> torch.Tensor:
    """What `rank` holds of `whole` by the cuts of `layout`."""
    for dim, intervals in enumerate(layout.region(rank)):
        whole = torch.cat([whole.narrow(dim, begin, end - begin) for begin, end in intervals or [(0, 0)]], dim)
    return whole
