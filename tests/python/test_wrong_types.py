"""Arguments of the wrong type or size raise a ValueError that names the argument, without internal messages."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwright as sw
from meshes import get_mesh
from pool import Pool

BIG = 1 << 63
INTERNAL = ("incompatible", "Invoked with", "object has no attribute", "not iterable", "Internal error", "codec can't")


def _refused(name: str, call: Callable[[], object], *fragments: str) -> None:
    try:
        result = call()
    except ValueError as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    else:
        raise AssertionError(f"{name}: was accepted: {result}")
    assert not [inside for inside in INTERNAL if inside in said], f"{name}: {said}"
    lacking = [fragment for fragment in fragments if fragment.lower() not in said.lower()]
    assert not lacking, f"{name}: {said} lacks {lacking}"


MESH = sw.Mesh({"a": 2, "b": 2})
SRC, DST = sw.Layout(MESH, (8, 8), ["S(0)", "R"]), sw.Layout(MESH, (8, 8), ["R", "S(1)"])
PLAN = sw.plan(SRC, DST)
LINK = sw.planning.Link(1, 1)


def _layout(shape: Any = (8, 8), placements: Any = ("S(0)", "S(0)"), **more: Any) -> sw.Layout:
    return sw.Layout(MESH, shape, placements, **more)


def _gemm_model(**more: Any) -> sw.planning.GemmModel:
    fields = ("num_processors", "tile_rows", "tile_columns", "flops_per_us", "launch_ps", "memory_ps_per_kib")
    return sw.planning.GemmModel(**{"name": "x", **dict.fromkeys(fields, 1), "contention_percent": 0, **more})


WRONG: dict[str, tuple[Callable[[], object], list[str]]] = {
    "mesh of a float": (lambda: sw.Mesh({"a": 2.0}), ["size", "2.0"]),
    "mesh of a text": (lambda: sw.Mesh({"a": "2"}), ["size", "'2'"]),
    "mesh of 2**63": (lambda: sw.Mesh({"a": BIG}), ["size", str(BIG), "64-bit"]),
    "mesh of 2**32": (lambda: sw.Mesh({"a": 1 << 32}), ["mesh", "4294967296", "1048576"]),
    "mesh name 1": (lambda: sw.Mesh({1: 2}), ["mesh dim names", "1 (of type int)"]),
    "mesh name of bytes": (lambda: sw.Mesh({b"\xff": 2}), ["mesh dim names", "bytes"]),
    "mesh name of a lone surrogate": (lambda: sw.Mesh({"a\udc80": 2}), ["mesh dim names", "UTF-8"]),
    "ranks of floats": (lambda: sw.Mesh({"a": 2}, ranks=[0, 1.5]), ["ranks", "1.5"]),
    "ranks of an int": (lambda: sw.Mesh({"a": 2}, ranks=3), ["ranks", "3", "list"]),
    "ranks of text": (lambda: sw.Mesh({"a": 2}, ranks="01"), ["ranks", "'01'"]),
    "ranks of none": (lambda: sw.Mesh({"a": 2}, ranks=[]), ["ranks", "none"]),
    "rank 2**63": (lambda: sw.Mesh({"a": 2}, ranks=[0, BIG]), ["ranks", str(BIG)]),
    "coordinate": (lambda: MESH.coordinate("x"), ["rank", "'x'"]),
    "coordinate of 2**63": (lambda: MESH.coordinate(BIG), ["rank", str(BIG)]),
    "group_ranks by name": (lambda: MESH.group_ranks(0, ["a"]), ["mesh_dims", "'a'"]),
    "group_ranks of an int": (lambda: MESH.group_ranks(0, 0), ["mesh_dims", "list"]),
    "group_ranks of 2**31": (lambda: MESH.group_ranks(0, [1 << 31]), ["mesh_dims", "2147483648"]),
    "shape of an int": (lambda: _layout(8), ["shape", "8", "list"]),
    "shape of floats": (lambda: _layout((8.0, 8)), ["shape", "8.0"]),
    "shape of text": (lambda: _layout("88"), ["shape", "'88'"]),
    "shape of None": (lambda: _layout(None), ["shape", "None"]),
    "shape of 2**63": (lambda: _layout((BIG, 8)), ["shape", str(BIG)]),
    "shape of -2**70": (lambda: _layout((-(1 << 70), 8)), ["shape", "64-bit"]),
    "placements of text": (lambda: _layout(placements="RR"), ["placements", "'RR'", "one placement per mesh dim"]),
    "placements of None": (lambda: _layout(placements=None), ["placements", "None"]),
    "placements of ints": (lambda: _layout(placements=[0, 1]), ["placements", "0, a int"]),
    "placements not UTF-8": (lambda: _layout(placements=["R\udc80", "R"]), ["placements", "UTF-8"]),
    "dtype not UTF-8": (lambda: _layout(dtype="f\udc80"), ["dtype", "UTF-8"]),
    "dtype None": (lambda: _layout(dtype=None), ["dtype", "None"]),
    "shard_order of a list": (lambda: _layout(shard_order=[1, 0]), ["shard_order", "[1, 0]", "tensor dim"]),
    "shard_order of text": (lambda: _layout(shard_order="ba"), ["shard_order", "'ba'"]),
    "shard_order of an int": (lambda: _layout(shard_order=1), ["shard_order", "1"]),
    "shard_order to an int": (lambda: _layout(shard_order={0: 1}), ["shard_order", "1", "list of mesh dims"]),
    "shard_order to text": (lambda: _layout(shard_order={0: "ba"}), ["shard_order", "'ba'"]),
    "shard_order from text": (lambda: _layout(shard_order={"0": [1, 0]}), ["shard_order", "'0'"]),
    "shard_order of floats": (lambda: _layout(shard_order={0: [1.0, 0.0]}), ["shard_order", "1.0"]),
    "shard_order of 2**63": (lambda: _layout(shard_order={BIG: [1, 0]}), ["shard_order", str(BIG)]),
    "shard_order twice": (lambda: _layout(shard_order=[_Entry(0, (0, 1)), _Entry(0, (1, 0))]), ["shard_order", "two"]),
    "strided": (lambda: _layout(strided=None), ["strided", "None"]),
    "flattened of 2**40": (lambda: _layout(flattened=1 << 40), ["flattened", "[1, 2]", str(1 << 40)]),
    "flattened of 2**63": (lambda: _layout(flattened=BIG), ["flattened", str(BIG)]),
    "local_shape": (lambda: SRC.local_shape("x"), ["rank", "'x'"]),
    "local_shape of 2**63": (lambda: SRC.local_shape(BIG), ["rank", str(BIG)]),
    "region": (lambda: SRC.region(0.0), ["rank", "0.0"]),
    "objective": (lambda: sw.plan(SRC, DST, objective=5), ["objective", "5"]),
    "reduce": (lambda: sw.plan(SRC, DST, reduce=None), ["reduce", "None"]),
    "backend": (lambda: sw.plan(SRC, DST, backend=1), ["backend", "1"]),
    "topology": (lambda: sw.plan(SRC, DST, topology="\udc80"), ["topology", "one of", r"'\udc80'"]),
    "topology with a null byte": (lambda: sw.plan(SRC, DST, topology="\0.json"), ["topology", "cannot be read"]),
    "groups of an int": (lambda: sw.plan(SRC, DST, groups=1), ["groups", "1"]),
    "groups of ints": (lambda: sw.plan(SRC, DST, groups=[0, 1]), ["groups", "0", "list of mesh dims"]),
    "groups of text": (lambda: sw.plan(SRC, DST, groups=["ab"]), ["groups", "'ab'"]),
    "groups of floats": (lambda: sw.plan(SRC, DST, groups=[[0.5]]), ["groups", "0.5"]),
    "through an int": (lambda: sw.plan(SRC, DST, through=5), ["through", "5"]),
    "through a layout": (lambda: sw.plan(SRC, DST, through=SRC), ["through", "list of Layouts"]),
    "through texts": (lambda: sw.plan(SRC, DST, through=["R"]), ["through", "str"]),
    "memory_limit of a float": (lambda: sw.plan(SRC, DST, memory_limit=1e9), ["memory_limit", "1000000000.0"]),
    "memory_limit of 2**63": (lambda: sw.plan(SRC, DST, memory_limit=BIG), ["memory_limit", str(BIG)]),
    "program": (lambda: PLAN.program("x"), ["rank", "'x'"]),
    "wire_bytes": (lambda: PLAN.wire_bytes(1.5), ["rank", "1.5"]),
    "rank_peak_bytes": (lambda: PLAN.rank_peak_bytes(None), ["rank", "None"]),
    "from_bytes of text": (lambda: sw.Plan.from_bytes("x"), ["data", "bytes"]),
    "from_bytes of None": (lambda: sw.Plan.from_bytes(None), ["data", "None"]),
    "from_json of None": (lambda: sw.planning.plan_from_json(None), ["plan", "NoneType", "JSON"]),
    "from_json of a path": (lambda: sw.planning.plan_from_json(Path("/x")), ["plan", "PosixPath"]),
    "from_json, deep": (lambda: sw.planning.plan_from_json("[" * 100_000), ["plan", "nested too deeply"]),
    "from_json, deep objects": (lambda: sw.planning.plan_from_json('{"a":' * 100_000), ["plan", "nested too deeply"]),
    "load_topology of None": (lambda: sw.planning.load_topology(None), ["topology", "NoneType"]),
    "load_topology of an int": (lambda: sw.planning.load_topology(5), ["topology", "int"]),
    "load_topology of bytes": (lambda: sw.planning.load_topology(b"/nope"), ["topology", "bytes"]),
    "link of text": (lambda: sw.planning.Link("a", 1), ["message_ps", "'a'"]),
    "link of a float": (lambda: sw.planning.Link(1, 1.5), ["ps_per_kib", "1.5"]),
    "link of 2**63": (lambda: sw.planning.Link(BIG, 1), ["message_ps", str(BIG)]),
    "topology of a name that is none": (lambda: sw.Topology(1, 2, 3, 4, LINK, LINK), ["name", "1"]),
    "topology of ints": (lambda: sw.Topology("x", 2, 3, 4, 5, LINK), ["inside", "5", "Link"]),
    "topology of 2**63": (lambda: sw.Topology("x", BIG, 3, 4, LINK, LINK), ["ranks_per_node", str(BIG)]),
    "topology, mesh_dims": (lambda: sw.Topology("x", 2, 3, 4, LINK, LINK, {"a": 1}), ["mesh_dims", "1", "Link"]),
    "topology, list": (lambda: sw.Topology("x", 2, 3, 4, LINK, LINK, [1]), ["mesh_dims", "[1]", "dict"]),
    "topology, named": (lambda: sw.Topology.named(5), ["topology", "5"]),
    "gemm model, name": (lambda: _gemm_model(name=1), ["name", "1"]),
    "gemm model, float": (lambda: _gemm_model(tile_rows=1.5), ["tile_rows", "1.5"]),
    "gemm model, named": (lambda: sw.planning.GemmModel.named(1), ["gemm_model", "1"]),
    "gemm model, sizes": (lambda: sw.planning.GemmModel.named("cpu").picoseconds("a", 1, 1), ["m", "'a'"]),
    "gemm model, negative": (lambda: sw.planning.GemmModel.named("cpu").picoseconds(1, -1, 1), ["n must be", "-1"]),
    "zigzag over no ranks": (lambda: sw.placements.Pieces.zigzag(0, 8, 0), ["count", "0", "at least 1"]),
    "zigzag of a float": (lambda: sw.placements.Pieces.zigzag(0, 8.0, 2), ["size", "8.0"]),
    "zigzag of less than nothing": (lambda: sw.placements.Pieces.zigzag(0, -1, 2), ["size", "-1", "at least 0"]),
    "unpin": (lambda: sw.unpin(None), ["plan", "NoneType"]),
    "pin": (lambda: sw.pin("x"), ["plan", "str"]),
}


class _Entry:
    """Has the fields of DTensorSpec's ShardOrderEntry."""

    def __init__(self, tensor_dim: int, mesh_dims: tuple[int, ...]) -> None:
        self.tensor_dim, self.mesh_dims = tensor_dim, mesh_dims


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    call, fragments = WRONG[name]
    _refused(name, call, *fragments)


def test_integer_like_arguments_are_accepted() -> None:
    """Anything that Python accepts as an index, and any iterable, is accepted."""
    numbers = numpy.array([3, 1, 0, 2])
    mesh = sw.Mesh({"a": numpy.int64(2), "b": torch.tensor(2)}, ranks=numbers)
    assert mesh.ranks == [3, 1, 0, 2] == sw.Mesh({"a": 2, "b": 2}, ranks=torch.from_numpy(numbers)).ranks
    layout = sw.Layout(mesh, torch.Size((numpy.int32(8), 8)), (p for p in ("S(0)", "R")))
    assert layout == sw.Layout(sw.Mesh({"a": 2, "b": 2}, ranks=[3, 1, 0, 2]), [8, 8], ["S(0)", "R"])
    assert layout.local_shape(numpy.int64(3)) == (4, 8)


def _with_checksum(body: bytes) -> bytes:
    """Returns the body and its FNV-1a checksum, as in csrc/support/wire_format.cpp."""
    hash = 14695981039346656037
    for byte in body:
        hash = (hash ^ byte) * 1099511628211 % (1 << 64)
    return body + struct.pack("<Q", hash)


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"\xc0\x80", b"\xed\xa0", b"a\x80"], ids=repr)
@pytest.mark.parametrize("which", ["mesh dim", "topology", "mesh dim of the topology", "dtype"])
def test_plan_bytes_with_invalid_utf8_raise(which: str, bad: bytes) -> None:
    mesh = sw.Mesh({"zz": 2})
    topology = sw.Topology("tt", 0, 1, 1, LINK, LINK, {"qq": LINK})
    ends = [sw.Layout(mesh, (8,), [placement], "float32") for placement in ("S(0)", "R")]
    body = sw.plan(*ends, topology=topology).to_bytes()[:-8]
    assert sw.Plan.from_bytes(_with_checksum(body)).to_bytes()[:-8] == body, "the checksum here is another one"
    good = {"mesh dim": b"zz", "topology": b"tt", "mesh dim of the topology": b"qq", "dtype": b"float32"}[which]
    assert body.count(good) == 1
    changed = body.replace(good, bad + b"x" * (len(good) - len(bad)))
    with pytest.raises(ValueError) as caught:
        sw.Plan.from_bytes(_with_checksum(changed))
    assert not isinstance(caught.value, UnicodeError), caught.value
    assert "\\x" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["mesh"].update(dim_names=["a", "a"]), "must be distinct"),
        (lambda t: t["mesh"].update(dim_names=["a"]), "one per dim_size"),
        (lambda t: t["mesh"].update(dim_names="ab"), "mesh.dim_names must be a list, got a str"),
        (lambda t: t["mesh"].update(dim_sizes=[2, 2.0]), "mesh dim sizes must be an integer, got 2.0"),
        (lambda t: t.update(shape=[8, 1e30]), "shape must be an integer, got 1e\\+30"),
        (lambda t: t.update(shape={}), "placements"),
        (lambda t: t.update(dtype=5), "dtype must be a str, got a int"),
        (lambda t: t.update(backend=None), "backend must be a str, got a NoneType"),
        (lambda t: t.update(topology=[]), "topology must be a JSON object, got a list"),
        (lambda t: t["steps"][0].update(rounds="1"), "rounds must be an integer, got '1'"),
        (lambda t: t["steps"][0].update(rounds=BIG), "rounds must be a 64-bit integer, got 9223372036854775808"),
        (lambda t: t["steps"][0].update(ordered=0), "ordered must be a bool, got a int"),
        (lambda t: t["steps"][0].update(op=1), "op must be a str, got a int"),
        (lambda t: t["steps"][0].update(mesh_dims=["q"]), "mesh dim must be one of .*, got 'q'"),
        (lambda t: t["steps"][0].update(mesh_dims="a"), "mesh_dims of a step must be a list .*, got 'a'"),
        (lambda t: t["source"].update(placements="S0"), "placements must be a list .*, got 'S0'"),
        (lambda t: t["source"].update(shard_order=[]), "shard_order of source must be a JSON object, got a list"),
        (lambda t: t["source"].update(shard_order={"a": ["a"]}), "shard_order of source: keys must be .*, got 'a'"),
        (lambda t: t["source"].update(shard_order={"00": ["a"]}), "shard_order of source: keys must be .*, got '00'"),
    ],
)
def test_json_with_wrong_types_raises(change: Callable[[dict[str, Any]], None], message: str) -> None:
    table = json.loads(PLAN.to_json())
    change(table)
    with pytest.raises(ValueError, match=message) as caught:
        sw.planning.plan_from_json(json.dumps(table))
    assert not [inside for inside in INTERNAL[:2] if inside in str(caught.value)]


def _unsupported_tensors() -> dict[str, torch.Tensor]:
    """Returns unsupported tensors by a word of their error. Those that have a shape have the right one."""
    ones = torch.ones(2, 6)
    return {
        "sparse": ones.to_sparse(),
        "csr": ones.to_sparse_csr(),
        "mkldnn": ones.to_mkldnn(),
        "meta": ones.to("meta"),
        "nested": torch.nested.nested_tensor([torch.ones(6), torch.ones(6)]),
    }


def _calls_on_tensors() -> None:
    mesh = get_mesh((2,))
    grid = sw.Mesh(mesh)
    src, dst = sw.Layout(grid, (4, 6), ["S(0)"]), sw.Layout(grid, (4, 6), ["R"])
    good = torch.ones(2, 6)
    move = sw.graph.operator(src, dst)
    arguments = {name: move.keywords[name] for name in ("plan", "groups", "rank")}
    shardwright = torch.ops.shardwright
    out = torch.empty(4, 6)
    for attempt in ("before", "after"):  # a cached good call must not serve these
        for word, tensor in _unsupported_tensors().items():
            name = f"{word} {attempt}"
            _refused(name, lambda: sw.redistribute_local(tensor, src, dst), "local", word)  # noqa: B023
            if word == "meta":
                continue  # operators compute shapes of meta tensors
            _refused(f"operator, {name}", lambda: move(tensor), "input", word)  # noqa: B023
            _refused(f"start, {name}", lambda: shardwright.redistribute_start(tensor, **arguments), "input", word)  # noqa: B023
            _refused(
                f"out, {name}",
                lambda: shardwright.redistribute_out(tensor, **arguments, out=out),  # noqa: B023
                "input",
                word,
            )
            _refused(
                f"into {name}",
                lambda: shardwright.redistribute_out(good, **arguments, out=tensor),  # noqa: B023
                "out",
                word,
            )
        assert torch.equal(sw.redistribute_local(good, src, dst), torch.ones(4, 6))
        assert torch.equal(move(good), torch.ones(4, 6))
    handle = shardwright.redistribute_start(good, **arguments)
    rest = {"plan": arguments["plan"], "rank": arguments["rank"]}
    for wrong in (torch.empty(0, dtype=torch.int64), torch.tensor([1.5]), torch.ones(2, dtype=torch.int64).to_sparse()):
        _refused("handle", lambda: shardwright.redistribute_wait(wrong, good, **rest), "handle")  # noqa: B023
    assert torch.equal(shardwright.redistribute_wait(handle, good, **rest), torch.ones(4, 6))


def test_unsupported_tensors_are_refused(pool: Pool) -> None:
    pool.run(_calls_on_tensors, 2)


def _calls_with_wrong_arguments() -> None:
    mesh = get_mesh((2,))
    grid = sw.Mesh(mesh)
    src, dst = sw.Layout(grid, (4, 6), ["S(0)"]), sw.Layout(grid, (4, 6), ["R"])
    good = torch.ones(2, 6)
    x = DTensor.from_local(good, mesh, [Shard(0)], run_check=False)
    replicated = [Replicate()]
    for given in ("RR", "R", None, 0, Replicate(), [0], ["R"], [Replicate]):
        _refused(f"placements {given!r}", lambda: sw.redistribute(x, given), "placements")  # noqa: B023
    _refused("mesh", lambda: sw.redistribute(x, replicated, "x"), "mesh", "str", "DeviceMesh")
    _refused("forward_dtype", lambda: sw.redistribute(x, replicated, forward_dtype="float32"), "forward_dtype", "str")
    _refused("backward_dtype", lambda: sw.redistribute(x, replicated, backward_dtype=3), "backward_dtype", "3")
    assert torch.equal(sw.redistribute(x, (p for p in replicated)).to_local(), torch.ones(4, 6))
    for given in ("x", 5, [1]):
        for name, call in (("redistribute_local", lambda **more: sw.redistribute_local(good, src, dst, **more)),) + (
            ("operator", lambda **more: sw.graph.operator(src, dst, **more)),
        ):
            _refused(name, lambda: call(device_mesh=given), "device_mesh", type(given).__name__)  # noqa: B023
            _refused(name, lambda: call(group=given), "group", type(given).__name__)  # noqa: B023
    _refused("operator, src", lambda: sw.graph.operator(None, dst), "src", "NoneType")
    _refused("operator, dst", lambda: sw.graph.operator(src, "R"), "dst", "str")
    for device_type in ("tpu", None, "meta"):
        _refused("device_type", lambda: sw.graph.operator(src, dst, device_type=device_type), "device_type", "cpu")  # noqa: B023
    for given in (5, [5], ["a"], [[0.5]]):
        _refused(f"prepare {given}", lambda: sw.prepare(mesh, given), "mesh_dims")  # noqa: B023
    _refused("prepare", lambda: sw.prepare("x"), "dims", "'x'")
    for given in (5, [src], [(src,)], [(src, "R")], [(src, dst, dst)]):
        _refused(f"prepare {given}", lambda: sw.prepare(mesh, redistributes=given), "redistributes")  # noqa: B023
    elsewhere = sw.Mesh({"elsewhere": 1})
    _refused("prepare", lambda: sw.prepare(elsewhere, redistributes=[(src, dst)]), "redistributes", "elsewhere")
    _refused("prepare", lambda: sw.prepare(mesh, device_type="tpu"), "device_type", "tpu")
    _refused("check_ranks", lambda: sw.debug.check_ranks(timeout_seconds="x"), "timeout_seconds", "x")
    _refused("explain", lambda: sw.explain(5), "function", "int")
    _refused("calibrate", lambda: sw.calibrate("x"), "group", "str")
    _refused("calibrate", lambda: sw.calibrate(device="tpu"), "device", "tpu")
    _refused("calibrate", lambda: sw.calibrate(ranks_per_node="x"), "ranks_per_node", "x")
    _refused("calibrate", lambda: sw.calibrate(name=5), "name", "5")
    _refused("calibrate_gemm", lambda: sw.calibration.calibrate_gemm("x"), "device", "x")
    _refused("calibrate_gemm", lambda: sw.calibration.calibrate_gemm(dtype="x"), "dtype", "x")
    for given in ("x", 1, None):

        def call() -> None:
            sw.runtime.set_fast_accumulation(given)  # noqa: B023

        _refused(f"set_fast_accumulation {given!r}", call, "enabled", repr(given))
    _refused("set_sm_carveout", lambda: sw.runtime.set_sm_carveout("x"), "sms", "'x'")
    _refused("set_sm_carveout", lambda: sw.runtime.set_sm_carveout(1 << 40), "sms", str(1 << 40))
    dist.barrier()


def test_calls_with_wrong_arguments_raise(pool: Pool) -> None:
    pool.run(_calls_with_wrong_arguments, 2)
