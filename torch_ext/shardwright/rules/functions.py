"""Rules from the tensors of one state dict to those of another: `fuse`, `split`, `stack`, `transpose`, and so on.

A rule is index arithmetic on pieces (pieces.py). Rules are applied in order, each to the names that the previous rules
produced. Names may be patterns: ``*`` is text without dots, ``**`` any text, ``{}`` a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._native import _planner
from ..layouts import argument_values
from ..layouts.errors import argument_error
from . import kinds, patterns
from .kinds import Rule


def fuse(name: str, parts: Sequence[str], dim: int = 0, *, groups: int = 1) -> Rule:
    """Concatenates tensors along a dim, as ``torch.cat(parts, dim)`` does.

    Args:
        name: name of the result, such as ``"qkv"`` or ``"layers.*.qkv"``.
        parts: names of the tensors to concatenate, with the same wildcards as `name`.
        dim: the dim of the concatenation.
        groups: number of equal chunks per part. The result has the first chunk of each part, then the second chunk of
            each, and so on. Grouped-query attention stores each group's queries next to its keys and values in this
            way.
    """
    return kinds.Fuse(_pattern("name", name), _patterns("parts", parts, name), _integer("dim", dim), _positive(groups))


def split(
    name: str, parts: Sequence[str], dim: int = 0, *, sizes: Sequence[int] | None = None, groups: int = 1
) -> Rule:
    """Cuts a tensor along a dim into parts, as ``torch.split`` does: the inverse of `fuse`.

    Args:
        name: name of the tensor to split, such as ``"qkv"`` or ``"layers.*.qkv"``.
        parts: names of the parts, with the same wildcards as `name`.
        dim: the dim that is cut.
        sizes: sizes of the parts in this dim; their sum is its length. Default: equal parts.
        groups: the number of groups of chunks, as in `fuse`; it divides every size.
    """
    names = _patterns("parts", parts, name)
    checked = None
    if sizes is not None:
        checked = tuple(_integer("sizes", size) for size in argument_values.items(sizes, "sizes", "a list of integers"))
        if len(checked) != len(names) or min(checked) < 0:
            raise argument_error("sizes", f"a list of {len(names)} integers of at least 0, one per part", list(checked))
    return kinds.Split(_pattern("name", name), names, _integer("dim", dim), checked, _positive(groups))


def transpose(names: str, dims: Sequence[int]) -> Rule:
    """Reorders dims, as ``torch.permute`` does.

    Args:
        names: a name or pattern.
        dims: a permutation: dim i of the result is dim ``dims[i]``.
    """
    items = argument_values.items(dims, "dims", "a list of dims, such as (1, 0)")
    return kinds.Transpose(_pattern("names", names), tuple(_integer("dims", dim) for dim in items))


def stack(names: str, dim: int = 0, *, into: str | None = None) -> Rule:
    """Stacks tensors with numbers in their names into one tensor, as ``torch.stack`` does.

    Args:
        names: a pattern with one ``{}``, which stands for the index: ``"layers.*.experts.{}.w1"``.
        dim: the new dim.
        into: the name of the result, with the other wildcards of `names`. Default: `names` without its ``{}``, here
            ``"layers.*.experts.w1"``.
    """
    template = _numbered("names", names)
    if into is None:
        into = template.replace("{}.", "", 1) if "{}." in template else template.replace(".{}", "").replace("{}", "")
    others = [wildcard for wildcard in patterns.wildcards(template) if wildcard != "{}"]
    return kinds.Stack(template, _with_wildcards("into", into, others, names), _integer("dim", dim))


def unstack(names: str, into: str, dim: int = 0) -> Rule:
    """Splits a tensor into its slices along a dim, as ``torch.unbind`` does: the inverse of `stack`.

    Args:
        names: name of the tensor, such as ``"layers.*.experts.w1"``.
        into: names of the slices, with one ``{}`` for the index and the wildcards of `names`:
            ``"layers.*.experts.{}.w1"``.
        dim: the dim that is removed.
    """
    others = [wildcard for wildcard in patterns.wildcards(_numbered("into", into)) if wildcard != "{}"]
    return kinds.Unstack(_with_wildcards("names", names, others, into), into, _integer("dim", dim))


def rename(names: str | Mapping[str, str] | Callable[[str], str], to: str | None = None) -> Rule:
    """Renames tensors.

    Args:
        names: a name or pattern, with `to`; a dict from old names or patterns to new ones; or a function that returns
            the new name of every name. All names change at once, so names can be swapped.
        to: the new name, with as many wildcards as `names`: ``rename("model.**", "**")``.
    """
    if callable(names):
        if to is not None:
            raise argument_error("to", "left out if names is a function", repr(to))
        return kinds.RenameBy(names)
    if isinstance(names, Mapping):
        if to is not None:
            raise argument_error("to", "left out if names is a dict", repr(to))
        pairs = list(names.items())
    else:
        if to is None:
            raise argument_error("to", f"the new name of {_pattern('names', names)!r}", None)
        pairs = [(names, to)]
    checked_pairs = []
    for old, new in pairs:
        count = len(patterns.wildcards(_pattern("names", old)))
        if len(patterns.wildcards(_pattern("to", new))) != count:
            raise argument_error("to", f"a name with as many wildcards as {old!r}", repr(new))
        checked_pairs.append((old, new))
    return kinds.Rename(tuple(checked_pairs))


def cast(dtype: Any, names: str | Sequence[str] | None = None) -> Rule:
    """Casts tensors before they move. The result has the bits of ``x.to(dtype)``.

    Args:
        dtype: a ``torch.dtype`` or its name. An element is cast once.
        names: a name or pattern, or a list of them. Default: all tensors of floating-point types of 16 bits and more.
    """
    mesh = _planner.Mesh(["a"], [1])
    known = _planner.Layout(mesh, [], ["R"], argument_values.dtype_text(dtype)).dtype
    if names is None:
        return kinds.Cast(known, None)
    texts = [names] if isinstance(names, str) else argument_values.items(names, "names", "a pattern or a list of them")
    return kinds.Cast(known, tuple(_pattern("names", pattern) for pattern in texts))


# ---- arguments


def _pattern(argument: str, value: Any) -> str:
    """Returns a nonempty text. Raises ValueError for anything else."""
    if not isinstance(value, str) or not value:
        raise argument_error(argument, "a name or a pattern, such as 'layers.*.weight'", repr(value))
    return value


def _with_wildcards(argument: str, value: Any, wildcards: list[str], other: str) -> str:
    """Returns a pattern. Raises ValueError, which names the pattern `other`, unless it has exactly these wildcards."""
    if patterns.wildcards(_pattern(argument, value)) != wildcards:
        raise argument_error(argument, f"a name with the wildcards of {other!r} (stack, unstack: no {{}})", repr(value))
    return str(value)


def _patterns(argument: str, value: Any, name: str) -> tuple[str, ...]:
    """Returns a nonempty list of patterns with the wildcards of `name`. Raises ValueError for anything else."""
    items = argument_values.items(value, argument, "a list of names, such as ['q', 'k', 'v']")
    if not items:
        raise argument_error(argument, "a list of at least one name", "none")
    wildcards = patterns.wildcards(_pattern("name", name))
    return tuple(_with_wildcards(argument, item, wildcards, name) for item in items)


def _numbered(argument: str, value: Any) -> str:
    """Returns a pattern with exactly one {}. Raises ValueError for anything else."""
    if patterns.wildcards(_pattern(argument, value)).count("{}") != 1:
        raise argument_error(argument, "a pattern with one {}, such as 'experts.{}.w1'", repr(value))
    return str(value)


def _integer(argument: str, value: Any) -> int:
    """Returns the argument as an int. Raises ValueError for other types."""
    return argument_values.integer(value, argument)


def _positive(value: Any) -> int:
    """Returns the argument groups. Raises ValueError if it is below 1."""
    groups = argument_values.integer(value, "groups")
    if groups < 1:
        raise argument_error("groups", "at least 1", groups)
    return groups
