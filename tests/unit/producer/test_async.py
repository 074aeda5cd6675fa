"""Client in event loops: one reader for all clients, and nothing left of who gave up."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import gc
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kombu.exceptions import OperationalError

from producer.client import Client, Job
from producer.contract import errors
from producer.contract.names import Keys, Priority
from producer.contract.settings import Settings
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.unit.producer.conftest import Worker

pytestmark = pytest.mark.redis

KEYS = Keys()
STREAM = KEYS.stream("fleet.digits", Priority.NORMAL)


@pytest.fixture
def fleet(settings: Settings) -> Iterator[Client]:
    with Client(settings) as fleet:
        yield fleet


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("fleet-")}


def wait_for_silence(client: Any) -> None:
    """Wait until the threads of tests before have ended: clients of one server share them."""
    gc.collect()
    wait_until(lambda: not client.pubsub_channels(), what="nobody who listens")


async def until(holds: Callable[[], Any], *, what: str) -> None:
    await asyncio.to_thread(wait_until, holds, what=what)


async def number(answer: Awaitable[Any]) -> int:
    return int((await answer).outputs["i"])


def test_a_client_for_each_request_costs_no_thread_and_no_connection(
    settings: Settings, worker: Worker, client: Any
) -> None:
    wait_for_silence(client)
    others = threads()
    before = len(client.client_list())
    seen: list[tuple[int, int, int]] = []

    async def request(i: int) -> int:
        answer = await number(Client(settings).infer("digits", {"i": i}, timeout_s=20))
        new = len(threads() - others)
        seen.append((new, len(client.client_list()), len(client.pubsub_channels())))
        return answer

    async def serve() -> list[int]:
        return await asyncio.gather(*(request(i) for i in range(100)))

    assert asyncio.run(serve()) == list(range(100))
    # One thread receives, one sends; a connection to hear, one to read, one or two to send.
    assert max(count for count, _, _ in seen) == 2
    assert max(count for _, count, _ in seen) - before <= 4
    assert max(count for _, _, count in seen) == 1

    def gone() -> bool:
        gc.collect()
        return threads() <= others and len(client.client_list()) <= before

    wait_until(gone, what="nothing left of them")


def test_a_client_that_is_closed_closes_no_other(
    settings: Settings, fleet: Client, worker: Worker
) -> None:
    other = Client(settings)
    theirs = other.submit("other", {"i": 1})

    other.close()

    with pytest.raises(errors.JobTimeout, match="closed"):
        theirs.reply(5)
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(other.infer("digits", {"i": 1}))
    assert asyncio.run(number(fleet.infer("digits", {"i": 2}, timeout_s=5))) == 2


def test_an_id_that_two_clients_send_is_one_job_for_both(
    settings: Settings, fleet: Client, worker: Worker
) -> None:
    other = Client(settings)
    first = other.submit("other", {"i": 1}, job_id="same")
    second = fleet.submit("other", {"i": 1}, job_id="same")

    other.close()

    assert first is second
    assert not second.done


def test_jobs_may_be_awaited_in_each_way_asyncio_has(fleet: Client, worker: Worker) -> None:
    async def ask() -> None:
        jobs = await asyncio.to_thread(
            fleet.submit_many, "digits", [{"i": number} for number in range(20)]
        )
        assert [await number(job) for job in jobs[:5]] == list(range(5))
        assert await asyncio.wait_for(number(jobs[5]), 5) == 5
        assert await number(asyncio.ensure_future(jobs[6])) == 6
        done = [await number(each) for each in asyncio.as_completed(jobs, timeout=5)]
        assert sorted(done) == list(range(20))
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            tasks = [group.create_task(number(job)) for job in jobs]
        assert [task.result() for task in tasks] == list(range(20))

    asyncio.run(ask())


def test_a_bad_input_fails_alone_among_those_sent_with_it(fleet: Client, worker: Worker) -> None:
    async def ask() -> list[Any]:
        inputs: list[Any] = [{"i": 1}, {"i": object()}, {"i": 3}, "no mapping"]
        calls = (fleet.infer("digits", each, timeout_s=5) for each in inputs)
        return await asyncio.gather(
            *calls, fleet.infer("no name", {"i": 5}), return_exceptions=True
        )

    one, bad, three, worse, nameless = asyncio.run(ask())

    assert (one.outputs["i"], three.outputs["i"]) == (1, 3)
    assert all(isinstance(each, errors.BadRequest) for each in (bad, worse, nameless))


def test_the_threads_of_the_loop_are_left_to_others(fleet: Client, worker: Worker) -> None:
    free = threading.Event()

    async def ask() -> int:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
        busy = asyncio.create_task(asyncio.to_thread(free.wait))
        try:
            return await number(fleet.infer("digits", {"i": 1}, timeout_s=5))
        finally:
            free.set()
            await busy

    assert asyncio.run(ask()) == 1


def test_large_and_many_jobs_go_out_in_parts(fleet: Client, worker: Worker, client: Any) -> None:
    large = np.ones((5, 1024, 256), np.float32)

    async def ask() -> None:
        await asyncio.gather(
            *(fleet.infer("digits", {"i": 1, "x": large}, timeout_s=20) for _ in range(3)),
            *(fleet.infer("digits", {"i": 1}, timeout_s=20) for _ in range(300)),
        )

    asyncio.run(ask())

    assert client.xlen(STREAM) == 303


@pytest.mark.parametrize("numbers", [1, 100_000], ids=["small", "large"])
def test_a_wait_that_is_over_cancels_its_job_and_deletes_its_result(
    fleet: Client, worker: Worker, client: Any, numbers: int
) -> None:
    held = threading.Event()
    worker.answer = lambda call: held.wait(10) and {"y": np.ones((1, numbers))}

    async def ask() -> None:
        with pytest.raises(errors.JobTimeout, match=r"digits.*0\.3 s.*cancelled"):
            await fleet.infer("digits", {"i": 1}, timeout_s=0.3)
        await until(lambda: client.keys(KEYS.cancelled("*")), what="the mark")
        await until(lambda: worker.messages, what="the job to be read")
        job_id = str(worker.messages[0].headers["id"])
        held.set()
        await until(lambda: client.exists(KEYS.fence(job_id)), what="the fence")
        assert not client.exists(KEYS.result(job_id))
        await until(lambda: not client.keys(KEYS.blob("*")), what="no array left")

    asyncio.run(ask())

    # Jobs of tests before, which nobody answered, may be known still: clients of one server share.
    assert str(worker.messages[0].headers["id"]) not in fleet._room.inbox._disowned._added_s
    assert not fleet._room.inbox._waiting()


@pytest.mark.parametrize("how", ["cancel", "wait_for", "timeout", "group"])
def test_a_task_that_is_cancelled_cancels_its_job(fleet: Client, client: Any, how: str) -> None:
    async def fail() -> None:
        await until(lambda: client.xlen(STREAM), what="the job in its queue")
        raise ValueError

    async def give_up() -> None:
        call = fleet.infer("digits", {"i": 1})
        match how:
            case "cancel":
                task = asyncio.create_task(call)
                await until(lambda: client.xlen(STREAM), what="the job in its queue")
                task.cancel()
                await task
            case "wait_for":
                await asyncio.wait_for(call, 1)
            case "timeout":
                async with asyncio.timeout(1):
                    await call
            case "group":
                async with asyncio.TaskGroup() as group:
                    group.create_task(call)
                    group.create_task(fail())

    with pytest.raises((asyncio.CancelledError, TimeoutError, ExceptionGroup)):
        asyncio.run(give_up())

    wait_until(lambda: client.keys(KEYS.cancelled("*")), what="the mark")
    assert client.xlen(STREAM) == 1
    # Though the traceback may hold the job yet.
    assert not fleet._room.inbox._waiting()


def test_a_job_in_hand_is_not_cancelled_with_the_task_that_awaits_it(
    fleet: Client, client: Any
) -> None:
    job = fleet.submit("digits", {"i": 1})

    async def give_up() -> None:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(job, 0.01)

    asyncio.run(give_up())

    wait_until(lambda: _idle(fleet), what="whatever was to be sent")
    assert not client.keys(KEYS.cancelled("*"))
    assert not job._on_done


def test_a_redis_that_does_not_answer_is_waited_for_no_longer_than_said(
    settings: Settings, fleet: Client, server: TestServer, client: Any
) -> None:
    asyncio.run(_one_that_times_out(fleet))
    sent = client.xlen(STREAM)

    async def ask() -> list[Any]:
        first = asyncio.create_task(fleet.infer("digits", {"i": 1}, timeout_s=0.5))
        await asyncio.sleep(0.2)
        # The thread hangs in the first: these wait behind it.
        others = (fleet.infer("digits", {"i": 2}, timeout_s=0.3) for _ in range(200))
        return await asyncio.gather(first, *others, return_exceptions=True)

    server.freeze()
    try:
        began_s = time.monotonic()
        ended = asyncio.run(ask())
        took_s = time.monotonic() - began_s
    finally:
        server.thaw()

    assert {type(each) for each in ended} == {errors.JobTimeout}
    # Redis is given 5 s for an answer.
    assert took_s < 3
    # The first may have reached Redis before it froze, or in it; those behind it did not.
    wait_until(lambda: _idle(fleet), what="the thread to have done all")
    assert client.xlen(STREAM) - sent <= 1


async def _one_that_times_out(fleet: Client) -> None:
    with contextlib.suppress(errors.JobTimeout):
        await fleet.infer("digits", {"i": 0}, timeout_s=0.2)


def _idle(fleet: Client) -> bool:
    """Return whether everything put into the outbox before now was taken out."""
    with pytest.raises(errors.BadRequest):
        asyncio.run(fleet.infer("no name", {}, timeout_s=20))
    return True


def test_a_broker_that_is_away_is_told_to_each(server: TestServer, client: Any) -> None:
    async def ask(fleet: Client) -> list[Any]:
        calls = (fleet.infer("digits", {"i": 1}) for _ in range(50))
        return await asyncio.gather(*calls, return_exceptions=True)

    with Client(Settings(broker_url="redis://127.0.0.1:1/0")) as fleet:
        assert {type(each) for each in asyncio.run(ask(fleet))} == {OperationalError}


def test_two_hundred_do_not_wait_one_after_the_other_for_a_redis_that_does_not_answer(
    settings: Settings, server: TestServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.publisher._ANSWER_S", 0.5)

    async def ask(fleet: Client) -> list[Any]:
        calls = (fleet.infer("digits", {"i": 1}) for _ in range(200))
        return await asyncio.gather(*calls, return_exceptions=True)

    with Client(dataclasses.replace(settings, result_ttl_s=3601)) as fleet:
        server.freeze()
        try:
            began_s = time.monotonic()
            ended = asyncio.run(ask(fleet))
            took_s = time.monotonic() - began_s
        finally:
            server.thaw()

    assert {type(each) for each in ended} == {OperationalError}
    # Two answers: the first of them may have gone out alone.
    assert took_s < 3


def test_a_loop_that_is_closed_while_a_job_is_awaited_hinders_nobody(
    fleet: Client, worker: Worker, client: Any
) -> None:
    held = threading.Event()
    worker.answer = lambda call: held.wait(10) and dict(call.inputs)
    job = fleet.submit("digits", {"i": 1})
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(number(job)), loop.create_task(number(fleet.infer("digits", {})))]
    loop.run_until_complete(asyncio.sleep(0.1))

    for task in tasks:
        # Else asyncio complains, and rightly, of a task that was never ended.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    held.set()

    assert job.reply(5).outputs["i"] == 1
    assert asyncio.run(number(fleet.infer("digits", {"i": 2}, timeout_s=5))) == 2
    del tasks, task, loop
    gc.collect()
    assert not job._on_done


def test_loops_in_several_threads_share_a_client(
    fleet: Client, worker: Worker, client: Any
) -> None:
    wait_for_silence(client)
    others = threads()

    async def ask(first: int) -> list[int]:
        numbers = range(first, first + 25)
        calls = (number(fleet.infer("digits", {"i": i}, timeout_s=10)) for i in numbers)
        return await asyncio.gather(*calls)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda first: asyncio.run(ask(first)), range(0, 100, 25)))

    assert [each for part in found for each in part] == list(range(100))
    assert sorted(each.name for each in threads() - others) == ["fleet-inbox", "fleet-outbox"]


def test_a_forked_child_awaits_through_threads_of_its_own(fleet: Client, worker: Worker) -> None:
    assert asyncio.run(number(fleet.infer("digits", {"i": 1}, timeout_s=5))) == 1

    pid = os.fork()
    if pid == 0:
        try:
            found = asyncio.run(number(fleet.infer("digits", {"i": 2}, timeout_s=5)))
            os._exit(0 if found == 2 else 2)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert isinstance(fleet.submit("digits", {"i": 3}), Job)
    assert asyncio.run(number(fleet.infer("digits", {"i": 4}, timeout_s=5))) == 4
