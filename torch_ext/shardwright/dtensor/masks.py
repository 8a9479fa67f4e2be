"""Handles `_MaskPartial`, the placement of embeddings whose table is sharded by rows.

Each rank looks up the indices of its own rows. `R -> _MaskPartial` turns global indices into local ones and stores a
mask of the indices of other ranks' rows. Before `_MaskPartial` is reduced, results for masked indices are set to zero.
This module does both steps with PyTorch's own methods, so that only a redistribute of ordinary placements is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec


class Unmasked(NamedTuple):
    """A redistribute of ordinary placements that is left after masks were applied, and the masks to make after it."""

    local: torch.Tensor
    current_spec: DTensorSpec
    target_spec: DTensorSpec
    masks_to_make: Sequence[int]  # mesh dims along which the result is masked

    def mask(self, result: torch.Tensor, placements: Sequence[Any]) -> torch.Tensor:
        """Returns the result with its masks made. `placements` are the requested placements, one per mesh dim."""
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


def apply_masks(local: torch.Tensor, masks: Iterable[Placement]) -> None:
    """Sets masked elements of `local` to zero, and releases the masks. `masks` are placements with masks."""
    for mask in masks:
        mask.mask_buffer.apply_mask(local)
        mask.mask_buffer.release_mask()


def unmask(local: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec) -> Unmasked | str:
    """Applies the masks of placements that are reduced, in place. Returns the redistribute that is left.

    Returns a reason instead if the masks cannot be handled.
    """
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
    apply_masks(local, masks)
    for mesh_dim in to_make:
        after[mesh_dim] = Replicate()
    return Unmasked(
        local,
        without_masks(current_spec),
        dataclasses.replace(target_spec, placements=tuple(after)),
        to_make,
    )
