"""Which precisions are fast on which GPUs: a table by compute capability, not by product.

TensorRT 11 no longer tells, so the table is ours. Sources: NVIDIA's data sheets of each chip; of
the B300 the dense rates that verda.com/blog/gb300-nvl72-architecture lists, which agree with
NVIDIA's sums for whole systems. Nothing of it was measured by us.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from workers.finding import Finding, State


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What chips of one compute capability are good at."""

    chips: str
    #: The first is what to quantise to.
    fast: tuple[str, ...]
    #: With the reason; fp32 is slow everywhere and not among them.
    slow: tuple[tuple[str, str], ...] = ()


_B300_INT8: Final = "0.15 POPS dense, against 2.25 PFLOPS in fp16 and 4.5 in fp8"

_TABLE: Final = {
    (7, 5): Speeds(chips="T4", fast=("int8", "fp16")),
    (8, 0): Speeds(chips="A100", fast=("int8", "fp16", "bf16")),
    (8, 6): Speeds(chips="A10, A40", fast=("int8", "fp16", "bf16")),
    (8, 9): Speeds(chips="L4, L40", fast=("fp8", "int8", "fp16", "bf16")),
    (9, 0): Speeds(chips="H100, H200", fast=("fp8", "int8", "fp16", "bf16")),
    (10, 0): Speeds(chips="B200", fast=("fp8", "int8", "fp16", "bf16")),
    (10, 3): Speeds(
        chips="B300, GB300", fast=("fp8", "fp16", "bf16"), slow=(("int8", _B300_INT8),)
    ),
    (12, 0): Speeds(chips="RTX PRO 6000", fast=("fp8", "int8", "fp16", "bf16")),
    (12, 1): Speeds(chips="GB10", fast=("fp8", "int8", "fp16", "bf16")),
}

#: The first chips that have a precision at all.
_SINCE: Final = {"bf16": (8, 0), "fp8": (8, 9)}


def speeds_of(capability: tuple[int, int] | None) -> Speeds | None:
    """Return the line of the table, None for chips that are not in it."""
    return _TABLE.get(capability) if capability else None


def fast(capabilities: Iterable[tuple[int, int]]) -> Iterator[Finding]:
    """Yield a line for each compute capability that is here."""
    for capability in capabilities:
        check, speeds = f"precisions {_name(capability)}", speeds_of(capability)
        if speeds is None:
            text = "Which precisions are fast on these GPUs is in no table of ours."
            yield Finding(check, State.OK, f"{text} Measure: `fleet build` says rows per second.")
            continue
        slow = "".join(
            f" {name} is slow: {why}. {speeds.fast[0]} is right there." for name, why in speeds.slow
        )
        names = ", ".join(speeds.fast)
        yield Finding(check, State.OK, f"Fast on {speeds.chips}: {names}.{slow}")


def unfit(
    served: Iterable[tuple[str, str]], capabilities: Sequence[tuple[int, int]]
) -> Iterator[Finding]:
    """Yield a finding for each model and precision that does not suit a GPU that is here."""
    for model, precision in served:
        for capability in capabilities:
            if found := _unfit(model, precision, capability):
                yield found


def _unfit(model: str, precision: str, capability: tuple[int, int]) -> Finding | None:
    check, name = f"precision {model}", _name(capability)
    speeds = speeds_of(capability)
    if capability < _SINCE.get(precision, (0, 0)):
        better = speeds.fast[0] if speeds else "fp16"
        text = f"{model} is served in {precision}, which GPUs of compute capability {name} lack."
        return Finding(check, State.ERROR, text, _instead(model, better))
    slow = dict(speeds.slow) if speeds else {}
    if speeds is None or precision not in slow:
        return None
    text = (
        f"{model} is served in {precision}, which is slow on {speeds.chips} ({name}): "
        f"{slow[precision]}. {speeds.fast[0]} is right there."
    )
    return Finding(check, State.WARNING, text, _instead(model, speeds.fast[0]))


def _instead(model: str, precision: str) -> str:
    return f'fleet build {model} --precision {precision}, then precision = "{precision}".'


def _name(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
