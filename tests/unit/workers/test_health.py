"""What a health check makes of a worker's own words."""

from __future__ import annotations

from typing import Any

import pytest

from workers.health import NotHealthy, verdict

NODE = "celery@host"


def said(*states: str, text: str = "") -> dict[str, Any]:
    instances = [{"slot": slot, "state": state, "text": text} for slot, state in enumerate(states)]
    return {"pool": {"instances": instances}}


def test_one_instance_that_is_ready_is_enough() -> None:
    assert verdict(NODE, said("loading", "ready")) == f"{NODE}: 1 of 2 instances ready."


def test_a_slot_that_autoscaling_gave_up_does_not_count() -> None:
    assert verdict(NODE, said("ready", "stopped")) == f"{NODE}: 1 of 1 instances ready."


@pytest.mark.parametrize("state", ["starting", "loading", "draining", "stopped"])
def test_without_an_instance_that_is_ready_a_worker_is_not_healthy(state: str) -> None:
    with pytest.raises(NotHealthy, match=f"No instance of {NODE} is ready"):
        verdict(NODE, said(state))


def test_what_keeps_the_instances_from_being_ready_is_said() -> None:
    with pytest.raises(NotHealthy) as caught:
        verdict(NODE, said("broken", "broken", text="digits.onnx: no such file"))

    assert "instance 1 is broken: digits.onnx: no such file" in str(caught.value)


def test_a_worker_that_says_nothing_is_not_healthy() -> None:
    with pytest.raises(NotHealthy, match=f"{NODE} does not answer within 6 s"):
        verdict(NODE, None)
