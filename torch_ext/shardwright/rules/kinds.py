"""The effect of each rule on tensors. functions.py has the public functions that create rules.

Except for renames, the fields of a rule are the arguments of the function of the same name. pieces.py defines pieces
and mapped tensors, patterns.py patterns and the captured texts of their wildcards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from .._native import _planner
from . import patterns
from .patterns import Captured
from .pieces import Mapped, Piece, Tensors


class Rule:
    """Base class of the rules that `fuse` and the other functions return."""

    def apply(self, tensors: Tensors, problems: list[str]) -> None:
        """Applies the rule to `tensors` in place. Appends a sentence to `problems` for each error, and continues."""
        raise NotImplementedError


def _dim_of(dim: int, ndim: int) -> int | None:
    """Returns the non-negative dim, or None if it is out of range."""
    return dim + ndim if -ndim <= dim < 0 else dim if 0 <= dim < ndim else None


def _add(tensors: Tensors, name: str, mapped: Mapped, rule: Rule, problems: list[str]) -> None:
    """Adds a tensor, or adds its pieces to the tensor with this name. Coverage later reports elements in both."""
    other = tensors.get(name)
    if other is None:
        tensors[name] = mapped
    elif (other.shape, other.dtype) == (mapped.shape, mapped.dtype):
        tensors[name] = other._replace(pieces=other.pieces + mapped.pieces)
    else:
        problems.append(f"{rule}: makes {name} with {_spec(mapped)}, but it exists already with {_spec(other)}")


def _spec(mapped: Mapped) -> str:
    """Returns dtype and shape as text."""
    return f"{mapped.dtype} of shape {mapped.shape}"


def _name_sets(
    sets: Sequence[str], tensors: Tensors, rule: Rule, problems: list[str]
) -> Iterator[tuple[Captured, list[str]]]:
    """Yields (texts of the wildcards, names) for each set of names that match the patterns `sets` with the same texts.

    Incomplete sets are reported.
    """
    names_by_texts = [patterns.names(pattern, tensors) for pattern in sets]
    captured = dict.fromkeys(texts for names in names_by_texts for texts in names)
    if not captured:
        problems.append(f"{rule}: no tensor is called {' or '.join(sets)}")
    for texts in captured:
        missing = [patterns.put(pattern, texts) for pattern, names in zip(sets, names_by_texts) if texts not in names]
        if missing:
            problems.append(f"{rule}: there is no tensor {', '.join(missing)}")
        else:
            yield texts, [names[texts] for names in names_by_texts]


def _matching(pattern: str, tensors: Tensors, rule: Rule, problems: list[str]) -> dict[Captured, str]:
    """Returns the names that match a pattern, by captured texts. Reports a pattern that matches none."""
    names = patterns.names(pattern, tensors)
    if not names:
        problems.append(f"{rule}: no tensor is called {pattern}")
    return names


def _chunks(sizes: Sequence[int], groups: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (part, begin in the part, begin in the fused dim, length) of each chunk, in the order of the fused dim."""
    at = 0
    for group in range(groups):
        for part, size in enumerate(sizes):
            length = size // groups
            yield part, group * length, at, length
            at += length


@dataclasses.dataclass(frozen=True)
class Fuse(Rule):
    """The rule of `fuse`."""

    name: str
    parts: tuple[str, ...]
    dim: int
    groups: int

    def __str__(self) -> str:
        return f"fuse({self.name!r})"

    def apply(self, tensors: Tensors, problems: list[str]) -> None:
        fused_tensors = []
        for captured, names in list(_name_sets(self.parts, tensors, self, problems)):
            fused = self._fused(names, tensors, problems)
            if fused is not None:
                fused_tensors.append((patterns.put(self.name, captured), fused))
            for name in set(names):
                del tensors[name]
        for name, mapped in fused_tensors:
            _add(tensors, name, mapped, self, problems)

    def _fused(self, names: list[str], tensors: Tensors, problems: list[str]) -> Mapped | None:
        """Returns the concatenation of the tensors with these names, or None after reporting why there is none."""
        parts = [tensors[name] for name in names]
        first = parts[0]
        dim = _dim_of(self.dim, len(first.shape))
        if dim is None:
            problems.append(f"{self}: {names[0]} of shape {first.shape} has no dim {self.dim}")
            return None
        sizes = [part.shape[dim] for part in parts]
        reason = ""
        if len({(*part.shape[:dim], *part.shape[dim + 1 :], part.dtype) for part in parts}) > 1:
            reason = f"parts must have one dtype and differ in dim {dim} only"
        elif any(size % self.groups for size in sizes):
            reason = f"dim {dim} of every part must be a multiple of {self.groups} groups"
        if reason:
            given = ", ".join(f"{name} ({_spec(part)})" for name, part in zip(names, parts))
            problems.append(f"{self}: {reason}, got {given}")
            return None
        pieces = []
        for part, begin, at, length in _chunks(sizes, self.groups):
            cut = (piece.cut(dim, begin, begin + length) for piece in parts[part].pieces)
            pieces += [piece.moved(dim, at - begin) for piece in cut if piece is not None]
        return Mapped((*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :]), first.dtype, tuple(pieces))


@dataclasses.dataclass(frozen=True)
class Split(Rule):
    """The rule of `split`."""

    name: str
    parts: tuple[str, ...]
    dim: int
    sizes: tuple[int, ...] | None
    groups: int

    def __str__(self) -> str:
        return f"split({self.name!r})"

    def apply(self, tensors: Tensors, problems: list[str]) -> None:
        for captured, name in _matching(self.name, tensors, self, problems).items():
            full = tensors.pop(name)
            for pattern, mapped in zip(self.parts, self._cut(name, full, problems)):
                _add(tensors, patterns.put(pattern, captured), mapped, self, problems)

    def _cut(self, name: str, full: Mapped, problems: list[str]) -> list[Mapped]:
        """Returns the parts of a tensor, or no parts after reporting why it cannot be cut."""
        dim = _dim_of(self.dim, len(full.shape))
        if dim is None:
            problems.append(f"{self}: {name} of shape {full.shape} has no dim {self.dim}")
            return []
        length, count = full.shape[dim], len(self.parts)
        sizes = self.sizes if self.sizes is not None else (length // count,) * count
        if sum(sizes) != length or any(size % self.groups for size in sizes):
            given = f"sizes {list(sizes)}" if self.sizes is not None else f"{count} equal parts"
            problems.append(
                f"{self}: sizes of {name} must sum to {length} and be multiples of groups={self.groups}, got {given}"
            )
            return []
        pieces: list[list[Piece]] = [[] for _ in sizes]
        for part, begin, at, size in _chunks(sizes, self.groups):
            cut = (piece.cut(dim, at, at + size) for piece in full.pieces)
            pieces[part] += [piece.moved(dim, begin - at) for piece in cut if piece is not None]
        before, after = full.shape[:dim], full.shape[dim + 1 :]
        return [Mapped((*before, size, *after), full.dtype, tuple(some)) for size, some in zip(sizes, pieces)]


@dataclasses.dataclass(frozen=True)
class Transpose(Rule):
    """The rule of `transpose`."""

    names: str
    dims: tuple[int, ...]

    def __str__(self) -> str:
        return f"transpose({self.names!r}, {self.dims})"

    def apply(self, tensors: Tensors, problems: list[str]) -> None:
        for name in _matching(self.names, tensors, self, problems).values():
            mapped = tensors[name]
            ndim = len(mapped.shape)
            dims = [_dim_of(dim, ndim) for dim in self.dims]
            if sorted(dim for dim in dims if dim is not None) != list(range(ndim)) or len(dims) != ndim:
                problems.append(f"{self}: dims must be a permutation of those of {name} of shape {mapped.shape}")
                continue
            order = [dim for dim in dims if dim is not None]
            new_dim = [order.index(dim) for dim in range(ndim)]
            tensors[name] = mapped._replace(
                shape=tuple(mapped.shape[dim] for dim in order),
                pieces=tuple(piece.with_dims(new_dim) for piece in mapped.pieces),
            )


@dataclasses.dataclass(frozen=True)
class Stack(Rule):
    """The rule of `stack`."""

    names: str
    into: str
    dim: int

    def __str__(self) -> str:
        return f"stack({self.names!r})"

    def apply(self, tensors: Tensors, problems: list[str]) -> None:
        index_at = patterns.wildcards(self.names).index("{}")
        # Names by the texts of the other wildcards, then by the number that {} stands for.
        slices: dict[Captured, dict[int, str]] = {}
        for captured, name in _matching(self.names, tensors, self, problems).items():
            rest = (*captured[:index_at], *captured[index_at + 1 :])
            slices.setdefault(rest, {})[int(captured[index_at])] = name
        for rest, names in slices.items():
            parts = {index: tensors.pop(name) for index, name in names.items()}
            stacked = self._stacked(names, parts, problems)
            if stacked is not None:
                _add(tensors, patterns.put(self.into, rest), stacked, self, problems)

    def _stacked(self, names: dict[int, str], parts: dict[int, Mapped], problems: list[str]) -> Mapped | None:
        """Returns the stacked tensor, or None after reporting why there is none.

        Arguments are by index in the new dim.
        """
        first = next(iter(parts))
        shape, dtype = parts[first].shape, parts[first].dtype
        for index, part in parts.items():
            if (part.shape, part.dtype) != (shape, dtype):
                problems.append(
                    f"{self}: slices must have one shape and dtype, got {names[first]} with {_spec(parts[first])} and "
                    f"{names[index]} with {_spec(part)}"
                )
                return None
        dim = _dim_of(self.dim, len(shape) + 1)
        if dim is None:
            problems.append(f"{self}: {names[first]} of shape {shape} cannot get a new dim {self.dim}")
            return None
        new_dim = [d + (d >= dim) for d in range(len(shape))]
        pieces = [
            piece.with_dims(new_dim).with_fixed(dim, index) for index, part in parts.items() for piece in part.pieces
        ]
        return Mapped((*shape[:dim], max(parts) + 1, *shape[dim:]), dtype, tuple(pieces))


@dataclasses.dataclass(frozen=True)
class Unstack(Rule):
    """The rule of `unstack`."""

    names: str
    into: str
    dim: int

    def __str__(self) -> str:
        return f"unstack({self.names!r})"

    def apply(self, tensors: Tensors, problems: list[str]) -> None:
        index_at = patterns.wildcards(self.into).index("{}")
        for captured, name in _matching(self.names, tensors, self, problems).items():
            full = tensors.pop(name)
            dim = _dim_of(self.dim, len(full.shape))
            if dim is None:
                problems.append(f"{self}: {name} of shape {full.shape} has no dim {self.dim}")
                continue
            shape = (*full.shape[:dim], *full.shape[dim + 1 :])
            new_dim = [d - (d > dim) for d in range(len(full.shape))]
            for index, pieces in enumerate(_slices(full, dim)):
                mapped = Mapped(shape, full.dtype, tuple(piece.with_dims(new_dim) for piece in pieces))
                numbered = (*captured[:index_at], str(index), *captured[index_at:])
                _add(tensors, patterns.put(self.into, numbered), mapped, self, problems)


def _slices(full: Mapped, dim: int) -> list[list[Piece]]:
    """Returns the pieces of each index of a dim. Time is linear in the number of returned pieces."""
    slices: list[list[Piece]] = [[] for _ in range(full.shape[dim])]
    for piece in full.pieces:
        begin, end = piece.box(len(full.shape))[dim]
        for index in range(begin, end):
            at = piece.at(dim, index)
            assert at is not None
            slices[index].append(at)
    return slices


@dataclasses.dataclass(frozen=True)
class Rename(Rule):
    """The rule of `rename` with patterns. `pairs` are (old pattern, new pattern)."""

    pairs: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        old, new = self.pairs[0] if self.pairs else ("", "")
        return f"rename({old!r}, {new!r})" if len(self.pairs) == 1 else "rename({...})"

    def apply(self, tensors: Tensors, problems: list[str]) -> None:
        new_name: dict[str, str] = {}
        for old, new in self.pairs:
            for captured, name in _matching(old, tensors, self, problems).items():
                renamed = patterns.put(new, captured)
                if new_name.setdefault(name, renamed) != renamed:
                    problems.append(f"{self}: {name} would become {new_name[name]} and {renamed}")
        _rename_all(tensors, new_name, self, problems)


@dataclasses.dataclass(frozen=True)
class RenameBy(Rule):
    """The rule of `rename` with a function from an old name to the new one."""

    function: Callable[[str], str]

    def __str__(self) -> str:
        return f"rename({getattr(self.function, '__name__', 'a function')})"

    def apply(self, tensors: Tensors, problems: list[str]) -> None:
        new_name = {}
        for name in tensors:
            renamed = self.function(name)
            if isinstance(renamed, str) and renamed:
                new_name[name] = renamed
            else:
                problems.append(f"{self}: the result for {name} must be a name, got {renamed!r}")
        _rename_all(tensors, new_name, self, problems)


def _rename_all(tensors: Tensors, new_name: dict[str, str], rule: Rule, problems: list[str]) -> None:
    """Gives tensors new names, all at once."""
    before = list(tensors.items())
    tensors.clear()
    for name, mapped in before:
        _add(tensors, new_name.get(name, name), mapped, rule, problems)


@dataclasses.dataclass(frozen=True)
class Cast(Rule):
    """The rule of `cast`."""

    dtype: str
    names: tuple[str, ...] | None

    def __str__(self) -> str:
        return f"cast({self.dtype!r})"

    def apply(self, tensors: Tensors, problems: list[str]) -> None:
        if self.names is None:
            chosen = [name for name, mapped in tensors.items() if _planner.is_floating(mapped.dtype)]
        else:
            chosen = [name for pattern in self.names for name in _matching(pattern, tensors, self, problems).values()]
        for name in dict.fromkeys(chosen):
            mapped = tensors[name]
            if mapped.dtype == self.dtype:
                continue
            if _planner.is_complex(mapped.dtype) and not _planner.is_complex(self.dtype):
                problems.append(f"{self}: {name} is {mapped.dtype}, whose imaginary part would be lost")
            elif any(piece.cast is not None for piece in mapped.pieces):
                problems.append(f"{self}: {name} must be cast only once, but is cast to {mapped.dtype} already")
            else:
                pieces = tuple(piece._replace(cast=self.dtype) for piece in mapped.pieces)
                tensors[name] = mapped._replace(dtype=self.dtype, pieces=pieces)


def apply_rules(tensors: Tensors, rules: Iterable[Rule], problems: list[str]) -> None:
    """Applies the rules in order, in place. Appends to `problems` as `Rule.apply` does."""
    for rule in rules:
        rule.apply(tensors, problems)


def renamed(names: Collection[str], rules: Iterable[Rule]) -> set[str]:
    """Returns the names, and the names that they have after all rules that only rename."""
    tensors = {name: Mapped((), "", ()) for name in names}
    apply_rules(tensors, [rule for rule in rules if isinstance(rule, (Rename, RenameBy))], [])
    return {*names, *tensors}
