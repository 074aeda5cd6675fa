"""The `fleet` command: the app side's own commands, and the worker side's where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import click
import redis

from producer import dead as dead_letters
from producer import status as fleet_status
from producer.contract.errors import FleetError
from producer.contract.names import Keys
from producer.contract.reach import reach, why_not
from producer.contract.settings import Settings

#: The worker side's commands, with what each is for; shown even where they are not installed.
_WORKER_COMMANDS: Final[Mapping[str, str]] = {
    "demo": "Answer 540 real digits on this machine, and again with too little memory.",
    "health": "Ask the worker on this host whether it works.",
    "up": "Run a server and a worker on this machine until Ctrl-C.",
    "worker": "Run one worker: celery -A workers.app worker.",
}


class Refused(click.ClickException):
    """One line that says what is wrong and what to do."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"fleet: {' '.join(self.message.split())}", file=file or sys.stderr)


class Commands(click.Group):
    """Our own commands and, when `workers` lies beside us, those of `workers.cli`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_WORKER_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if own := super().get_command(ctx, cmd_name):
            return own
        if cmd_name not in _WORKER_COMMANDS:
            return None
        return _worker_command(cmd_name) or _missing(cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FleetError as error:
            raise Refused(str(error)) from error
        except redis.RedisError as error:
            raise Refused(why_not(error, Settings.from_env().broker_url)) from error


def _worker_command(name: str) -> click.Command | None:
    spec = importlib.util.find_spec("workers")
    # An app may have a package of the same name; ours lies in the clone beside `producer`.
    if spec is None or spec.origin is None:
        return None
    if Path(spec.origin).resolve().parents[1] != Path(__file__).resolve().parents[1]:
        return None
    return cast(click.Command, getattr(importlib.import_module("workers.cli"), name))


def _missing(name: str) -> click.Command:
    """Return a stand-in that says where the command is to be had."""

    @click.command(
        name,
        short_help=_WORKER_COMMANDS[name],
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def missing() -> None:
        raise Refused(
            f"`fleet {name}` belongs to the worker side, which is not in this installation. In a "
            'clone of the project: pip install -e ".[cli,worker,embedded]"'
        )

    return missing


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fleet-inference", prog_name="fleet")
def cli() -> None:
    """Batch inference on Celery and Redis.

    Apps send jobs with infer.delay(model, inputs); workers run those that wait together as one
    batch. Try it on this machine, without Redis or Docker:

    \b
      fleet demo       real digits through a real worker, in under a minute
      fleet up         keep a server and a worker running, and use them from Python

    With a Redis of your own, say where it is and start as many workers as you like:

    \b
      export FLEET_BROKER_URL=redis://user:password@host:6379/0
      fleet worker     on every machine that shall compute
      fleet status     what the workers do, from anywhere

    Exit code 2 and one line on standard error mean: something is set wrong, or not there.
    """


def _json_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")(
        command
    )


@cli.command()
@_json_option
def status(as_json: bool) -> None:
    """Show the workers, their instances and their counters.

    An instance is one process with its engines. It is starting, loading, ready, draining, or
    broken: then the text says why, and it goes on trying. Counters are a few seconds old.

    "closed" says why batches were run as they were: full, or the queue was empty, or they had
    waited as long as the model lets them (delay), or held enough bytes, or their job had to run
    alone because its last start had no end.
    """
    fleet = _read()
    if as_json:
        _print_json({"workers": list(fleet.workers), "totals": fleet.totals()})
    elif not fleet.workers:
        click.echo(
            "No worker runs. Start one with `fleet worker`, or all on this machine: fleet up"
        )
    else:
        _print_table(
            ("worker", "instance", "pid", "state", "for", "loads", "models"),
            _instance_rows(fleet),
        )
        _print_table(
            (
                "model",
                "jobs",
                "succeeded",
                "failed",
                "batches",
                "mean batch",
                "closed",
                "no memory",
            ),
            _counter_rows(fleet),
        )


@cli.command()
@_json_option
def models(as_json: bool) -> None:
    """Show the models that workers served within the last day, and how each is run."""
    fleet = _read()
    if as_json:
        engines = fleet.engines()
        _print_json(
            {
                name: {"queued": fleet.queued.get(name, 0), "instances": engines[name]}
                for name in engines
            }
        )
    elif not fleet.queued:
        click.echo("No worker has served a model. Start one with `fleet worker`, or: fleet up")
    else:
        _print_table(
            ("model", "ready", "queued", "runtime", "precision", "rows a batch", "because"),
            _model_rows(fleet),
        )


@cli.group()
def dead() -> None:
    """Look at dead letters: jobs that will not be tried again.

    A job becomes one when its process died at every start it was allowed, or when nobody can read
    it. The sender has its error; the letter keeps the entry for people.
    """


@dead.command("list")
@_json_option
def dead_list(as_json: bool) -> None:
    """List the dead letters of every queue, the oldest first."""
    found = list(_dead_letters())
    if as_json:
        _print_json([letter.about() for letter in found])
    elif not found:
        click.echo("No dead letters.")
    else:
        _print_table(
            ("queue", "job", "code", "starts", "buried", "reason"),
            (
                (
                    letter.queue,
                    letter.job_id or f"(none; letter {letter.letter_id})",
                    letter.code,
                    str(letter.attempts),
                    time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter.buried_unix_s)),
                    letter.reason,
                )
                for letter in found
            ),
        )


@dead.command("show")
@click.argument("job_id")
@_json_option
def dead_show(job_id: str, as_json: bool) -> None:
    """Show one dead letter, by the id of its job or its own; its payload only by size."""
    found = [letter for letter in _dead_letters() if job_id in (letter.job_id, letter.letter_id)]
    if not found:
        raise Refused(f"There is no dead letter {job_id}. See `fleet dead list`.")
    if as_json:
        _print_json([letter.about() for letter in found])
        return
    for letter in found:
        for name, value in letter.about().items():
            click.echo(f"{name:<14} {value}")


def _dead_letters() -> Iterator[dead_letters.DeadLetter]:
    settings = Settings.from_env()
    keys = Keys(prefix=settings.prefix)
    with reach(settings.broker_url) as client:
        for queue in dead_letters.queues(client, keys):
            yield from dead_letters.letters(client, keys, queue)


def _read() -> fleet_status.Fleet:
    settings = Settings.from_env()
    with reach(settings.broker_url) as client:
        return fleet_status.read(client, Keys(prefix=settings.prefix), now_unix_s=time.time())


def _instance_rows(fleet: fleet_status.Fleet) -> Iterator[tuple[str, ...]]:
    for worker in fleet.workers:
        if not worker.get("instances"):
            yield (worker["node"], "", str(worker["pid"]), worker.get("state", ""), "", "", "")
        for instance in worker.get("instances", ()):
            text = instance.get("text", "")
            yield (
                worker["node"],
                str(instance["slot"]),
                str(instance["pid"]),
                f"{instance['state']}: {text}" if text else instance["state"],
                f"{instance.get('for_s', 0):.0f} s",
                str(instance.get("loads", 0)),
                ", ".join(sorted(instance.get("models", {}))),
            )


def _counter_rows(fleet: fleet_status.Fleet) -> Iterator[tuple[str, ...]]:
    for model, counters in sorted(fleet.totals().items()):
        batches, rows = counters.get("batches", 0), counters.get("rows", 0)
        closed = counters.get("closed", {})
        yield (
            model,
            *(str(counters.get(name, 0)) for name in ("jobs", "succeeded", "failed", "batches")),
            f"{rows / batches:.1f}" if batches else "",
            ", ".join(f"{count} {reason}" for reason, count in closed.items() if count),
            str(counters.get("out_of_memory", 0)),
        )


def _model_rows(fleet: fleet_status.Fleet) -> Iterator[tuple[str, ...]]:
    for model, engines in sorted(fleet.engines().items()):
        ready = [engine for engine in engines if engine.get("state") != "broken"]
        shown = (ready or engines or [{}])[0]
        yield (
            model,
            f"{len(ready)} of {len(engines)}",
            str(fleet.queued.get(model, 0)),
            *(str(shown.get(name, "")) for name in ("runtime", "precision", "max_rows")),
            shown.get("why") or shown.get("text", ""),
        )


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


def _print_table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    from rich import box, console, table

    shown = table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        shown.add_column(head, overflow="fold")
    for row in rows:
        # Texts come from workers and files; rich must not read markup in them.
        shown.add_row(*(cell.replace("[", "\\[") for cell in row))
    # A pipe has no width; a program that wants columns takes --json.
    console.Console(width=None if sys.stdout.isatty() else 160).print(shown)


def main() -> None:
    """Run the command; the entry point of the package."""
    if importlib.util.find_spec("rich") is None:
        click.echo(
            'fleet: the command needs its extra. In the clone: pip install ".[cli]"',
            file=sys.stderr,
        )
        raise SystemExit(2)
    cli()


if __name__ == "__main__":
    main()
