"""Which file answers in which precision: what [engines] lists, and what `fleet build` made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from producer.contract.errors import ConfigError
from workers.batching.ladder import SAME, parse_step
from workers.build.options import BuildOptions
from workers.build.store import find_variant
from workers.half_precision import is_half_precision
from workers.onnx_file import why_not_onnx
from workers.tables import Table, nearest

PRECISIONS: Final = ("fp32", "fp16", "bf16", "int8", "fp8")
_HALF_PRECISIONS: Final = ("fp16", "bf16")
#: What `fleet build` makes of an fp32 file.
_BUILT: Final = ("fp16", "int8", "fp8")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineFiles:
    """Which file answers in which precision, and what follows when memory runs out."""

    files: Mapping[str, Path | None]
    precision: str
    ladder: tuple[str, ...]


def served(table: Table, folder: Path, build: BuildOptions, *, takes_onnx: bool) -> EngineFiles:
    """Return the engines that answer and those of the ladder; what is not listed was built.

    ``takes_onnx``: the runtime runs ONNX files; an engine of one's own may need no file.
    """
    precision = table.text("precision", "fp32")
    listed = _engines(table, folder, precision, build, takes_onnx=takes_onnx)
    found: dict[str, Path | None] = {}

    def has(name: str) -> bool:
        source = build.source or listed.get("fp32")
        if name not in found and name in listed:
            found[name] = listed[name]
        elif name not in found and source and (built := find_variant(folder, name, source)):
            found[name] = built
        return name in found

    if not has(precision):
        raise _missing(table, "precision", f"is {precision!r}", precision, folder)
    # A twin that the ladder does not name is not looked at: it may be one of an earlier model.
    has_twin = "ladder" not in table and has("fp16")
    ladder = table.texts("ladder", ("fp16/2" if has_twin else f"{SAME}/2",))
    for step in ladder:
        try:
            wanted = parse_step(step).after(precision)
        except ValueError as error:
            raise table.error("ladder", f"{error}") from None
        if not has(wanted):
            instead = f'Or write ladder = ["{SAME}/2"].'
            raise _missing(table, "ladder", f"names {wanted}", wanted, folder, instead=instead)
    needed = {precision, *(parse_step(step).after(precision) for step in ladder)}
    files = {name: found[name] for name in (*listed, *found) if name in needed}
    return EngineFiles(files=files, precision=precision, ladder=ladder)


def _missing(
    table: Table, key: str, says: str, precision: str, folder: Path, *, instead: str = ""
) -> ConfigError:
    """Return the error of a key that ``says`` a precision which there is no file of."""
    if precision not in PRECISIONS:
        unknown = f"which is not a known precision.{nearest(precision, PRECISIONS)}"
        return table.error(key, f"{says}, {unknown}", instead)
    do = f"{_build(folder.name, precision)} {instead}".strip()
    return table.error(key, f"{says}, but [engines] has no such entry.", do)


def source(table: Table, folder: Path, build: BuildOptions, *, takes_onnx: bool) -> EngineFiles:
    """Return the file that variants are made of, as the model's only engine."""
    if not takes_onnx:
        runtime = table.raw("runtime")
        raise table.error("runtime", f"is {runtime!r}; variants are built of ONNX files alone.")
    table.text("precision", "fp32")
    table.texts("ladder", ())
    file = build.source or _listed_source(table, folder)
    table.raw("engines")
    if file is None:
        raise table.error("engines", "lists no fp32 to build from; name it as [build] source.")
    return EngineFiles(files={"fp32": file}, precision="fp32", ladder=(f"{SAME}/2",))


def _listed_source(table: Table, folder: Path) -> Path | None:
    """Return the fp32 file of [engines]. The others may be missing or wrong: they are why people
    build.
    """
    files = table.table("engines")
    listed = None
    for name in files.names():
        _check_precision(files, name)
        if name == "fp32":
            listed = _engine_file(files, name, folder, takes_onnx=True)
    return listed


def _engines(
    table: Table, folder: Path, precision: str, build: BuildOptions, *, takes_onnx: bool
) -> dict[str, Path | None]:
    """Return the file of each precision; an engine of one's own may list precisions alone."""
    listed = table.raw("engines")
    if not takes_onnx and (listed is None or isinstance(listed, list)):
        names = table.texts("engines", (precision,))
        for name in names:
            _check_precision(table, name)
        return dict.fromkeys(names)
    files = table.table("engines")
    engines: dict[str, Path | None] = {}
    for name in files.names():
        _check_precision(files, name)
        engines[name] = _engine_file(files, name, folder, takes_onnx=takes_onnx)
    if not engines and build.source is None:
        raise table.error("engines", 'is missing; write [engines] and fp32 = "model.onnx" below.')
    return engines


def _check_precision(table: Table, name: str) -> None:
    if name not in PRECISIONS:
        raise table.error(name, f"is not a known precision.{nearest(name, PRECISIONS)}")


def _engine_file(files: Table, name: str, folder: Path, *, takes_onnx: bool) -> Path:
    path = folder / files.text(name, "model.onnx")
    if not path.is_file():
        there = [file.name for file in folder.iterdir() if file.suffix not in (".toml", ".md")]
        hint = nearest(path.name, there) + _without(folder.name, name)
        raise files.error(name, f"names {path}, which does not exist.{hint}")
    is_onnx = takes_onnx or path.suffix == ".onnx"
    if is_onnx and (problem := why_not_onnx(path)):
        raise files.error(name, f"names {path}, which {problem}.")
    if name in _HALF_PRECISIONS and path.suffix == ".onnx" and not is_half_precision(path):
        raise files.error(
            name,
            f"names {path}, which computes in float32: it would take as much memory as the model "
            f"it stands in for.{_without(folder.name, name)}",
        )
    return path


def _build(model: str, precision: str) -> str:
    """Return what to do about a missing file, where a command makes it."""
    if precision not in _BUILT:
        return ""
    return f" Build it with `fleet build {model} --precision {precision}`."


def _without(model: str, precision: str) -> str:
    """Return what to do about a listed file that is of no use: what is listed goes before what was
    built.
    """
    if precision not in _BUILT:
        return ""
    return (
        f" Without this line the one is used that `fleet build {model} --precision {precision}` "
        "makes."
    )
