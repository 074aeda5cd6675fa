"""Remote control that knows our jobs: Celery's own commands look at requests the parent never
holds.

Registered under Celery's names, so that ``celery inspect`` and Flower find them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import redis
from celery.worker import state as celery_state
from celery.worker.control import Panel, nok, ok

from producer.contract.cancel import cancel_command, cancel_stamped_command
from producer.contract.errors import ConfigError
from producer.contract.names import GROUP, INFER_TASK, PRIORITIES, Keys, model_of, queue_of
from producer.contract.settings import Settings, redis_client
from workers.parent import placement
from workers.parent.process import InstanceProcess
from workers.telemetry.logs import said as said_by

#: Remote control must answer within a second; Redis gets less.
_REDIS_TIMEOUT_S: Final = 0.8

_TERMINATED: Final = (
    "of those that run here, one that is alone ends with its process, and of one with batch-mates "
    "the answer is dropped"
)

_SCALES: Final = "the queues decide how many instances run; change the bounds with autoscale."


def _command(kind: str, **options: Any) -> Any:
    return Panel.register(type=kind, **options)


@_command("inspect", alias="dump_active")
def active(state: Any, safe: bool = False, **_: Any) -> list[dict[str, Any]]:
    """List of jobs that this worker's instances run."""
    return [job for job, _ in _begun(state)]


@_command("inspect", alias="dump_reserved")
def reserved(state: Any, **_: Any) -> list[dict[str, Any]]:
    """List of jobs that are claimed and not begun: at most one batch an instance."""
    begun = {(job["delivery_info"]["stream"], entry) for job, entry in _begun(state)}
    found = []
    with _client() as client:
        for queue, stream in _streams(state):
            for instance in state.consumer.pool.processes.alive():
                for pending in _pending(client, stream, instance.consumer):
                    entry_id = pending["message_id"].decode()
                    if (stream, entry_id) not in begun:
                        found.append(_info(state, None, queue, stream, instance))
    return found


@_command("inspect", args=[("ids", str)], variadic="ids", signature="[id1 [id2 [... [idN]]]]")
def query_task(state: Any, ids: Any, **_: Any) -> dict[str, Any]:
    """Query for jobs by id: only those that run here are known."""
    wanted = {ids} if isinstance(ids, str) else set(ids)
    return {job["id"]: ["active", job] for job, _ in _begun(state) if job["id"] in wanted}


@_command("inspect")
def active_queues(state: Any) -> list[dict[str, Any]]:
    """List the queues that this worker's instances claim from."""
    return [
        {
            "name": queue_of(model),
            "exchange": {"name": "", "type": "direct"},
            "routing_key": queue_of(model),
            "type": "stream",
            "durable": True,
            # Flower's page of a worker shows each of these.
            "exclusive": False,
            "auto_delete": False,
            "no_ack": False,
            "alias": None,
            "queue_arguments": None,
            "binding_arguments": None,
        }
        for model in state.consumer.pool.serving.models
    ]


@_command(
    "control", variadic="task_id", signature="[id1 [id2 [... [idN]]]]", args=[("task_id", str)]
)
def revoke(
    state: Any, task_id: Any, terminate: bool = False, signal: Any = None, **_: Any
) -> dict[str, Any]:
    """Cancel jobs that have not started; with terminate, also those that run."""
    ids = [task_id] if isinstance(task_id, str) else list(task_id)
    keys = _keys()
    with _client() as client:
        marked = client.execute_command(*cancel_command(keys, ids))
    # Only for `inspect revoked`; what decides is the mark.
    celery_state.revoked.update(ids)
    text = _marked_text(ids, marked)
    if terminate:
        state.consumer.pool.processes.terminate([keys.cancelled(job_id) for job_id in ids])
        text += f"; {_TERMINATED}"
    return dict(ok(text))


@_command("control", args=[("signal", str), ("task_id", str)], variadic="task_id")
def terminate(state: Any, signal: Any, task_id: Any, **_: Any) -> dict[str, Any]:
    """Cancel jobs, also those that run. Batch-mates come to no harm; the signal is not used."""
    return dict(revoke(state, task_id, terminate=True))


@_command(
    "control",
    args=[("headers", str)],
    variadic="headers",
    signature="[key1=value1 [key2=value2 [... [keyN=valueN]]]]",
)
def revoke_by_stamped_headers(
    state: Any, headers: Any, terminate: bool = False, signal: Any = None, **_: Any
) -> dict[str, Any]:
    """Cancel the jobs that carry one of these stamps, as `revoke` does by id."""
    stamps = _stamps_of(headers)
    keys = _keys()
    with _client() as client:
        client.execute_command(*cancel_stamped_command(keys, stamps))
    text = f"jobs with {len(stamps)} stamps marked as cancelled"
    if terminate:
        marks = [keys.cancelled_stamp(header, stamp) for header, stamp in stamps]
        state.consumer.pool.processes.terminate(marks)
        text += f"; {_TERMINATED}"
    return dict(ok(text))


def _marked_text(ids: Sequence[str], marked: Sequence[int]) -> str:
    by_mark: dict[int, list[str]] = {1: [], 0: []}
    for job_id, mark in zip(ids, marked, strict=True):
        by_mark[mark].append(job_id)
    said = {1: "marked as cancelled", 0: "answered before"}
    return "; ".join(
        f"tasks {', '.join(by_mark[mark])} {said[mark]}" for mark in (1, 0) if by_mark[mark]
    )


def _stamps_of(headers: Any) -> list[tuple[str, str]]:
    """Return the stamps in either of Celery's forms: a map, or a list of ``header=stamp``."""
    if isinstance(headers, Mapping):
        return [
            (str(header), str(stamp))
            for header, given in headers.items()
            for stamp in (given if isinstance(given, list | tuple | set) else [given])
        ]
    given = [headers] if isinstance(headers, str) else list(headers)
    return [(header, stamp) for header, _, stamp in (str(each).partition("=") for each in given)]


@_command("control")
def enable_events(state: Any, **_: Any) -> dict[str, Any]:
    """Say whether the instances send events: that is chosen at start."""
    if state.consumer.pool.settings.events:
        return dict(ok("task events already enabled"))
    return dict(nok("events are off; set events = true in configs/fleet.toml and restart."))


@_command("control", args=[("n", int)], signature="[N=1]")
def pool_grow(state: Any, n: int = 1, **_: Any) -> dict[str, Any]:
    """Run N more instances, as far as there are slots."""
    pool = state.consumer.pool
    if pool.scales:
        return dict(nok(_SCALES))
    return dict(ok(f"{pool.grow(n)} instances wanted"))


@_command("control", args=[("n", int)], signature="[N=1]")
def pool_shrink(state: Any, n: int = 1, **_: Any) -> dict[str, Any]:
    """Let N instances finish what they run and end; at least one stays."""
    pool = state.consumer.pool
    if pool.scales:
        return dict(nok(_SCALES))
    return dict(ok(f"{pool.shrink(n)} instances wanted"))


@_command("control", args=[("max", int), ("min", int)], signature="[max [min]]")
def autoscale(
    state: Any,
    max: int | None = None,  # noqa: A002 - Celery's names
    min: int | None = None,  # noqa: A002
    **_: Any,
) -> dict[str, Any]:
    """Let the queues decide between MIN and MAX instances."""
    most, least = state.consumer.pool.set_bounds(least=min, most=max)
    return dict(ok(f"autoscale now max={most} min={least}"))


@_command("control", args=[("queue", str)], signature="<queue>")
def add_consumer(state: Any, queue: str, **_: Any) -> dict[str, Any]:
    """Serve the model of QUEUE too, until the worker ends."""
    pool = state.consumer.pool
    try:
        with _client() as client:
            said = placement.add(
                pool.serving,
                queue,
                client=client,
                keys=_keys(),
                config_dir=pool.settings.config_dir,
            )
    except redis.RedisError as error:
        return dict(nok(f"{queue} was not added: Redis says: {said_by(error)}"))
    except ConfigError as error:
        return dict(nok(str(error)))
    return dict(ok(said))


@_command("control", args=[("queue", str)], signature="<queue>")
def cancel_consumer(state: Any, queue: str, **_: Any) -> dict[str, Any]:
    """Claim no more jobs of QUEUE, and free its model; what runs is finished."""
    try:
        said = placement.remove(state.consumer.pool.serving, queue, node=state.hostname)
    except ConfigError as error:
        return dict(nok(str(error)))
    return dict(ok(said))


def _refusal(name: str, text: str) -> None:
    """Answer Celery's command ``name`` with ``text``; it takes the arguments it always took."""
    stock = Panel.meta[name]

    def refuse(state: Any, **_: Any) -> dict[str, Any]:
        return dict(nok(text))

    refuse.__name__, refuse.__doc__ = name, f"Refused: {text}"
    _command("control", args=stock.args, signature=stock.signature, variadic=stock.variadic)(refuse)


_refusal("pool_restart", "instances keep their engines; restart the worker to reload everything.")
_refusal("rate_limit", "instances take a job when they are free; there is no rate to limit.")
_refusal("time_limit", "set batch_timeout_s in configs/fleet.toml.")
_refusal("disable_events", "set events = false in configs/fleet.toml and restart the worker.")
_refusal("election", "workers of a fleet do not gossip; every instance takes what it can run.")


def _begun(state: Any) -> list[tuple[dict[str, Any], str]]:
    """Return what runs on this worker, each with its entry id, as the journals say."""
    keys = _keys()
    instances = {running.consumer: running for running in state.consumer.pool.processes.alive()}
    found = []
    with _client() as client:
        for queue in state.consumer.pool.serving.held_queues:
            for job_id, record in client.hgetall(keys.journal(queue)).items():
                stream, entry_id, _, _, consumer = record.decode().split(" ", 4)
                if consumer in instances:
                    info = _info(state, job_id.decode(), queue, stream, instances[consumer])
                    found.append((info, entry_id))
    return found


def _info(
    state: Any, job_id: str | None, queue: str, stream: str, instance: InstanceProcess
) -> dict[str, Any]:
    """Return a job in the words of Celery's ``Request.info``; arguments are never shown."""
    return {
        "id": job_id,
        "name": f"{INFER_TASK}.{model_of(queue)}",
        "type": INFER_TASK,
        "args": "",
        "kwargs": "",
        "hostname": state.hostname,
        "time_start": _batch_began_unix_s(instance) if job_id else None,
        "acknowledged": False,
        "delivery_info": {"routing_key": queue, "stream": stream, "redelivered": False},
        "worker_pid": instance.pid,
    }


def _batch_began_unix_s(instance: InstanceProcess) -> float:
    """Return when the running batch began, from what the instance said last, within a second.

    A batch of which it has said nothing yet began after that.
    """
    batch_s = float(instance.said.get("batch_s", 0.0))
    return time.time() - (time.monotonic() - instance.said_at_s) - batch_s


def _streams(state: Any) -> Iterable[tuple[str, str]]:
    keys = _keys()
    for queue in state.consumer.pool.serving.held_queues:
        for priority in PRIORITIES:
            yield queue, keys.stream(queue, priority)


def _pending(client: redis.Redis, stream: str, consumer: str) -> list[dict[str, Any]]:
    return list(client.xpending_range(stream, GROUP, "-", "+", 1000, consumername=consumer))


def _keys() -> Keys:
    return Keys(prefix=Settings.from_env().prefix)


def _client() -> redis.Redis:
    return redis_client(Settings.from_env().broker_url, socket_timeout=_REDIS_TIMEOUT_S)
