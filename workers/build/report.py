"""What a build found out about one variant, for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from workers.build.compare import Difference

_NAMES_SHOWN: Final = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Rows answered in a second on this machine, with the threads of one instance."""

    rows: int
    fp32_rows_per_s: float
    rows_per_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One variant beside the fp32 file that it was made of."""

    size_bytes: int
    source_bytes: int
    #: Conv, MatMul and Gemm that compute in the variant's precision, of those there are.
    converted: Mapping[str, int]
    candidates: Mapping[str, int]
    #: Nodes that stayed in fp32: asked for, or because fp16 cannot hold their values.
    kept_fp32: tuple[str, ...]
    #: Rows in one run, at most, as the probe found; and why no more.
    max_rows: int
    why: str
    #: The file whose rows were compared.
    compared_on: str
    outputs: Mapping[str, Difference]
    #: Right answers by output, as shares: of fp32 and of the variant.
    accuracy: Mapping[str, tuple[float, float]]
    #: What the user's own metric says of fp32 and of the variant; ``None`` without one.
    metric: tuple[float, float] | None
    speed: tuple[Speed, ...]
    #: Why it is not good enough; empty when it is.
    refused: str = ""

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def lines(title: str, report: Report, *, metric: str | None) -> Iterator[str]:
    """Yield the report as text."""
    yield title
    share = report.size_bytes / report.source_bytes
    yield f"  size        {report.size_bytes:,} bytes, {share:.0%} of the source"
    if report.converted:
        yield f"  converted   {counts(report)}"
    if report.kept_fp32:
        yield f"  in fp32     {_some(report.kept_fp32)}"
    yield f"  batch       up to {report.max_rows} rows{f': {report.why}' if report.why else ''}"
    for name, difference in report.outputs.items():
        rows = "1 row" if difference.rows == 1 else f"{difference.rows} rows"
        yield f"  {name}: {rows} of {report.compared_on} beside fp32"
        yield f"    difference  largest {difference.max_abs:.3g}, mean {difference.mean_abs:.3g}"
        if difference.cosine_mean is not None:
            yield (
                f"    cosine      mean {difference.cosine_mean:.6f}, "
                f"least {difference.cosine_least:.6f}"
            )
        if difference.top1_agreement is not None:
            yield f"    same top 1  {difference.top1_agreement:.2%}"
        if difference.not_finite:
            yield f"    not finite  {difference.not_finite} values"
        if name in report.accuracy:
            before, after = report.accuracy[name]
            right = round(after * difference.rows)
            yield (f"    accuracy    {after:.2%} ({right} of {difference.rows}), fp32 {before:.2%}")
    if report.metric is not None:
        yield f"  {metric}  {report.metric[1]:.6g}, fp32 {report.metric[0]:.6g}"
    for speed in report.speed:
        yield (
            f"  speed here  batch of {speed.rows}: {speed.rows_per_s:,.0f} rows/s, "
            f"fp32 {speed.fp32_rows_per_s:,.0f}"
        )
    if report.refused:
        yield f"  refused     {report.refused}"


def _some(names: Sequence[str]) -> str:
    """Return the first of many names, and how many more there are; the manifest has them all."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def counts(report: Report) -> str:
    """Return which nodes were converted, such as ``2 of 2 Conv, 2 of 2 Gemm``."""
    return ", ".join(
        f"{report.converted.get(kind, 0)} of {count} {kind}"
        for kind, count in report.candidates.items()
    )
