"""Handles `_MaskPartial`, the placement of embeddings whose table is sharded by rows.

Each rank looks up the indices of its own rows. `R -> _MaskPartial` makes global indices local and keeps a mask of the
indices of other ranks' rows. Before `_MaskPartial` is reduced, the results for masked indices are set to zero. Both
steps use PyTorch's own methods here; a redistribute of ordinary placements remains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec


class Unmasked(NamedTuple):
    """A redistribute without masks."""

    local: torch.Tensor
    current_spec: DTensorSpec
    target_spec: DTensorSpec
    masks_to_make: Sequence[int]  # mesh dims along which the result is masked

    def mask(self, result: torch.Tensor, placements: Sequence[Any]) -> torch.Tensor:
        """Masks the result, so that it has the placements that were requested."""
        for mesh_dim in self.masks_to_make:
            result = placements[mesh_dim]._partition_value(result, self.target_spec.mesh, mesh_dim)
        return result


def is_masked(placement: Placement) -> bool:
    """Returns True for `_MaskPartial`."""
    return hasattr(placement, "mask_buffer")


def without_masks(spec: DTensorSpec) -> DTensorSpec:
    """Returns the spec with plain partial placements in place of masked ones."""
    placements = [Partial(p.reduce_op) if is_masked(p) else p for p in spec.placements]
    return dataclasses.replace(spec, placements=tuple(placements))


def apply(local: torch.Tensor, masks: Iterable[Placement]) -> None:
    """Applies masks, in place. Raises RuntimeError for a mask that was never made."""
    for mask in masks:
        mask.mask_buffer.apply_mask(local)
        mask.mask_buffer.release_mask()


def unmask(local: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec) -> Unmasked | str:
    """Returns the redistribute without masks, or the reason why there is none. Applies reduced masks in place."""
    before, after = list(current_spec.placements), list(target_spec.placements)
    to_apply, to_make = [], []
    for mesh_dim, (source, target) in enumerate(zip(before, after, strict=True)):
        if is_masked(source) and not is_masked(target):
            to_apply.append(mesh_dim)
        elif is_masked(target) and source.is_replicate():
            to_make.append(mesh_dim)
        elif is_masked(source) or is_masked(target):
            return "a mask that is pending before and after"
    masks = [before[mesh_dim] for mesh_dim in to_apply]
    if any(mask.mask_buffer.data is None for mask in masks):
        return "a mask that was never made"
    apply(local, masks)
    for mesh_dim in to_make:
        after[mesh_dim] = Replicate()
    return Unmasked(
        local,
        without_masks(current_spec),
        dataclasses.replace(target_spec, placements=tuple(after)),
        to_make,
    )
