"""Rows of a user's own for calibration and comparison: an .npz, checked against the model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from producer.contract.errors import ConfigError
from workers.batching.stacking import Array
from workers.engines.base import EngineRefused
from workers.models import TensorSpec
from workers.tables import nearest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The inputs of many rows, as one array for each input."""

    #: Where they come from, for people.
    origin: str
    inputs: Mapping[str, Array]
    axes: Mapping[str, int | None]
    count: int
    #: What else the file holds: labels, and whatever a metric needs.
    others: Mapping[str, Array] = dataclasses.field(default_factory=dict)

    def batches(self, size: int) -> Iterator[dict[str, Array]]:
        """Yield the inputs of at most ``size`` rows at a time."""
        for start in range(0, self.count, size):
            yield {
                name: value
                if (axis := self.axes[name]) is None
                else value[(slice(None),) * axis + (slice(start, start + size),)]
                for name, value in self.inputs.items()
            }

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Name these rows where an engine refuses one of their values."""
        try:
            yield
        except EngineRefused as error:
            raise ConfigError(f"{self.origin}: the model refuses its rows. {error}") from error

    def multiple_of(self, size: int) -> Rows:
        """Return as many of the rows as fill runs of ``size``."""
        count = self.count - self.count % size
        if count == 0:
            raise ConfigError(f"{self.origin}: holds {self.count} rows; the model takes {size}.")
        whole = next(self.batches(count))
        return dataclasses.replace(self, inputs=whole, count=count)


def read_rows(path: Path, inputs: Sequence[TensorSpec], *, others_allowed: bool = False) -> Rows:
    """Return the rows of ``path``; ConfigError says what does not fit the model's ``inputs``."""
    arrays = _arrays(path)
    known = [tensor.name for tensor in inputs]
    for name in known:
        if name not in arrays:
            raise ConfigError(
                f"{path}: holds no array {name!r}, which is an input of the model. "
                f"It holds: {', '.join(sorted(arrays)) or 'nothing'}."
            )
    others = {name: value for name, value in arrays.items() if name not in known}
    if others and not others_allowed:
        extra = min(others)
        raise ConfigError(f"{path}: {extra!r} is no input of the model.{nearest(extra, known)}")
    for tensor in inputs:
        _check(path, tensor, arrays[tensor.name])
    axes = {tensor.name: tensor.batch_axis for tensor in inputs}
    counts = {name: arrays[name].shape[axis] for name, axis in axes.items() if axis is not None}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(f"{path}: its arrays differ in their number of rows: {said}.")
    count = next(iter(counts.values()), 1)
    if count == 0:
        raise ConfigError(f"{path}: holds no rows.")
    return Rows(
        origin=path.name,
        inputs={name: arrays[name] for name in known},
        axes=axes,
        count=count,
        others=others,
    )


def _arrays(path: Path) -> dict[str, Array]:
    try:
        # Opened here: numpy leaves a file open that turns out to be none of its own.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
            if others := [name for name, value in found.items() if isinstance(value, bytes)]:
                raise ValueError(f"{others[0]!r} is no array.")
            return found
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except Exception as error:
        # numpy, zipfile and what unpacks a member have errors of their own each. Not in their
        # words: numpy's advise to load it unsafely.
        raise ConfigError(
            f"{path}: is not an .npz of plain arrays; write it with numpy.savez."
        ) from error


def _check(path: Path, tensor: TensorSpec, value: Array) -> None:
    if value.dtype != np.dtype(tensor.dtype):
        raise ConfigError(
            f"{path}: {tensor.name!r} is {value.dtype}, the model takes {tensor.dtype}; "
            f'store it with .astype("{tensor.dtype}").'
        )
    wanted = [None if axis == tensor.batch_axis else size for axis, size in enumerate(tensor.shape)]
    fits = len(wanted) == value.ndim and all(
        size is None or size == found for size, found in zip(wanted, value.shape, strict=True)
    )
    if not fits:
        shown = [
            "rows" if axis == tensor.batch_axis else "any" if size is None else size
            for axis, size in enumerate(tensor.shape)
        ]
        raise ConfigError(
            f"{path}: {tensor.name!r} has shape {list(value.shape)}, the model takes "
            f"[{', '.join(map(str, shown))}]."
        )
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise ConfigError(f"{path}: {tensor.name!r} holds values that are not finite.")
