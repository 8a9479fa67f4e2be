"""Parses command-line options: meshes, shapes, placements, orders of cuts, files to write.

All functions raise a ValueError that names the option.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..layouts.errors import argument_error

MAX_RANKS = 1 << 20  # maximum number of ranks in a mesh


def parse_integer(text: str, where: str) -> int:
    """Parses a 64-bit integer. Errors begin with `where`."""
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", text.strip()) or not -(1 << 63) <= int(text) < 1 << 63:
        raise argument_error(where, "a 64-bit integer", repr(text))
    return int(text)


def parse_mesh(text: str, option: str = "--mesh") -> dict[str, int]:
    """Parses names and sizes such as ``dp=2,tp=4``, also as torch prints them: ``DeviceMesh((dp=2, tp=4), 'cpu')``.

    If all names are missing, as in ``(2, 4)``, they are dim0, dim1, ..., as for DeviceMeshes without names.
    """
    mesh = re.fullmatch(r"\s*(?:DeviceMesh\s*\()?\s*(\([^()]*\)).*", text, re.DOTALL)
    inner = _without_brackets(mesh[1] if mesh else text)
    if re.fullmatch(r"[0-9\s]+(,[0-9\s]+)*", inner):
        inner = ",".join(f"dim{index}={size}" for index, size in enumerate(inner.split(",")))
    return parse_sizes(inner, option)


def parse_sizes(text: str, option: str) -> dict[str, int]:
    """Parses names and sizes such as ``b=8,s=4096``."""
    dims: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        name = name.strip()
        if not equals:
            raise argument_error(option, "NAME=SIZE,NAME=SIZE", f"{part!r} in {text!r}")
        if name in dims:
            raise ValueError(f"{option} must have distinct names, got {name!r} twice in {text!r}")
        dims[name] = parse_integer(size, f"{option}: size of {name!r} in {text!r}")
    return dims


def parse_shape(text: str) -> list[int]:
    """Parses sizes such as ``64,64``, also as torch prints them; empty text is a scalar."""
    inner = _without_brackets(re.sub(r"^\s*torch\.Size\((.*)\)\s*$", r"\1", text))
    sizes = inner.split(",") if inner else []
    return [parse_integer(size, f"--shape: each size in {text!r}") for size in sizes]


def parse_ranks(option: str, text: str | None) -> list[int] | None:
    """Parses ranks and ranges of ranks such as ``0,1,4-7``."""
    if text is None or not text.strip():
        return None
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        begin = parse_integer(first, f"{option}: rank in {text!r}")
        end = parse_integer(last, f"{option}: rank in {text!r}") if dash else begin
        if not 0 <= end - begin < MAX_RANKS:
            raise argument_error(option, "ranks and ranges such as 0,1,4-7", f"{part!r} in {text!r}")
        ranks += range(begin, end + 1)
    return ranks


def split_placements(text: str) -> list[str]:
    """Splits at the commas that are not within parentheses. Also splits torch's short form, such as ``S(0)R``."""
    if re.fullmatch(rf"({_SHORT})+", short := text.replace(" ", "")):
        return re.findall(_SHORT, short)
    return [part.strip() for part in re.split(r",(?![^()]*\))", _without_brackets(text))]


_SHORT = r"(?:_?S\([^()]*\)|R|P(?:\([^()]*\))?)"


def _without_brackets(text: str) -> str:
    """Removes brackets around a list or tuple, and a comma after its last item."""
    inner = text.strip()
    if re.fullmatch(r"\[.*\]|\((?:[^()]|\([^()]*\))*\)", inner, re.DOTALL):
        return inner[1:-1].strip().removesuffix(",").rstrip()
    return inner


def parse_order(option: str, text: str | None) -> dict[int, list[int | str]] | None:
    """Parses mesh dims by tensor dim, such as ``0:tp,dp;1:pp``."""
    if text is None or not text.strip():
        return None
    order: dict[int, list[int | str]] = {}
    for entry in text.split(";"):
        dim, colon, mesh_dims = entry.partition(":")
        if not colon:
            raise argument_error(option, "TENSOR_DIM:MESH_DIM,MESH_DIM;...", repr(entry))
        tensor_dim = parse_integer(dim, f"{option}: tensor dim of {entry!r}")
        if tensor_dim in order:
            raise ValueError(f"{option} must have one entry per tensor dim, got two for {tensor_dim} in {text!r}")
        names = [name.strip() for name in mesh_dims.split(",")]
        order[tensor_dim] = [int(name) if re.fullmatch(r"[0-9]{1,9}", name) else name for name in names]
    return order


def write_file(option: str, path: str, text: str) -> None:
    """Writes text to the file of an option."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be written: {error.strerror}") from None
    except ValueError as error:  # a path with a null byte
        raise ValueError(f"{option}: {path!r} cannot be written: {error}") from None
