"""Those who watch Celery: Sentry and its like put their own code around Celery's functions, where
others listen to its signals.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any, Final

from celery import Celery, Task, signals
from kombu import Producer

#: The headers that name the trace a call belongs to: those of W3C, Sentry, and Zipkin.
_TRACE_HEADERS: Final = frozenset({"traceparent", "tracestate", "baggage", "sentry-trace", "b3"})

#: How those of Datadog and Zipkin begin that are several.
_TRACE_PREFIXES: Final = ("x-datadog-", "x-b3-")

#: Where Sentry looks for its headers: Celery once lost those that were not in a map of this name.
_INNER: Final = "headers"


def is_watched() -> bool:
    """Return whether somebody would see a job that is sent through Celery."""
    return bool(
        signals.before_task_publish.receivers
        or signals.after_task_publish.receivers
        or signals.task_sent.receivers
        or is_wrapped(Task.apply_async, "celery.app.task")
        or is_wrapped(Celery.send_task, "celery.app.base")
        or is_wrapped(Producer.publish, "kombu.messaging")
    )


def is_wrapped(function: Any, home: str) -> bool:
    """Return whether ``function`` is not any more the one that the module ``home`` defines.

    A wrapper takes over every name of what it is around, and not its globals.
    """
    return type(function) is not FunctionType or function.__globals__.get("__name__") != home


def trace_headers(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``headers`` that name the trace, for what is called next."""
    found = {name: value for name, value in headers.items() if _is_of_trace(name)}
    inner = headers.get(_INNER)
    if isinstance(inner, Mapping) and (kept := trace_headers(inner)):
        found[_INNER] = kept
    return found


def _is_of_trace(name: object) -> bool:
    return isinstance(name, str) and (name in _TRACE_HEADERS or name.startswith(_TRACE_PREFIXES))
