"""What the arguments of a buried job look like: names, dtypes and shapes; short values only where
somebody asks for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from producer.contract.blobs import Named
from producer.contract.body import read_body
from producer.contract.call import parse_call, shape_of
from producer.contract.errors import FleetError
from producer.contract.message import from_fields
from producer.contract.names import Field

#: A larger entry is not fetched for a look at it.
MOST_BYTES: Final = 16 * 1024 * 1024

#: What is short: characters of JSON; an array of more elements is not even tried.
_LONGEST: Final = 120
_DEEPEST: Final = 8


def look(fields: Mapping[bytes, bytes], *, values: bool) -> dict[str, Any]:
    """Return what an entry's arguments look like, fit for JSON; why not, where nobody can read it.

    ``values``: those that are short, too, as JSON; None for one that is not.
    """
    try:
        named = Named.read(fields.get(Field.BLOBS.encode(), b""))
        args, kwargs, _ = read_body(from_fields(fields), dict.fromkeys(named.ids))
        inputs = parse_call(args, kwargs).inputs
    except FleetError as error:
        return {"inputs": None, "unreadable": str(error)}
    seen: dict[str, Any] = {"inputs": {name: _shape_of(value) for name, value in inputs.items()}}
    if values:
        seen["values"] = {name: _short(value) for name, value in inputs.items()}
    return seen


def _shape_of(value: object) -> str:
    """Return an input's type and shape; a list that JSON has in place of an array has one too."""
    if not isinstance(value, list | tuple):
        return shape_of(value)
    sizes: list[str] = []
    inner: object = value
    while isinstance(inner, list | tuple) and len(sizes) < _DEEPEST:
        sizes.append(str(len(inner)))
        inner = inner[0] if inner else None
    return f"list[{', '.join(sizes)}] of {type(inner).__name__}"


def _short(value: object) -> str | None:
    """Return a short value as JSON, None for one that is long or that JSON does not have."""
    if isinstance(value, np.ndarray):
        if value.size > _LONGEST:
            return None
        value = value.tolist()
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None
    return text if len(text) <= _LONGEST else None
