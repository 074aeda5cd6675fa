"""One variant, run beside the file it was made of: what differs, how right it is, how fast."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from producer.contract.errors import ConfigError
from workers.batching.stacking import Array
from workers.build.compare import Comparison, Difference, accuracy, why_refused
from workers.build.metric import Metric
from workers.build.opened import Opened, opened
from workers.build.report import Report, Speed
from workers.build.rows import Rows, read_rows
from workers.models import ModelSpec, TensorSpec
from workers.tables import nearest

#: Rows that are run and compared at a time.
_ROWS_AT_A_TIME: Final = 32

Outputs = Mapping[str, list[Array]]


@dataclasses.dataclass(kw_only=True)
class Reference:
    """The source in fp32, and the rows on which variants are compared with it."""

    spec: ModelSpec
    opened: Opened
    source_bytes: int
    metric: Metric | None
    threads: int

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        return self.opened.inputs

    @property
    def fixed_rows(self) -> int:
        return self.opened.fixed_rows

    @property
    def rows_a_run(self) -> int:
        return self.opened.rows_a_run

    @property
    def rows_at_a_time(self) -> int:
        """Return how many rows are compared at a time: whole runs of the source."""
        return self.fixed_rows * max(1, _ROWS_AT_A_TIME // self.fixed_rows)

    @cached_property
    def rows(self) -> Rows:
        """Return the user's test rows, else the calibration's, else the probe's own."""
        options = self.spec.build
        if options.test is not None:
            found = read_rows(options.test, self.inputs, others_allowed=True)
            self._check_labels(found)
        elif options.calibrate is not None:
            found = read_rows(options.calibrate, self.inputs)
        else:
            found = self._made_up()
        return found.multiple_of(self.fixed_rows)

    @cached_property
    def answers(self) -> list[dict[str, Array]]:
        """Return what the source answers, run once for all variants."""
        with self.rows.blamed():
            return list(self.opened.answers(self.rows, at_a_time=self.rows_at_a_time))

    def _made_up(self) -> Rows:
        feeds = self.opened.batching.row
        return Rows(
            origin="made-up values",
            inputs=feeds,
            axes={tensor.name: tensor.batch_axis for tensor in self.inputs},
            count=self.fixed_rows,
        )

    def _check_labels(self, rows: Rows) -> None:
        known = [tensor.name for tensor in self.opened.outputs]
        for output, array in self.spec.build.labels.items():
            if output not in known:
                raise ConfigError(
                    f"{self.spec.name}: labels name an output {output!r}, which the model does "
                    f"not have.{nearest(output, known)}"
                )
            if array not in rows.others:
                raise ConfigError(
                    f"{rows.origin}: holds no array {array!r} with labels."
                    f"{nearest(array, rows.others)}"
                )
            labels = rows.others[array]
            if labels.dtype.kind not in "biu":
                raise ConfigError(
                    f"{rows.origin}: {array!r} is {labels.dtype}; labels are whole numbers: the "
                    "place of the right class."
                )
            if labels.ndim == 0 or len(labels) != rows.count:
                count = len(labels) if labels.ndim else "no row of"
                raise ConfigError(
                    f"{rows.origin}: {array!r} holds {count} labels for {rows.count} rows."
                )


def evaluated(
    reference: Reference,
    path: Path,
    precision: str,
    *,
    converted: Mapping[str, int],
    candidates: Mapping[str, int],
    kept: Sequence[str],
    progress: Callable[[str, int, int], None],
) -> Report:
    """Return what ``path`` is like, run in the engine that will serve it."""
    spec = reference.spec
    with opened(spec, path, precision, threads=reference.threads) as variant:
        axes = {tensor.name: tensor.batch_axis for tensor in variant.outputs}
        found, differences = _compared(
            reference, variant, axes, tell=partial(progress, f"{precision}: comparing with fp32")
        )
        progress(f"{precision}: measuring", 0, 0)
        return Report(
            size_bytes=path.stat().st_size,
            source_bytes=reference.source_bytes,
            converted=converted,
            candidates=candidates,
            kept_fp32=tuple(kept),
            max_rows=variant.batching.max_rows,
            why=variant.batching.why,
            compared_on=reference.rows.origin,
            outputs=differences,
            accuracy=_accuracy(reference, found, axes),
            metric=_metric(reference, found, axes),
            speed=_speed(reference, variant),
            refused=why_refused(
                differences,
                min_agreement=spec.build.min_agreement,
                min_cosine=spec.build.min_cosine,
            ),
        )


def _compared(
    reference: Reference,
    variant: Opened,
    axes: Mapping[str, int | None],
    *,
    tell: Callable[[int, int], None],
) -> tuple[list[dict[str, Array]], dict[str, Difference]]:
    """Return what a variant answers to all rows, and how far each output is from fp32.

    ``tell`` is told how many parts of how many are done.
    """
    rows, size = reference.rows, reference.rows_at_a_time
    comparisons = {name: Comparison(axis) for name, axis in axes.items()}
    found: list[dict[str, Array]] = []
    for number, answer in enumerate(variant.answers(rows, at_a_time=size)):
        tell(number + 1, -(-rows.count // size))
        for name, comparison in comparisons.items():
            _compare(comparison, name, reference.answers[number], answer)
        found.append(answer)
    return found, {name: made.difference() for name, made in comparisons.items()}


def _compare(
    comparison: Comparison, name: str, expected: Mapping[str, Array], found: Mapping[str, Array]
) -> None:
    before, after = expected[name], found[name]
    if before.shape != after.shape:
        raise ConfigError(
            f"output {name!r} has shape {list(after.shape)}, and {list(before.shape)} in fp32."
        )
    comparison.add(before, after)


def _accuracy(
    reference: Reference, found: Sequence[Mapping[str, Array]], axes: Mapping[str, int | None]
) -> dict[str, tuple[float, float]]:
    shares = {}
    for output, array in reference.spec.build.labels.items():
        labels = reference.rows.others[array][: reference.rows.count]
        axis = axes[output]
        before, after = (
            accuracy(_whole(answers, output, axis), labels, axis=axis)
            for answers in (reference.answers, found)
        )
        shares[output] = (before, after)
    return shares


def _metric(
    reference: Reference, found: Sequence[Mapping[str, Array]], axes: Mapping[str, int | None]
) -> tuple[float, float] | None:
    if reference.metric is None:
        return None
    data: dict[str, Any] = {**reference.rows.inputs, **reference.rows.others}
    before, after = (
        reference.metric.of({name: _whole(answers, name, axes[name]) for name in axes}, data)
        for answers in (reference.answers, found)
    )
    return before, after


def _whole(answers: Sequence[Mapping[str, Array]], name: str, axis: int | None) -> Array:
    return np.concatenate([answer[name] for answer in answers], axis=axis or 0)


def _speed(reference: Reference, variant: Opened) -> tuple[Speed, ...]:
    """Return how fast both are with one row and with as many as both take."""
    first = reference.opened
    most = min(first.rows_a_run, variant.rows_a_run, reference.rows.count)
    sizes = sorted({reference.fixed_rows, most})
    speeds = []
    for size in sizes:
        feeds = next(reference.rows.batches(size))
        speeds.append(
            Speed(
                rows=size,
                fp32_rows_per_s=first.rows_per_s(feeds, size),
                rows_per_s=variant.rows_per_s(feeds, size),
            )
        )
    return tuple(speeds)
