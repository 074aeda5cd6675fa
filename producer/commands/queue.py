"""`fleet queue`: what waits where, for how long, and who serves it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import click
import redis

from producer.commands.output import json_option, plain, print_json, print_table, table
from producer.contract import live, queues
from producer.contract.names import Keys, model_of, queue_of
from producer.contract.queues import Queue, Served
from producer.contract.reach import ANSWER_WITHIN_S, reach, why_not
from producer.contract.settings import Settings, redis_client

#: The search for queues that nobody serves walks over all keys, so a watch does it this seldom.
_SEARCH_EVERY_S: Final = 60.0

_HEADS: Final = ("queue", "waiting", "claimed", "delayed", "dead", "oldest", "rate", "served by")

#: Shows what was seen, or why nothing was.
_Show = Callable[["list[Queue] | str"], None]


@click.command()
@json_option
@click.option(
    "--watch",
    "every_s",
    is_flag=False,
    flag_value=2.0,
    type=click.FloatRange(min=0.1),
    metavar="[SECONDS]",
    help="Look again every 2 seconds, or so many, until Ctrl-C.",
)
def queue(*, as_json: bool, every_s: float | None) -> None:
    """Show what waits in each queue, for how long, and who serves it.

    \b
      waiting     could be claimed now, also what an instance gave back
      claimed     an instance has them: they run, or are next
      delayed     sent with a countdown or an eta, and not due yet
      dead        will not be tried again: see `fleet dead list`
      oldest      how long ago the oldest of the waiting was sent
      rate        jobs answered a second, over the last ten seconds
      served by   instances ready to run them, and workers; or why none is

    Listed are the models that workers served within the last day, and every queue that holds
    anything, also one that nobody serves: its jobs wait for a worker that has the model.

    With --watch it goes on while Redis is away, and says so. Where the output is no terminal, or
    with --json, every look adds lines.
    """
    settings = Settings.from_env()
    if every_s is not None:
        _watch(settings, every_s, as_json=as_json)
        return
    with reach(settings.broker_url) as client:
        seen = Looks(client, Keys(prefix=settings.prefix)).look()
    if as_json:
        print_json(_for_programs(seen))
    elif not seen:
        click.echo(_NOTHING)
    else:
        print_table(_HEADS, map(_row, seen))


_NOTHING: Final = (
    "No worker has served a model within a day, and no queue holds anything. "
    "Start a worker with `fleet worker`, or: fleet up"
)


class Looks:
    """Looks at all queues that matter, again and again."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client, self._keys = client, keys
        self._found: set[str] = set()
        self._search_at_s = 0.0

    def look(self) -> list[Queue]:
        """Return the queues that were served within a day or hold anything, by name."""
        if time.monotonic() >= self._search_at_s:
            self._found = queues.find(self._client, self._keys)
            self._search_at_s = time.monotonic() + _SEARCH_EVERY_S
        now_unix_s = time.time()
        served = {*map(queue_of, live.models(self._client, self._keys, now_unix_s=now_unix_s))}
        names = sorted(served | self._found)
        seen = queues.look(self._client, self._keys, names, now_unix_s=now_unix_s)
        return [each for each in seen if each.name in served or not each.held.nothing]


def _watch(settings: Settings, every_s: float, *, as_json: bool) -> None:
    """Look until Ctrl-C; without Redis, say so and try again."""
    limits = {"socket_timeout": ANSWER_WITHIN_S, "socket_connect_timeout": ANSWER_WITHIN_S}
    with (
        contextlib.suppress(KeyboardInterrupt),
        redis_client(settings.broker_url, **limits) as client,
        _showing(as_json=as_json) as show,
    ):
        looks = Looks(client, Keys(prefix=settings.prefix))
        while True:
            began_s = time.monotonic()
            try:
                show(looks.look())
            except (redis.RedisError, OSError) as error:
                show(f"{why_not(error, settings.broker_url)} Trying again.")
            time.sleep(max(0.0, began_s + every_s - time.monotonic()))


# -- how it is shown


@contextlib.contextmanager
def _showing(*, as_json: bool) -> Iterator[_Show]:
    if as_json:
        yield _print_json_line
    elif not sys.stdout.isatty():
        yield _print_lines
    else:
        with _redrawing() as show:
            yield show


@contextlib.contextmanager
def _redrawing() -> Iterator[_Show]:
    """Draw over what was drawn; while there is no news the last stays, and why stands below it."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    drawn: Any = ""
    with Live(auto_refresh=False) as screen:

        def show(seen: list[Queue] | str) -> None:
            nonlocal drawn
            note = f"{_clock()}  Ctrl-C ends this."
            if isinstance(seen, str):
                note = f"{_clock()}  {seen}"
            else:
                rows = map(_row, seen)
                drawn = table(_HEADS, rows, screen.console.width) if seen else Text(_NOTHING)
            screen.update(Group(drawn, Text(note)), refresh=True)

        yield show


def _print_lines(seen: list[Queue] | str) -> None:
    if isinstance(seen, str):
        click.echo(f"{_clock()}  {' '.join(seen.split())}")
        return
    for each in seen:
        cells = zip(_HEADS[1:], _row(each)[1:], strict=True)
        click.echo(
            f"{_clock()}  {plain(each.name)}  " + ", ".join(f"{h} {c or '-'}" for h, c in cells)
        )
    if not seen:
        click.echo(f"{_clock()}  {_NOTHING}")


def _print_json_line(seen: list[Queue] | str) -> None:
    words = {"error": seen} if isinstance(seen, str) else _for_programs(seen)
    click.echo(json.dumps({"at_unix_s": round(time.time(), 3), **words}))


def _for_programs(seen: list[Queue]) -> dict[str, Any]:
    rows = [
        {
            "queue": each.name,
            "model": model_of(each.name),
            **dataclasses.asdict(each.held),
            "ready_instances": each.served.ready,
            "workers": each.served.workers,
            "answered_per_s": each.served.answered_per_s,
            "trouble": each.served.trouble,
        }
        for each in seen
    ]
    return {"queues": rows}


def _row(queue: Queue) -> tuple[str, ...]:
    held, served = queue.held, queue.served
    return (
        queue.name,
        *(f"{number:,}" for number in (held.waiting, held.claimed, held.delayed, held.dead)),
        "" if held.oldest_s is None else age(held.oldest_s),
        "" if served.answered_per_s is None else f"{served.answered_per_s:,.1f}/s",
        served_by(served),
    )


def served_by(served: Served) -> str:
    """Return who serves a queue, in words."""
    if not served.workers:
        return "nobody at the moment"
    workers = f"{served.workers} worker" + ("s" if served.workers > 1 else "")
    if served.trouble:
        return f"{workers}, no instance ready: {served.trouble}"
    if not served.ready:
        return f"{workers}, no instance ready yet"
    return f"{served.ready} instance{'s' if served.ready > 1 else ''} of {workers}"


def age(seconds: float) -> str:
    """Return a time as people say it, in the largest unit that has two of it."""
    for unit, unit_s in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _clock() -> str:
    return time.strftime("%H:%M:%S")
