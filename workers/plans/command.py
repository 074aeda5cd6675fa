"""`fleet build MODEL --plans`: the plans of what a model serves, for the GPU of this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Final

import click

from producer.contract.errors import ConfigError
from workers import children
from workers.engines.nvidia import open_nvidia
from workers.models import RUNTIMES, load_models
from workers.plans.making import Made, make_plans, workshop_of
from workers.settings import WorkerSettings

_CLEAR: Final = "\r\x1b[K"


def build_plans(model: str, *, as_json: bool) -> None:
    """Build, print, and end as the command's help promises."""
    settings = WorkerSettings.load()
    spec = load_models(settings.config_dir, [model])[model]
    if spec.runtime not in RUNTIMES:
        raise ConfigError(f"{model}: runtime is {spec.runtime!r}, which takes no plans of ours.")
    workshop = workshop_of(open_nvidia())
    try:
        with children.ended_by_signals():
            made = make_plans(spec, workshop, tell=_tell)
    except children.Ended as ended:
        click.echo("fleet: interrupted; what was not finished left no trace.", err=True)
        raise SystemExit(128 + ended.signum) from None
    _tell("")
    _print(made, as_json=as_json)


def _tell(text: str) -> None:
    """Show progress in one line, where somebody can see it."""
    if sys.stderr.isatty():
        click.echo(f"{_CLEAR}{text}", err=True, nl=False)


def _print(made: Sequence[Made], *, as_json: bool) -> None:
    if as_json:
        said = [
            {
                "precision": each.precision,
                "state": "built" if each.why else "unchanged",
                "path": str(each.path),
                "why": each.why,
                "build_s": round(each.build_s, 1),
            }
            for each in made
        ]
        click.echo(json.dumps(said, indent=2))
        return
    for each in made:
        how = f"built in {each.build_s:.0f} s ({each.why})" if each.why else "unchanged"
        click.echo(f"{each.precision}: {each.path}, {how}")
