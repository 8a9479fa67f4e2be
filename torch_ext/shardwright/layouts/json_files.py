"""JSON in files: plans, topologies, layouts and rules. Errors begin with `where`, which names the file or the entry."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import argument_error


def read_text(path: Path, where: str) -> str:
    """Returns a file's text. Raises ValueError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or a path with a null byte
        raise ValueError(f"{where} cannot be read: {error}") from None


def read_json(text: str | bytes | bytearray, where: str) -> Any:
    """Parses JSON. Raises ValueError if the text is not JSON, or if an object has a key twice."""
    repeated: list[str] = []

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=make_object)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{where} has lists and objects that are nested too deeply") from None
    if repeated:
        raise ValueError(f"{where} must have each key of an object once, got {repeated[0]!r} twice")
    return value


def json_object(value: Any, where: str, keys: Iterable[str] | None = None) -> dict[str, Any]:
    """Returns a JSON object. Raises ValueError for other values, and for keys outside `keys` (None: any key)."""
    if not isinstance(value, dict):
        raise argument_error(where, "a JSON object", f"a {type(value).__name__}")
    if keys is not None and (unknown := [str(key) for key in value if key not in keys]):
        raise ValueError(f"{where} must have only the keys {', '.join(keys)}, got {', '.join(unknown)}")
    return value


def shard_order(value: Any, where: str) -> dict[int, Any]:
    """Returns a shard order, whose keys are texts in JSON. Raises ValueError if a key is no tensor dim."""
    table = json_object(value, where)
    if wrong := [key for key in table if not re.fullmatch("0|[1-9][0-9]{0,8}", key)]:
        raise argument_error(f"{where}: keys", "tensor dims: 0, 1, 2, ...", repr(wrong[0]))
    return {int(key): value for key, value in table.items()}
