"""Random problems of routing tokens to experts, and the results of an unsharded layer, written without shardwright.

Every rank makes the whole problem from a seed. The first column of a token's hidden state is its number in the job, so
that rows can be identified on the receiver.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

LOADS = ("uniform", "zipf", "one")
PLACEMENTS = ("even", "uneven", "copies")


@dataclasses.dataclass
class Problem:
    placement: list[list[int]]  # expert ids by rank
    x: list[torch.Tensor]  # by rank: [tokens, hidden]
    expert_ids: list[torch.Tensor]  # by rank: [tokens, top-k]
    scores: list[torch.Tensor]
    weights: torch.Tensor  # [experts, hidden, hidden]
    gradients: list[torch.Tensor]  # by rank, of the output

    @property
    def num_experts(self) -> int:
        return self.weights.shape[0]

    def first_token(self, rank: int) -> int:
        return sum(map(len, self.x[:rank]))

    def rank_of_token(self) -> list[int]:
        return [rank for rank, tokens in enumerate(self.x) for _ in tokens]


def placement_of(kind: str, num_experts: int, world: int, generator: torch.Generator) -> list[list[int]]:
    if kind == "even":
        return [part.tolist() for part in torch.arange(num_experts).tensor_split(world)]
    order = torch.randperm(num_experts, generator=generator).tolist()
    cuts = sorted(torch.randint(0, num_experts + 1, (world - 1,), generator=generator).tolist())
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, num_experts], strict=True)]
    if kind == "copies":
        for expert in range(0, num_experts, 2):
            for rank in torch.randint(0, world, (2,), generator=generator).tolist():
                if expert not in parts[rank]:
                    parts[rank].append(expert)
    return parts


def problem(
    world: int,
    seed: int,
    *,
    load: str = "uniform",
    placement: str = "even",
    num_experts: int = 6,
    top_k: int = 3,
    hidden: int = 5,
    most_tokens: int = 9,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Returns a problem with a random number of tokens per rank, possibly none. Some tokens have fewer experts (-1)."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, most_tokens + 1, (world,), generator=g).tolist()
    tokens[seed % world] = 0 if seed % 2 else most_tokens
    rank = torch.arange(1, num_experts + 1, dtype=torch.float64)
    chances = {"uniform": torch.ones(num_experts), "zipf": 1 / rank, "one": (rank == 1) + 1e-12}[load]
    expert_ids = []
    for n in tokens:
        ids = [torch.multinomial(chances.to(torch.float64), top_k, generator=g) for _ in range(n)]
        expert_ids.append(torch.stack(ids) if ids else torch.empty(0, top_k, dtype=torch.int64))
        if load == "one":
            expert_ids[-1][:, 1:] = -1
        elif n > 2:
            expert_ids[-1][1, 0] = -1  # a token with one expert fewer
            expert_ids[-1][2, :] = -1  # a token without experts

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    x = [random(n, hidden) for n in tokens]
    numbers = torch.arange(sum(tokens)).to(dtype).split(tokens)
    for part, own in zip(x, numbers, strict=True):
        part[:, 0] = own
    return Problem(
        placement=placement_of(placement, num_experts, world, g),
        x=x,
        expert_ids=expert_ids,
        scores=[random(n, top_k) for n in tokens],
        weights=random(num_experts, hidden, hidden) / 10,
        gradients=[random(n, hidden) for n in tokens],
    )


def expert(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.sin(rows @ weight)


def layer(weights: torch.Tensor, x: torch.Tensor, expert_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Applies each token's experts and sums their outputs by score: the unsharded layer."""
    out = []
    for token, ids, own_scores in zip(x, expert_ids.tolist(), scores, strict=True):
        parts = [own_scores[j] * expert(weights[e], token) for j, e in enumerate(ids) if e >= 0]
        out.append(torch.stack(parts).sum(0) if parts else torch.zeros_like(token))
    return torch.stack(out) if out else x.new_zeros(x.shape)


def unsharded(p: Problem) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Returns outputs, gradients of x and of scores (lists by rank), and the gradient of the weights."""
    weights = p.weights.clone().requires_grad_()
    x = [part.clone().requires_grad_() for part in p.x]
    scores = [part.clone().requires_grad_() for part in p.scores]
    outs = [layer(weights, *parts) for parts in zip(x, p.expert_ids, scores, strict=True)]
    total = sum(((out * g).sum() for out, g in zip(outs, p.gradients, strict=True)), torch.zeros(()))
    (total + 0 * weights.sum() + sum((0 * t.sum() for t in (*x, *scores)), torch.zeros(()))).backward()
    grads = [[t.grad for t in tensors] for tensors in (x, scores)]
    assert weights.grad is not None
    return [out.detach() for out in outs], grads[0], grads[1], weights.grad  # type: ignore[return-value]


def destinations(p: Problem) -> list[set[int]]:
    """Returns, for each token of the job, the ranks of its experts. Requires that every expert is on one rank."""
    rank_of = {e: rank for rank, experts in enumerate(p.placement) for e in experts}
    ids = [row for ids_of_rank in p.expert_ids for row in ids_of_rank.tolist()]
    return [{rank_of[e] for e in row if e >= 0} for row in ids]


def fewest_foreign_ranks(p: Problem, own: int, ids: Sequence[int]) -> int:
    """Returns the fewest ranks besides `own` that together have all these experts, by trying all sets of ranks."""
    wanted = {e for e in ids if e >= 0} - set(p.placement[own])
    world = len(p.placement)
    best = world
    for chosen in range(1 << world):
        ranks = [r for r in range(world) if chosen >> r & 1]
        if wanted <= {e for r in ranks for e in p.placement[r]}:
            best = min(best, len([r for r in ranks if r != own]))
    return best
