"""Answers are packed whatever a sender put into its headers."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import numpy as np
import pytest
from celery import signals
from celery.app import trace

from producer.contract import wire
from producer.contract.app import make_app
from producer.contract.errors import BadMessage, Expired
from producer.contract.settings import Settings
from workers.delivery.ledger import Entry
from workers.loop.answers import Answer, Answers, register_infer
from workers.loop.jobs import Job


@pytest.fixture
def answers() -> Answers:
    app = make_app(Settings())
    register_infer(app)
    return Answers(app)


def job(**headers: Any) -> Job:
    entry = Entry(stream="s", entry_id="1-0", fields={})
    return Job(entry=entry, job_id="j", headers={"id": "j", **headers}, properties={})


@pytest.mark.parametrize(
    "headers",
    [{"children": 7}, {"update": 1, "get": 2, "__class__": 3}, {"group": ["x"]}, {"fleet": "mine"}],
)
def test_no_header_keeps_an_answer_from_being_packed(
    answers: Answers, headers: dict[str, Any]
) -> None:
    answer = Answer(job=job(**headers), outputs={"y": 1}, about={"model": "m"})

    meta = wire.loads(answers.pack(answer).body)

    assert meta["status"] == "SUCCESS"
    assert meta["result"] == {"y": 1}
    assert meta["task_id"] == "j"
    assert meta["fleet"] == {"model": "m"}


def test_an_expired_job_is_revoked_with_its_own_error(answers: Answers) -> None:
    answer = Answer(job=job(), error=Expired("too late"))

    meta = wire.loads(answers.pack(answer).body) if answers.pack(answer).body[:1] != b"{" else None

    assert answer.state == "REVOKED"
    assert meta is None or meta["result"]["exc_type"] == "Expired"


def test_a_job_that_came_in_json_is_answered_in_json(answers: Answers) -> None:
    outputs = {
        "y": np.array([[1.5, 2]], np.float16),
        "deep": [{"z": np.float32(0.25)}, (np.arange(2),)],
        "label": "seven",
    }
    came = dataclasses.replace(job(), in_json=True)

    meta = json.loads(answers.pack(Answer(job=came, outputs=outputs, about={"model": "m"})).body)

    assert meta["result"] == {
        "y": [[1.5, 2.0]],
        "deep": [{"z": 0.25}, [[0, 1]]],
        "label": "seven",
    }
    assert meta["fleet"] == {"model": "m"}


def test_an_error_says_its_code_to_an_app_without_our_classes(answers: Answers) -> None:
    packed = answers.pack_failure("j", BadMessage("what to do"), {}).body

    assert json.loads(packed)["result"] == {
        "exc_type": "BadMessage",
        "exc_message": ["BAD_MESSAGE: what to do"],
        "exc_module": "producer.contract.errors",
    }


@pytest.mark.parametrize("in_json", [True, False])
def test_what_follows_a_job_is_sent_in_the_format_the_job_came_in(
    answers: Answers, in_json: bool
) -> None:
    embed = {
        "callbacks": [{"task": "a", "options": {"queue": "q"}}],
        "errbacks": [{"task": "b"}],
        "chain": [{"task": "c", "options": {"serializer": "yaml"}}, {"task": "d", "options": None}],
        "chord": {"task": "e", "options": {}},
    }
    came = dataclasses.replace(job(), in_json=in_json, embed=embed)

    request = answers._request(Answer(job=came, outputs={}))

    expected = {
        "callbacks": [{"task": "a", "options": {"serializer": "json", "queue": "q"}}],
        "errbacks": [{"task": "b", "options": {"serializer": "json"}}],
        "chain": [
            {"task": "c", "options": {"serializer": "yaml"}},
            {"task": "d", "options": {"serializer": "json"}},
        ],
        "chord": {"task": "e", "options": {"serializer": "json"}},
    }
    assert {part: getattr(request, part) for part in embed} == (expected if in_json else embed)


@pytest.mark.parametrize("in_json", [True, False])
def test_what_follows_a_job_is_part_of_its_trace(answers: Answers, in_json: bool) -> None:
    headers = {"traceparent": "p", "headers": {"sentry-trace": "t"}}
    embed = {
        "callbacks": [{"task": "a", "options": {"headers": {"shelf": 7, "traceparent": "own"}}}],
        "chain": [{"task": "c"}],
        "chord": {"task": "e", "options": {"headers": None}},
    }
    came = dataclasses.replace(job(**headers, shelf=1), in_json=in_json, embed=embed)

    request = answers._request(Answer(job=came, outputs={}))

    assert request.callbacks[0]["options"]["headers"] == {
        **headers,
        "shelf": 7,
        "traceparent": "own",
    }
    assert request.chain[0]["options"]["headers"] == headers
    assert request.chord["options"]["headers"] == headers
    assert ("serializer" in request.chord["options"]) is in_json


def test_a_job_goes_through_the_tracer_when_somebody_listens_or_is_around_it(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listen(**_: Any) -> None: ...

    assert not answers.needs_tracer(job())
    signals.task_prerun.connect(listen)
    assert answers.needs_tracer(job())
    signals.task_prerun.disconnect(listen)

    @functools.wraps(trace.build_tracer)
    def watched(*args: Any) -> None: ...

    monkeypatch.setattr(trace, "build_tracer", watched)

    assert answers.needs_tracer(job())
