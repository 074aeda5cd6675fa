"""What a model's file says about building its variants: the table [build] of model.toml.

Read with every model; that the files it names exist matters to a build alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from workers.tables import Table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How the variants of one model are made, and what they must reach."""

    #: Precisions that [engines] names a file of; those are served, whatever is built.
    listed: tuple[str, ...] = ()
    #: The file that variants are made of; ``None``: the fp32 of [engines].
    source: Path | None = None
    #: Rows that int8 and fp8 take their ranges from: an .npz with one array for each input.
    calibrate: Path | None = None
    #: Rows that variants are compared on, and whatever else a metric needs; ``None``: `calibrate`.
    test: Path | None = None
    #: The array of `test` that holds the right class of each row, by output.
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: ``module:function``, called as ``function(outputs, data)``.
    metric: str | None = None
    #: Nodes that stay in fp32.
    keep_fp32: tuple[str, ...] = ()
    #: The least share of rows that a variant must answer as fp32 does.
    min_agreement: float = 0.0
    #: The least mean cosine between answers of a variant and of fp32.
    min_cosine: float = 0.9


def read_build(table: Table, folder: Path) -> BuildOptions:
    """Return what the table [build] of ``table`` says; ConfigError for what cannot be meant."""
    build = table.table("build")
    labels = build.table("labels")
    engines = table.raw("engines")
    options = BuildOptions(
        listed=tuple(engines) if isinstance(engines, dict) else (),
        source=_file(build, "source", folder),
        calibrate=_file(build, "calibrate", folder),
        test=_file(build, "test", folder),
        labels={name: labels.text(name, "labels") for name in labels.names()},
        metric=_metric(build),
        keep_fp32=build.texts("keep_fp32", ()),
        min_agreement=_share(build, "min_agreement", 0.0),
        min_cosine=_share(build, "min_cosine", 0.9),
    )
    if options.labels and options.test is None:
        raise build.error("labels", 'needs test = "file.npz", which holds them.')
    build.finish()
    return options


def is_metric(text: str) -> bool:
    """Return whether ``text`` names a function as ``module:function``."""
    module, colon, function = text.partition(":")
    return bool(module and colon and function.isidentifier())


def _file(build: Table, key: str, folder: Path) -> Path | None:
    if key not in build:
        build.raw(key)
        return None
    return folder / build.text(key, f"{key}.npz")


def _metric(build: Table) -> str | None:
    if "metric" not in build:
        build.raw("metric")
        return None
    text = build.text("metric", "measures:word_errors")
    if not is_metric(text):
        raise build.error("metric", f'must be "module:function", not {text!r}.')
    return text


def _share(build: Table, key: str, default: float) -> float:
    value = build.number(key, default)
    if value > 1:
        raise build.error(key, f"must be a share from 0 to 1, not {value:g}.")
    return value
