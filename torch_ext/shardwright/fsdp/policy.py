"""Dtypes of weights and gradients: sharded, in use and in messages (`mp_policy`, `Options.message_format`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from . import nvfp4  # noqa: F401  (one of FORMATS)
from .formats import FORMATS, Format

Wire: TypeAlias = torch.dtype | str | None

# Until 2.14, gradients are reduced in param_dtype where reduce_dtype is None; after that, in the parameter's dtype.
_REDUCES_IN_PARAM_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15)

_ALLOWED = f"torch.bfloat16, torch.float16, {', '.join(map(repr, FORMATS))}, None or a function that returns one"


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """Of one weight."""

    use: torch.dtype  # gathered
    gathers: Format  # in messages
    reduce: torch.dtype  # of gradients while they are added up
    gradients: torch.dtype  # in messages
    mp_policy: MixedPrecisionPolicy | None = None

    @property
    def are_plain(self) -> bool:
        """Returns whether messages carry a weight in the dtype of its use."""
        return type(self.gathers) is Format and self.gathers.dtype == self.use

    def is_as_at_rest(self, own: torch.dtype) -> bool:
        """Returns whether a weight that is whole at rest can be used as it is."""
        return self.use == own and type(self.gathers) is Format and self.gathers.dtype == own


class Policy:
    """The policy of one unit."""

    def __init__(self, mp_policy: MixedPrecisionPolicy | None, given: Any) -> None:
        if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
            raise ValueError(
                f"mp_policy: got a {type(mp_policy).__name__}; allowed is a torch.distributed.fsdp.MixedPrecisionPolicy"
            )
        self._policy = mp_policy or MixedPrecisionPolicy()
        self._message_format: Callable[[nn.Parameter], Wire] = given if callable(given) else lambda parameter: given

    def of(self, parameter: nn.Parameter) -> Dtypes:
        """Returns the dtypes of a parameter, whole or cut."""
        return dataclasses.replace(self._of(parameter), mp_policy=self._policy)

    def _of(self, parameter: nn.Parameter) -> Dtypes:
        own = parameter.dtype
        if not own.is_floating_point:
            return Dtypes(own, Format(own), own, own)
        policy = self._policy
        override: Any = getattr(policy, "param_dtype_override_fn", None)  # since torch 2.15
        use = (override(parameter) if override is not None else None) or policy.param_dtype or own
        if use not in (own, policy.param_dtype):
            raise ValueError(
                f"mp_policy: param_dtype_override_fn returned {use!r}; allowed are {own}, {policy.param_dtype} and None"
            )
        reduce = policy.reduce_dtype or (use if _REDUCES_IN_PARAM_DTYPE else own)
        message = self._message_format(parameter)
        check_message_format(message)
        if message is None:
            return Dtypes(use, Format(use), reduce, reduce)
        reduce = policy.reduce_dtype or torch.float32
        if isinstance(message, torch.dtype):
            return Dtypes(use, Format(message), reduce, message)
        # Biases and norms, which are small, keep their precision.
        gathers = FORMATS[message]() if parameter.ndim > 1 else Format(use)
        return Dtypes(use, gathers, reduce, torch.bfloat16)

    def cast_inputs(self, value: Any) -> Any:
        """Casts one of a forward's arguments."""
        return _cast(value, self._policy.param_dtype if self._policy.cast_forward_inputs else None)

    def cast_output(self, value: Any) -> Any:
        return _cast(value, self._policy.output_dtype)

    @property
    def casts_inputs(self) -> bool:
        return self._policy.cast_forward_inputs and self._policy.param_dtype is not None

    @property
    def casts_outputs(self) -> bool:
        return self._policy.output_dtype is not None


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype)


def check_message_format(given: Any) -> None:
    if given is not None and given not in (torch.bfloat16, torch.float16) and given not in FORMATS:
        raise ValueError(f"message_format must be {_ALLOWED}, got {given!r}")
