"""Merges the profiles of a job's ranks, as torch.profiler exports them, into one trace."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SUFFIXES = (".json", ".json.gz")


def files_in(paths: Sequence[str]) -> list[Path]:
    """Returns the given files, and all profiles in the given folders. Raises ValueError for folders without any."""
    found: list[Path] = []
    for path in map(Path, paths):
        try:
            inside = sorted(path.iterdir()) if path.is_dir() else [path]
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        profiles = [file for file in inside if file.name.endswith(_SUFFIXES) or file == path]
        if not profiles:
            raise ValueError(f"{path} must have files *.json or *.json.gz, got none")
        found += profiles
    return found


def merge(files: Sequence[Path]) -> dict[str, Any]:
    """Returns one trace with the events of all files: a process per rank and device, in order of the ranks.

    Times of ranks on one machine are comparable. Times of different machines differ by the offset of their clocks.

    Raises:
        ValueError: a file cannot be read or is no profile, or two files are of the same rank.
    """
    traces = {file: _read(file) for file in files}
    file_of: dict[int, Path] = {}
    for position, (file, trace) in enumerate(traces.items()):
        rank = trace.get("distributedInfo", {}).get("rank", position)
        if rank in file_of:
            raise ValueError(f"profiles must be of different ranks, got two of rank {rank}: {file_of[rank]} and {file}")
        file_of[rank] = file
    bases = [trace.get("baseTimeNanoseconds", 0) for trace in traces.values()]
    events: list[dict[str, Any]] = []
    for rank, file in sorted(file_of.items()):
        trace = traces[file]
        offset_us = (trace.get("baseTimeNanoseconds", 0) - min(bases)) / 1000
        try:
            events += _of_rank(rank, trace["traceEvents"], offset_us, first_pid=len(events))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{file} must have events as torch.profiler exports them, got {error!r}") from None
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": min(bases), "traceEvents": events}


def _read(file: Path) -> dict[str, Any]:
    """Returns the profile in a file. Raises ValueError if the file cannot be read or holds no profile."""
    try:
        data = file.read_bytes()
        trace = json.loads(gzip.decompress(data) if file.suffix == ".gz" else data)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, RecursionError, zlib.error) as error:
        raise ValueError(f"{file} must be JSON, got: {error}") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{file} must be a profile that torch.profiler exported, got JSON without traceEvents")
    info, base = trace.get("distributedInfo", {}), trace.get("baseTimeNanoseconds", 0)
    if not isinstance(info, dict) or not isinstance(info.get("rank", 0), int):
        raise ValueError(f"{file}: distributedInfo must be an object with an integer rank, got {json.dumps(info)[:80]}")
    if not isinstance(base, (int, float)):
        raise ValueError(f"{file}: baseTimeNanoseconds must be a number, got {json.dumps(base)[:80]}")
    return trace


def _of_rank(rank: int, events: Sequence[dict[str, Any]], offset_us: float, first_pid: int) -> list[dict[str, Any]]:
    """Returns the events of one rank with process ids of its own from `first_pid` on, and names with the rank."""
    pids: dict[Any, int] = {}  # new process ids, by the id in the profile (a number or a word)
    names: dict[Any, str] = {}
    moved = []
    for event in events:
        old = event.get("pid", 0)
        pid = pids.setdefault(old, first_pid + len(pids))
        if event.get("ph") == "M" and event["name"] in ("process_name", "process_sort_index"):
            if event["name"] == "process_name":
                names[old] = event["args"]["name"]
            continue
        changed = {**event, "pid": pid}
        if "ts" in event:
            changed["ts"] = event["ts"] + offset_us
        if "id" in event:  # equal ids join events by arrows, which must not lead to other ranks
            changed["id"] = f"{rank}.{event['id']}"
        moved.append(changed)
    heads: list[dict[str, Any]] = []
    for old, pid in pids.items():
        name = {"name": f"rank {rank}: {names.get(old) or str(old) or 'profiler'}"}
        heads += [
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": name},
            {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}},
        ]
    return heads + moved
