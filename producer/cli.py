"""The `fleet` command: the app side's own commands, and the worker side's where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import click
import redis

from producer import status as fleet_status
from producer.commands.dead import dead
from producer.commands.output import Refused, json_option, print_json, print_table
from producer.commands.queue import queue
from producer.contract.errors import FleetError
from producer.contract.names import Keys
from producer.contract.reach import reach, why_not
from producer.contract.settings import Settings

#: How a shell says that Ctrl-C ended a command.
INTERRUPTED: Final = 130

#: The worker side's commands, with what each is for; shown even where they are not installed.
_WORKER_COMMANDS: Final[Mapping[str, str]] = {
    "add": "Make an ONNX file a model that workers serve, and say how it is run.",
    "build": "Make fp16, int8 and fp8 variants of a model, and say how good they are.",
    "demo": "Answer 540 real digits on this machine, and again with too little memory.",
    "doctor": "Say whether this machine, its server and its models are fit for the fleet.",
    "health": "Ask the worker on this host whether it works.",
    "up": "Run a server and a worker on this machine until Ctrl-C.",
    "worker": "Run one worker: celery -A workers.app worker.",
}


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
        except KeyboardInterrupt:
            # Click's own exit code for it is 1, which means something else in some commands.
            raise click.exceptions.Exit(INTERRUPTED) from None


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
      fleet up         keep a server and a worker running, for your own Python
      fleet add FILE   serve an ONNX file of your own

    With a Redis of your own, say where it is and start as many workers as you like:

    \b
      export FLEET_BROKER_URL=redis://user:password@host:6379/0
      fleet doctor     whether all is fit for it, and what to do
      fleet worker     on every machine that shall compute
      fleet status     what the workers do, from anywhere
      fleet queue      what waits, how long it has, and who serves it

    Exit code 2 and one line on standard error mean: something is set wrong, or not there.
    """


cli.add_command(dead)
cli.add_command(queue)


@cli.command()
@json_option
def status(as_json: bool) -> None:
    """Show the workers, their instances and their counters.

    An instance is one process with its engines. It is starting, loading, ready, draining, or
    broken: then the text says why, and it goes on trying. One that is ready may lack a model, which
    its text says, too. Counters are a few seconds old.

    "closed" says why batches were run as they were: full, or the queue was empty, or they had
    waited as long as the model lets them (delay), or held enough bytes, or their job had to run
    alone because its last start had no end.
    """
    fleet = _read()
    if as_json:
        print_json({"workers": list(fleet.workers), "totals": fleet.totals()})
    elif not fleet.workers:
        click.echo(
            "No worker runs. Start one with `fleet worker`, or all on this machine: fleet up"
        )
    else:
        print_table(
            ("worker", "instance", "pid", "state", "for", "loads", "models"),
            _instance_rows(fleet),
        )
        print_table(
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
@json_option
def models(as_json: bool) -> None:
    """Show the models that workers served within the last day, and how each is run.

    "memory" is what loading a model added to the process of an instance on CPU cores: the weights
    of every precision it has, and what a run of two rows takes. The first model of a process pays
    for the runtime too, about 15 MB. A GPU's memory is not in it.
    """
    fleet = _read()
    if as_json:
        engines = fleet.engines()
        print_json(
            {
                name: {"queued": fleet.queued.get(name, 0), "instances": engines[name]}
                for name in engines
            }
        )
    elif not fleet.queued:
        click.echo("No worker has served a model. Start one with `fleet worker`, or: fleet up")
    else:
        print_table(
            (
                "model",
                "ready",
                "queued",
                "runtime",
                "precision",
                "memory",
                "rows a batch",
                "because",
            ),
            _model_rows(fleet),
        )


def _read() -> fleet_status.Fleet:
    settings = Settings.from_env()
    with reach(settings.broker_url) as client:
        return fleet_status.read(client, Keys(prefix=settings.prefix), now_unix_s=time.time())


def _instance_rows(fleet: fleet_status.Fleet) -> Iterator[tuple[str, ...]]:
    for worker in fleet.workers:
        if not worker.get("instances"):
            state = worker.get("waiting") or worker.get("state", "")
            yield (worker["node"], "", str(worker["pid"]), state, "", "", "")
        for instance in worker.get("instances", ()):
            yield (
                worker["node"],
                _short(instance),
                str(instance["pid"]),
                fleet_status.state_of(instance),
                f"{instance.get('for_s', 0):.0f} s",
                str(instance.get("loads", 0)),
                ", ".join(
                    f"{name} ({how})" if (how := _how(about)) else name
                    for name, about in sorted(instance.get("models", {}).items())
                ),
            )


def _how(engine: Mapping[str, Any]) -> str:
    """Return what runs a model in an instance, or that it cannot be loaded there."""
    return "broken" if engine.get("state") == "broken" else str(engine.get("runtime", ""))


def _short(instance: Mapping[str, Any]) -> str:
    """Return an instance's place in its worker and the first letters of its name."""
    uuid, _, slot = str(instance.get("instance", "")).rpartition("/")
    return f"{instance['slot']} {uuid[:12]}/{slot}" if uuid else str(instance["slot"])


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
            *(str(shown.get(name, "")) for name in ("runtime", "precision")),
            _memory_of(ready),
            _rows_of(shown),
            shown.get("why") or shown.get("text", ""),
        )


def _memory_of(engines: Sequence[Mapping[str, Any]]) -> str:
    """Return what a model takes in the process that it takes the most of."""
    most = max((engine.get("memory_bytes") or 0 for engine in engines), default=0)
    return f"{most / 1e6:,.1f} MB" if most else ""


def _rows_of(engine: Mapping[str, Any]) -> str:
    """Return the rows of a batch, and of the largest that fitted where memory ran out."""
    most = str(engine.get("max_rows", ""))
    fits = ", ".join(f"{rows} in {name}" for name, rows in engine.get("ceilings", {}).items())
    return f"{most}; fits: {fits}" if fits else most


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
