"""Who watches Celery is noticed, and a trace goes on to what is called next."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from celery import Celery, Task
from celery.app import trace
from kombu import Producer

from producer.contract.watching import is_wrapped, trace_headers

OF_CELERY = [
    (Task.apply_async, "celery.app.task"),
    (Celery.send_task, "celery.app.base"),
    (Producer.publish, "kombu.messaging"),
    (trace.build_tracer, "celery.app.trace"),
]


@pytest.mark.parametrize(("function", "home"), OF_CELERY, ids=[home for _, home in OF_CELERY])
def test_a_function_of_celery_is_its_own_until_somebody_wraps_it(function: Any, home: str) -> None:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    assert not is_wrapped(function, home)
    assert is_wrapped(wrapper, home)
    assert is_wrapped(functools.partial(function), home)


def test_what_names_a_trace_goes_on_and_nothing_else() -> None:
    sentry = {"sentry-trace": "t", "baggage": "b"}
    trace = {"traceparent": "p", "tracestate": "s", "x-datadog-trace-id": "7", **sentry}
    inner = {**sentry, "sentry-task-enqueued-time": 1.5, "shelf": 7}
    headers = {"id": "j", "task": "fleet.infer", "shelf": 7, **trace, "headers": inner}

    assert trace_headers(headers) == {**trace, "headers": sentry}


@pytest.mark.parametrize("headers", [{}, {"id": "j"}, {"headers": 7}, {"headers": {"id": "j"}}])
def test_where_there_is_no_trace_nothing_goes_on(headers: dict[str, Any]) -> None:
    assert trace_headers(headers) == {}
