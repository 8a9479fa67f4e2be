"""The redistributes and products that benchmarks time.

The twelve redistributes of a 2 x 2 mesh, which the demo uses too, are `TWELVE` in examples/redistribute_cases.py.
Placements are written as there, with blanks between mesh dims.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

from redistribute_cases import Case, torch_placements  # noqa: E402


def placements(text: str) -> tuple[str, ...]:
    """Splits a text such as "S(0) R"."""
    return tuple(text.split())


def as_torch(text: str) -> tuple:
    """Returns the text's placements as PyTorch's objects."""
    return torch_placements(placements(text))


# ---- redistributes on one mesh dim, timed on one rank

ONE_DIM = (("S(0)", "R"), ("S(0)", "S(1)"), ("P", "R"))

# ---- overhead of calls, without moving data: a (4, 4, 4) mesh

THREE_DIMS = (  # stock PyTorch runs the first with one collective and the others with several moves
    ("S(0) R R", "R R R"),
    ("S(0) S(0) S(0)", "R R R"),
    ("P P P", "R S(0) R"),
    ("P P P", "R R R"),
    ("S(0) S(1) R", "S(1) S(0) R"),
    ("S(0) S(0) R", "S(1) S(1) R"),
    ("R S(0) S(1)", "S(0) S(0) R"),
)

# ---- over links with a given rate: a mesh (node, gpu); with one rank per node the second mesh dim has size 1

MOVES = (
    ("S(0) S(0)", "R R"),
    ("S(0) S(0)", "S(1) S(1)"),
    ("P P", "S(0) S(0)"),
    ("P P", "R R"),
    ("R S(0)", "S(0) R"),
)

# Intermediate layouts, one move each: all at once, and within nodes first or last.
FORCED = {
    ("S(0) S(0)", "R R"): {"flat": [], "between, then within": ["R SS(0,2)"], "within, then between": ["S(0) R"]},
    ("P P", "R R"): {"flat": [], "within, then between": ["P R"], "scatter first": ["P S(0)", "R S(0)"]},
    ("P P", "S(0) S(0)"): {"flat": [], "within, then between": ["P SS(0,2)"]},
}

# ---- accuracy of the predicted ranking


@dataclass(frozen=True)
class Pair:
    """A pair of layouts of an n x n float32 matrix, and intermediate layouts of plans made by hand."""

    src: str
    dst: str
    n: int
    through: tuple[str, ...]  # one text per plan: its intermediate layouts, separated by " > "; "" for a single move
    mesh_shape: tuple[int, ...]

    @property
    def case(self) -> Case:
        return Case(f"{self.src} > {self.dst}", placements(self.src), placements(self.dst), (0, 0), self.mesh_shape)


PAIRS = (
    Pair("S(0)", "S(1)", 64, ("", "R"), (4,)),
    Pair("S(0)", "S(1)", 2048, ("", "R"), (4,)),
    Pair("P", "R", 64, ("", "S(0)", "S(1)"), (4,)),
    Pair("P", "R", 2048, ("", "S(0)", "S(1)"), (4,)),
    Pair("P", "S(1)", 1024, ("", "S(0)", "R"), (4,)),
    Pair("S(0)", "R", 4096, ("", "S(1)"), (4,)),
    Pair("S(0) S(0)", "R R", 64, ("", "S(0) R", "S(1) S(1)"), (2, 2)),
    Pair("S(0) S(0)", "R R", 2048, ("", "S(0) R", "S(1) S(1)"), (2, 2)),
    Pair("S(0) S(1)", "R R", 1024, ("", "S(0) R", "R S(1)", "S(0) S(0)"), (2, 2)),
    Pair("S(0) S(0)", "S(1) S(1)", 64, ("", "S(0) S(1)", "S(0) R", "R R"), (2, 2)),
    Pair("S(0) S(1)", "S(1) S(0)", 2048, ("", "R S(1)", "S(0) R > S(0) S(0)", "R R"), (2, 2)),
    Pair("S(0) R", "R S(0)", 1024, ("", "R R", "S(0) S(0)"), (2, 2)),
    Pair("P P", "R R", 256, ("", "S(0) S(0)", "P R", "S(0) P > S(0) S(0)"), (2, 2)),
    Pair("P P", "R R", 2048, ("", "S(0) S(0)", "P R", "S(0) P > S(0) S(0)"), (2, 2)),
    Pair("P P", "S(0) S(1)", 1024, ("", "S(0) P", "R R", "S(0) S(0)"), (2, 2)),
    Pair("P S(0)", "R S(1)", 1024, ("R S(0)", "P S(1)", "S(1) S(0)", "S(1) S(0) > S(1) S(1)"), (2, 2)),
    Pair("S(0) S(0) S(0)", "R R R", 64, ("", "S(0) R R", "S(0) S(0) R > S(0) R R"), (2, 2, 2)),
    Pair("S(0) S(0) S(0)", "R R R", 1024, ("", "S(0) R R", "S(0) S(0) R > S(0) R R"), (2, 2, 2)),
    Pair("P P P", "R S(0) R", 512, ("S(0) S(0) S(0)", "S(0) P P > S(0) S(0) S(0)", "P S(0) P", "R R R"), (2, 2, 2)),
    Pair("S(0) S(1) R", "R S(0) S(1)", 1024, ("", "S(0) S(1) S(1)", "R S(1) R", "R R R"), (2, 2, 2)),
)

# ---- products: the global rows, k and columns of a layer; in the last ones the rows are uneven

HOST_PRODUCTS = ((256, 256, 1024), (1024, 512, 2048), (2048, 1024, 1024), (4096, 512, 512), (1022, 512, 2048))
LINK_PRODUCTS = ((2048, 1024, 2048), (4096, 1024, 1024), (1022, 512, 3000))
