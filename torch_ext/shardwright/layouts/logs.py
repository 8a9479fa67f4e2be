"""Applies the environment variable SHARDWRIGHT_LOG to the logger ``shardwright``."""

from __future__ import annotations

import logging
import os

from .errors import argument_error

ENVIRONMENT_VARIABLE = "SHARDWRIGHT_LOG"
_LEVELS = ("debug", "info", "warning", "error")


class _Formatter(logging.Formatter):
    """Formats a message as one line with the rank, if torchrun or another launcher has set RANK."""

    def format(self, record: logging.LogRecord) -> str:
        rank = os.environ.get("RANK")
        where = "" if rank is None else f" rank {rank}"
        return f"shardwright{where}: {record.levelname.lower()}: {super().format(record)}"


def apply_environment() -> None:
    """Sets the level of the logger and shows its messages on stderr, if the variable is set.

    Raises:
        ValueError: the variable is not a level.
    """
    level = os.environ.get(ENVIRONMENT_VARIABLE, "").lower()
    if not level:
        return
    if level not in _LEVELS:
        raise argument_error(ENVIRONMENT_VARIABLE, f"one of {', '.join(_LEVELS)} in the environment", repr(level))
    logger = logging.getLogger("shardwright")
    logger.setLevel(level.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter())
    logger.addHandler(handler)
    logger.propagate = False  # otherwise handlers of the root logger would show messages again
