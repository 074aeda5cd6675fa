"""What comes in over kombu's own lists and channels: anybody may have put it there, and what is no
message has to be known before kombu trips over it.
"""

from __future__ import annotations

import base64
from typing import Any


def fault_of(message: Any) -> str | None:
    """Return why a decoded ``message`` is none that kombu can take in; None when it is one."""
    if not isinstance(message, dict):
        return "it is not a map"
    properties = message.get("properties")
    if not isinstance(properties, dict):
        return "it has no map of properties"
    if not isinstance(properties.get("delivery_tag"), str | int):
        return "it has no delivery tag"
    for name, part in (
        ("headers", message.get("headers")),
        ("delivery info", properties.get("delivery_info")),
    ):
        if not isinstance(part, dict | None):
            return f"its {name} are not a map"
    for name in ("content-type", "content-encoding"):
        if not isinstance(message.get(name), str | None):
            return f"its {name} is not text"
    return _fault_of_body(message.get("body"), properties.get("body_encoding"))


def _fault_of_body(body: object, encoding: object) -> str | None:
    if not isinstance(body, str | bytes | None):
        return "its body is not text"
    if not encoding or (isinstance(encoding, str) and encoding.lower() == "utf-8"):
        return None
    if encoding != "base64":
        return f"its body encoding is not one of kombu's: {encoding!r:.40}"
    try:
        base64.b64decode(body or "")
    except ValueError:
        return "its body is not base64"
    return None
