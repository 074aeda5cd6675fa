"""Answers are packed whatever a sender put into its headers."""

from __future__ import annotations

from typing import Any

import pytest

from producer.contract import wire
from producer.contract.app import make_app
from producer.contract.errors import Expired
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

    meta = wire.loads(answers.pack(answer))

    assert meta["status"] == "SUCCESS"
    assert meta["result"] == {"y": 1}
    assert meta["task_id"] == "j"
    assert meta["fleet"] == {"model": "m"}


def test_an_expired_job_is_revoked_with_its_own_error(answers: Answers) -> None:
    answer = Answer(job=job(), error=Expired("too late"))

    meta = wire.loads(answers.pack(answer)) if answers.pack(answer)[:1] != b"{" else None

    assert answer.state == "REVOKED"
    assert meta is None or meta["result"]["exc_type"] == "Expired"
