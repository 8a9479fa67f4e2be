"""Random compiled programs, each called with several global sizes. Some ranks have the same part of all sizes.

Programs redistribute, view and multiply DTensors and apply elementwise functions. Results and gradients are compared
with the global tensor. In every other program check_ranks is on: it raises if ranks run different graphs, and must not
raise otherwise. SHARDWRIGHT_FUZZ_SEED selects another seed, SHARDWRIGHT_FUZZ_SCALE multiplies the number of programs.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import fuzz
import oracle
import shardwright as sw
from compilers import fresh_compilers
from dtensors import distribute, to_placements
from meshes import get_mesh
from pool import Pool

pytestmark = pytest.mark.cpu_only("compiled code is compared on the CPU")

PROGRAMS = {2: 2, 4: 3}
MESHES: dict[int, list[tuple[int, ...]]] = {2: [(2,)], 4: [(4,), (2, 2)]}
WIDTH = 6
TIMEOUT_SECONDS = 600


@dataclasses.dataclass(frozen=True)
class Program:
    """A random program. Its repr can be pasted into _run([Program(...)]) to reproduce it."""

    mesh: tuple[int, ...]
    placements: tuple[str, ...]
    steps: tuple[tuple[Any, ...], ...]  # (name, argument)
    sizes: tuple[int, ...]
    dynamic: bool | None
    checks: bool


def _placements(rng: random.Random, mesh: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(rng.choice(("R", "S(0)", "S(0)", "S(1)")) for _ in mesh)


def _programs(seed: int, world_size: int, count: int) -> list[Program]:
    rng = random.Random(seed * 100 + world_size)
    programs = []
    for i in range(count):
        mesh = rng.choice(MESHES[world_size])
        steps: list[tuple[Any, ...]] = []
        for name in rng.choices(("redistribute", "elementwise", "linear", "view"), (4, 2, 1, 1), k=3):
            steps.append((name, _placements(rng, mesh)))
        largest = rng.randint(4, 12)
        sizes = [largest, largest - 1, *(rng.randint(1, 12) for _ in range(2))]
        rng.shuffle(sizes)
        dynamic = (None, True, False)[i % 3]
        programs.append(Program(mesh, _placements(rng, mesh), tuple(steps), tuple(sizes), dynamic, i % 2 == 0))
    return programs


def _function(program: Program) -> Callable[[Any, list[Any]], Any]:
    def function(x: Any, weights: list[Any]) -> Any:
        for (name, argument), weight in zip(program.steps, weights, strict=True):
            is_whole = not isinstance(x, DTensor)
            if name in ("redistribute", "view") and not is_whole:
                x = x.redistribute(placements=to_placements(argument))
            if name == "elementwise":
                x = x.sin() * 2 + 1
            elif name == "linear":
                x = x @ weight
            elif name == "view":
                x = x.view(x.shape[0], 2, -1) if is_whole else sw.views.view(x, (x.shape[0], 2, -1), redistribute=True)
                x = x * 3
                x = x.view(x.shape[0], -1) if is_whole else sw.views.view(x, (x.shape[0], -1), redistribute=True)
        return x

    return function


def _run(programs: list[Program]) -> None:
    for program in programs:
        try:
            _run_one(program)
        except BaseException as error:
            raise AssertionError(f"{program}: {type(error).__name__}") from error


def _run_one(program: Program) -> None:
    mesh, function = get_mesh(program.mesh), _function(program)
    whole_weights = [
        oracle.global_tensor((WIDTH, WIDTH), torch.float64, step, True) / 8 for step in range(len(program.steps))
    ]
    everywhere = tuple("R" for _ in program.mesh)
    weights = [
        distribute(weight, mesh, argument if name == "linear" else everywhere)
        for weight, (name, argument) in zip(whole_weights, program.steps, strict=True)
    ]
    sw.debug.check_ranks(program.checks)
    try:
        with sw.enabled(views=True), fresh_compilers():
            compiled = torch.compile(function, backend="aot_eager", dynamic=program.dynamic)
            for size in (*program.sizes, program.sizes[0]):
                full = oracle.global_tensor((size, WIDTH), torch.float64, size, True) / 8
                plain = full.clone().requires_grad_()
                expected = function(plain, whole_weights)
                x = distribute(full, mesh, program.placements).requires_grad_()
                result = compiled(x, weights)
                assert result.shape == expected.shape, f"size {size}: {tuple(result.shape)}, not {expected.shape}"
                torch.testing.assert_close(result.full_tensor(), expected)
                (given,) = torch.autograd.grad(result.square().sum().full_tensor(), x)
                (wanted,) = torch.autograd.grad(expected.square().sum(), plain)
                assert given.to_local().shape == x.to_local().shape, f"size {size}"
                torch.testing.assert_close(given.full_tensor(), wanted)
    finally:
        sw.debug.check_ranks(False)


@pytest.mark.parametrize("world_size", list(PROGRAMS))
def test_programs_called_with_several_sizes(pool: Pool, world_size: int) -> None:
    seed = fuzz.seed_from_environment()
    count = max(1, int(PROGRAMS[world_size] * float(os.environ.get("SHARDWRIGHT_FUZZ_SCALE", "1"))))
    print(f"world size {world_size}: {count} programs, SHARDWRIGHT_FUZZ_SEED={seed}")
    for program in _programs(seed, world_size, count):
        pool.run(_run, world_size, [program], timeout_seconds=TIMEOUT_SECONDS)
