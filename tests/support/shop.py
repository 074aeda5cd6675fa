"""Somebody's project beside the fleet: a Celery app on stock ``redis://`` with `infer` on it, a
worker of its own, and a package of its own called ``workers``.

`tests.support.project` copies this file into a folder and runs it in an environment of its own,
which holds Celery and the app side as it is installed: nothing here may need anything else.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import json
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
from celery import Celery, Task, chain, chord, group, signals
from celery.result import AsyncResult

from producer.client import Client
from producer.contract.errors import FleetError
from producer.tasks import register

URL = os.environ["FLEET_BROKER_URL"]
MODEL = "scripted"
#: What the scripted engine does when the first number of its row is this one.
RAISE = 15

app = Celery("shop", broker=URL, backend=URL)
app.conf.broker_connection_retry_on_startup = True
infer = register(app)


@app.task(name="shop.row")
def row(*values: float) -> dict[str, Any]:
    """Return the inputs of a job."""
    return {"x": [list(values)]}


@app.task(name="shop.answer")
def answer(value: float) -> dict[str, Any]:
    """Return what a job could, or fail as one could."""
    if value == RAISE:
        raise ValueError("told to")
    return {"y": [[0, 2 * value, 0]]}


@app.task(name="shop.total", bind=True)
def total(task: Task, outputs: Any) -> float:
    """Return the sum of what one job, or each of a chord, answered."""
    note("total", pid=os.getpid(), worker=task.request.hostname)
    answers = outputs if isinstance(outputs, list) else [outputs]
    return float(sum(np.sum(each["y"]) for each in answers))


@app.task(name="shop.headers", bind=True)
def headers(task: Task, outputs: Any) -> Any:
    """Return the headers that its own code sees."""
    return task.request.headers


@app.task(name="shop.failed", bind=True)
def failed(task: Task, job_id: str) -> None:
    """Note the id of a job that failed."""
    note("failed", job=job_id, worker=task.request.hostname)


def note(task: str, **what: Any) -> None:
    """Keep what a run of a task says of itself."""
    with app.backend.client.pipeline() as pipe:
        pipe.rpush(f"shop:{task}", json.dumps(what))
        pipe.expire(f"shop:{task}", 600)
        pipe.execute()


def noted(task: str, *, least: int = 1) -> list[dict[str, Any]]:
    """Return what runs of a task in this trial said, once there are so many and none waits."""
    client, key = app.backend.client, f"shop:{task}"
    deadline_s = time.monotonic() + 10
    while client.llen(key) < least or client.llen("celery"):
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
    return [json.loads(each) for each in client.lrange(key, 0, -1)]


def inputs(argument: float = 0, do: float = 0) -> dict[str, Any]:
    """Return the inputs of a job that is answered with twice ``argument``."""
    return {"x": np.array([[do, argument, 0]], np.float32)}


def jobs(count: int) -> list[Any]:
    return [infer.s(MODEL, inputs(1)) for _ in range(count)]


def outcome(result: AsyncResult) -> dict[str, Any]:
    """Wait for a result and return what its app sees of it."""
    try:
        value: Any = result.get(timeout=30)
    except FleetError as error:
        value = error.code
    except Exception as error:  # noqa: BLE001 - whichever it is, the test looks at it
        value = f"{type(error).__name__}: {error}"
    # What the body of a chord came to may be known before it is stored.
    deadline_s = time.monotonic() + 10
    while not result.ready() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return {"value": value, "state": result.state}


# -- What is tried; each returns what the test judges.


def surroundings() -> Any:
    """Say what is installed, and whose `workers` this is."""
    return {
        "celery": importlib.metadata.version("celery"),
        "kombu": importlib.metadata.version("kombu"),
        "redis": importlib.metadata.version("redis"),
        "workers": importlib.import_module("workers.mail").SENDER,
        "runtimes": [
            name for name in ("onnxruntime", "tensorrt") if importlib.util.find_spec(name)
        ],
    }


def round_trip() -> Any:
    return infer.delay(MODEL, inputs(2)).get(timeout=30)["y"]


def client_round_trip() -> Any:
    async def ask() -> Any:
        return (await fleet.infer(MODEL, inputs(3), timeout_s=30)).outputs["y"]

    with Client() as fleet:
        many = fleet.submit_many(MODEL, (inputs(number) for number in range(50)))
        replies = [job.reply(30).outputs["y"][0, 1] for job in many]
        return {"many": sum(replies), "awaited": asyncio.run(ask())}


def watched_client() -> Any:
    """Send a Client's jobs while somebody listens to Celery's signals."""
    seen: list[dict[str, Any]] = []

    def watch(sender: str, headers: dict[str, Any], **_: Any) -> None:
        seen.append({"task": sender, "id": headers["id"], "shadow": headers["shadow"]})

    signals.before_task_publish.connect(watch)
    try:
        with Client() as fleet:
            sent = [fleet.submit(MODEL, inputs(2)), *fleet.submit_many(MODEL, [inputs(3)])]
            answers = [job.reply(30).outputs["y"] for job in sent]
    finally:
        signals.before_task_publish.disconnect(watch)
    return {"answers": answers, "ids": [job.id for job in sent], "seen": seen}


def errors() -> Any:
    return [
        outcome(infer.delay(MODEL, {"wrong": inputs()["x"]})),
        outcome(infer.delay(MODEL, inputs(do=RAISE))),
        outcome(infer.apply_async((MODEL, inputs()), expires=1e-6)),
    ]


def chain_across() -> Any:
    steps = chain(row.s(0, 2, 0), infer.for_model(MODEL).s(), total.s())
    return {"value": steps.apply_async().get(timeout=30), "runs": noted("total")}


def chain_back() -> Any:
    steps = chain(infer.s(MODEL, inputs(2)), total.s(), row.s(0, 1), infer.for_model(MODEL).s())
    return steps.apply_async().get(timeout=30)["y"]


def group_of_both() -> Any:
    both = group(infer.s(MODEL, inputs(0.5)), answer.s(3), infer.s(MODEL, inputs(2)))
    return [each["y"][0][1] for each in both.apply_async().get(timeout=30)]


def chord_of(count: int) -> Any:
    began_s = time.monotonic()
    value = chord(jobs(count))(total.s()).get(timeout=60)
    return {"value": value, "took_s": time.monotonic() - began_s, "runs": noted("total")}


def chord_of_both() -> Any:
    return chord([*jobs(2), answer.s(3)])(total.s()).get(timeout=30)


def chord_that_fails() -> Any:
    return outcome(chord([*jobs(1), infer.s(MODEL, inputs(do=RAISE))])(total.s()))


def link() -> Any:
    job = infer.apply_async((MODEL, inputs(2)), link=total.s(), link_error=failed.s())
    value = job.get(timeout=30)["y"]
    return {"value": value, "total": noted("total"), "failed": noted("failed", least=0)}


def link_error() -> Any:
    job = infer.apply_async((MODEL, inputs(do=RAISE)), link=total.s(), link_error=failed.s())
    told = outcome(job)
    return {"job": job.id, **told, "failed": noted("failed"), "total": noted("total", least=0)}


def revoked() -> Any:
    by_app, by_result = (infer.apply_async((MODEL, inputs()), countdown=2) for _ in range(2))
    app.control.revoke(by_app.id)
    by_result.revoke()
    return [outcome(by_app), outcome(by_result)]


def traced() -> Any:
    """Send a job with headers of a trace, and return what the task after it sees of them."""
    trace = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "shelf": "7"}
    job = infer.apply_async((MODEL, inputs()), headers=trace, link=headers.s())
    job.get(timeout=30)
    return job.children[0].get(timeout=30)


def stored(result: AsyncResult, **names: str | None) -> dict[str, Any]:
    """Return what is stored for ``result``, once it is final; ids by what they are of."""
    outcome(result)
    known = {result.id: "self", **{task: name for name, task in names.items() if task}}
    backend = infer.backend

    def named(value: Any) -> Any:
        if isinstance(value, str):
            return known.get(value, value)
        if isinstance(value, list | tuple):
            return [named(each) for each in value]
        return value

    meta = backend.decode(backend.get(backend.get_key_for_task(result.id)))
    return {name: named(value) for name, value in meta.items()}


def stored_results() -> Any:
    """Return what is stored for a task of ours and for a job, in the same places."""
    found: dict[str, list[Any]] = {}
    kinds = (
        (answer.s(1), answer.s(RAISE)),
        # Lists: the message of a task before a job carries what the job will get, in JSON.
        (infer.s(MODEL, row(0, 1, 0)), infer.s(MODEL, row(RAISE, 0, 0))),
    )
    for good, bad in kinds:
        alone, wrong, late = good.delay(), bad.delay(), good.clone().set(expires=1e-6).delay()
        members = group(good.clone(), good.clone()).apply_async()
        last = chain(row.si(0, 1, 0), good.clone().set(immutable=True), total.s()).apply_async()
        outcome(last)
        middle = last.parent
        metas = {
            "answered": stored(alone),
            "failed": stored(wrong),
            "expired": stored(late),
            "in a group": stored(members[0], group=members.id),
            "in a chain": stored(middle, after=last.id, before=middle.parent.id),
        }
        for place, meta in metas.items():
            found.setdefault(place, []).append(meta)
    return found


TRIALS: dict[str, Callable[[], Any]] = {
    "surroundings": surroundings,
    "round trip": round_trip,
    "client": client_round_trip,
    "watched client": watched_client,
    "errors": errors,
    "chain": chain_across,
    "chain back": chain_back,
    "group": group_of_both,
    "chord of 8": lambda: chord_of(8),
    "chord of 1,000": lambda: chord_of(1000),
    "chord of both": chord_of_both,
    "chord that fails": chord_that_fails,
    "link": link,
    "link_error": link_error,
    "revoked": revoked,
    "traced": traced,
    "stored": stored_results,
}


def main() -> None:
    """Try everything; print what came of it as JSON."""
    said: dict[str, Any] = {}
    for name, trial in TRIALS.items():
        app.backend.client.delete("shop:total", "shop:failed")
        try:
            said[name] = trial()
        except Exception:  # noqa: BLE001 - one trial that fails says nothing of the others
            said[name] = traceback.format_exc()[-2000:]
    print(json.dumps(said, default=lambda value: value.tolist()))
