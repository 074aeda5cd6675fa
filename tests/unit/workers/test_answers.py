"""Answers are packed whatever a sender put into its headers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from producer.contract import wire
from producer.contract.app import make_app
from producer.contract.errors import BadMessage, Expired
from producer.contract.settings import Settings
from workers.answers import Answer, Answers, register_infer
from workers.delivery.ledger import Entry
from workers.jobs import Job


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
