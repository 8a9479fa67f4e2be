"""Compares `sw.experts.dispatch` and `combine` with an unsharded layer: values, gradients, row order, bytes, bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import meshes
import routing
import shardwright as sw
from pool import Pool
from shardwright._native import _runtime
from shardwright.experts import combine, dispatch

CASES = [(load, placement) for load in routing.LOADS for placement in routing.PLACEMENTS]
SEEDS = range(3)


def _mine(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().to(meshes.device)


def _apply_experts(p: routing.Problem, weights: torch.Tensor, rows: torch.Tensor, handle: object, counts: torch.Tensor):
    """Applies each expert of this rank to its rows."""
    parts = rows.split(counts.tolist())
    done = [routing.expert(weights[e], part) for e, part in zip(handle.experts, parts, strict=True)]  # type: ignore[attr-defined]
    return torch.cat(done) if done else rows.new_zeros(rows.shape)  # no rows: takes no part in the backward


def _close(actual: torch.Tensor | None, expected: torch.Tensor, what: object) -> None:
    assert actual is not None, f"{what}: none"
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-11, atol=1e-12, msg=lambda text: f"{what}: {text}")


def _check_layer(p: routing.Problem, what: object, **options: object) -> None:
    """Compares forward and backward of one layer with the unsharded layer."""
    rank = dist.get_rank()
    outs, x_grads, score_grads, weight_grad = routing.unsharded(p)
    x, scores = (_mine(parts[rank]).requires_grad_() for parts in (p.x, p.scores))
    weights = _mine(p.weights).requires_grad_()
    rows, counts, handle = dispatch(x, _mine(p.expert_ids[rank]), scores, p.placement, **options)  # type: ignore[arg-type]
    out = combine(_apply_experts(p, weights, rows, handle, counts), handle)
    out.backward(_mine(p.gradients[rank]))
    _close(out.detach(), outs[rank], what)
    _close(x.grad, x_grads[rank], f"{what}: gradient of x")
    _close(scores.grad, score_grads[rank], f"{what}: gradient of scores")
    total = torch.zeros_like(weights) if weights.grad is None else weights.grad
    dist.all_reduce(total)
    _close(total, weight_grad, f"{what}: gradient of the experts")


def _check_layers() -> None:
    world = dist.get_world_size()
    for load, placement in CASES:
        for seed in SEEDS:
            p = routing.problem(world, seed, load=load, placement=placement)
            _check_layer(p, f"{load}, {placement}, seed {seed}")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_layer_matches_unsharded(pool: Pool, world: int) -> None:
    pool.run(_check_layers, world)


# --------------------------------------------------------------------------------------------------- rows and bytes


def _rows_and_bytes() -> list[tuple[int, list[list[int]], int, int, int, int, int, int]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for load, placement in CASES:
        p = routing.problem(world, 5, load=load, placement=placement)
        with sw.debug.wire_meter() as going:
            rows, counts, handle = dispatch(
                _mine(p.x[rank]), _mine(p.expert_ids[rank]), _mine(p.scores[rank]), p.placement
            )
        with sw.debug.wire_meter() as coming:
            combine(rows, handle)
        kept = handle._scores
        assert kept is not None and kept.untyped_storage().nbytes() == 8 * kept.numel(), "what arrived is kept as well"
        numbers = [part[:, 0].to(torch.int64).tolist() for part in rows.cpu().split(counts.tolist())]
        for part, own in zip(rows.cpu().split(counts.tolist()), numbers, strict=True):
            assert torch.equal(part, torch.cat(p.x)[own])
        bytes_ = (going.received_bytes, handle.payload_bytes, handle.metadata_bytes)
        found.append((rank, numbers, *bytes_, going.sent_bytes, coming.received_bytes, coming.sent_bytes))
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_are_in_order_and_bytes_equal_the_bound(pool: Pool, world: int) -> None:
    """Every token is once, in order, on each rank of its experts. The bytes sent equal the lower bound."""
    ranks = pool.run(_rows_and_bytes, world)
    for case, (load, placement) in enumerate(CASES):
        p = routing.problem(world, 5, load=load, placement=placement)
        row_bytes = p.x[0].shape[1] * 8
        ids = [row for ids_of_rank in p.expert_ids for row in ids_of_rank.tolist()]
        home = p.rank_of_token()
        at: list[set[int]] = [set() for _ in ids]
        served: dict[tuple[int, int], int] = {}
        for rank in range(world):
            for expert, numbers in zip(p.placement[rank], ranks[rank][case][1], strict=True):
                assert numbers == sorted(numbers)  # ordered by rank, then by token
                for token in numbers:
                    at[token].add(rank)
                    served[token, expert] = served.get((token, expert), 0) + 1
        assert served == {(t, e): 1 for t, row in enumerate(ids) for e in row if e >= 0}
        for rank in range(world):
            _, _, going, payload, metadata, _, coming, coming_sent = ranks[rank][case]
            foreign = sum(rank in ranks_of and home[t] != rank for t, ranks_of in enumerate(at))
            assert payload == foreign * row_bytes, f"{load}, {placement}"
            assert going == payload + metadata
            # The check of ranks before a combine sends 3 words to each other rank.
            compared = 3 * 8 * (world - 1)
            assert coming_sent == foreign * row_bytes + compared
            own = sum(len(at[t] - {rank}) for t in range(len(ids)) if home[t] == rank)
            assert coming == own * row_bytes + compared
        if placement != "copies":
            assert at == routing.destinations(p)


def _foreign_ranks(top_k: int) -> list[int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    p = routing.problem(world, 3, placement="copies", top_k=top_k, num_experts=9, most_tokens=40)
    _, _, handle = dispatch(_mine(p.x[rank]), _mine(p.expert_ids[rank]), None, p.placement)
    return [handle.payload_bytes // (8 * p.x[0].shape[1])]


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_replicated_experts_save_bytes(pool: Pool, top_k: int) -> None:
    """Among ranks with copies of its experts, a token is sent to the fewest ranks: always true for two experts."""
    world = 4
    p = routing.problem(world, 3, placement="copies", top_k=top_k, num_experts=9, most_tokens=40)
    least = sum(
        routing.fewest_foreign_ranks(p, rank, ids) for rank in range(world) for ids in p.expert_ids[rank].tolist()
    )
    found = sum(rows for (rows,) in pool.run(_foreign_ranks, world, top_k))
    assert found == least if top_k <= 2 else least <= found <= 1.05 * least


# ------------------------------------------------------------------------------------------------------------- bits


def _bits(dtype: torch.dtype) -> None:
    """Checks the documented sum: in float32 on each rank in the order of a token's experts, rounded, then by rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    p = routing.problem(world, 2, dtype=dtype, most_tokens=30, hidden=33)
    rank_of = {e: r for r, experts in enumerate(p.placement) for e in experts}
    p.scores = [part.to(torch.float32) for part in p.scores]
    for turn in range(3):
        if turn == rank % 3:
            torch.manual_seed(turn)
            torch.randn(300, 300) @ torch.randn(300, 300)  # delays this rank
        rows, counts, handle = dispatch(_mine(p.x[rank]), _mine(p.expert_ids[rank]), _mine(p.scores[rank]), p.placement)
        factors = torch.tensor([3.0 + e for e in handle.experts]).repeat_interleave(counts.cpu())
        out = combine((rows.cpu() * factors.unsqueeze(1).to(dtype)).to(rows.device), handle).cpu()
        for token, ids in enumerate(p.expert_ids[rank].tolist()):
            by_rank = torch.zeros(33)
            for r in range(world):
                own = [j for j, e in enumerate(ids) if e >= 0 and rank_of[e] == r]
                if own:
                    partial = torch.zeros(33)
                    for j in own:
                        y = p.x[rank][token] * torch.tensor(3.0 + ids[j]).to(dtype)
                        partial = partial + p.scores[rank][token, j] * y.to(torch.float32)
                    by_rank = by_rank + partial.to(dtype).to(torch.float32)
            assert torch.equal(out[token], by_rank.to(dtype)), f"token {token} of rank {rank}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_combine_sums_in_the_documented_order(pool: Pool, dtype: torch.dtype) -> None:
    pool.run(_bits, 4, dtype)


def _without_scores() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    p = routing.problem(world, 4)
    x = _mine(p.x[rank]).requires_grad_()
    rows, _, handle = dispatch(x, _mine(p.expert_ids[rank]).to(torch.int32), None, p.placement)
    out = combine(rows, handle)
    num = (p.expert_ids[rank] >= 0).sum(1, keepdim=True).to(torch.float64)
    _close(out.detach(), p.x[rank] * num, "sums")
    out.sum().backward()
    _close(x.grad, num.expand_as(x), "gradient")


def test_combine_without_scores(pool: Pool) -> None:
    pool.run(_without_scores, 3)


# ------------------------------------------------------------------------------------------------- bytes with scales


def _in_a_checkpoint() -> None:
    """Only rank 0 has experts, and only they are trained. All ranks recompute at the same point of the backward."""
    weights = _mine(torch.eye(4).repeat(2, 1, 1)).requires_grad_()
    x, ids = _mine(torch.arange(12.0).view(3, 4)), _mine(torch.tensor([[0], [1], [0]]))

    def layer(x: torch.Tensor) -> torch.Tensor:
        rows, counts, handle = dispatch(x, ids, None, [[0, 1], []])
        parts = zip(handle.experts, rows.split(counts.tolist()), strict=True)
        return combine(torch.cat([part @ weights[e] for e, part in parts]) if handle.experts else rows, handle)

    gradients = []
    for function in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        weights.grad = None
        function(x).square().sum().backward()
        gradients.append(weights.grad)
    if dist.get_rank() == 0:
        assert torch.equal(*gradients) and gradients[0].any()
    else:
        assert gradients == [None, None]


def test_ranks_without_experts_recompute_checkpoints(pool: Pool) -> None:
    pool.run(_in_a_checkpoint, 2)


def _lazy_bits() -> None:
    """Tensors with the conjugate or negative bit, whose memory is neither conjugated nor negated."""
    rank, world = dist.get_rank(), dist.get_world_size()
    p = routing.problem(world, 6)
    placement, ids = p.placement, p.expert_ids[rank]
    pairs = torch.complex(p.x[rank], p.x[rank] + 1).conj()
    assert pairs.is_conj() and pairs.imag.is_neg()
    rows, _, _ = dispatch(pairs, ids, None, placement)
    plain, _, _ = dispatch(pairs.resolve_conj(), ids, None, placement)
    assert torch.equal(rows, plain)
    negative = torch.complex(p.scores[rank], p.scores[rank]).conj().imag
    rows, _, handle = dispatch(pairs.imag, ids, negative, placement, scales=pairs.imag)
    plain, _, expected = dispatch(-p.x[rank] - 1, ids, -p.scores[rank], placement, scales=-p.x[rank] - 1)
    assert torch.equal(rows, plain) and handle.scales is not None and expected.scales is not None
    assert torch.equal(handle.scales, expected.scales)
    sums = combine(torch.complex(rows, -rows).conj().imag, handle)
    assert torch.equal(sums, combine(rows, expected))
    x = p.x[rank].clone().requires_grad_()
    rows, _, handle = dispatch(x, ids, None, placement)
    combine(rows, handle).backward(pairs.imag)
    plain = p.x[rank].clone().requires_grad_()
    rows, _, handle = dispatch(plain, ids, None, placement)
    combine(rows, handle).backward(pairs.imag.resolve_neg())
    assert x.grad is not None and plain.grad is not None and torch.equal(x.grad, plain.grad)


@pytest.mark.cpu_only("the device has no complex numbers")
def test_tensors_with_conjugate_or_negative_bit(pool: Pool) -> None:
    pool.run(_lazy_bits, 3)


def _with_scales(dtype: torch.dtype) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    p = routing.problem(world, 6, hidden=16)
    x = [part.to(torch.float32).to(dtype) for part in p.x]
    scales = [part[:, :2].to(torch.float32) for part in p.x]
    rows, counts, handle = dispatch(
        _mine(x[rank]), _mine(p.expert_ids[rank]), _mine(p.scores[rank]), p.placement, scales=_mine(scales[rank])
    )
    assert handle.scales is not None and handle.scales.dtype == torch.float32
    numbers = handle.scales[:, 0].cpu().to(torch.int64)
    assert torch.equal(rows.cpu().view(torch.uint8), torch.cat([part.view(torch.uint8) for part in x])[numbers])
    assert torch.equal(handle.scales.cpu(), torch.cat(scales)[numbers])
    expected = [sorted(t for t, e in _pairs(p) if e == expert) for expert in p.placement[rank]]
    assert [part.tolist() for part in numbers.split(counts.tolist())] == expected
    out = combine(rows.to(torch.float32) * handle.scales[:, 1:], handle)
    assert out.dtype == torch.float32 and out.shape == x[rank].shape


def _pairs(p: routing.Problem) -> list[tuple[int, int]]:
    rows = [row for ids_of_rank in p.expert_ids for row in ids_of_rank.tolist()]
    return [(t, e) for t, row in enumerate(rows) for e in row if e >= 0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bfloat16], ids=str)
def test_scales_are_sent_with_their_tokens(pool: Pool, dtype: torch.dtype) -> None:
    pool.run(_with_scales, 3, dtype)


# ---------------------------------------------------------------------------------------------------------- capacity


def _kept(p: routing.Problem, capacity: int) -> set[tuple[int, int]]:
    """Returns the (token, index of its expert) pairs within capacity, first come, first served."""
    taken: dict[int, int] = {}
    kept = set()
    for t, row in enumerate(row for ids_of_rank in p.expert_ids for row in ids_of_rank.tolist()):
        for j, e in enumerate(row):
            if e >= 0 and taken.get(e, 0) < capacity:
                kept.add((t, j))
                taken[e] = taken.get(e, 0) + 1
    return kept


def _drop(capacity: int, load: str, rows_per_rank: int | None) -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    p = routing.problem(world, 8, load=load)
    kept = _kept(p, capacity)
    lacking = [row.clone() for row in p.expert_ids]
    for r, ids in enumerate(lacking):
        for t in range(len(ids)):
            for j in range(ids.shape[1]):
                if (p.first_token(r) + t, j) not in kept:
                    ids[t, j] = -1
    as_if = routing.Problem(p.placement, p.x, lacking, p.scores, p.weights, p.gradients)
    outs, x_grads, score_grads, _ = routing.unsharded(as_if)
    x, scores = (_mine(parts[rank]).requires_grad_() for parts in (p.x, p.scores))
    rows, counts, handle = dispatch(
        x, _mine(p.expert_ids[rank]), scores, p.placement, capacity, overflow="drop", rows_per_rank=rows_per_rank
    )
    assert (counts <= capacity).all()
    number = int(counts.sum())
    y = _apply_experts(p, _mine(p.weights), rows[:number], handle, counts)
    out = combine(torch.cat([y, rows[number:]]), handle)
    out.backward(_mine(p.gradients[rank]))
    _close(out.detach(), outs[rank], "sums")
    _close(x.grad, x_grads[rank], "gradient of x")
    _close(scores.grad, score_grads[rank], "gradient of scores")
    return int(handle.dropped)


@pytest.mark.parametrize("rows_per_rank", [None, 9], ids=["counted", "fixed"])
@pytest.mark.parametrize("load", routing.LOADS)
@pytest.mark.parametrize("capacity", [0, 1, 4, 100])
def test_capacity_drops_later_tokens(pool: Pool, capacity: int, load: str, rows_per_rank: int | None) -> None:
    world = 3
    p = routing.problem(world, 8, load=load)
    dropped = sum(pool.run(_drop, world, capacity, load, rows_per_rank))
    assert dropped == len(_pairs(p)) - len(_kept(p, capacity))


def _raise(capacity: int) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    p = routing.problem(world, 8, load="one")
    x = _mine(p.x[rank])
    try:
        dispatch(x, _mine(p.expert_ids[rank]), _mine(p.scores[rank]), p.placement, capacity)
    except ValueError as error:
        assert torch.equal(x.cpu(), p.x[rank])
        return str(error)
    return ""


def test_capacity_raises_on_all_ranks(pool: Pool) -> None:
    asked = sum(map(len, routing.problem(3, 8, load="one").x))
    assert pool.run(_raise, 3, asked) == [""] * 3
    for text in pool.run(_raise, 3, asked - 1):
        assert f"capacity must be at least {asked} for expert 0 on rank 0, got {asked - 1}" in text


# ----------------------------------------------------------------------------------------------- counts on the device


def _fixed(placement: str, rows_per_rank: int) -> None:
    """Rows, sums and gradients equal those with counts on the host, bit for bit."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for load in routing.LOADS:
        p = routing.problem(world, 7, load=load, placement=placement)
        found = []
        for options in ({}, {"rows_per_rank": rows_per_rank, "overflow": "drop"}):
            x, scores = (_mine(parts[rank]).requires_grad_() for parts in (p.x, p.scores))
            rows, counts, handle = dispatch(x, _mine(p.expert_ids[rank]), scores, p.placement, **options)  # type: ignore[arg-type]
            out = combine(torch.sin(rows), handle)
            out.backward(_mine(p.gradients[rank]))
            number = int(counts.sum())
            assert not rows[number:].any()
            assert int(handle.dropped) == 0
            found.append((rows[:number], counts, out, x.grad, scores.grad))
        for of_host, of_device in zip(*found, strict=True):
            assert torch.equal(of_host, of_device), f"{load}: {of_host} {of_device}"


@pytest.mark.parametrize("placement", routing.PLACEMENTS)
def test_fixed_rows_equal_counted_rows(pool: Pool, placement: str) -> None:
    for world in (1, 3, 4):
        pool.run(_fixed, world, placement, 9)


def _too_few_rows() -> None:
    """Every rank receives one row from each rank. Later tokens for that rank are dropped and counted."""
    rank, world = dist.get_rank(), dist.get_world_size()
    p = routing.problem(world, 8)
    rank_of = {e: r for r, experts in enumerate(p.placement) for e in experts}
    dropped, seen = 0, set()
    expected = torch.zeros_like(p.x[rank])
    for t, ids in enumerate(p.expert_ids[rank].tolist()):
        goes = {rank_of[e] for e in ids if e >= 0} - seen
        for j, e in enumerate(ids):
            if e >= 0 and rank_of[e] in goes:
                expected[t] += p.scores[rank][t, j] * p.x[rank][t]
            dropped += e >= 0 and rank_of[e] not in goes
        seen |= goes
    rows, _, handle = dispatch(
        _mine(p.x[rank]),
        _mine(p.expert_ids[rank]),
        _mine(p.scores[rank]),
        p.placement,
        overflow="drop",
        rows_per_rank=1,
    )
    _close(combine(rows, handle), expected, "sums")
    assert int(handle.dropped) == dropped


def test_too_few_fixed_rows_drop_tokens(pool: Pool) -> None:
    pool.run(_too_few_rows, 3)


@pytest.mark.parametrize("world", [1, 4, 9])
def test_device_chooses_the_same_replicas_as_host(world: int) -> None:
    g = torch.Generator().manual_seed(world)
    for seed in range(20):
        experts = int(torch.randint(1, 20, (), generator=g))
        placement = routing.placement_of("copies", experts, world, g)
        for rank in range(1, world):
            placement[rank] += [e for e in range(0, experts, 3) if e not in placement[rank] and (e + rank) % 2]
        held = _runtime.ExpertPlacement(experts, placement)
        ids = torch.randint(-1, experts, (17, 4), generator=g)
        for rank in range(world):
            on_host = held.choose(ids, rank, [])
            on_device = _runtime.DevicePlacement(held, "cpu").choose(ids, rank)
            assert torch.equal(on_host, on_device), f"seed {seed}, rank {rank}"


# ------------------------------------------------------------------------------------------------------------- nodes


def _nodes(ranks_per_node: int) -> list[tuple[int, int]]:
    """Checks that rows equal those without nodes. Returns the bytes between and inside nodes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    topology = _topology(ranks_per_node)
    found = []
    for load, placement in CASES:
        p = routing.problem(world, 5, load=load, placement=placement)
        _check_layer(p, f"{load}, {placement}", topology=topology)
        if placement != "copies":  # with nodes, other copies of an expert may be chosen
            tensors = (_mine(p.x[rank]), _mine(p.expert_ids[rank]), _mine(p.scores[rank]), p.placement)
            flat = dispatch(*tensors)
            with sw.debug.wire_meter() as meter:
                rows, counts, handle = dispatch(*tensors, topology=topology)
            assert torch.equal(rows, flat.rows) and torch.equal(counts, flat.tokens_per_expert)
            assert meter.received_bytes == handle.payload_bytes + handle.metadata_bytes
            found.append((meter.received_bytes, handle.payload_bytes))
    return found


def _topology(ranks_per_node: int) -> sw.Topology:
    link = sw.planning.Link(message_ps=1, ps_per_kib=1)
    return sw.Topology("nodes", ranks_per_node, step_ps=1, memory_ps_per_kib=1, inside=link, between=link)


@pytest.mark.parametrize("world, ranks_per_node", [(4, 2), (3, 2), (5, 3)])
def test_tokens_enter_each_node_once(pool: Pool, world: int, ranks_per_node: int) -> None:
    """A token is sent once to each other node, and from there once to each rank of its experts."""
    ranks = pool.run(_nodes, world, ranks_per_node)
    node = [rank // ranks_per_node for rank in range(world)]
    members = {n: [r for r in range(world) if node[r] == n] for n in node}
    for case, (load, placement) in enumerate((lo, pl) for lo, pl in CASES if pl != "copies"):
        p = routing.problem(world, 5, load=load, placement=placement)
        received = [0] * world
        for home, ranks_of in zip(p.rank_of_token(), routing.destinations(p), strict=True):
            for n in {node[r] for r in ranks_of}:
                place = members[node[home]].index(home)
                entry = home if n == node[home] else members[n][place % len(members[n])]
                received[entry] += entry != home
                for r in ranks_of:
                    received[r] += node[r] == n and r != entry
        assert [found[case][1] for found in ranks] == [rows * 8 * p.x[0].shape[1] for rows in received]


def _nodes_with_all() -> None:
    """With nodes, capacity and scales give the same rows and the same dropped tokens as without."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for load in routing.LOADS:
        p = routing.problem(world, 9, load=load, placement="uneven")
        tensors = (_mine(p.x[rank]), _mine(p.expert_ids[rank]), None, p.placement, 3)
        found = []
        for topology in (None, _topology(2)):
            rows, counts, handle = dispatch(
                *tensors, overflow="drop", scales=_mine(p.x[rank][:, :1]), topology=topology
            )
            assert handle.scales is not None
            found.append((rows, counts, handle.scales, torch.tensor(handle.dropped), combine(rows, handle)))
        _close(found[1][4], found[0][4].cpu(), load)
        assert all(map(torch.equal, found[0][:4], found[1][:4])), load


def test_nodes_with_capacity_and_scales(pool: Pool) -> None:
    pool.run(_nodes_with_all, 4)


# --------------------------------------------------------------------------------------------- ranks without a part


def _single_input(trains: str) -> None:
    """At most one of the inputs has gradients, and only one rank has experts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    p = routing.problem(world, 1)
    p.placement = [[], list(range(p.num_experts)), *([] for _ in range(world - 2))]
    outs, x_grads, score_grads, weight_grad = routing.unsharded(p)
    x, scores, weights = _mine(p.x[rank]), _mine(p.scores[rank]), _mine(p.weights)
    if trains != "nothing":
        {"x": x, "scores": scores, "experts": weights}[trains].requires_grad_()
    rows, counts, handle = dispatch(x, _mine(p.expert_ids[rank]), scores, p.placement)
    out = combine(_apply_experts(p, weights, rows, handle, counts), handle)
    _close(out.detach(), outs[rank], trains)
    if trains == "nothing":
        assert out.requires_grad != handle._compares, "known without a gradient only if ranks compare"
        return
    out.backward(_mine(p.gradients[rank]))
    if trains == "x":
        _close(x.grad, x_grads[rank], trains)
    elif trains == "scores":
        _close(scores.grad, score_grads[rank], trains)
    elif rank == 1:
        _close(weights.grad, weight_grad, trains)


@pytest.mark.parametrize("trains", ["x", "scores", "experts", "nothing"])
def test_backward_of_a_single_input(pool: Pool, trains: str) -> None:
    pool.run(_single_input, 3, trains)


def _no_tokens() -> None:
    placement = [[0, 1], [], [2]][: dist.get_world_size()]
    x = torch.empty(0, 4, device=meshes.device, requires_grad=True)
    ids, scores = (torch.empty(0, 2, dtype=d, device=meshes.device) for d in (torch.int64, torch.float32))
    for options in (
        {},
        {"capacity": 3},
        {"rows_per_rank": 2, "overflow": "drop"},
        {"rows_per_rank": 0, "overflow": "drop"},
    ):
        rows, counts, handle = dispatch(x, ids, scores, placement, **options)  # type: ignore[arg-type]
        out = combine(rows, handle)
        out.sum().backward()
        assert out.shape == (0, 4) and int(counts.sum()) == 0 and len(counts) == len(placement[dist.get_rank()])


def test_no_tokens_anywhere(pool: Pool) -> None:
    pool.run(_no_tokens, 3)


# -------------------------------------------------------------------------------------------- placements and groups


def _layouts() -> None:
    rank = dist.get_rank()
    mesh = meshes.get_mesh((2, 2))
    cases: list[tuple[sw.Layout, list[list[int]]]] = [
        (sw.Layout(mesh, (5, 3), ["S(0)", "S(0)"]), [[0, 1], [2], [3], [4]]),
        (sw.Layout(mesh, (5,), ["R", "S(0)"]), [[0, 1, 2], [3, 4], [0, 1, 2], [3, 4]]),
        (sw.Layout(mesh, (5, 3), ["S(0)", "R"]), [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]),
        (sw.Layout(mesh, (3,), ["S(0)", "S(0)"]), [[0], [1], [2], []]),
    ]
    for layout, lists in cases:
        p = routing.problem(4, 2, num_experts=layout.shape[0])
        found = []
        for placement in (layout, lists):
            rows, _, handle = dispatch(_mine(p.x[rank]), _mine(p.expert_ids[rank]), _mine(p.scores[rank]), placement)
            assert list(handle.experts) == lists[rank]
            found.append(combine(rows, handle))
        assert torch.equal(*found)


def test_layouts_as_placements(pool: Pool) -> None:
    pool.run(_layouts, 4)


def _groups() -> None:
    """Two groups of two ranks work separately, given as a DeviceMesh, a process group, or a layout on some ranks."""
    rank = dist.get_rank()
    mesh = meshes.get_mesh((2, 2))
    half = mesh["b"]
    own = [0, 1] if rank < 2 else [2, 3]
    p = routing.problem(2, 10 + rank // 2)
    place = own.index(rank)
    layout = sw.Layout(sw.Mesh({"ep": 2}, ranks=own), (p.num_experts,), ["S(0)"])
    in_group = sw.Layout(sw.Mesh({"ep": 2}), (p.num_experts,), ["S(0)"])
    outs = routing.unsharded(p)[0]
    of_mesh = sw.Layout(half, (p.num_experts,), ["S(0)"])
    for placement, group in [
        (p.placement, half),
        (p.placement, half.get_group()),
        (layout, None),
        (of_mesh, half),
        (of_mesh, half.get_group()),
    ]:
        _check_in_group(p, place, outs, placement, group)
    _check_in_group(p, place, outs, in_group, half.get_group())


def _check_in_group(p: routing.Problem, place: int, outs: list[torch.Tensor], placement: object, group: object) -> None:
    tensors = (_mine(p.x[place]), _mine(p.expert_ids[place]), _mine(p.scores[place]))
    rows, counts, handle = dispatch(*tensors, placement, group=group)
    out = combine(_apply_experts(p, _mine(p.weights), rows, handle, counts), handle)
    _close(out, outs[place], placement)


def test_dispatch_within_groups(pool: Pool) -> None:
    pool.run(_groups, 4)


# ----------------------------------------------------------------------------------------------------- compiled code


def _compiled() -> None:
    """The graph breaks once per call, and the rest is compiled."""
    torch._dynamo.reset()
    rank, world = dist.get_rank(), dist.get_world_size()
    p = routing.problem(world, 4)
    graphs = []

    def backend(graph: torch.fx.GraphModule, examples: object) -> object:
        graphs.append(graph)
        return graph.forward

    def layer(x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows, _, handle = dispatch(x * 2, ids, scores, p.placement)
        return combine(torch.sin(rows), handle) + 1

    found = []
    for function in (layer, torch.compile(layer, backend=backend)):
        x, scores = (parts[rank].clone().requires_grad_() for parts in (p.x, p.scores))
        out = function(x, p.expert_ids[rank], scores)
        out.backward(p.gradients[rank])
        found.append((out.detach(), x.grad, scores.grad))
    assert len(graphs) == 3  # before, between and after the two calls
    assert all(map(torch.equal, *found))


@pytest.mark.cpu_only("compiled code is compared on the CPU")
def test_torch_compile_breaks_once_per_call(pool: Pool) -> None:
    pool.run(_compiled, 2)


# ---------------------------------------------------------------------------------------------------- a small model


def _train(sharded: bool) -> list[torch.Tensor]:
    """Trains a layer with a router and eight experts for ten steps. The batch is cut by rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    batch = torch.randn(23, 8, generator=g, dtype=torch.float64)
    target = torch.sin(3 * batch)
    router = torch.randn(8, 8, generator=g, dtype=torch.float64).requires_grad_()
    weights = (torch.randn(8, 8, 8, generator=g, dtype=torch.float64) / 3).requires_grad_()
    placement = [[0, 1, 2, 3], [4], [5, 6, 7]]
    own = batch.tensor_split(world)[rank], target.tensor_split(world)[rank]
    losses = []
    for _ in range(10):
        x, wanted = own if sharded else (batch, target)
        scores, ids = torch.softmax(x @ router, 1).topk(2, dim=1)
        if sharded:
            rows, counts, handle = dispatch(x, ids, scores, placement)
            parts = zip(handle.experts, rows.split(counts.tolist()), strict=True)
            out = combine(torch.cat([routing.expert(weights[e], part) for e, part in parts]), handle)
        else:
            out = routing.layer(weights, x, ids, scores)
        loss = ((x + out - wanted) ** 2).sum() / batch.numel()
        gradients = list(torch.autograd.grad(loss, [router, weights], allow_unused=True))
        loss = loss.detach()
        if sharded:
            for value in (loss, *gradients):
                dist.all_reduce(value)
        losses.append(loss)
        with torch.no_grad():
            for parameter, gradient in zip((router, weights), gradients, strict=True):
                parameter -= 0.5 * gradient
    return losses


def _train_both() -> None:
    sharded, unsharded = _train(True), _train(False)
    assert unsharded[-1] < 0.9 * unsharded[0]
    torch.testing.assert_close(torch.stack(sharded), torch.stack(unsharded), rtol=1e-10, atol=0)


@pytest.mark.cpu_only("the model is on the CPU")
def test_small_model_trains_like_unsharded(pool: Pool) -> None:
    pool.run(_train_both, 3)
