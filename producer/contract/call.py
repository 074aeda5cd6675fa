"""What a job asks for: the ways to write a call, read into one form on both sides."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from producer.contract.errors import BadRequest
from producer.contract.wire import Reference

_MODEL: Final = "model"
_INPUTS: Final = "inputs"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request: a model and its named inputs."""

    #: None when the call does not say; then the queue does.
    model: str | None
    inputs: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"Call(model={self.model!r}, inputs={shapes_of(self.inputs)})"


def parse_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Read ``(model, inputs)``, keywords, or a chain's ``(inputs,)`` with ``model=``."""
    unknown = sorted(str(name) for name in set(kwargs) - {_MODEL, _INPUTS})
    if unknown:
        raise BadRequest(f"infer takes model and inputs, not {', '.join(unknown)}.")
    free = [name for name in (_MODEL, _INPUTS) if name not in kwargs]
    if len(args) > len(free):
        raise BadRequest("infer takes model and inputs, once each.")
    given = {**kwargs, **dict(zip(free, args, strict=False))}
    if _INPUTS not in given:
        raise BadRequest('infer needs inputs: infer.delay("digits", {"image": array}).')
    model, inputs = given.get(_MODEL), given[_INPUTS]
    if isinstance(model, Mapping):
        raise BadRequest(
            "infer takes the model's name first. In a chain, where inputs come first, "
            'use infer.for_model("digits").s().'
        )
    if model is not None and not isinstance(model, str):
        raise BadRequest(f"model must be a name, not {type(model).__name__}.")
    if not isinstance(inputs, Mapping):
        raise BadRequest(f"inputs must be a map of input names, not {type(inputs).__name__}.")
    if not all(isinstance(name, str) for name in inputs):
        raise BadRequest("The names of inputs must be text.")
    return Call(model=model, inputs=inputs)


def rows_of(inputs: Mapping[str, Any]) -> int:
    """Return how many rows a job claims to have: what a claim counts before anything is decoded."""
    for value in inputs.values():
        if isinstance(value, np.ndarray):
            if value.ndim:
                return max(1, int(value.shape[0]))
        elif isinstance(value, list | tuple):
            return max(1, len(value))
    return 1


def shapes_of(inputs: Mapping[str, Any]) -> str:
    """Describe ``inputs`` for logs and events: names, types and shapes, never a value."""
    return "{" + ", ".join(f"{name}: {shape_of(value)}" for name, value in inputs.items()) + "}"


def shape_of(value: object) -> str:
    """Describe one input: its type, and what of its size can be told at once."""
    if isinstance(value, np.ndarray | Reference):
        return f"{_name_of(value.dtype)}{list(value.shape)}"
    if isinstance(value, list | tuple | str | bytes):
        return f"{type(value).__name__}[{len(value)}]"
    return type(value).__name__


@functools.cache
def _name_of(dtype: np.dtype[Any]) -> str:
    # numpy builds the name anew each time, at the price of packing a small job.
    return dtype.name
