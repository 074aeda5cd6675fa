"""Whether a worker could load the Python that a model names: tried in a process of its own, since
code that is imported may do anything.

    python -m workers.doctor.code CONFIG_DIR MODEL RESULT.json

The result is {"refused": why}, empty where all is well.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from producer.contract.errors import FleetError
from workers import children
from workers.error_text import one_line, signal_name
from workers.hooks import load_hooks
from workers.models import RUNTIMES, ModelSpec, load_models

#: Some import a whole framework; a person waits for it.
_WITHIN_S: Final = 60.0
_END_S: Final = 1.0

_ROOT: Final = Path(__file__).resolve().parents[2]


def names_code(spec: ModelSpec) -> bool:
    """Return whether a model brings Python of its own: hooks, or an engine."""
    return spec.code is not None or spec.runtime not in RUNTIMES


def why_not_loaded(spec: ModelSpec, config_dir: Path, *, within_s: float = _WITHIN_S) -> str:
    """Return what keeps the code from being loaded, as a worker would say it; empty: nothing."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="fleet-doctor-") as folder:
        result = Path(folder, "result.json")
        words = [str(config_dir), spec.name, str(result)]
        with children.running(
            # -P: the project in whose folder this is called may have a package of that name, too.
            [sys.executable, "-P", "-m", "workers.doctor.code", *words],
            environ={**os.environ, "PYTHONPATH": path},
            within_s=_END_S,
            # Nobody reads it, and a flood would fill the disk.
            output=Path(os.devnull),
        ) as child:
            try:
                status = child.wait(timeout=within_s)
            except subprocess.TimeoutExpired:
                return f"its code is still being loaded after {within_s:g} s."
            finally:
                _end_what_it_started(child)
        if result.is_file():
            return str(json.loads(result.read_text(encoding="utf-8"))["refused"])
    if status < 0:
        return f"loading its code killed the process ({signal_name(-status)})."
    return f"loading its code ended the process with status {status}."


def _end_what_it_started(child: subprocess.Popen[bytes]) -> None:
    """End the child, if it still runs, and the processes that the code has begun beside it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # Its session is its own, and so is the group of that number.
        os.killpg(child.pid, signal.SIGKILL)


def main(config_dir: str, name: str, result: str) -> None:
    """Load what an instance would load before it opens an engine, and write what came of it."""
    refused = ""
    try:
        _load(load_models(Path(config_dir), [name])[name])
    except FleetError as error:
        refused = str(error)
    except Exception as error:  # noqa: BLE001 - whatever it does, the doctor says it
        refused = one_line(error)
    Path(result).write_text(json.dumps({"refused": refused}), encoding="utf-8")
    # Threads that the code has begun are not waited for.
    os._exit(0)


def _load(spec: ModelSpec) -> None:
    from workers.engines.base import engine_class

    if hooks := load_hooks(spec):
        hooks.close()
    if spec.runtime not in RUNTIMES:
        engine_class(spec)


if __name__ == "__main__":
    main(*sys.argv[1:])
