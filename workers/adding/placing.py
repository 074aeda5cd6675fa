"""How a new model gets into configs/models: whole or not at all, one at a time.

    configs/models/
        .adding-*/<name>/     half-made; gone when the command ends, or when the next one begins
        .<name>.before/       what --replace took away, kept until the next time
        <name>/               in one step

Names that begin with a dot are no models.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from producer.contract.errors import ConfigError
from workers.adding.graph import Graph
from workers.models import MODEL_FILE

_SCRATCH: Final = ".adding-"


@contextlib.contextmanager
def scratch(models: Path) -> Iterator[Path]:
    """Yield a folder for a half-made model, on the disk where it belongs; it is gone after the
    block, and so is ``models`` if nothing came of it.
    """
    models.mkdir(parents=True, exist_ok=True)
    try:
        with _alone(models):
            _remove_leftovers(models)
            with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=models) as name:
                yield Path(name)
    except BaseException:
        with contextlib.suppress(OSError):
            models.rmdir()
        raise


def copy_model(graph: Graph, folder: Path) -> Path:
    """Copy the model with the files of its weights; return where it lies then."""
    folder.mkdir()
    for file in (graph.path, *graph.external):
        target = folder / os.path.relpath(file, graph.path.parent)
        if target.relative_to(folder).parts[0] == MODEL_FILE:
            raise ConfigError(
                f"{file}: this is the name of the file that says how a model is run, and of a file "
                "of the model as well. Save the model again under other names: onnx.save(model, "
                "'model.onnx', save_as_external_data=True, location='weights.bin')."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    return folder / graph.path.name


def check_free(models: Path, name: str, *, replace: bool) -> None:
    """Raise ConfigError when there is something of this name that may not be replaced."""
    if not replace and os.path.lexists(models / name):
        raise ConfigError(
            f"{models / name}: there is a model {name!r} already. Choose another with --name, or "
            "take its place with --replace."
        )


def put_in_place(made: Path, models: Path, *, replace: bool) -> Path:
    """Move a whole model to where workers look; return its folder."""
    folder = models / made.name
    check_free(models, made.name, replace=replace)
    if not os.path.lexists(folder):
        made.rename(folder)
        return folder
    before = before_of(folder)
    if before.exists():
        shutil.rmtree(before)
    folder.rename(before)
    try:
        made.rename(folder)
    except BaseException:
        before.rename(folder)
        raise
    return folder


def before_of(folder: Path) -> Path:
    """Return where the model is kept that ``folder`` took the place of."""
    return folder.with_name(f".{folder.name}.before")


@contextlib.contextmanager
def _alone(models: Path) -> Iterator[None]:
    """Hold the only `fleet add` of this configuration; the kernel lets go when we are killed."""
    descriptor = os.open(models, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{models}: another `fleet add` is at work here; try again when it has ended."
            ) from None
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(models: Path) -> None:
    for left in models.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
