"""Random transfer rules, and the results of the same operations in torch."""

from __future__ import annotations

import random

import torch

import shardwright as sw
from shardwright.rules.kinds import Rule

State = dict[str, torch.Tensor]


def random_rules(draw: random.Random, state: State) -> tuple[list[Rule], State]:
    """Returns a few successive rules on tensors x.0, x.1, ... of one shape, and torch's result for these tensors."""
    rules: list[Rule] = []
    for _ in range(5):
        count, ndim = len(state), state["x.0"].ndim
        kind = draw.choice(("transpose", "fuse", "split", "stack"))
        if kind == "transpose":
            dims = draw.sample(range(ndim), ndim)
            rules.append(sw.rules.transpose("x.{}", dims))
            state = {name: x.permute(dims) for name, x in state.items()}
        elif kind == "fuse" and count % 2 == 0:
            dim = draw.randrange(ndim)
            groups = draw.choice((1, 2)) if state["x.0"].shape[dim] % 2 == 0 else 1
            pairs = [[f"x.{2 * i}", f"x.{2 * i + 1}"] for i in range(count // 2)]
            rules += [sw.rules.fuse(f"y.{i}", pair, dim, groups=groups) for i, pair in enumerate(pairs)]
            rules.append(sw.rules.rename("y.*", "x.*"))
            chunked = [[state[name].chunk(groups, dim) for name in pair] for pair in pairs]
            state = {
                f"x.{i}": torch.cat([part[g] for g in range(groups) for part in parts], dim)
                for i, parts in enumerate(chunked)
            }
        elif kind == "split" and count <= 4:
            dim = draw.randrange(ndim)
            if state["x.0"].shape[dim] % 2 == 0:
                rules += [sw.rules.split(f"x.{i}", [f"y.{2 * i}", f"y.{2 * i + 1}"], dim) for i in range(count)]
                rules.append(sw.rules.rename({"y.*": "x.*"}))
                halves = [half for i in range(count) for half in state[f"x.{i}"].chunk(2, dim)]
                state = {f"x.{i}": half for i, half in enumerate(halves)}
        elif kind == "stack":
            dim, other = draw.randrange(ndim + 1), draw.randrange(ndim + 1)
            rules += [sw.rules.stack("x.{}", dim, into="y"), sw.rules.unstack("y", "x.{}", other)]
            full = torch.stack([state[f"x.{i}"] for i in range(count)], dim)
            state = {f"x.{i}": full.select(other, i) for i in range(full.shape[other])}
    return rules, state
