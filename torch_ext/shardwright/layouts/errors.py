"""The form of messages about invalid arguments."""

from __future__ import annotations

from typing import Any


def argument_error(argument: str, allowed: str, value: Any) -> ValueError:
    """Returns ValueError("<argument> must be <allowed>, got <value>").

    Args:
        argument: the argument's name, as the caller writes it, or "item 3 of names"
        allowed: the allowed values, such as "in [-4, 3]", "a list of mesh dims", "one of sum, avg"
        value: the value, or a text that describes it, such as "a dict"
    """
    return ValueError(f"{argument} must be {allowed}, got {value}")
