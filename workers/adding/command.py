"""`fleet add`: read, try in a process of its own, write, say what was decided."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from producer.contract.errors import ConfigError
from producer.contract.names import is_model_name
from producer.contract.settings import Settings
from workers import children
from workers.adding import placing, report
from workers.adding.found import Found
from workers.adding.graph import read_graph
from workers.adding.hints import Hints, check, to_json
from workers.adding.model_file import model_file
from workers.adding.progress import Tell, shown
from workers.adding.serving import Served, serve
from workers.adding.trial import stage_of
from workers.error_text import signal_name
from workers.models import MODEL_FILE, load_model
from workers.settings import WorkerSettings

_NEEDED: Final = ("onnx", "onnxruntime")

#: The clone or image that this package lies in; the child must find `workers` there.
_ROOT: Final = Path(__file__).resolve().parent.parent.parent

#: How long a trial may take to end when it is told to.
_END_S: Final = 2.0
_LOOK_EVERY_S: Final = 0.2


def add(
    path: Path, name: str | None, hints: Hints, *, replace: bool, serves: bool, as_json: bool
) -> None:
    """Add the model and print what was decided; every refusal is a ConfigError."""
    _check_installed()
    name = _name_of(path) if name is None else name
    if not is_model_name(name):
        raise ConfigError(
            f"--name: {name!r} cannot name a model: letters, digits, - and _, at most 64."
        )
    settings = WorkerSettings.load()
    # Before the model is there: what is wrong with a URL is no answer to whether it was added.
    where = Settings.from_env() if serves else None
    try:
        with children.ended_by_signals() as too_late, shown(f"trying {path.name}") as tell:
            folder, found, kept = _add(
                path, name, hints, settings, replace=replace, tell=tell, at_last=too_late
            )
    except children.Ended as ended:
        click.echo("fleet: interrupted; nothing was added.", err=True)
        raise SystemExit(128 + ended.signum) from None
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path}: cannot be read or written: {error.strerror}."
        ) from error
    if as_json:
        served = _served(name, settings, where)
        click.echo(json.dumps(_as_json(name, folder, found, served), indent=2))
        return
    click.echo("\n".join([*report.lines(name, folder, found), ""]))
    served = _served(name, settings, where)
    click.echo("\n".join(report.next_lines(name, found, served)))
    if settings.models and name not in settings.models:
        click.echo(f"\nfleet.toml or FLEET_MODELS lists the models to serve; add {name} there.")
    if kept:
        click.echo(f"\nThe model that was there is kept in {kept}.")


def _served(name: str, settings: WorkerSettings, where: Settings | None) -> Served:
    """Have it served; ``where`` None: nobody is asked."""
    if where is None:
        return Served()
    with shown(f"asking workers to serve {name}"):
        return serve(name, settings.config_dir, where)


def _add(
    path: Path,
    name: str,
    hints: Hints,
    settings: WorkerSettings,
    *,
    replace: bool,
    tell: Tell,
    at_last: Callable[[], None],
) -> tuple[Path, Found, Path | None]:
    """Return the new folder, what was found, and where a replaced model is kept.

    ``at_last`` is called before the model is put in place.
    """
    models = settings.config_dir / "models"
    placing.check_free(models, name, replace=replace)
    graph = read_graph(path)
    check(hints, graph.inputs)
    with placing.scratch(models) as scratch:
        made = scratch / name
        file = placing.copy_model(graph, made)
        found = _tried(file, name, hints, settings, source=path, tell=tell)
        text = model_file(name, file.name, found, hints)
        (made / MODEL_FILE).write_text(text, encoding="utf-8")
        load_model(made)
        had_one = os.path.lexists(models / name)
        # Whoever interrupts it from here on is told what was added.
        at_last()
        folder = placing.put_in_place(made, models, replace=replace)
    return folder, found, placing.before_of(folder) if had_one else None


def _tried(
    file: Path, name: str, hints: Hints, settings: WorkerSettings, *, source: Path, tell: Tell
) -> Found:
    """Return what a process of its own found out about the copied model."""
    scratch = file.parent.parent
    result, log = scratch / "result.json", scratch / "log.txt"
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    words = [str(file), name, str(settings.threads), to_json(hints), str(result)]
    with children.running(
        # -P: the project in whose folder this is called may have a package `workers` of its own.
        [sys.executable, "-P", "-m", "workers.adding.trial", *words],
        environ={**os.environ, "PYTHONPATH": path},
        within_s=_END_S,
        output=log,
    ) as child:
        limit_s = settings.batch_timeout_s
        if not _ends(child, stage_of(result), limit_s=limit_s, name=source.name, tell=tell):
            raise ConfigError(
                f"{source}: a few rows of it took more than {limit_s:g} s, after which workers end "
                "a batch. Raise batch_timeout_s in fleet.toml if it is meant to be that slow."
            )
    if not result.is_file():
        raise ConfigError(f"{source}: {_how_it_ended(child.returncode, log)}")
    said: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if "refused" in said:
        # It was tried as a copy, whose place means nothing to anybody.
        text = str(said["refused"]).replace(str(file), source.name)
        for said_already in (f"{source.name}: ", f"{name}: "):
            text = text.removeprefix(said_already)
        raise ConfigError(f"{source}: {text}")
    return Found.from_json(said["found"])


def _ends(
    child: subprocess.Popen[bytes], stage: Path, *, limit_s: float, name: str, tell: Tell
) -> bool:
    """Wait for the trial and tell what it is at; False when it takes longer than ``limit_s``."""
    began_s, doing = time.monotonic(), "reading it"
    while (took_s := time.monotonic() - began_s) < limit_s:
        with contextlib.suppress(OSError):
            doing = stage.read_text(encoding="utf-8") or doing
        tell(f"trying {name}: {doing}, {took_s:.0f} s of at most {limit_s:g} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=min(_LOOK_EVERY_S, limit_s - took_s))
            return True
    return False


def _how_it_ended(status: int, log: Path) -> str:
    said = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(said) if line.strip()), "")
    if status < 0:
        how = f"running one row of it killed its process ({signal_name(-status)})."
        return f"{how} {report.plain(last)}".strip()
    return f"trying it ended with status {status}. {report.plain(last)}".strip()


def _name_of(path: Path) -> str:
    """Return a model's name that is like the file's."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem).strip("-_")[:64]
    if not name:
        raise ConfigError(f"{path}: its name makes no model's name; give one with --name.")
    return name


def _check_installed() -> None:
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"`fleet add` needs {name}, which is not installed. In the clone: "
                'pip install -e ".[cli,worker]"'
            )


def _as_json(name: str, folder: Path, found: Found, served: Served) -> dict[str, Any]:
    return {
        "model": name,
        "folder": str(folder),
        "max_batch_size": found.max_batch_size,
        "why_batch": report.why_batch(found),
        "served": dataclasses.asdict(served),
        **found.as_json(),
    }
