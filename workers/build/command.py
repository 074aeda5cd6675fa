"""`fleet build`: what was asked for, a progress bar on standard error, the reports on standard
output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from producer.contract.errors import ConfigError
from workers import children
from workers.build import store
from workers.build.options import is_metric
from workers.models import ModelSpec, load_source
from workers.settings import WorkerSettings
from workers.tables import nearest

if TYPE_CHECKING:
    from workers.build import variants

_NEEDED: Final = ("onnx", "onnxruntime")
_REFUSED: Final = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command's options; ``None`` or empty: what the model's file says."""

    model: str
    precisions: str | None = None
    calibrate: Path | None = None
    metric: str | None = None
    keep_fp32: tuple[str, ...] = ()


def build(asked: Asked, *, as_json: bool) -> None:
    """Build, print, and end with the exit code that the command's help promises."""
    _check_installed()
    settings = WorkerSettings.load()
    spec = _with(asked, _source_of(settings.config_dir, asked.model))
    precisions = _precisions(asked.precisions, spec)
    try:
        with children.ended_by_signals():
            refused = _run(spec, precisions, threads=settings.threads, as_json=as_json)
    except children.Ended as ended:
        click.echo("fleet: interrupted; what was not finished left no trace.", err=True)
        raise SystemExit(128 + ended.signum) from None
    if refused:
        raise SystemExit(_REFUSED)


def _run(spec: ModelSpec, precisions: list[str], *, threads: int, as_json: bool) -> bool:
    from workers.build import variants

    made = []
    with contextlib.ExitStack() as stack:
        bar = _Bar()
        stack.callback(bar.clear)
        found = variants.build(spec, precisions, threads=threads, progress=bar)
        for built in stack.enter_context(contextlib.closing(found)):
            made.append(built)
            bar.clear()
            if not as_json:
                click.echo(f"{built.text}\n  {_ending(built, spec)}\n")
    if as_json:
        click.echo(
            json.dumps([{"state": built.state, **built.manifest} for built in made], indent=2)
        )
    return any(built.state == "refused" for built in made)


def _ending(built: variants.Built, spec: ModelSpec) -> str:
    """Return the line that says what became of a variant, and what to do with it."""
    precision = built.precision
    if built.state == "refused":
        return "Not kept. Leave its worst nodes in fp32 (--keep-fp32), or calibrate with more rows."
    path = store.variants_folder(spec.folder) / built.manifest["file"]
    done = f"{built.state.capitalize()}: {path}."
    if precision not in spec.build.listed:
        return f'{done} Serve it with precision = "{precision}" in model.toml.'
    if precision == "fp32":
        name = built.manifest["source"]["file"]
        return f'{done} To serve it, write [build] source = "{name}" in place of [engines] fp32.'
    return (
        f"{done} [engines] in model.toml lists another {precision} file, which workers go on "
        "using; without that line they use this one."
    )


def _check_installed() -> None:
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"`fleet build` needs {name}, which is not installed. In the clone: "
                'pip install -e ".[cli,worker]"'
            )


def _source_of(config_dir: Path, name: str) -> ModelSpec:
    root = config_dir / "models"
    there = (
        sorted(folder.name for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else []
    )
    if name not in there:
        raise ConfigError(f"{root}: there is no model {name!r}.{nearest(name, there)}")
    return load_source(root / name)


def _with(asked: Asked, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with the command's options over those of its file."""
    if asked.metric is not None and not is_metric(asked.metric):
        raise ConfigError(f'--metric must be "module:function", not {asked.metric!r}.')
    options = dataclasses.replace(
        spec.build,
        calibrate=asked.calibrate or spec.build.calibrate,
        metric=asked.metric or spec.build.metric,
        keep_fp32=asked.keep_fp32 or spec.build.keep_fp32,
    )
    return dataclasses.replace(spec, build=options)


def _precisions(text: str | None, spec: ModelSpec) -> list[str]:
    from workers.build.variants import BUILT

    if text is None:
        return ["fp16", "int8", "fp8"] if spec.build.calibrate else ["fp16"]
    named = [name.strip() for name in text.split(",") if name.strip()]
    for name in named:
        if name not in BUILT:
            raise ConfigError(f"--precision: {name!r} cannot be built.{nearest(name, BUILT)}")
    if not named:
        raise ConfigError(f"--precision names none of {', '.join(BUILT)}.")
    return [name for name in BUILT if name in named]


class _Bar:
    """A progress bar on standard error, where somebody can see it; gone when it is cleared."""

    def __init__(self) -> None:
        self._shown: Progress | None = None
        self._what, self._task = "", TaskID(0)

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._shown is None or what != self._what:
            self.clear()
            self._show(what)
        assert self._shown is not None
        count = f"{done}/{total}" if total else ""
        self._shown.update(self._task, completed=done, total=total or None, count=count)

    def clear(self) -> None:
        """Leave the line to whoever writes next."""
        if self._shown is not None:
            self._shown.stop()
        self._shown = None

    def _show(self, what: str) -> None:
        console = Console(stderr=True)
        self._what = what
        self._shown = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            console=console,
            transient=True,
            redirect_stdout=False,
            disable=not console.is_terminal,
        )
        self._task = self._shown.add_task(what, total=None, count="")
        self._shown.start()
