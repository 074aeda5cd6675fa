"""`fleet up`: a broker, a worker and Flower on this machine, until a signal ends it."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from typing import Final

import click
import redis

from producer.contract import queues
from producer.contract.errors import ConfigError
from producer.contract.local_broker import NOTE, noting
from producer.contract.reach import reach
from producer.contract.settings import redacted
from workers import children
from workers.settings import WorkerSettings
from workers.up import local
from workers.up.embedded import Server, aside_of

_LOOK_EVERY_S: Final = 0.2

#: What else there is to say does not wait longer for it.
_FLOWER_WITHIN_S: Final = 20.0

#: What the server knows, from one run to the next.
_KEPT: Final = NOTE.with_name("server")


def up(*, with_flower: bool, log_level: str) -> None:
    """Run until Ctrl-C, SIGTERM or the end of the terminal; then stop the worker, then the rest."""
    with contextlib.ExitStack() as stack, children.ended_by_signals():
        try:
            _run(stack, with_flower=with_flower, log_level=log_level)
        except children.Ended:
            _say(
                "Stopping: what runs is finished first, for as long as grace_s allows; a second "
                "Ctrl-C waits for less."
            )
        finally:
            stack.close()
    _say("Stopped.")


def _run(stack: contextlib.ExitStack, *, with_flower: bool, log_level: str) -> None:
    settings = WorkerSettings.load()
    # First, so that nobody else is in the folder.
    note = _note(stack)
    broker = stack.enter_context(local.broker(settings, os.environ, kept=_KEPT if note else None))
    if note:
        note(broker.settings.broker_url, lasting=broker.server is not None)
    # After the worker, which gives back what it claimed, and before the server.
    stack.callback(_tell_of_what_waits, broker, is_kept=note is not None)
    # Flower first, so that it hears the worker's first events and ends after it.
    flower = stack.enter_context(local.flower(broker, settings.config_dir)) if with_flower else None
    worker = stack.enter_context(
        local.worker(broker, grace_s=settings.grace_s, log_level=log_level)
    )
    # Engines of any size: how long they may take to load is not for us to say.
    words = local.wait_until_ready(broker, worker, tell=_Steps().tell, within_s=math.inf)
    # It starts beside the worker, and is named when it can be looked at, or is late.
    until_s = time.monotonic() + _FLOWER_WITHIN_S
    while flower and flower.is_on_its_way and time.monotonic() < until_s:
        time.sleep(_LOOK_EVERY_S)
        _alive(broker, worker)
    _introduce(broker, words, flower, is_noted=note is not None)
    while True:
        time.sleep(_LOOK_EVERY_S)
        _alive(broker, worker)
        if flower and (code := flower.process.poll()) is not None:
            _say(
                f"Flower ended with exit code {code}; the rest goes on. It comes with a new start."
            )
            flower = None


def _alive(broker: local.Broker, worker: local.Worker) -> None:
    if (code := worker.process.poll()) is not None:
        raise ConfigError(f"The worker ended with exit code {code}.")
    if broker.process and (code := broker.process.poll()) is not None:
        # There is nothing to give back to, so nothing is waited for. Not SIGTERM: of two that come
        # together, its own and that of the end of the block, a process sees one.
        worker.process.send_signal(signal.SIGQUIT)
        raise ConfigError(f"The embedded server ended with exit code {code}.")


def _tell_of_what_waits(broker: local.Broker, *, is_kept: bool) -> None:
    """Say how many jobs nobody has answered, and what becomes of them."""
    if not broker.process or broker.process.poll() is not None:
        return
    with (
        contextlib.suppress(ConfigError, redis.RedisError),
        reach(broker.settings.broker_url) as client,
    ):
        held = queues.count(client, broker.keys, queues.find(client, broker.keys)).values()
        if count := sum(queue.queued + queue.delayed for queue in held):
            jobs = "1 job waits" if count == 1 else f"{count:,} jobs wait"
            fate = "kept for the next start" if is_kept else "gone with this server"
            _say(f"{jobs}, and {'is' if count == 1 else 'are'} {fate}.")


def _note(stack: contextlib.ExitStack) -> Callable[..., None] | None:
    """Return what notes the URL; None where nothing can be kept beside the clone."""
    try:
        return stack.enter_context(noting())
    except OSError as error:
        _say(f"{NOTE.parent} cannot be written ({error.strerror}): nothing is kept.")
        return None


class _Steps:
    """Says each state of the instances once."""

    def __init__(self) -> None:
        self._said = ""

    def tell(self, states: str) -> None:
        if states != self._said:
            self._said = states
            _say(f"instances: {states}")


def _introduce(
    broker: local.Broker, words: local.Words, flower: local.Flower | None, *, is_noted: bool
) -> None:
    url = broker.settings.broker_url
    _say(f"\nbroker   {redacted(url)}")
    _say(f"worker   {words['node']}: {', '.join(words['models'])}")
    if flower:
        _say(f"Flower   {flower.address}  {flower.access.how_to_log_in()}")
    if trouble := local.troubles(words):
        _say(f"not yet  {trouble}")
    if broker.server:
        _tell_the_address(broker.server, is_noted=is_noted)
    if "digits" in words["models"]:
        _say(
            "\nIn a Python prompt in this folder:\n\n"
            "  import numpy; from producer.tasks import infer\n"
            '  x = numpy.zeros((1, 1, 8, 8), "float32")\n'
            '  infer.delay("digits", {"image": x}).get(timeout=10)'
        )
    _say(f"\n`{_fleet()} status` shows what it does. Ctrl-C stops everything.")


def _tell_the_address(server: Server, *, is_noted: bool) -> None:
    if server.copied_from:
        _say(
            f"new port: this folder is a copy, and the old one belongs to {server.copied_from}. "
            f"What the copy brought along of jobs is in {aside_of(_KEPT)}."
        )
    if server.moved_from:
        _say(f"new port: another program has {server.moved_from}; start your apps again.")
    # A password is shown only where there is no other way to get at it.
    url = f"$(cat {shlex.quote(str(NOTE))})" if is_noted else server.url
    again = " (the same at each start)" if is_noted else ""
    _say(f"\nFor an app in another folder{again}:\n\n  export FLEET_BROKER_URL={url}")


def _fleet() -> str:
    """Return how this command was called, so that another one can be called the same way."""
    return os.path.relpath(sys.argv[0]) if os.path.isabs(sys.argv[0]) else sys.argv[0]


def _say(text: str) -> None:
    # With its terminal gone a command can still end in order; it only cannot say so.
    with contextlib.suppress(OSError):
        click.echo(text)
