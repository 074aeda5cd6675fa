"""The Python code around one model: `preprocess` before its engine, `postprocess` behind it.

Both run in threads beside the engine, each job by itself: what one raises or returns ends its own
job alone. Errors name classes, types and what the code itself says, never a value.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from producer.contract import wire
from producer.contract.errors import (
    BadMessage,
    BadRequest,
    ConfigError,
    FleetError,
    ModelCodeFailed,
)
from workers.beside import named_class
from workers.error_text import one_line, with_place
from workers.models import ModelSpec

Hook: TypeAlias = Callable[..., Any]
Pool: TypeAlias = concurrent.futures.ThreadPoolExecutor


class Hooks:
    """The code of one model, loaded, and the threads that it runs in."""

    def __init__(self, made: object, *, model: str, threads: int) -> None:
        self._preprocess = _method(made, "preprocess", model=model)
        self._postprocess = _method(made, "postprocess", model=model)
        if self._preprocess is None and self._postprocess is None:
            raise ConfigError(
                f"{model}: {type(made).__name__} has neither preprocess nor postprocess."
            )
        # Apart, so that no answer waits behind the inputs of the next batch.
        self.before = _pool(threads, "preprocess")
        self.behind = _pool(threads, "postprocess")

    @property
    def has_preprocess(self) -> bool:
        return self._preprocess is not None

    @property
    def has_postprocess(self) -> bool:
        return self._postprocess is not None

    @property
    def names(self) -> list[str]:
        """Return which hooks there are, for people."""
        there = {"preprocess": self.has_preprocess, "postprocess": self.has_postprocess}
        return [name for name, has in there.items() if has]

    def preprocess(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what one job's inputs become for the engine; ``FleetError`` for its fault."""
        if self._preprocess is None:
            return inputs
        arrays = _called("preprocess", self._preprocess, dict(inputs))
        if not isinstance(arrays, Mapping):
            raise _wrong_kind("preprocess", "a dict of arrays", arrays)
        # Copies: the code may fill the same array for the next job, before this one has run.
        return {
            name: np.array(array) if isinstance(array, np.ndarray) else array
            for name, array in arrays.items()
        }

    def postprocess(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
        """Return one job's reply; ``FleetError`` for what the code raised or returned."""
        if self._postprocess is None:
            return outputs
        # Copies: what an output shares with other jobs must not be changed for them.
        own = {name: np.array(array) for name, array in outputs.items()}
        reply = _called("postprocess", self._postprocess, own, dict(inputs))
        try:
            # As it is read: what fails fails here, one job and beside the engine. And what the code
            # keeps of it is not the reply any more: it may change that for the next job.
            return wire.loads(wire.dumps(reply))
        except (BadRequest, BadMessage) as error:
            raise _wrong_kind("postprocess", "arrays or values as JSON has them", reply) from error

    def close(self) -> None:
        """Begin nothing more; what runs is left to end."""
        for pool in (self.before, self.behind):
            pool.shutdown(wait=False, cancel_futures=True)


def load_hooks(spec: ModelSpec) -> Hooks | None:
    """Return the hooks that the model's file names, if it does; ``ConfigError`` has their text."""
    if spec.code is None:
        return None
    kind = named_class(spec, spec.code, key="code")
    try:
        made = kind()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{spec.name}: code {spec.code!r} cannot be made: {with_place(error, spec.folder)}"
        ) from error
    return Hooks(made, model=spec.name, threads=spec.hook_threads)


def _method(made: object, name: str, *, model: str) -> Hook | None:
    method = getattr(made, name, None)
    if method is not None and not callable(method):
        raise ConfigError(f"{model}: {name} of {type(made).__name__} is no method.")
    return method


def _pool(threads: int, name: str) -> Pool:
    return concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix=name)


def _called(name: str, hook: Hook, *args: Any) -> Any:
    """Return what ``hook`` returns; whatever it raises is the end of one job."""
    try:
        return hook(*args)
    except BaseException as error:  # noqa: BLE001 - sys.exit() in a hook ends its job, not us
        raise _error_of(name, error) from None


def _error_of(name: str, error: BaseException) -> FleetError:
    try:
        told = one_line(error)
    except BaseException:  # noqa: BLE001 - an exception of theirs may have no text
        told = type(error).__name__
    if isinstance(error, ValueError):
        return BadRequest(f"{name} refused the job: {told}")
    return ModelCodeFailed(f"{name} raised {told}")


def _wrong_kind(name: str, wanted: str, returned: object) -> ModelCodeFailed:
    return ModelCodeFailed(
        f"{name} must return {wanted}; it returned a {type(returned).__name__} that is not."
    )
