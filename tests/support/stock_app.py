"""A Celery app without any code of the fleet: tasks and a worker of its own on ``redis://``.

`tests.support.stock` copies this file to where `producer` cannot be imported, and runs it there.
"""

from __future__ import annotations

import importlib.util
import os
import time
from typing import Any

from celery import Celery
from celery.canvas import Signature
from celery.result import AsyncResult

if importlib.util.find_spec("producer") is not None:
    raise SystemExit("This app must not find the code of the fleet.")

URL = os.environ.get("STOCK_URL", "")

app = Celery("stock", broker=URL, backend=URL)
app.conf.broker_connection_retry_on_startup = True


def infer(inputs: Any, model: str = "scripted", **options: Any) -> Signature:
    """Return the signature of a job, as an app writes it that has read a page of the docs."""
    return app.signature("fleet.infer", (model, inputs), queue="fleet.scripted", **options)


def then_infer() -> Signature:
    """Return the signature of a job whose inputs come from the step before it."""
    return app.signature("fleet.infer", kwargs={"model": "scripted"}, queue="fleet.scripted")


@app.task(name="stock.row")
def row(*values: float) -> dict[str, Any]:
    """Return the inputs of a job."""
    return {"x": [list(values)]}


@app.task(name="stock.total")
def total(outputs: Any) -> float:
    """Return the sum of what one job, or each of a chord, answered; note the run."""
    _note("total", str(os.getpid()))
    answers = outputs if isinstance(outputs, list) else [outputs]
    return float(sum(sum(map(sum, answer["y"])) for answer in answers))


@app.task(name="stock.failed")
def failed(job_id: str) -> None:
    """Note the id of a job that failed."""
    _note("failed", job_id)


def _note(task: str, text: str) -> None:
    with app.backend.client.pipeline() as pipe:
        pipe.rpush(f"stock:{task}", text)
        pipe.expire(f"stock:{task}", 60)
        pipe.execute()


def noted(task: str) -> list[str]:
    """Return what runs of a task noted since this was asked last, once there is any."""
    key, deadline_s = f"stock:{task}", time.monotonic() + 20
    while not app.backend.client.llen(key) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    found = [each.decode() for each in app.backend.client.lrange(key, 0, -1)]
    app.backend.client.delete(key)
    return found


def timed(result: AsyncResult) -> list[Any]:
    """Wait for a result; return it and how long that took."""
    began_s = time.monotonic()
    return [result.get(timeout=60), time.monotonic() - began_s]


def outcome(result: AsyncResult, timeout_s: float = 20) -> dict[str, Any]:
    """Wait for a result and return what its app sees of it."""
    try:
        value = result.get(timeout=timeout_s)
    except Exception as error:  # noqa: BLE001 - whichever it is, the test looks at it
        value = f"{type(error).__name__}: {error}"
    facts = result._get_task_meta().get("fleet")
    return {"id": result.id, "value": value, "state": result.state, "fleet": facts}
