"""Pairs of placements (source, destination) that several tests use. Shorter lists name the pairs that they select."""

from __future__ import annotations

Pair = tuple[list[str], list[str]]

ONE_DIM: dict[str, Pair] = {
    "S->R": (["S(0)"], ["R"]),
    "S->S": (["S(0)"], ["S(1)"]),
    "P->S": (["P(sum)"], ["S(0)"]),
    "P->R": (["P(sum)"], ["R"]),
    "R->S": (["R"], ["S(0)"]),
}

TWO_DIMS: dict[str, Pair] = {
    "gather one": (["S(0)", "R"], ["R", "R"]),
    "gather both": (["S(0)", "S(0)"], ["R", "R"]),
    "gather both tensor dims": (["S(0)", "S(1)"], ["R", "R"]),
    "gather one, turn the other": (["S(0)", "S(1)"], ["R", "S(0)"]),
    "turn one": (["S(0)", "R"], ["S(1)", "R"]),
    "turn one, gather the other": (["S(0)", "S(0)"], ["S(1)", "R"]),
    "swap": (["S(0)", "S(1)"], ["S(1)", "S(0)"]),
    "swap back": (["S(1)", "S(0)"], ["S(0)", "S(1)"]),
    "hand over": (["S(0)", "R"], ["R", "S(1)"]),
    "sum": (["P(sum)", "P(sum)"], ["R", "R"]),
    "sum and cut": (["P(sum)", "P(sum)"], ["R", "S(0)"]),
    "sum one, turn the other": (["P(sum)", "S(0)"], ["R", "S(1)"]),
    "sum one, cut the other": (["R", "P(sum)"], ["S(0)", "R"]),
    "cut one": (["R", "R"], ["S(0)", "R"]),
    "cut both": (["R", "R"], ["S(0)", "S(1)"]),
    "nothing": (["S(0)", "R"], ["S(0)", "R"]),
}


def two_dims(*names: str) -> list[Pair]:
    return [TWO_DIMS[name] for name in names]
