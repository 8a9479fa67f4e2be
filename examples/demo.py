"""Demonstrates shardwright on four processes of this machine, in about a minute: `python examples/demo.py`.

1. A small Llama trains with tensor, sequence and data parallelism, alternating between stock DTensor and shardwright.
2. Moves over several mesh dims: the trained weights into a serving layout, strided shards, gradients.
3. Twelve plain redistributes, stock against shardwright, compared with the global tensor.
4. One plan in full.

`--size 128 --blocks 2` moves smaller tensors and trains for fewer steps.
"""

import argparse
import sys
import time

try:
    import shardwright as sw
except ModuleNotFoundError:
    sys.exit("The demo needs shardwright. In the root of the repository: pip install --no-build-isolation .")

import torch

import workloads
from ranks import launch, make_mesh
from redistribute_cases import GRADIENTS
from report import heading, in_mebibytes, say, say_text
from training import NUM_BLOCKS, train


def main() -> None:
    """Runs all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=workloads.SIZE, help="rows and columns of the moved tensors")
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help="blocks of training steps, of each engine")
    options = parser.parse_args()
    if options.blocks < 2:
        parser.error(f"--blocks must be at least 2, because the first one is not timed, got {options.blocks}")
    start = time.perf_counter()
    say(f"shardwright on torch {torch.__version__}: Gloo on CPU, one thread per rank")
    launch(4, on_four_ranks, options.size, options.blocks)
    launch(8, workloads.gradients, options.size)
    launch(4, twelve, options.size)
    show_plan(options.size)
    say(f"\nThe demo took {time.perf_counter() - start:.0f} seconds.")


def on_four_ranks(size: int, num_blocks: int) -> None:
    """Runs parts 1 and 2, which share the trained weights."""
    mesh = make_mesh((2, 2), ("dp", "tp"))
    heading(1, "Training on 2 x 2 ranks (dp, tp)")
    trainer = train(mesh, num_blocks)
    heading(2, "Moves over several mesh dims, where planning pays")
    workloads.planned_moves(trainer, mesh, size)


def twelve(size: int) -> None:
    """Runs part 3."""
    heading(3, "Twelve redistributes on 2 x 2 ranks, every result compared with the global tensor")
    workloads.table_of_twelve(make_mesh((2, 2), ("dp", "tp")), size)
    say()
    say_text(
        "MiB: received from other ranks, all ranks together. bound: the least that any plan must move. "
        "times: how many times as fast as stock. P: to be summed, S0: cut in tensor dim 0, SS0/2: strided, R: copies."
    )


def show_plan(size: int) -> None:
    """Runs part 4: the plan for the gradients, and its proof."""
    heading(4, "The plan for those gradients")
    mesh = sw.Mesh(dict(zip(workloads.MESH_NAMES[3], GRADIENTS.mesh_shape, strict=True)))
    shape = GRADIENTS.shape(size)
    source, target = sw.Layout(mesh, shape, GRADIENTS.src), sw.Layout(mesh, shape, GRADIENTS.dst)
    plan = sw.plan(source, target, backend="gloo")
    for line in str(plan).splitlines():
        say(f"  {line}")
    say(f"\n  {'step':8}{'operation':18}{'over mesh dims':22}{'MiB to worst rank':>18}{'messages':>10}")
    for number, step in enumerate(plan.steps, start=1):
        dims = ", ".join(mesh.dim_names[d] for d in step.mesh_dims)
        mebibytes = in_mebibytes(step.wire_bytes_max)
        say(f"  {number:<8}{step.op:18}{dims:22}{mebibytes:>18}{step.messages_max:>10}")
    say(f"\n  received by the worst rank   {in_mebibytes(plan.wire_bytes_max):>6} MiB")
    say(f"  received by all ranks        {in_mebibytes(plan.wire_bytes_sum):>6} MiB")
    say(f"  least that any plan can do   {in_mebibytes(plan.bound_bytes_sum):>6} MiB")
    say(f"  peak memory of a rank        {in_mebibytes(plan.peak_bytes):>6} MiB, the result included")
    moved_bytes = plan.simulate()
    say(f"  Simulated on all ranks: every element right, {in_mebibytes(moved_bytes)} MiB moved.")


if __name__ == "__main__":
    main()
