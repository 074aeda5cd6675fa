"""The model.toml of a new model: what was found, and beside each key what it means and why."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from typing import Final

from workers.adding.found import Found, Port
from workers.adding.hints import Hints, widened
from workers.adding.report import plain, threads, timing_rows, why_batch, why_wider
from workers.adding.trial import INT8_TOLERANCE

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


def model_file(name: str, file: str, found: Found, hints: Hints) -> str:
    """Return the text of model.toml for the model in ``file``."""
    hints = widened(hints, found.wider)
    return "\n".join([*_head(name, file, found), *_ports(found, hints), *_tail(name)]) + "\n"


def _head(name: str, file: str, found: Found) -> Iterator[str]:
    yield f"# Written by `fleet add` from {plain(file)}; yours to change."
    yield "# After a change start the workers again. Every key: configs/models/digits/model.toml."
    yield f'# In an app: infer.delay("{name}", {{...}}), with the inputs below by name.'
    yield ""
    yield "# What answers as long as memory suffices: the entry of [engines] below."
    yield f'precision = "{found.precision}"'
    yield ""
    yield from _batch(found)
    yield ""
    if found.wider:
        yield "# How far answers to rows run together may differ from those run alone, as a share"
        yield "# of the largest: what the number of rows in a run did to rows of 0 and 1."
        yield f"tolerance = {found.tolerance:g}"
        yield ""
    elif found.precision == "int8":
        yield "# Answers to rows run together may differ from those run alone by ten times this"
        yield "# share of the largest: less than a step of INT8."
        yield f"tolerance = {INT8_TOLERANCE:.4f}"
        yield ""
    yield "# How long a free instance may wait for more jobs. 0: it runs what waits, at once."
    yield "max_queue_delay_s = 0.0"
    yield ""
    yield "# A batch that runs longer, code around the model included, is ended with its process;"
    yield "# until then its instance serves no others. Without it: batch_timeout_s of fleet.toml."
    yield "# time_limit_s = 10"
    yield ""
    yield "# What is tried when a batch ran out of memory: half of it, down to one row."
    if found.precision == "fp32":
        yield f'# After `fleet build {name} --precision fp16`, better: ["fp16/2"].'
    yield 'ladder = ["same/2"]'
    yield ""
    yield "[engines]"
    yield f"{found.precision} = {_quoted(file)}"


def _batch(found: Found) -> Iterator[str]:
    """Yield the largest batch, and what was measured."""
    yield "# At most this many rows in one run."
    yield f"# {plain(why_batch(found))}"
    if found.batches:
        yield f"# {plain(found.runtime)}, {threads(found)}, inputs of one row as below:"
        yield from (f"#   {line}" for line in timing_rows(found))
    yield f"max_batch_size = {found.max_batch_size}"


def _ports(found: Found, hints: Hints) -> Iterator[str]:
    yield ""
    if found.batches:
        yield '# The axis that counts rows; "none": all jobs of a batch have the same value there.'
    else:
        yield "# Declare batch_axis where you know which axis counts rows: a job of several rows is"
        yield "# then cut into runs of one row. If rows influence each other, but so little that it"
        yield "# does no harm, a larger tolerance (above; without it 0.001) and max_batch_size let"
        yield "# them share a run again."
    if wider := why_wider(found):
        yield "#"
        yield from textwrap.wrap(plain(wider), 98, initial_indent="# ", subsequent_indent="# ")
    for side, ports in (("inputs", found.inputs), ("outputs", found.outputs)):
        for port in ports:
            yield ""
            yield f"[{side}.{_key(port.name)}] # {port.dtype} {port.shape}"
            yield _axis_line(port, declared=found.batches)
            if side == "inputs":
                yield from _hint(port, hints)
                yield from _free_axes(port)


def _axis_line(port: Port, *, declared: bool) -> str:
    axis = '"none"' if port.batch_axis is None else str(port.batch_axis)
    return f"{'' if declared else '# '}batch_axis = {axis}"


def _hint(port: Port, hints: Hints) -> Iterator[str]:
    """Yield what the probe is told, now and each time the model is loaded."""
    hint = hints.get(port.name)
    if hint is not None and hint.shape is not None:
        yield f"probe_shape = {list(hint.shape)}"
    if hint is not None and hint.largest != 1:
        yield f"probe_max = {hint.largest!r}"
    if hint is not None and hint.least is not None:
        yield f"probe_min = {hint.least!r}"


def _free_axes(port: Port) -> Iterator[str]:
    if not port.free_axes:
        return
    axes = ", ".join(str(axis) for axis in port.free_axes)
    yield f"# Any size on axis {axes}: jobs of one size share a batch. All sizes share batches"
    yield "# where padding changes no answer, as is tried at load. For each input as long:"
    yield f"# pad = {{ axis = {port.free_axes[0]}, value = 0, to = [16, 32, 64, 128] }}"
    yield "# For TensorRT on a GPU say which sizes there are, as whole shapes of one row; tried"
    yield f"# with {list(port.tried)}:"
    yield f"# min_shape = {list(port.tried)}"
    yield f"# max_shape = {list(port.tried)}"


def _tail(name: str) -> Iterator[str]:
    yield ""
    yield f"# Smaller and faster variants: fleet build {name}. See docs/quantization.md."


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    """Return ``text`` as a TOML string: JSON's escapes, and one more that TOML wants."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
