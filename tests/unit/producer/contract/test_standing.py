"""What is made of workers' words for somebody who waits in vain."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from producer.contract.settings import Settings
from producer.contract.standing import said_by, standing


def worker(*instances: dict[str, Any]) -> dict[str, Any]:
    return {"models": ["a", "b"], "instances": list(instances)}


def instance(state: str, text: str = "", **models: dict[str, Any]) -> dict[str, Any]:
    return {"state": state, "text": text, "models": models}


READY = {"state": "ready"}
BROKEN = {"state": "broken", "text": "no weights."}


def test_what_somebody_has_loaded_is_no_trouble() -> None:
    words = (
        worker(instance("ready", a=READY, b=BROKEN)),
        worker(instance("ready", a=READY, b=READY)),
    )

    assert said_by(words) == ""


def test_a_model_that_nobody_has_loaded_is_named_with_its_error() -> None:
    words = (worker(instance("ready", a=READY, b=BROKEN), instance("loading")),)

    assert said_by(words) == "No running worker has 'b' loaded: no weights. "


def test_an_instance_that_ends_while_it_loads_has_nothing_loaded() -> None:
    words = (worker(instance("broken", "was killed by SIGABRT")),)

    assert said_by(words).count("loaded: was killed by SIGABRT. ") == 2


def test_one_that_still_loads_is_no_trouble() -> None:
    assert said_by((worker(instance("loading")),)) == ""


def test_without_a_server_nothing_is_known_and_soon() -> None:
    settings = dataclasses.replace(Settings(), broker_url="redis://127.0.0.1:1/0")
    began_s = time.monotonic()

    assert standing(settings) == ""
    assert time.monotonic() - began_s < 5
