"""Parts 2 and 3 of the demo: moves over several mesh dims, where planning pays off, and the table of twelve cases."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compare import compare, compare_case, least_bytes, say_header, say_row
from ranks import coordinate, make_mesh
from redistribute_cases import (
    GRADIENTS,
    STRIDED_TO_PLAIN,
    TWELVE,
    Case,
    assemble,
    local_shard,
    torch_placements,
)
from report import say, say_text
from training import Trainer, Weight

MESH_NAMES = {2: ("dp", "tp"), 3: ("dp", "cp", "tp")}
SIZE = 1024


def arrow(src: tuple[str, ...], dst: tuple[str, ...]) -> str:
    """Returns both placements as one short text: "SS0/2,S0 -> S0,S0"."""

    def short(placements: tuple[str, ...]) -> str:
        return ",".join(text.replace(",", "/").replace("(", "").replace(")", "") for text in placements)

    return f"{short(src)} -> {short(dst)}"


def move_weights(trainer: Trainer, mesh: DeviceMesh) -> None:
    """Moves the trained weights to four-way tensor parallel serving, then to whole copies."""
    weights = trainer.weights
    globals_ = [_whole(weight, mesh) for weight in weights]
    serving = [_serving_layout(weight) for weight in weights]
    training = [weight.sharded_layout for weight in weights]
    replicated = [("R", "R") for _ in weights]
    wrong = _move_all(f"{len(weights)} weights, training -> serving", globals_, training, serving, mesh)
    wrong += _move_all(f"{len(weights)} weights, serving -> whole, for a file", globals_, serving, replicated, mesh)
    if wrong:
        names = [weights[index].name for index in sorted(set(wrong))]
        say_text(f"Stock left {len(names)} weights wrong, without an error: {', '.join(names)}.", indent=4)


def _move_all(label: str, globals_: list[torch.Tensor], src: list, dst: list, mesh: DeviceMesh) -> list[int]:
    """Prints one row; returns the weights that stock got wrong."""
    here, mesh_shape = coordinate(mesh), tuple(mesh.shape)
    sources, expected, bound_bytes = [], [], 0
    for tensor, before, after in zip(globals_, src, dst, strict=True):
        local = local_shard(tensor, before, mesh_shape, here)
        placements = torch_placements(before)
        sources.append(
            DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
        )
        expected.append(local_shard(tensor, after, mesh_shape, here))
        bound_bytes += least_bytes(mesh, tuple(tensor.shape), before, after)
    pairs = list(zip(sources, map(torch_placements, dst), strict=True))

    def move() -> list[torch.Tensor]:
        return [source.redistribute(placements=placements).to_local() for source, placements in pairs]

    outcomes = compare(move, expected)
    say_row(label, outcomes, bound_bytes)
    return outcomes["stock"].wrong


def _serving_layout(weight: Weight) -> tuple[str, str]:
    """Returns the placements of tensor parallelism over all four ranks: dp cuts the tensor dim that tp cuts."""
    _, on_tp = weight.sharded_layout
    return (on_tp, on_tp)


def _whole(weight: Weight, mesh: DeviceMesh) -> torch.Tensor:
    """Returns the global weight, assembled from every rank's part without DTensor."""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (coordinate(mesh), weight.local.detach()))
    return assemble(dict(parts), weight.parameter.shape, weight.sharded_layout, tuple(mesh.shape))


def run_case(label: str, case: Case, n: int, mesh: DeviceMesh, rounds: int = 4, repeats: int = 3) -> None:
    """Prints one row for one case."""
    outcomes = compare_case(case, n, mesh, rounds, repeats)
    say_row(label, outcomes, least_bytes(mesh, case.shape(n), case.src, case.dst))


def planned_moves(trainer: Trainer, mesh: DeviceMesh, size: int = SIZE) -> None:
    """Part 2, on the four ranks that trained."""
    say_header("on 2 x 2 ranks")
    run_case(f"{2 * size} x {2 * size}, {STRIDED_TO_PLAIN.name}", STRIDED_TO_PLAIN, 2 * size, mesh)
    move_weights(trainer, mesh)


def gradients(size: int = SIZE) -> None:
    """Part 2, on eight ranks of their own."""
    mesh = make_mesh(GRADIENTS.mesh_shape, MESH_NAMES[3])
    say("\n  on 2 x 2 x 2 ranks")
    run_case(f"gradients {size} x {size}, {arrow(GRADIENTS.src, GRADIENTS.dst)}", GRADIENTS, size, mesh)


def table_of_twelve(mesh: DeviceMesh, size: int = SIZE) -> None:
    """Part 3."""
    say_header(f"about {size} x {size} float32")
    for case in TWELVE:
        run_case(f"{case.name:21}{arrow(case.src, case.dst)}", case, size, mesh)
