"""The README's Flask app, examples/django and examples/fastapi: with a function in place of the
model, and the latter two on a worker.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import django
import numpy as np
import pytest
from django.test import Client as Browser
from fastapi.testclient import TestClient

from producer.contract import errors
from producer.testing import answering
from tests.support.examples import EXAMPLES, imported
from tests.support.ports import kept_port
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import ROOT, running_worker
from workers.demo.digits import held_out

SITE = EXAMPLES / "django" / "digits_site.py"
SERVICE = EXAMPLES / "fastapi" / "app.py"
README = ROOT / "README.md"

PICTURE = [[0.0] * 8] * 8


def seven(inputs: dict[str, Any]) -> dict[str, Any]:
    """Stand for the model, which takes eight by eight pixels."""
    if np.shape(inputs["image"]) != (1, 1, 8, 8):
        raise ValueError("eight by eight pixels")
    return {"scores": np.eye(10, dtype=np.float32)[[7]]}


@pytest.fixture(scope="module")
def browser() -> Browser:
    imported(SITE)
    django.setup()
    return Browser()


@pytest.mark.parametrize(
    ("pixels", "status", "says"),
    [
        (PICTURE, 200, {"digit": 7}),
        ([[0.0]], 422, {"code": "BAD_REQUEST"}),
    ],
)
def test_one_view_of_django_submits_and_one_polls(
    browser: Browser, pixels: list[list[float]], status: int, says: dict[str, Any]
) -> None:
    with answering({"digits": seven}):
        sent = browser.post("/digit", {"pixels": pixels}, content_type="application/json")
        answer = browser.get(sent.json()["answer"])

    assert sent.status_code == 202
    assert answer.status_code == status
    assert answer.json().items() >= says.items()


def test_django_tells_of_a_model_that_nobody_serves_and_of_an_answer_that_is_not_there(
    browser: Browser,
) -> None:
    with answering({"other": seven}):
        sent = browser.post("/digit", {"pixels": PICTURE}, content_type="application/json")
        answer = browser.get("/digit/never-sent")

    assert (sent.status_code, sent.json()["code"]) == (503, "UNKNOWN_MODEL")
    assert (answer.status_code, answer.json()) == (202, {"state": "PENDING"})


@pytest.mark.parametrize(
    ("pixels", "status", "says"),
    [
        (PICTURE, 200, {"digit": 7}),
        ([[0.0]], 422, {"code": "BAD_REQUEST"}),
        ([], 422, {}),
    ],
)
def test_fastapi_awaits_the_answer(
    pixels: list[list[float]], status: int, says: dict[str, Any]
) -> None:
    with answering({"digits": seven}), TestClient(imported(SERVICE).app) as service:
        answer = service.post("/digit", json={"pixels": pixels})

    assert answer.status_code == status
    assert answer.json().items() >= says.items()


def flask_code() -> str:
    """Return the README's app."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    (code,) = (block for block in blocks if "Flask(__name__)" in block)
    return str(code)


def flask_app() -> Any:
    """Return a test client of the README's app."""
    names: dict[str, Any] = {"__name__": "readme"}
    exec(flask_code(), names)
    return names["app"].test_client()


def by_flask(browser: Browser) -> tuple[int, Any]:
    answer = flask_app().post("/digit", json={"image": PICTURE})
    return answer.status_code, answer.json


def by_django(browser: Browser) -> tuple[int, Any]:
    sent = browser.post("/digit", {"pixels": PICTURE}, content_type="application/json")
    answer = browser.get(sent.json()["answer"]) if sent.status_code == 202 else sent
    return answer.status_code, answer.json()


def by_fastapi(browser: Browser) -> tuple[int, Any]:
    with TestClient(imported(SERVICE).app) as service:
        answer = service.post("/digit", json={"pixels": PICTURE})
    return answer.status_code, answer.json()


@pytest.mark.parametrize("ask", [by_flask, by_django, by_fastapi])
@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (ValueError("eight by eight pixels"), 422, "BAD_REQUEST"),
        (KeyError("image"), 500, "MODEL_CODE_FAILED"),
        (errors.EngineFailed("the model is broken"), 500, "ENGINE_FAILED"),
        (errors.Overloaded("Redis is full"), 503, "OVERLOADED"),
        (errors.Expired("too late"), 504, "EXPIRED"),
    ],
)
def test_what_a_job_ended_with_has_the_same_status_everywhere(
    browser: Browser,
    ask: Callable[[Browser], tuple[int, Any]],
    raised: Exception,
    status: int,
    code: str,
) -> None:
    def fail(inputs: dict[str, Any]) -> dict[str, Any]:
        raise raised

    with answering({"digits": fail}):
        answered, said = ask(browser)

    assert (answered, said["code"]) == (status, code)


@pytest.mark.parametrize(
    "sent",
    [
        *({}, {"image": [[0]]}, {"image": [[0], [0, 0]]}, {"image": "x"}),
        *({"image": {"a": 1}}, {"image": None}, [1], "image"),
    ],
)
def test_the_readmes_app_says_what_an_image_is(sent: Any) -> None:
    answer = flask_app().post("/digit", json=sent)

    assert (answer.status_code, answer.json) == (
        422,
        {"error": "image must be 8 rows of 8 numbers"},
    )


def test_the_readmes_app_answers_where_there_is_no_redis() -> None:
    ask = f"\nprint(app.test_client().post('/digit', json={{'image': {PICTURE}}}).status_code)"

    asked = subprocess.run(
        [sys.executable, "-c", flask_code() + ask],
        cwd=ROOT,
        env={**os.environ, "FLEET_BROKER_URL": "redis://127.0.0.1:1/0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (asked.stdout, asked.returncode) == ("503\n", 0), asked.stderr


@pytest.mark.parametrize("ask", [by_flask, by_django, by_fastapi])
def test_a_picture_has_its_answer_everywhere(
    browser: Browser, ask: Callable[[Browser], tuple[int, Any]]
) -> None:
    with answering({"digits": seven}):
        answered, said = ask(browser)

    assert (answered, said["digit"]) == (200, 7)


@pytest.fixture(scope="module")
def fleet_url(server: TestServer) -> Iterator[str]:
    """Return the broker of a fleet with one worker, which serves the digits."""
    # What an earlier worker of this name said would be taken for this one's.
    with server.client() as client:
        client.flushall()
    with running_worker(server, ROOT / "configs", environ={"FLEET_MODELS": "digits"}):
        yield server.url


@pytest.fixture
def site(fleet_url: str) -> Iterator[str]:
    """Run the Django site as its README says; return its address."""
    with kept_port() as port:
        address = f"127.0.0.1:{port}"
        process = subprocess.Popen(
            [sys.executable, str(SITE), "runserver", "--noreload", address],
            env={**os.environ, "FLEET_BROKER_URL": fleet_url, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(
                lambda: _is_up(f"http://{address}/digit/none"), what="the site", timeout_s=30
            )
            yield f"http://{address}"
        finally:
            process.kill()
            process.wait(timeout=10)


def test_the_django_site_answers_from_a_worker(site: str) -> None:
    digits = held_out(ROOT / "configs")

    status, sent = _fetched(f"{site}/digit", {"pixels": digits.images[0][0, 0].tolist()})
    answer = wait_until(
        lambda: found[1] if (found := _fetched(site + sent["answer"]))[0] == 200 else None,
        what="the answer",
    )

    assert (status, answer) == (202, {"digit": int(digits.labels[0])})


def test_the_fastapi_service_answers_from_a_worker(
    fleet_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_BROKER_URL", fleet_url)
    digits = held_out(ROOT / "configs")

    with TestClient(imported(SERVICE).app) as service:
        good = service.post("/digit", json={"pixels": digits.images[0][0, 0].tolist()})
        bad = service.post("/digit", json={"pixels": [[0.0]]})

    assert (good.status_code, good.json()["digit"]) == (200, int(digits.labels[0]))
    assert (bad.status_code, bad.json()["code"]) == (422, "BAD_REQUEST")


def _fetched(url: str, body: object = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=10) as answer:
        return answer.status, json.load(answer)


def _is_up(url: str) -> bool:
    try:
        _fetched(url)
    except OSError:
        return False
    return True
