"""What a person says about the values that a model is tried with: --probe-shape, --probe-max and
--probe-min.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from producer.contract.errors import ConfigError
from workers.tables import nearest
from workers.tensor_tables import ProbeHint

Hints: TypeAlias = Mapping[str, ProbeHint]

#: The largest integer that is tried where 0 and 1 say too little: a byte's.
WIDER: Final = 255


def read_hints(shapes: Iterable[str], largest: Iterable[str], least: Iterable[str] = ()) -> Hints:
    """Return the hints for each input, such as ``state=2,1,128`` and ``rate=16000``."""
    hints: dict[str, ProbeHint] = {}
    for text in shapes:
        name, sizes = _split(text, "--probe-shape", "NAME=1,576")
        hint = hints.get(name, ProbeHint())
        hints[name] = dataclasses.replace(hint, shape=_shape(text, sizes))
    for text in largest:
        name, number = _split(text, "--probe-max", "NAME=16000")
        hint = hints.get(name, ProbeHint())
        hints[name] = dataclasses.replace(hint, largest=_largest(text, number))
    for text in least:
        name, number = _split(text, "--probe-min", "NAME=-1")
        hint = hints.get(name, ProbeHint())
        hints[name] = dataclasses.replace(hint, least=_least(text, number, hint.largest))
    return hints


def widened(hints: Hints, names: Iterable[str]) -> Hints:
    """Return the hints by which the inputs of these names are tried with larger integers."""
    wider = {
        name: dataclasses.replace(hints.get(name, ProbeHint()), largest=WIDER) for name in names
    }
    return {**hints, **wider}


def check(hints: Hints, inputs: Mapping[str, object]) -> None:
    """Raise ConfigError for a hint about an input that the model does not have."""
    for name in hints:
        if name not in inputs:
            raise ConfigError(f"the model has no input {name!r}.{nearest(name, inputs)}")


def to_json(hints: Hints) -> str:
    """Return the hints as text for the process of the trial."""
    return json.dumps({name: dataclasses.asdict(hint) for name, hint in hints.items()})


def from_json(text: str) -> Hints:
    """Return the hints that `to_json` wrote."""
    return {
        name: ProbeHint(
            shape=None if hint["shape"] is None else tuple(hint["shape"]),
            largest=hint["largest"],
            least=hint["least"],
        )
        for name, hint in json.loads(text).items()
    }


def _split(text: str, option: str, like: str) -> tuple[str, str]:
    # Names of tensors may hold a "=" themselves; sizes and numbers never do.
    name, equals, value = text.rpartition("=")
    if not equals or not name:
        raise ConfigError(f"{option} must be like {like}, not {text!r}.")
    return name, value


def _shape(text: str, sizes: str) -> tuple[int, ...]:
    words = [word.strip() for word in sizes.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"--probe-shape must list sizes, as NAME=1,576, not {text!r}.")
    return tuple(int(word) for word in words)


def _largest(text: str, number: str) -> float:
    value = _number(number)
    if not value >= 0:
        raise ConfigError(f"--probe-max must be a number of at least 0, not {text!r}.")
    return value


def _least(text: str, number: str, largest: float) -> float:
    value = _number(number)
    if not value < largest:
        raise ConfigError(
            f"--probe-min must be a number below --probe-max, which is {largest:g}, not {text!r}."
        )
    return value


def _number(text: str) -> float:
    """Return a number that is finite, else NaN."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
