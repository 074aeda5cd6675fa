"""What ``celery -A workers.app worker`` loads: the app, with our pool, consumer and remote
control.

`fleet worker` is the same command. Every worker option that means nothing here is refused in one
line.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from celery.signals import celeryd_init, setup_logging, worker_init

from producer.contract.app import make_app
from producer.contract.errors import ConfigError, FleetError
from producer.contract.names import is_stream_queue, model_of
from workers.instances.discovery import discover
from workers.loop.answers import register_infer
from workers.models import load_models
from workers.parent import control  # noqa: F401 - registers the remote control commands
from workers.parent.placement import NOT_OURS
from workers.preflight import check, check_name
from workers.settings import WorkerSettings
from workers.telemetry import logs

_POOL: Final = "workers.pool:InstancePool"

#: Exit status for a mistake in the configuration or on the command line.
_EX_USAGE: Final = 2


def _say(text: str) -> None:
    sys.stderr.write(f"fleet: {' '.join(text.split())}\n")


def _refuse(text: str) -> NoReturn:
    _say(text)
    sys.exit(_EX_USAGE)


app = make_app()
try:
    # Read now: Celery's command would meet a mistake in a place where it ends in a traceback.
    _ = app.settings
except FleetError as error:
    _refuse(str(error))
app.conf.worker_pool = _POOL
app.conf.worker_consumer = "workers.parent.consumer:FleetConsumer"
# The parent runs no task that could be cancelled; unset, Celery warns of it at every reconnect.
app.conf.worker_cancel_long_running_tasks_on_connection_loss = True
app.conf.worker_autoscaler = "workers.parent.scaler:CeleryAutoscaler"
register_infer(app)

_BATCH_LIMIT: Final = "set batch_timeout_s in configs/fleet.toml"
_CLAIMS: Final = "an instance claims what it runs next and no more"

#: Worker options that mean nothing here, and what stands in their place.
_MEANINGLESS: Final = {
    "time_limit": _BATCH_LIMIT,
    "soft_time_limit": _BATCH_LIMIT,
    "max_tasks_per_child": "an instance loads its engines once and keeps them",
    "max_memory_per_child": "set memory_limit_bytes in configs/fleet.toml",
    "pool_start_method": "instances are always fresh interpreters",
    "prefetch_multiplier": _CLAIMS,
    "disable_prefetch": _CLAIMS,
    "exclude_queues": "name the models to serve with -Q",
    "purge": "a worker throws no waiting jobs away",
    "beat": "run `celery beat` as a process of its own",
}


def meaningless_option(options: Mapping[str, Any], conf: Mapping[str, Any]) -> str | None:
    """Return why a worker with these options must not start, or None."""
    pool = _name_of_pool(options.get("pool") or options.get("pool_cls") or _POOL)
    if pool != _POOL:
        return f"the {pool} pool cannot hold engines; leave -P out (prefork means ours here)."
    for option, instead in _MEANINGLESS.items():
        if options.get(option) not in (None, conf.get(f"worker_{option}"), False, []):
            return f"--{option.replace('_', '-')} means nothing here: {instead}."
    if conf.get("worker_disable_prefetch"):
        return f"--disable-prefetch means nothing here: {_CLAIMS}."
    return None


def _name_of_pool(pool: Any) -> str:
    """Return ``solo`` for Celery's class of that name, ``module:Class`` for any that is not its."""
    if isinstance(pool, str):
        return pool
    module = str(pool.__module__)
    if module.startswith("celery.concurrency."):
        return module.rpartition(".")[2]
    return f"{module}:{pool.__name__}"


def models_to_serve(queues: list[str] | None, settings: WorkerSettings) -> tuple[str, ...]:
    """Return the models of the ``-Q`` queues, else those of the settings, else all there are."""
    if queues:
        strange = [queue for queue in queues if not is_stream_queue(queue)]
        if strange:
            raise ConfigError(f"-Q {','.join(strange)}: {NOT_OURS}")
        return tuple(load_models(settings.config_dir, [model_of(queue) for queue in queues]))
    return tuple(load_models(settings.config_dir, settings.models or None))


def instance_bounds(
    slots: int, *, concurrency: object, autoscale: tuple[int, int] | None, least: int
) -> tuple[int, int]:
    """Return the least and the most instances to run; equal where the number is fixed.

    ``-c`` and ``--autoscale most,least`` are upper bounds: one line says so where there are fewer
    ``slots``. ``least`` is the setting ``min_instances``, 0 for a fixed number.
    """
    asked = autoscale[0] if autoscale else concurrency
    most = slots
    if isinstance(asked, int) and asked > 0:
        if asked > slots:
            option = "--autoscale" if autoscale else "-c"
            _say(f"{option} {asked}: this worker has {slots} instance(s) and runs them.")
        most = min(asked, slots)
    if autoscale:
        least = max(1, autoscale[1])
    return (min(least, most) or most, most)


def end_at_signals() -> None:
    """End this process at the first signal, until Celery's own handlers come: it must not look like
    a crash.

    Nothing is in hand yet. And not by an exception: one that is raised while a finalizer runs
    reaches nobody.
    """
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: os._exit(0))
    # `fleet worker` holds back those that came before; here the first is obeyed.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT])


@celeryd_init.connect
def _look_before_start(
    sender: str = "",
    instance: Any = None,
    conf: Any = None,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> None:
    end_at_signals()
    options = options or {}
    if text := meaningless_option(options, conf):
        _refuse(text)
    try:
        settings = WorkerSettings.load()
        for warning in check(settings):
            _say(warning)
        check_name(instance.app, sender)
        conf.fleet_inventory = discover(settings)
        for warning in conf.fleet_inventory.warnings:
            _say(warning)
        conf.fleet_models = models_to_serve(options.get("queues"), settings)
        conf.fleet_bounds = instance_bounds(
            len(conf.fleet_inventory.instances),
            concurrency=options.get("concurrency"),
            autoscale=options.get("autoscale"),
            least=settings.min_instances,
        )
    except FleetError as error:
        _refuse(str(error))


@worker_init.connect
def _consume_no_queue(sender: Any = None, **_: Any) -> None:
    queues = sender.app.amqp.queues
    queues.deselect(list(queues.consume_from))


@worker_init.connect
def _count_instances(sender: Any = None, **_: Any) -> None:
    """Let Celery's banner and numbers show the instances there are."""
    sender.concurrency = sender.app.conf.fleet_bounds[1]


@setup_logging.connect
def _log_our_way(loglevel: Any = None, **_: Any) -> None:
    logs.configure(loglevel or "WARNING", who="worker")
