"""The worker side's `fleet` commands; `producer.cli` mounts them where this package lies."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click


def other_pool(celery_options: Sequence[str]) -> str | None:
    """Return the pool that ``-P`` or ``--pool`` names, unless it means ours."""
    for option, value in itertools.pairwise((*celery_options, "")):
        name, equals, inline = option.partition("=")
        if name == "--pool" or option == "-P":
            named = inline if equals else value
        elif option.startswith("-P"):
            named = option[2:]
        else:
            continue
        return None if named in ("prefork", "workers.pool:InstancePool") else named
    return None


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]},
)
@click.option("--instances", metavar="all|N|NAME,...", help="What it may use; see above.")
@click.argument("celery_options", nargs=-1, type=click.UNPROCESSED)
def worker(*, instances: str | None, celery_options: tuple[str, ...]) -> None:
    """Run one worker: celery -A workers.app worker.

    Workers of one host share its instances: each GPU, MIG slice or CPU slot has the one process of
    one worker. --instances, or FLEET_INSTANCES, says which this one may use: all, the first N, or
    those of these names, such as GPU-..., MIG-... or cpu/0.

    \b
    Options of `celery worker` that mean something here:
      -c N                    at most N instances (all there are)
      --autoscale MAX,MIN     let the queues decide how many instances run
      -Q fleet.A,fleet.B      serve these models only
      -n NAME                 the node's name; each worker needs its own
      -l LEVEL                what is logged (INFO: starts, loaded models, ends; no job)
      -f FILE, --pidfile, -D, --uid, --gid

    Other options are refused with what to do instead. Everything else is in configs/fleet.toml.
    """
    if pool := other_pool(celery_options):
        # Celery would try to import it before it asks us.
        click.echo(f"fleet: the {pool} pool cannot hold engines; leave -P out.", err=True)
        sys.exit(2)
    if instances:
        os.environ["FLEET_INSTANCES"] = instances
    # The same process from here on, so that a supervisor's signals reach Celery itself. Those that
    # came already are held back since `producer.entry`.
    command = [sys.executable, "-m", "celery", "-A", "workers.app", "worker", "-l", "INFO"]
    # Of two levels the last one counts.
    os.execv(sys.executable, [*command, *celery_options])


@click.command()
@click.option(
    "-n", "--hostname", "node", metavar="NODE", help="The worker's -n, if it was given one."
)
def health(*, node: str | None) -> None:
    """Ask the worker on this host whether it works.

    For health checks of containers and supervisors. The worker itself must answer, by the name of
    its own node, and have an instance that is ready. Otherwise the exit code is 1, and one line on
    standard error says why. The worker of `fleet up` has a name of its own: see `fleet status`.
    """
    from workers import health as asked

    try:
        click.echo(asked.health(node))
    except asked.NotHealthy as error:
        click.echo(f"fleet: {' '.join(str(error).split())}", err=True)
        sys.exit(1)


@click.command()
@click.option("--flower", "with_flower", is_flag=True, help="Run Flower too, on port 5555.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="What the worker writes here.",
)
def up(*, with_flower: bool, log_level: str) -> None:
    """Run a server and a worker on this machine until Ctrl-C.

    Starts a Valkey server on a port of the loopback, and a worker with one instance for every
    core. The server's port, password and data are kept in .fleet, for the next start. Set
    FLEET_BROKER_URL to use a server of your own instead. While it runs, Python in this folder
    finds the broker by itself.
    """
    from workers.up.command import up as run

    run(with_flower=with_flower, log_level=log_level)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
def demo(*, as_json: bool) -> None:
    """Answer 540 real digits on this machine, and again with too little memory.

    Starts a server and a worker of its own, sends each of the held-out images as one job, and
    checks the answers. Then it restarts the worker with a memory limit that a full batch exceeds:
    such batches are answered in FP16, in smaller pieces. Exit code 0 means that all of it held.
    """
    from workers.demo.run import demo as run

    run(as_json=as_json)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--name", metavar="NAME", help="What apps call it. [the file's name]")
@click.option("--replace", is_flag=True, help="Take the place of a model of this name.")
@click.option(
    "--probe-shape",
    "shapes",
    multiple=True,
    metavar="INPUT=SIZES",
    help="The whole shape of one row, as state=2,1,128. May be repeated.",
)
@click.option(
    "--probe-max",
    "largest",
    multiple=True,
    metavar="INPUT=NUMBER",
    help="The largest value to try, as rate=16000. May be repeated.",
)
@click.option(
    "--probe-min",
    "least",
    multiple=True,
    metavar="INPUT=NUMBER",
    help="The least value that jobs send, as ids=1. May be repeated.",
)
@click.option("--no-serve", is_flag=True, help="Ask no worker that runs to serve it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
def add(
    *,
    file: Path,
    name: str | None,
    replace: bool,
    shapes: tuple[str, ...],
    largest: tuple[str, ...],
    least: tuple[str, ...],
    no_serve: bool,
    as_json: bool,
) -> None:
    """Make an ONNX file a model that workers serve, and say how it is run.

    \b
      fleet add model.onnx --name my
      fleet up
      infer.delay("my", {"x": rows}).get(timeout=10)      in Python

    FILE is tried in a process of its own: which axis counts rows, whether rows of different jobs
    may share a run without a change of their answers, and how fast batches of 1, 2, 4, ... 32 rows
    are. max_batch_size is the smallest batch within a tenth of the best jobs/s. What was decided is
    printed with its reason.

    The file is copied, with the files that hold its weights, to models/NAME of FLEET_CONFIG, or of
    configs/. Beside it a model.toml is written, with comments; it is yours to change. Workers read
    it when they start; those that run on this machine, and serve all other models of the folder,
    are asked to load it now. With --replace, the folder that was there is kept as
    models/.NAME.before, and workers that run must be started again.

    Values are made up, and sizes where the file leaves them free. A model that takes none of them
    needs --probe-shape, --probe-max or --probe-min, which model.toml keeps.

    Refused, with what is in the way and nothing left behind: inputs of text, outputs that are no
    tensors (scikit-learn's ZipMap), operators that ONNX Runtime does not know, no inputs, a file
    that is no ONNX model, weights that are not there. Ctrl-C leaves nothing behind either.

    Exit code 0: added. 2: refused, or something is set wrong.
    """
    from workers.adding.command import add as run
    from workers.adding.hints import read_hints

    run(
        file,
        name,
        read_hints(shapes, largest, least),
        replace=replace,
        serves=not no_serve,
        as_json=as_json,
    )


@click.command()
@click.argument("model")
@click.option(
    "--precision",
    "precisions",
    metavar="LIST",
    help="Of fp32,fp16,int8,fp8. [fp16; with rows to calibrate: fp16,int8,fp8]",
)
@click.option(
    "--calibrate",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Rows for int8 and fp8: an .npz with one array for each input.",
)
@click.option(
    "--metric",
    metavar="MODULE:FUNCTION",
    help="Your measure: function(outputs, data) returns a number.",
)
@click.option(
    "--keep-fp32", multiple=True, metavar="NODE", help="Leave this node in fp32. May be repeated."
)
@click.option(
    "--plans",
    is_flag=True,
    help="Instead: TensorRT's plans of what is served, for the GPU here.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
def build(*, plans: bool, as_json: bool, **asked: Any) -> None:
    """Make fp16, int8 and fp8 variants of a model, and say how good they are.

    MODEL is a folder of configs/models. Each variant is made of the fp32 file, run beside it, and
    reported: how far its answers are from fp32, how often they are right, how fast it is here.
    int8 and fp8 need rows of your own, and with them a report means most:

    \b
      fleet build digits          what model.toml's [build] asks for
      fleet build my --precision int8 --calibrate rows.npz

    In rows.npz each input of the model is one array, as numpy.savez writes it; 100 to 500 typical
    rows are enough. The table [build] of model.toml keeps these options, test rows with labels, and
    the least a variant must reach (docs/quantization.md).

    A worker uses a built variant once model.toml says so: precision = "int8", or ladder =
    ["fp16/2"]. Variants lie in FLEET_CACHE, or in configs/.cache. They appear whole or not at all;
    Ctrl-C is safe at any time, and what is unchanged is not built again.

    With --plans, plans of the engines that model.toml serves are built for the first GPU that this
    process sees, as a worker does at its start; build them before a rollout, and workers start at
    once. Another kind of GPU: CUDA_VISIBLE_DEVICES=<uuid> fleet build my --plans

    Exit code 1: a variant is below min_agreement or min_cosine, and was not kept. 2: something is
    set wrong, or missing.
    """
    if plans:
        _build_plans(**asked, as_json=as_json)
        return
    from workers.build.command import Asked
    from workers.build.command import build as run

    run(Asked(**asked), as_json=as_json)


def _build_plans(model: str, *, as_json: bool, **of_variants: Any) -> None:
    if any(of_variants.values()):
        raise click.UsageError("--plans goes with no other option but --json.")
    from workers.plans.command import build_plans

    build_plans(model, as_json=as_json)


@click.command()
@click.option("--strict", is_flag=True, help="Warnings count: exit code 1.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
@click.option("--selftest", is_flag=True, help="Run the GPU tests on the card here (5 minutes).")
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("fleet-selftest.md"),
    show_default=True,
    help="Where --selftest writes what came of it.",
)
def doctor(*, strict: bool, as_json: bool, selftest: bool, report: Path) -> None:
    """Say whether this machine, its server and its models are fit for the fleet.

    Looks at NVIDIA's driver, CUDA, the runtimes, each GPU and MIG slice with its free memory, its
    holder and the precisions that are fast on it; at cores, memory and the folder for what is
    built; at Redis; and at the files of every model. Each line is ok, a warning or an error, with
    what to do. A model's own Python is loaded as an instance would, in a process of its own, for at
    most a minute. Otherwise nothing is started, written or changed.

    Exit code 0: no error. 1: a warning, and --strict was given. 2: an error. With --json: a list of
    {check, state, text, do}.

    With --selftest the tests in tests/gpu/ of the clone are run on the first GPU or slice here, or
    on that of CUDA_VISIBLE_DEVICES: pinning, copies, memory that really runs out, plans, the same
    answers in every precision, two minutes of load. Exit code 0: those that ran passed. 2: one
    failed, none ran, or there is no GPU.
    """
    if selftest:
        if as_json or strict:
            raise click.UsageError("--selftest goes with no other option but --report.")
        from workers.doctor.selftest import selftest as test

        if code := test(report):
            sys.exit(code)
        return
    from workers.doctor.command import doctor as run

    run(as_json=as_json, strict=strict)
