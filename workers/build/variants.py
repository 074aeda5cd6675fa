"""The build itself: each asked precision of one model is made, checked, measured and published."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import onnx

from producer.contract.errors import ConfigError, FleetError
from workers.build import calibration, graph, quantize, store
from workers.build.evaluation import Reference, evaluated
from workers.build.free_batch import with_free_batch
from workers.build.half import beyond, halved
from workers.build.metric import Metric, load_metric
from workers.build.opened import opened
from workers.build.options import BuildOptions
from workers.build.report import Report, lines
from workers.build.rows import Rows, read_rows
from workers.models import ModelSpec
from workers.tables import nearest

#: What can be built, in the order it is built in.
BUILT: Final = ("fp32", "fp16", "int8", "fp8")

#: Told what is done, how much of it, and how much there is.
Progress = Callable[[str, int, int], None]

#: Rows whose ranges are looked at together.
_CALIBRATED_AT_A_TIME: Final = 8

_LARGEST_BYTES: Final = (1 << 31) - (1 << 20)
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What became of one asked precision."""

    precision: str
    #: ``built``, ``unchanged`` (it was there already) or ``refused``.
    state: str
    manifest: dict[str, Any]
    text: str


def build(
    spec: ModelSpec, precisions: Sequence[str], *, threads: int, progress: Progress
) -> Generator[Built]:
    """Yield what became of each of ``precisions``; ConfigError for what cannot be built at all.

    ``spec`` is the model with its source as fp32, and the options to build with.
    """
    folder = store.variants_folder(spec.folder)
    with (
        _room(folder),
        store.locked(
            folder, waiting=lambda: progress("waiting for another build of this model", 0, 0)
        ),
        store.scratch(folder) as scratch,
        contextlib.ExitStack() as stack,
    ):
        bench = _Bench(spec, scratch, stack, threads=threads, progress=progress)
        for precision in precisions:
            yield bench.unchanged(precision) or bench.build(precision)


@contextlib.contextmanager
def _room(folder: Path) -> Iterator[None]:
    """Say in one line that a disk is full or may not be written."""
    try:
        yield
    except OSError as error:
        advice = "Free some space" if error.errno in _NO_ROOM else "Let this user write there"
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror or error}; no variant was changed. "
            f"{advice}, or set FLEET_CACHE to a folder elsewhere."
        ) from error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """A converted model that was not looked at yet."""

    model: onnx.ModelProto
    converted: dict[str, int]
    #: Nodes that stayed in fp32, asked for or because they had to.
    kept: list[str]


class _Bench:
    """Everything that the precisions of one build share."""

    def __init__(
        self,
        spec: ModelSpec,
        scratch: Path,
        stack: contextlib.ExitStack,
        *,
        threads: int,
        progress: Progress,
    ) -> None:
        source, options = spec.engines["fp32"], spec.build
        assert source is not None
        self._spec, self._scratch, self._stack = spec, scratch, stack
        self._threads, self._progress = threads, progress
        self._source: Path = source
        self._options: BuildOptions = options
        progress("reading", 0, 0)
        self._model = graph.read_source(source)
        files = (source, *graph.external_files(source))
        self._source_bytes = sum(path.stat().st_size for path in files)
        self._check_size(self._source_bytes)
        self._sums = graph.digests(source)
        self._metric: Metric | None = (
            load_metric(options.metric, spec.folder) if options.metric else None
        )
        self._base: onnx.ModelProto | None = None
        self._reference: Reference | None = None

    def unchanged(self, precision: str) -> Built | None:
        """Return the variant that is there, if it was made of exactly what is given now."""
        folder = store.variants_folder(self._spec.folder)
        manifest = store.read_manifest(folder, precision)
        if manifest is None or manifest["key"] != self._key(precision):
            return None
        try:
            store.find_variant(self._spec.folder, precision, self._source)
            text = (folder / manifest["text"]).read_text(encoding="utf-8")
        except (ConfigError, OSError):
            return None
        return Built(precision=precision, state="unchanged", manifest=manifest, text=text)

    def build(self, precision: str) -> Built:
        """Make one variant, look at it, and publish it if it is good enough."""
        key = self._key(precision)
        path = self._scratch / f"{precision}-{key[:12]}.onnx"
        self._progress(f"{precision}: converting", 0, 0)
        made = self._variant(precision)
        onnx.save(made.model, path)
        graph.check(path)
        candidates = quantize.candidates(self._prepared())
        if precision != "fp32" and not made.converted and (candidates or precision != "fp16"):
            raise ConfigError(
                f"{self._source}: {precision} would change nothing: none of its "
                f"{', '.join(f'{count} {kind}' for kind, count in candidates.items()) or 'nodes'} "
                f"could be converted."
            )
        report = evaluated(
            self._the_reference(),
            path,
            precision,
            converted=made.converted,
            candidates=candidates,
            kept=made.kept,
            progress=self._progress,
        )
        text = "\n".join(lines(self._title(precision), report, metric=self._options.metric))
        manifest = self._manifest(precision, key, path, report)
        if report.refused:
            path.unlink()
            return Built(precision=precision, state="refused", manifest=manifest, text=text)
        readable = path.with_suffix(".txt")
        readable.write_text(text + "\n", encoding="utf-8")
        store.publish(
            store.variants_folder(self._spec.folder),
            (path, readable),
            precision=precision,
            manifest=manifest,
        )
        return Built(precision=precision, state="built", manifest=manifest, text=text)

    # -- the graph ------------------------------------------------------------------------------

    def _variant(self, precision: str) -> _Variant:
        model, keep = self._prepared(), list(self._options.keep_fp32)
        if precision == "fp32":
            return _Variant(model=model, converted={}, kept=[])
        if precision == "fp16":
            keep += [name for name in beyond(model, self._ranges_compared) if name not in keep]
            half, converted = halved(model, keep=keep)
            return _Variant(model=half, converted=converted, kept=keep)
        made, converted = quantize.quantized(model, self._ranges_calibrated, precision, keep=keep)
        return _Variant(model=made, converted=converted, kept=keep)

    def _prepared(self) -> onnx.ModelProto:
        """Return the source with its constants folded and, where it bears that, a free batch."""
        if self._base is None:
            model = graph.prepared(self._model)
            # Weights that were stored in fewer bits have grown.
            self._check_size(sum(len(tensor.raw_data) for tensor in model.graph.initializer))
            self._check_kept(model)
            self._base = self._freed(model) or model
        return self._base

    def _check_size(self, nbytes: int) -> None:
        if nbytes > _LARGEST_BYTES:
            raise ConfigError(
                f"{self._source}: models of more than 2 GiB in fp32 cannot be built yet."
            )

    def _freed(self, model: onnx.ModelProto) -> onnx.ModelProto | None:
        freed = with_free_batch(model, self._spec)
        if freed is None:
            return None
        path = self._scratch / "freed.onnx"
        onnx.save(freed, path)
        try:
            with opened(self._spec, path, "fp32", threads=self._threads) as found:
                return freed if found.batching.max_rows > 1 else None
        except FleetError:
            return None
        finally:
            path.unlink()

    def _check_kept(self, model: onnx.ModelProto) -> None:
        names = [node.name for node in model.graph.node]
        for name in self._options.keep_fp32:
            if name not in names:
                raise ConfigError(
                    f"{self._source}: has no node {name!r} to keep in fp32.{nearest(name, names)}"
                )

    # -- the rows -------------------------------------------------------------------------------

    @functools.cached_property
    def _calibration(self) -> Rows:
        options, reference = self._options, self._the_reference()
        if options.calibrate is None:
            raise ConfigError(
                f"{self._spec.name}: int8 and fp8 need rows to calibrate with: --calibrate "
                'rows.npz, or calibrate = "rows.npz" below [build] of model.toml.'
            )
        rows = read_rows(options.calibrate, reference.inputs)
        return rows.multiple_of(reference.fixed_rows)

    @functools.cached_property
    def _ranges_calibrated(self) -> dict[str, float]:
        return self._seen(self._calibration)

    @functools.cached_property
    def _ranges_compared(self) -> dict[str, float]:
        """Return ranges on what there is: fp16 needs no rows to calibrate with."""
        if self._options.calibrate is not None:
            return self._ranges_calibrated
        return self._seen(self._the_reference().rows)

    def _seen(self, rows: Rows) -> dict[str, float]:
        """Return the largest magnitude of every float32 tensor while ``rows`` run."""
        reference, model = self._the_reference(), self._prepared()
        names = graph.floats(model)
        path = self._scratch / "ranges.onnx"
        onnx.save(calibration.with_ranges(model, names), path)
        size = min(reference.rows_a_run, reference.fixed_rows * _CALIBRATED_AT_A_TIME)
        done, total = 0, -(-rows.count // size)

        def advance() -> None:
            nonlocal done
            done += 1
            self._progress(f"looking at ranges on {rows.origin}", done, total)

        try:
            with rows.blamed():
                return calibration.ranges(
                    self._spec,
                    path,
                    names,
                    rows,
                    size=size,
                    threads=self._threads,
                    advance=advance,
                )
        finally:
            path.unlink()

    def _the_reference(self) -> Reference:
        if self._reference is None:
            found = opened(self._spec, self._source, "fp32", threads=self._threads)
            self._reference = Reference(
                spec=self._spec,
                opened=self._stack.enter_context(found),
                source_bytes=self._source_bytes,
                metric=self._metric,
                threads=self._threads,
            )
        return self._reference

    # -- the manifest ---------------------------------------------------------------------------

    def _key(self, precision: str) -> str:
        """Return the digest of everything that goes into a variant and its report."""
        parts = {
            "format": store.FORMAT,
            "source": self._sums,
            "precision": precision,
            **self._recipe(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _recipe(self) -> dict[str, Any]:
        options = self._options
        return {
            "options": {
                "calibrate": _sum_of(options.calibrate),
                "test": _sum_of(options.test),
                "labels": dict(options.labels),
                "metric": [self._metric.name, self._metric.sha256] if self._metric else None,
                "keep_fp32": list(options.keep_fp32),
                "min_agreement": options.min_agreement,
                "min_cosine": options.min_cosine,
                "batch_axes": [self._spec.batch_axes_in, self._spec.batch_axes_out],
            },
            "versions": {
                name: importlib.metadata.version(name) for name in ("onnx", "onnxruntime", "numpy")
            },
        }

    def _manifest(self, precision: str, key: str, path: Path, report: Report) -> dict[str, Any]:
        return {
            "format": store.FORMAT,
            "model": self._spec.name,
            "precision": precision,
            "key": key,
            "file": path.name,
            "files": {path.name: store.digest(path)},
            "text": path.with_suffix(".txt").name,
            "source": {"file": self._source.name, "files": self._sums},
            **self._recipe(),
            "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "report": report.as_json(),
        }

    def _title(self, precision: str) -> str:
        return f"{self._spec.name} {precision}, from {self._source.name}"


def _sum_of(path: Path | None) -> str | None:
    if path is None:
        return None
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file.")
    return store.digest(path)
