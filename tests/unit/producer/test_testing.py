"""``answering``: an app's own tests without workers and without Redis; there is no server here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from celery import Celery, chain, chord, group, states
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult
from kombu.exceptions import OperationalError

from producer.client import Client
from producer.contract.errors import (
    BadRequest,
    Cancelled,
    ConfigError,
    FleetError,
    JobTimeout,
    ModelCodeFailed,
    OutOfMemory,
    UnknownModel,
)
from producer.contract.settings import Settings
from producer.stand_in import stand_in
from producer.tasks import Infer, infer, register
from producer.testing import answering, fixture

#: Nobody listens there: whatever is not answered in place fails.
NOWHERE = "redis://127.0.0.1:1/0"
ROW = np.arange(8, dtype=np.float32).reshape(1, 8)


def double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"y": inputs["x"] * 2}


def load() -> dict[str, Any]:
    return {"x": ROW}


def total(outputs: dict[str, Any]) -> float:
    return float(outputs["y"].sum())


def totals(many: list[dict[str, Any]]) -> list[float]:
    return [total(each) for each in many]


def shout(text: str) -> str:
    return text.upper()


fleet = fixture({"double": double, "other": lambda inputs: "text"})


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_BROKER_URL", NOWHERE)


@pytest.fixture(params=["sent", "eager"])
def app(request: pytest.FixtureRequest) -> Iterator[Celery]:
    """A team's own app, which runs its tasks in place or does not."""
    app = Celery("team", broker=NOWHERE, backend=NOWHERE, set_as_current=False)
    app.conf.task_always_eager = request.param == "eager"
    yield app
    app.close()


@pytest.fixture(params=["of its own", "registered"])
def task(request: pytest.FixtureRequest, app: Celery) -> Infer:
    return infer if request.param == "of its own" else register(app, Settings(broker_url=NOWHERE))


@pytest.fixture
def client() -> Iterator[Client]:
    with Client(Settings(broker_url=NOWHERE)) as client:
        yield client


@pytest.mark.usefixtures("fleet")
def test_a_job_is_answered_in_place_however_it_is_sent(task: Infer) -> None:
    ways = [
        task.delay("double", {"x": ROW}),
        task.apply_async(("double", {"x": ROW}), priority="low", countdown=5, queue="fleet.double"),
        task.for_model("double").delay({"x": ROW}),
        task.s("double", {"x": ROW}).apply_async(),
        task.apply(("double", {"x": ROW})),
    ]

    for result in ways:
        np.testing.assert_array_equal(result.get(timeout=1)["y"], ROW * 2)
        assert result.successful()


@pytest.mark.usefixtures("fleet")
def test_a_result_is_found_by_its_id_until_it_is_forgotten(task: Infer) -> None:
    sent = task.apply_async(("other", {}), task_id="mine")

    found = task.AsyncResult("mine")
    assert found.get(timeout=1) == "text"
    sent.forget()
    assert task.AsyncResult("mine").state == states.PENDING
    with pytest.raises(CeleryTimeoutError, match="No job mine"):
        task.AsyncResult("mine").get(timeout=60)


@pytest.mark.usefixtures("fleet")
def test_a_chain_crosses_between_an_eager_app_and_the_model() -> None:
    app = Celery("team", broker=NOWHERE, backend=NOWHERE, set_as_current=False)
    app.conf.task_always_eager = True
    first, last, body = map(app.task, (load, total, totals))

    for task in (infer, register(app, Settings(broker_url=NOWHERE))):
        model = task.for_model("double")
        assert chain(first.s(), model.s(), last.s()).delay().get(timeout=1) == 56
        assert chain(model.s({"x": ROW}), last.s()).delay().get(timeout=1) == 56
        both = group(model.s({"x": ROW}), model.s({"x": ROW})).delay().get(timeout=1)
        assert [float(each["y"].sum()) for each in both] == [56, 56]
        assert chord([model.s({"x": ROW})] * 2, body.s()).delay().get(timeout=1) == [56, 56]
    app.close()


@pytest.mark.usefixtures("fleet")
def test_a_group_is_answered_for_an_app_that_is_not_eager(task: Infer) -> None:
    many = group(task.s("double", {"x": ROW}), task.s("other", {})).apply_async()

    assert many.get(timeout=1)[1] == "text"


@pytest.mark.usefixtures("fleet")
def test_what_follows_in_a_chain_is_sent_by_an_app_that_is_not_eager() -> None:
    app = Celery("team", broker="memory://", backend="cache+memory://", set_as_current=False)
    task = register(app, Settings(broker_url=NOWHERE))
    after = app.task(shout, name="after")

    chain(task.s("other", {}), after.s()).apply_async()

    with app.connection_for_read() as connection, connection.SimpleQueue("celery") as queue:
        message = queue.get(timeout=1)
    assert (message.headers["task"], message.payload[0]) == ("after", ["text"])
    with pytest.raises(ConfigError, match="task_always_eager"):
        chord([task.s("other", {}), task.s("other", {})], after.s()).apply_async()
    app.close()


@pytest.mark.usefixtures("fleet")
def test_links_and_errbacks_of_an_eager_app_are_called() -> None:
    app = Celery("team", broker=NOWHERE, backend=NOWHERE, set_as_current=False)
    app.conf.task_always_eager = True
    heard: list[Any] = []

    @app.task
    def linked(answer: Any) -> None:
        heard.append(answer)

    @app.task
    def failed(request: Any, error: BaseException, traceback: Any) -> None:
        heard.append(error)

    infer.apply_async(("other", {}), link=linked.s())
    infer.apply_async(("double", {}), link_error=failed.s())

    assert heard[0] == "text"
    assert isinstance(heard[1], ModelCodeFailed)
    app.close()


def test_the_function_sees_what_a_worker_would_see(client: Client) -> None:
    seen: list[dict[str, Any]] = []

    def look(inputs: dict[str, Any]) -> Any:
        seen.append(inputs)
        return {"shape": (1, 2), "mean": np.float32(3)}

    inputs = {"a": ROW.astype(">f4"), "pair": (1, 2), "one": np.int64(7), "raw": b"x", "text": "y"}
    with answering({"look": look}):
        answers = [
            infer.delay("look", inputs).get(timeout=1),
            client.submit("look", inputs).reply(1).outputs,
        ]

    for each in seen:
        assert each["a"].dtype == np.dtype("<f4")
        assert each["a"] is not inputs["a"]
        assert each["pair"] == [1, 2]
        assert isinstance(each["one"], np.ndarray)
        assert (each["raw"], each["text"]) == (b"x", "y")
    for answer in answers:
        assert answer["shape"] == [1, 2]
        assert isinstance(answer["mean"], np.ndarray)
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("raised", "expected", "text"),
    [
        (ValueError("too dark"), BadRequest, "bad refused the job: ValueError: too dark"),
        (OutOfMemory("one row"), OutOfMemory, "one row"),
        (Cancelled("by hand"), Cancelled, "by hand"),
        (KeyError("x"), ModelCodeFailed, "bad raised KeyError: 'x'"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_the_function_raises_is_the_error_that_a_worker_sends(
    task: Infer, client: Client, raised: Exception, expected: type[FleetError], text: str
) -> None:
    def bad(inputs: dict[str, Any]) -> None:
        raise raised

    with answering({"bad": bad}):
        result = task.delay("bad", {})
        job = client.submit("bad", {})

        for ask in (result.get, job.reply):
            with pytest.raises(expected) as caught:
                ask(1)
            assert type(caught.value) is expected
            assert str(caught.value) == text
        wanted = states.REVOKED if expected is Cancelled else states.FAILURE
        assert result.state == wanted


def test_task_eager_propagates_raises_at_the_call(app: Celery) -> None:
    task = register(app, Settings(broker_url=NOWHERE))
    app.conf.task_eager_propagates = True

    with answering({"double": double}), pytest.raises(ModelCodeFailed, match="KeyError"):
        task.delay("double", {})


@pytest.mark.usefixtures("fleet")
def test_what_production_refuses_at_the_call_is_refused_at_the_call(
    task: Infer, client: Client
) -> None:
    for send in (task.delay, client.submit):
        with pytest.raises(UnknownModel, match="double, other"):
            send("unknown", {"x": ROW})
        with pytest.raises(BadRequest, match="type object cannot be sent"):
            send("double", {"x": object()})
        with pytest.raises(BadRequest, match="FLEET_MAX_BODY_BYTES"):
            send("double", {"x": bytes(65 * 1024 * 1024)})
    with pytest.raises(BadRequest, match="priority"):
        task.apply_async(("double", {"x": ROW}), priority="soon")


def test_outputs_that_cannot_be_sent_fail_the_job(task: Infer, client: Client) -> None:
    with answering({"bad": lambda inputs: {"y": object()}}):
        for ask in (task.delay("bad", {}).get, client.submit("bad", {}).reply):
            with pytest.raises(ModelCodeFailed, match="must return arrays or values"):
                ask(1)


@pytest.mark.usefixtures("fleet")
def test_a_client_gets_replies_in_every_way(client: Client) -> None:
    jobs = client.submit_many("double", [{"x": ROW}] * 3)
    results = [infer.delay("double", {"x": ROW}), infer.delay("double", {"x": ROW}).id]

    done = list(client.as_completed([*jobs, *results], timeout_s=1))

    assert len(done) == 5
    for job in done:
        np.testing.assert_array_equal(job.reply(1).outputs["y"], ROW * 2)
    assert (jobs[0].reply().model, jobs[0].reply().attempts) == ("double", 1)
    jobs[0].cancel()


@pytest.mark.usefixtures("fleet")
def test_replies_are_awaited(client: Client) -> None:
    async def ask() -> list[Any]:
        one = await client.infer("other", {}, timeout_s=1)
        two = await client.submit("other", {})
        return [one.outputs, two.outputs]

    assert asyncio.run(ask()) == ["text", "text"]


def test_a_job_id_runs_once(client: Client) -> None:
    ran: list[int] = []

    def count(inputs: dict[str, Any]) -> int:
        ran.append(1)
        return len(ran)

    with answering({"count": count}):
        assert client.submit("count", {}, job_id="one").reply(1).outputs == 1
        with pytest.raises(BadRequest, match="answered before"):
            client.submit("count", {}, job_id="one").reply(1)
        for _ in range(2):
            assert infer.apply_async(("count", {}), task_id="two").get(timeout=1) == 2


def test_nothing_is_left_when_the_block_ends_whatever_it_raised(client: Client) -> None:
    threads = set(threading.enumerate())
    eager = infer.app.conf.task_always_eager

    kept: list[AsyncResult] = []

    def fail() -> None:
        with answering({"double": double}):
            kept.append(infer.delay("double", {"x": ROW}))
            client.submit("double", {"x": ROW}).reply(1)
            raise RuntimeError("their test failed")

    with pytest.raises(RuntimeError, match="their test failed"):
        fail()

    assert stand_in() is None
    # Those of tests before may end meanwhile.
    assert set(threading.enumerate()) <= threads
    assert infer.app.conf.task_always_eager == eager
    np.testing.assert_array_equal(kept[0].get(timeout=1)["y"], ROW * 2)
    with pytest.raises(OperationalError):
        infer.delay("double", {"x": ROW})
    with pytest.raises(OperationalError):
        client.submit("double", {"x": ROW})
    with pytest.raises(ConfigError, match="runs in fleet workers"):
        infer.apply(("double", {"x": ROW}))


def test_the_inner_block_answers_and_then_the_outer_one_again() -> None:
    with answering({"m": lambda inputs: "outer"}):
        with answering({"m": lambda inputs: "inner", "n": lambda inputs: "n"}):
            assert infer.delay("m", {}).get(timeout=1) == "inner"
        assert infer.delay("m", {}).get(timeout=1) == "outer"
        assert infer.app.conf.task_always_eager
        with pytest.raises(UnknownModel):
            infer.delay("n", {})


def test_a_block_without_models_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a model"), answering({}):
        pass


@pytest.mark.usefixtures("fleet")
def test_a_closed_client_takes_nothing_here_either() -> None:
    client = Client(Settings(broker_url=NOWHERE))
    client.close()

    with pytest.raises(RuntimeError, match="closed"):
        client.submit("other", {})


@pytest.mark.usefixtures("fleet")
def test_an_id_that_was_never_sent_has_no_reply(client: Client) -> None:
    with pytest.raises(JobTimeout):
        list(client.as_completed(["nobody"], timeout_s=0.05))


def test_large_arrays_pass_as_between_an_app_and_a_worker() -> None:
    # Whoever stands in writes no files, wherever the app's arrays lie at other times.
    settings = Settings(broker_url=NOWHERE, blob_url="file:///nonexistent/arrays")
    wide = np.arange(100_000, dtype=np.float32).reshape(1, -1)

    with answering({"double": double}), Client(settings) as client:
        (job,) = client.submit_many("double", [{"x": wide}])
        outputs = [
            job.reply(timeout_s=0).outputs,
            infer.delay("double", {"x": wide}).get(timeout=1),
        ]

    for answered in outputs:
        np.testing.assert_array_equal(answered["y"], wide * 2)
        assert answered["y"].flags.writeable


def test_what_ends_a_test_in_a_models_function_ends_the_await(client: Client) -> None:
    async def ask() -> None:
        await client.infer("m", {}, timeout_s=5)

    with answering({"m": lambda inputs: pytest.fail("not to be asked")}):
        for _ in range(2):
            with pytest.raises(pytest.fail.Exception, match="not to be asked"):
                asyncio.run(ask())


def test_an_answer_that_nobody_could_read_is_the_functions_fault() -> None:
    with answering({"m": lambda inputs: {np.int64(1): 1}}), pytest.raises(ModelCodeFailed):
        infer.delay("m", {}).get(timeout=1)
