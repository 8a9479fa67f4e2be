"""Rules of transfers: their pieces, copied by plain indexing, compared with torch.cat, split, permute, stack and to."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import shardwright as sw
from map_rules import random_rules
from shardwright.rules.checking import Wanted, check
from shardwright.rules.kinds import Rule, apply_rules
from shardwright.rules.pieces import Box, Mapped, Tensors, coverage, source_tensor

State = dict[str, torch.Tensor]


def _mapped(state: State, rules: list[Rule]) -> tuple[Tensors, list[str]]:
    tensors = {name: source_tensor(name, x.shape, str(x.dtype).removeprefix("torch.")) for name, x in state.items()}
    problems: list[str] = []
    apply_rules(tensors, rules, problems)
    return tensors, problems


def _build(state: State, mapped: Mapped) -> torch.Tensor:
    """Returns a tensor of NaN or 99 into which every piece is copied by plain indexing."""
    dtype = getattr(torch, mapped.dtype)
    result = torch.full(mapped.shape, float("nan") if dtype.is_floating_point else 99, dtype=dtype)
    for piece in mapped.pieces:
        source = state[piece.source]
        source = source if piece.cast is None else source.to(getattr(torch, piece.cast))
        src_index: list[slice | int] = [0] * source.ndim
        index: list[slice | int] = [0] * len(mapped.shape)
        for run in piece.runs:
            src_index[run.src_dim] = slice(run.src_start, run.src_start + run.length)
            index[run.dim] = slice(run.start, run.start + run.length)
        for dim, at in piece.src_fixed:
            src_index[dim] = at
        for dim, at in piece.fixed:
            index[dim] = at
        # The remaining dims are those of runs: in the order of the source on one side, of the tensor on the other.
        dims_by_src = [run.dim for run in sorted(piece.runs, key=lambda run: run.src_dim)]
        order = [dims_by_src.index(dim) for dim in sorted(dims_by_src)]
        result[tuple(index)] = source[tuple(src_index)].permute(order)
    return result


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def _check(state: State, rules: list[Rule], expected: State) -> None:
    tensors, problems = _mapped(state, rules)
    assert problems == []
    wanted = {n: Wanted(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for n, x in expected.items()}
    names, problems = check(tensors, wanted)
    assert problems == []
    assert names == list(expected)
    for name, x in expected.items():
        assert torch.equal(_build(state, tensors[name]), x), name


def test_fuse_and_split() -> None:
    torch.manual_seed(1)
    q, k, v = _random(8, 6), _random(4, 6), _random(4, 6)
    parts = {"l.0.q": q, "l.0.k": k, "l.0.v": v, "w": _random(3)}
    fused = {"w": parts["w"], "l.0.qkv": torch.cat([q, k, v])}
    names = ["l.*.q", "l.*.k", "l.*.v"]
    _check(parts, [sw.rules.fuse("l.*.qkv", names)], fused)
    _check(fused, [sw.rules.split("l.*.qkv", names, sizes=[8, 4, 4])], parts)
    by_group = {"w": parts["w"], "l.0.qkv": torch.cat([x.chunk(2)[g] for g in range(2) for x in (q, k, v)])}
    _check(parts, [sw.rules.fuse("l.*.qkv", names, groups=2)], by_group)
    _check(by_group, [sw.rules.split("l.*.qkv", names, sizes=[8, 4, 4], groups=2)], parts)
    wide = {"a": _random(3, 2), "b": _random(3, 5)}
    _check(wide, [sw.rules.fuse("ab", ["a", "b"], dim=-1)], {"ab": torch.cat([wide["a"], wide["b"]], 1)})
    _check({"ab": torch.arange(6)}, [sw.rules.split("ab", ["a", "b"])], {"a": torch.arange(3), "b": torch.arange(3, 6)})


def test_stack_and_unstack() -> None:
    torch.manual_seed(2)
    experts = {f"l.{n}.experts.{e}.w1": _random(3, 4) for n in range(2) for e in range(12)}
    for dim in range(3):
        stacked = {
            f"l.{n}.experts.w1": torch.stack([experts[f"l.{n}.experts.{e}.w1"] for e in range(12)], dim)
            for n in range(2)
        }
        _check(experts, [sw.rules.stack("l.*.experts.{}.w1", dim=dim)], stacked)
        _check(stacked, [sw.rules.unstack("l.*.experts.w1", "l.*.experts.{}.w1", dim=dim - 3)], experts)
    named = {"all": torch.stack([torch.tensor(0.0), torch.tensor(1.0)])}
    _check({"s.0": torch.tensor(0.0), "s.1": torch.tensor(1.0)}, [sw.rules.stack("s.{}", into="all")], named)


def test_transpose_rename_cast() -> None:
    torch.manual_seed(3)
    state = {"m.a": _random(2, 3, 4), "m.b": _random(5), "n": torch.arange(3)}
    _check(state, [sw.rules.transpose("m.a", (2, 0, -2))], {**state, "m.a": state["m.a"].permute(2, 0, 1)})
    _check(state, [sw.rules.rename("m.*", "**")], {"a": state["m.a"], "b": state["m.b"], "n": state["n"]})
    swap = sw.rules.rename({"m.a": "m.b", "m.b": "m.a"})
    _check(state, [swap], {"m.b": state["m.a"], "m.a": state["m.b"], "n": state["n"]})
    _check(state, [sw.rules.rename(str.upper)], {name.upper(): x for name, x in state.items()})
    cast = {name: x.bfloat16() if x.is_floating_point() else x for name, x in state.items()}
    _check(state, [sw.rules.cast(torch.bfloat16)], cast)
    _check(state, [sw.rules.cast("fp16", ["m.b"])], {**state, "m.b": state["m.b"].half()})
    _check(state, [sw.rules.cast("bf16", "m.b"), sw.rules.cast("bf16")], cast)
    assert _mapped(state, [sw.rules.cast("fp16"), sw.rules.cast("float64", "m.b")])[1] == [
        "cast('float64'): m.b must be cast only once, but is cast to float16 already"
    ]


def test_rules_compose() -> None:
    draw = random.Random(4)
    torch.manual_seed(4)
    for _ in range(60):
        state = {f"x.{i}": _random(4, 2, 4) for i in range(4)}
        _check(state, *random_rules(draw, state))


def test_coverage_equals_counts() -> None:
    draw = random.Random(5)
    for _ in range(300):
        shape = tuple(draw.randrange(5) for _ in range(draw.randrange(4)))
        boxes: list[Box] = []
        for _ in range(draw.randrange(5)):
            sides = [sorted(draw.choices(range(n + 1), k=2)) for n in shape]
            boxes.append(tuple((begin, end) for begin, end in sides))
        counts = torch.zeros(shape, dtype=torch.int64)
        for box in boxes:
            counts[tuple(slice(begin, end) for begin, end in box)] += 1
        found = torch.ones(shape, dtype=torch.int64)
        missing, repeated = coverage(shape, boxes)
        for box in missing:
            found[tuple(slice(begin, end) for begin, end in box)] -= 1
        for box, numbers in repeated:
            found[tuple(slice(begin, end) for begin, end in box)] += len(numbers) - 1
        assert torch.equal(counts, found), (shape, boxes)


def test_all_problems_are_reported_together() -> None:
    state = {
        "q": _random(4, 2),
        "k": _random(4, 3),
        "e.0": _random(2),
        "e.2": _random(2),
        "e.02": _random(2),
        "x": _random(3),
        "y": _random(3),
        "half": _random(2, dtype=torch.float16),
        "lost": _random(1),
        "spare": _random(1),
    }
    rules = [
        sw.rules.fuse("qk", ["q", "k"]),
        sw.rules.fuse("l.*.qkv", ["l.*.q", "l.*.k"]),
        sw.rules.stack("e.{}", into="e"),
        sw.rules.rename({"x": "z", "y": "z"}),
        sw.rules.transpose("z", (1, 0)),
    ]
    wanted = {
        "e": Wanted((3, 2), "float32"),
        "e.02": Wanted((3,), "float32"),
        "z": Wanted((3,), "float32"),
        "half": Wanted((2,), "float32"),
        "nobody": Wanted((2,), "float32"),
        "kept": Wanted((2,), "float32"),
    }
    tensors, problems = _mapped(state, rules)
    names, differences = check(tensors, wanted, unused=["spare"], ignore=["kep*"])
    assert names == []
    found = "\n".join([*problems, *differences])
    for said in (
        "fuse('qk'): parts must have one dtype and differ in dim 0 only, got q (float32 of shape (4, 2)), k (",
        "fuse('l.*.qkv'): no tensor is called l.*.q or l.*.k",
        "transpose('z', (1, 0)): dims must be a permutation of those of z of shape (3,)",
        "e: no source gives [1:2, 0:2] of (3, 2)",
        "e.02: the map makes (2,) from e.02, and the destination has shape (3,): [2:3] of dim 0 has no source",
        "z: [0:3] of (3,) is given 2 times, by x and y",
        "half: the map makes float16, and the destination has float32. cast('float32', 'half') casts it",
        "lost: the map makes it from lost, and the destination has no such tensor",
        "nobody: the destination has it, and no source is mapped to it",
    ):
        assert said in found, said
    assert "spare" not in found
    assert "kept" not in found


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (lambda: sw.rules.fuse("qkv", "q"), "parts must be a list of names, such as ['q', 'k', 'v'], got 'q'"),
        (lambda: sw.rules.fuse("l.*.qkv", ["q"]), "wildcards of 'l.*.qkv' (stack, unstack: no {}), got 'q'"),
        (lambda: sw.rules.fuse("qkv", ["q"], groups=0), "groups must be at least 1, got 0"),
        (lambda: sw.rules.split("qkv", ["q", "k"], sizes=[1]), "sizes must be a list of 2 integers"),
        (lambda: sw.rules.stack("experts.w1"), "names must be a pattern with one {}, "),
        (lambda: sw.rules.stack("e.{}.*.w", into="w"), "into must be a name with the wildcards of 'e.{}.*.w'"),
        (lambda: sw.rules.rename("a"), "to must be the new name of 'a', got None"),
        (lambda: sw.rules.rename("a.*", "b"), "to must be a name with as many wildcards as 'a.*', got 'b'"),
        (lambda: sw.rules.rename(3), "names must be a name or a pattern, such as 'layers.*.weight', got 3"),  # type: ignore[arg-type]
        (lambda: sw.rules.cast("float3"), "float3"),
        (lambda: sw.rules.transpose("w", 1), "dims must be a list of dims, such as (1, 0), got 1"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_of_rules_raise(rule: Callable[[], Rule], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        rule()
    assert said in str(raised.value)
