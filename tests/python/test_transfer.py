"""Tests of transfers of state dicts between layouts, on Gloo ranks: every element, repeated starts and streams."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import meshes
import oracle
import shardwright as sw
from map_rules import random_rules
from parts import part_of
from pool import Pool

WORLD_SIZE = 6
TRAIN = sw.Mesh({"dp": 2, "tp": 2}, [0, 1, 2, 3])
SERVE = sw.Mesh({"tp": 3}, [5, 3, 4])
KINDS = ("R", "S(0)", "S(1)")

State = dict[str, torch.Tensor]

RULES = [
    sw.rules.fuse("l.*.qkv", ["l.*.q", "l.*.k", "l.*.v"]),
    sw.rules.stack("l.*.experts.{}.w"),
    sw.rules.transpose("l.*.experts.w", (0, 2, 1)),
    sw.rules.cast("bfloat16", ["l.**"]),
    sw.rules.rename("l.**", "layers.**"),
]


def _trained(version: int) -> State:
    state: State = {"embed": oracle.global_tensor((11, 6), torch.float32, version), "step": torch.tensor(version)}
    for layer in range(2):
        for i, (name, rows) in enumerate((("q", 8), ("k", 4), ("v", 4))):
            state[f"l.{layer}.{name}"] = oracle.global_tensor((rows, 6), torch.float32, version + 10 * layer + i)
        for expert in range(5):
            seed = version + 100 * layer + expert
            state[f"l.{layer}.experts.{expert}.w"] = oracle.global_tensor((3, 7), torch.float32, seed)
    return state


def _served(state: State) -> State:
    result = {"embed": state["embed"], "step": state["step"]}
    for layer in range(2):
        parts = [state[f"l.{layer}.{name}"] for name in "qkv"]
        result[f"layers.{layer}.qkv"] = torch.cat(parts).bfloat16()
        experts = torch.stack([state[f"l.{layer}.experts.{i}.w"] for i in range(5)])
        result[f"layers.{layer}.experts.w"] = experts.permute(0, 2, 1).bfloat16()
    return result


def _layouts(state: State, mesh: sw.Mesh, draw: random.Random) -> dict[str, sw.Layout]:
    return {
        name: sw.Layout(
            mesh, x.shape, [draw.choice(KINDS[: 1 + min(x.ndim, 2)]) for _ in range(mesh.ndim)], str(x.dtype)
        )
        for name, x in state.items()
    }


def _parts(state: State, layouts: dict[str, sw.Layout]) -> dict[str, tuple[torch.Tensor, sw.Layout]] | None:
    """Returns this rank's state dict, or None if the rank holds nothing."""
    rank = dist.get_rank()
    local = {n: (part_of(state[n], y, rank).to(meshes.device), y) for n, y in layouts.items() if rank in y.mesh.ranks}
    return local or None


def _check(tensors: dict[str, Any], state: State, layouts: dict[str, sw.Layout]) -> None:
    rank = dist.get_rank()
    assert set(tensors) == {name for name, layout in layouts.items() if rank in layout.mesh.ranks}
    for name, x in tensors.items():
        wrong = oracle.difference(x, part_of(state[name], layouts[name], rank).to(x.device))
        assert wrong is None, f"{name} on rank {rank}: {wrong}"


def _train_to_serve() -> None:
    draw = random.Random(1)
    state = _trained(1)
    sources = _layouts(state, TRAIN, draw)
    served = _served(state)
    layouts = _layouts(served, SERVE, draw)
    given = _parts(state, sources)
    t = sw.transfer(given, layouts, map=RULES, bucket_bytes=1000, buckets=2)
    assert t.names == list(served)
    t.start().wait()
    _check(t.tensors, served, layouts)
    assert f"transfer of {len(served)} tensors" in t.explain()
    addresses = {name: x.data_ptr() for name, x in t.tensors.items()}
    for version in (2, 3):
        state = _trained(version)
        for name, (local, layout) in (given or {}).items():
            local.copy_(part_of(state[name], layout, dist.get_rank()))
        handle = t.start()
        handle.source_free.wait()
        for local, _ in (given or {}).values():
            local.zero_()
        handle.wait()
        assert handle.is_done()
        _check(t.tensors, _served(state), layouts)
        assert addresses == {name: x.data_ptr() for name, x in t.tensors.items()}


def test_transfer_can_be_started_repeatedly(pool: Pool) -> None:
    pool.run(_train_to_serve, WORLD_SIZE)


def _in_place() -> None:
    """Transfers into a DTensor, into every other column of a tensor, and into a tensor that two ranks hold in full."""
    rank = dist.get_rank()
    state = {name: oracle.global_tensor((6, 8), torch.float32, i) for i, name in enumerate("abcd")}
    mesh = meshes.get_mesh((2, 3))
    layouts = {
        "b": sw.Layout(SERVE, (6, 8), [sw.placements.Cyclic(1, 1)]),
        "a": sw.Layout(mesh, (6, 8), ["S(1)", "S(0)"]),
    }
    to: dict[str, Any] = {"a": DTensor.from_local(torch.zeros(2, 4, device=meshes.device), mesh, [Shard(1), Shard(0)])}
    kept = None
    if rank in SERVE.ranks:
        kept = torch.zeros(6, 2 * layouts["b"].local_shape(rank)[1], device=meshes.device)
        to["b"] = (kept[:, ::2], layouts["b"])
    if rank in (1, 4):
        to["c"] = torch.zeros(6, 8, device=meshes.device)
    if rank == 2:  # declares it for all ranks of the mesh
        to["d"] = ([Shard(1), Replicate()], mesh, (6, 8), torch.float32)
    replicated = DTensor.from_local(state["a"].to(meshes.device), mesh, [Replicate(), Replicate()])
    given: dict[str, Any] = {"a": replicated, "nested": {name: state[name].to(meshes.device) for name in "bd"}}
    if rank == 0:
        given["c"] = state["c"].to(meshes.device)
    t = sw.transfer(given, to, map=sw.rules.rename("nested.*", "*"))
    t.start().wait()
    assert t.tensors["a"] is to["a"]
    _check({"a": to["a"].to_local()}, state, {"a": layouts["a"]})
    _check({"d": t.tensors["d"]}, state, {"d": sw.Layout(mesh, (6, 8), ["S(1)", "R"])})
    if kept is not None:
        _check({"b": kept[:, ::2]}, state, {"b": layouts["b"]})
        assert not kept[:, 1::2].any()
    if rank in (1, 4):
        assert torch.equal(to["c"].cpu(), state["c"])


def test_destinations_are_filled_in_place(pool: Pool) -> None:
    pool.run(_in_place, WORLD_SIZE)


def _stream(early: bool) -> list[str]:
    draw = random.Random(2)
    state = _trained(4)
    served = _served(state)
    layouts = _layouts(served, SERVE, draw)
    # Each tensor is on one rank only, as if each rank were a pipeline stage.
    owners = {name: sw.Mesh({"one": 1}, [i % 4]) for i, name in enumerate(state)}
    sources = {name: sw.Layout(owners[name], x.shape, ["R"], str(x.dtype)) for name, x in state.items()}
    t = sw.transfer(_parts(state, sources), layouts if dist.get_rank() == 5 else {}, RULES, bucket_bytes=300)
    names = []
    for _ in range(2):
        received = {}
        for name, x in t.receive():
            received[name] = x
            if early and dist.get_rank() == 4:
                break
        if not early or dist.get_rank() != 4:
            _check(received, served, layouts)
        names = list(received)
    t.start().wait()
    _check(t.tensors, served, layouts)
    return names


@pytest.mark.parametrize("early", [False, True])
def test_receive_yields_complete_tensors(pool: Pool, early: bool) -> None:
    names = pool.run(_stream, WORLD_SIZE, early)
    assert names[:3] == [[], [], []]
    assert len(names[4]) == (1 if early else 6)
    assert len(names[5]) == 6


def _failing_caller(how: str) -> None:
    """On rank 0 the progress function or the loop over tensors raises. Rank 1 receives every tensor."""
    rank = dist.get_rank()
    src, dst = (sw.Layout(sw.Mesh({"a": 2}), (4, 8), [kind]) for kind in ("S(0)", "S(1)"))

    def explode(*_: Any) -> None:
        if rank == 0:
            raise KeyError(how)

    state = {f"w{i}": (torch.full((2, 8), float(i)), src) for i in range(12)}
    t = sw.transfer(state, dict.fromkeys(state, dst), bucket_bytes=64, progress=explode if how == "progress" else False)
    received = t.receive()
    if rank == 0:
        with pytest.raises(KeyError):
            for _ in received:
                received.throw(KeyError(how))  # type: ignore[attr-defined]
    else:
        assert [int(x[0, 0]) for _, x in received] == list(range(12))


@pytest.mark.cpu_only("what the caller does is the same on all devices")
@pytest.mark.parametrize("how", ["progress", "throw"])
def test_other_ranks_receive_if_caller_fails(pool: Pool, how: str) -> None:
    pool.run(_failing_caller, 2, how)


def _stream_memory(buckets: int) -> None:
    """Counts the tensors that exist at once while rank 1 receives 24 tensors of 64 KiB in groups of two."""
    size = 64 << 10
    names = [f"w{i}" for i in range(24)]
    src, dst = (sw.Layout(sw.Mesh({"a": 1}, [rank]), (128, 128), ["R"]) for rank in range(2))
    given = {name: (torch.full((128, 128), float(i)), src) for i, name in enumerate(names)}
    t = sw.transfer(
        given if dist.get_rank() == 0 else None, dict.fromkeys(names, dst), bucket_bytes=2 * size, buckets=buckets
    )
    made: list[int] = []
    make = t._destination_tensor

    def noted(number: int) -> torch.Tensor:
        local = make(number)
        if local.numel():
            made.append(local.untyped_storage()._weak_ref())
        return local

    t._destination_tensor = noted  # type: ignore[method-assign]
    most, allowed = 0, 2 * min(2, buckets)

    def count() -> int:
        return sum(not torch.UntypedStorage._expired(storage) for storage in made)

    for i, (name, x) in enumerate(t.receive()):
        assert name == names[i]
        assert bool((x == i).all())
        # The thread that ran a batch frees its tensors shortly after it has reported them complete.
        end = time.monotonic() + 5
        while count() > allowed and time.monotonic() < end:
            time.sleep(0.001)
        most = max(most, count())
        del x
    if dist.get_rank() == 1:
        assert len(made) == 24
        assert most == allowed


@pytest.mark.cpu_only("the run on a device keeps what it writes until it is over there")
@pytest.mark.parametrize("buckets", [1, 3])
def test_receive_takes_bounded_memory(pool: Pool, buckets: int) -> None:
    pool.run(_stream_memory, 2, buckets)


def _progress() -> list[tuple[int, int, str]]:
    state = _trained(5)
    served = _served(state)
    draw = random.Random(5)
    sources, layouts = _layouts(state, TRAIN, draw), _layouts(served, SERVE, draw)
    calls: list[tuple[int, int, str]] = []
    t = sw.transfer(_parts(state, sources), layouts, RULES, progress=lambda *said: calls.append(said))
    t.start().wait()
    assert sorted(name for _, _, name in calls) == sorted(served)
    total = sum(x.nbytes for x in served.values())
    assert [done for done, _, _ in calls] == sorted({done for done, _, _ in calls})
    assert {said for _, said, _ in calls} == {total}
    assert calls[-1][0] == total
    return calls


def test_progress_counts_to_the_total(pool: Pool) -> None:
    pool.run(_progress, WORLD_SIZE)


def _interrupted() -> None:
    """A caller that restarts a transfer on one rank does not block the other ranks."""
    rank = dist.get_rank()
    src, dst = (sw.Layout(sw.Mesh({"a": 2}), (4, 8), [kind]) for kind in ("S(0)", "S(1)"))
    state = {f"w{i}": (torch.full((2, 8), float(i)), src) for i in range(12)}

    def explode(*_: Any) -> None:
        if rank == 0:
            raise KeyError("progress")

    t = sw.transfer(state, dict.fromkeys(state, dst), bucket_bytes=64, progress=explode)
    for ways in (("start", "start"), ("start", "receive"), ("receive", "start")):
        failed = False
        runs = []
        for way in ways:
            if way == "start":
                runs.append(t.start().wait)
            else:
                received = t.receive()
                runs.append(lambda received=received: list(received))  # type: ignore[misc]
        try:
            runs[-1]()
        except KeyError:
            failed = True
        assert failed == (rank == 0), ways
        if ways[0] == "receive":
            with pytest.raises(RuntimeError, match=r"receive: start\(\) was called before the end"):
                runs[0]()
    for i in range(12):
        assert t.tensors[f"w{i}"].eq(i).all()

    t = sw.transfer(state, dict.fromkeys(state, dst), bucket_bytes=64)
    received = t.receive()
    if rank == 0:
        assert next(received)[0] == "w0"
    else:
        assert len(list(received)) == 12
    handle = t.start()
    with pytest.raises(RuntimeError if rank == 0 else StopIteration):
        next(received)
    handle.wait()
    assert t.tensors["w11"].eq(11).all()


@pytest.mark.cpu_only("what the caller does is the same on all devices")
def test_restart_on_one_rank_does_not_block_others(pool: Pool) -> None:
    pool.run(_interrupted, 2)


def _moved_destination(options: dict[str, Any]) -> None:
    """Rank 1's destination gets another storage during a run that a second start supersedes."""
    rank = dist.get_rank()
    src, dst = (sw.Layout(sw.Mesh({"a": 1}, [owner]), (8,), ["R"]) for owner in range(2))
    local, into, which = torch.full((8,), 3.0), [torch.zeros(8), torch.zeros(8)], 0
    to = (lambda: {"w": (into[which], dst)}) if rank == 1 else None
    t = sw.transfer({"w": (local, src)} if rank == 0 else None, to, **options)
    t.start()
    which = 1
    t.start().wait()
    assert rank == 0 or into[1].eq(3).all()


@pytest.mark.cpu_only("what the caller does is the same on all devices")
@pytest.mark.parametrize("options", [{}, {"only_changed": True}, {"staging": "double"}])
def test_superseded_run_with_moved_destination_raises_nothing(pool: Pool, options: dict[str, Any]) -> None:
    pool.run(_moved_destination, 2, options)


def _never_advanced(how: str) -> None:
    """Rank 0, which holds the sources, does not advance its iterator before rank 1 has received."""
    rank = dist.get_rank()
    src, dst = (sw.Layout(sw.Mesh({"a": 1}, [owner]), (8,), ["R"]) for owner in range(2))
    names = [f"w{i}" for i in range(12)]
    sources = {name: torch.full((8,), float(i)) for i, name in enumerate(names)} if rank == 0 else {}
    given = {name: (x, src) for name, x in sources.items()}
    # Buckets of 64 bytes make six groups. Larger buckets make one group, which starts with the call.
    t = sw.transfer(given, dict.fromkeys(names, dst), bucket_bytes=1 << 20 if how == "later" else 64)
    received: Any = t.receive()
    added = 0
    if rank == 1:
        assert [int(x[0]) for _, x in received] == list(range(12))
    if how == "later":
        dist.barrier()
        assert list(received) == []
    elif how != "start":
        if rank == 0 and how == "close":
            received.close()
        received = None
        added = 100
        for x in sources.values():
            x.add_(added)
    t.start().wait()
    assert [int(x[0]) for x in t.tensors.values()] == ([i + added for i in range(12)] if rank == 1 else [])
    if how == "start" and rank == 0:
        with pytest.raises(RuntimeError, match=r"receive: start\(\) was called before the end"):
            next(received)


@pytest.mark.cpu_only("what the caller does is the same on all devices")
@pytest.mark.parametrize("how", ["later", "start", "close", "drop"])
def test_other_ranks_receive_if_iterator_is_not_advanced(pool: Pool, how: str) -> None:
    pool.run(_never_advanced, 2, how)


def _random_transfers(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)  # the same tensors on all ranks
    for _ in range(6):
        state = {f"x.{i}": torch.randn(4, 2, 4) for i in range(4)}
        rules, expected = random_rules(draw, state)
        src_mesh = sw.Mesh({"a": 2, "b": 2}, draw.sample(range(WORLD_SIZE), 4))
        size = draw.choice((1, 3, 4))
        dst_mesh = sw.Mesh({"c": size}, draw.sample(range(WORLD_SIZE), size))
        sources, layouts = _layouts(state, src_mesh, draw), _layouts(expected, dst_mesh, draw)
        bucket_bytes = draw.choice((256, 4096, 1 << 20))
        t = sw.transfer(_parts(state, sources), layouts, rules, bucket_bytes=bucket_bytes, buckets=draw.choice((1, 3)))
        t.start().wait()
        _check(t.tensors, expected, layouts)
        _check(dict(t.receive()), expected, layouts)


@pytest.mark.parametrize("seed", [1, 2])
def test_transfers_with_random_rules_and_layouts(pool: Pool, seed: int) -> None:
    pool.run(_random_transfers, WORLD_SIZE, seed)


def _subgroup() -> None:
    group = dist.new_group([1, 3, 4])
    rank = dist.get_rank()
    if rank not in (1, 3, 4):
        return
    full = oracle.global_tensor((5, 3), torch.float32, 1)
    src, dst = sw.Layout(sw.Mesh({"a": 2}, [4, 1]), (5, 3), ["S(0)"]), sw.Layout(sw.Mesh({"a": 1}, [3]), (5, 3), ["R"])
    t = sw.transfer(_parts({"w": full}, {"w": src}), {"w": dst} if rank == 3 else None, group=group)
    t.start().wait()
    _check(t.tensors, {"w": full}, {"w": dst})


@pytest.mark.cpu_only("groups of some ranks are Gloo's here")
def test_transfer_within_subgroup(pool: Pool) -> None:
    pool.run(_subgroup, WORLD_SIZE)


def _alone() -> None:
    full = torch.arange(6.0).view(2, 3)
    t = sw.transfer(
        {"w": full, "e": torch.empty(0, 2)},
        {"w": torch.empty(3, 2), "e": torch.empty(0, 2)},
        sw.rules.transpose("w", (1, 0)),
    )
    t.start().wait()
    assert torch.equal(t.tensors["w"], full.t())
    assert [name for name, _ in t.receive()] == ["e", "w"]  # an empty tensor needs no copy and is complete first
    t = sw.transfer(None, None)
    t.start().wait()
    assert list(t.receive()) == []


def test_transfer_on_one_rank(pool: Pool) -> None:
    pool.run(_alone, 1)


def _fsdp() -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3, bias=False))
    wholes = {name: x.detach().clone() for name, x in model.state_dict().items()}
    fully_shard(model, mesh=meshes.get_mesh((WORLD_SIZE,)))
    named = {"in.weight": "0.weight", "in.bias": "0.bias", "out.weight": "1.weight"}
    served = {new: wholes[old].half() for new, old in named.items()}
    layouts = {name: sw.Layout(SERVE, x.shape, ["S(0)"], x.dtype) for name, x in served.items()}
    rules = [sw.rules.cast("float16"), sw.rules.rename({"0.*": "in.*", "1.*": "out.*"})]
    t = sw.transfer(get_model_state_dict(model), layouts, rules)
    t.start().wait()
    _check(t.tensors, served, layouts)


@pytest.mark.cpu_only("FSDP2 needs a device that it knows")
def test_transfer_of_fsdp2_state_dicts(pool: Pool) -> None:
    pool.run(_fsdp, WORLD_SIZE)


class _Training:
    """A model on some ranks. All ranks use the same batches, so gradients do not depend on the number of ranks."""

    def __init__(self, ranks: list[int], seed: int) -> None:
        mesh = DeviceMesh("cpu", ranks)
        self.takes_part = dist.get_rank() in ranks
        if not self.takes_part:
            return
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.LayerNorm(13), torch.nn.Linear(13, 5))
        for part in (*self.model, self.model):
            fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step(seed)

    def step(self, seed: int) -> None:
        if self.takes_part:
            torch.manual_seed(seed)
            self.optimizer.zero_grad()
            self.model(torch.randn(3, 7)).square().sum().backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any] | None:
        return dict(zip(("model", "optim"), get_state_dict(self.model, self.optimizer))) if self.takes_part else None

    def weights(self) -> list[torch.Tensor] | None:
        return [p.full_tensor().detach() for p in self.model.parameters()] if self.takes_part else None


def _restart() -> None:
    before, after = _Training([0, 1, 2, 3], seed=0), _Training([1, 2, 4], seed=1)
    options: dict[str, Any] = {"unused": ["optim.param_groups"], "ignore": ["optim.param_groups"]}
    for given in ({}, {"unused": options["unused"]}):
        with pytest.raises(ValueError, match="destination optim.param_groups: must be .*, or listed in ignore="):
            sw.transfer(before.state(), after.state(), **given)
    sw.transfer(before.state(), after.state(), **options).start().wait()
    for training in (before, after):
        training.step(2)
    found: list[Any] = [None] * 5
    dist.all_gather_object(found, (before.weights(), after.weights()))
    for rank in (1, 2, 4):
        for expected, got in zip(found[0][0], found[rank][1], strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.cpu_only("FSDP2 needs a device that it knows")
def test_training_continues_after_transfer_to_other_ranks(pool: Pool) -> None:
    pool.run(_restart, 5)
