"""The projects in examples/, as somebody finds them who took a clone."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.real_models import file_types
from tests.support.servers import TestServer
from tests.support.worker import ROOT

EXAMPLES = ROOT / "examples"


def file_types_config(folder: Path) -> Path:
    """Return a copy of examples/file_types with what its README copies out of the package."""
    model = file_types()
    config = Path(shutil.copytree(EXAMPLES / "file_types", folder / "file_types"))
    for file in (model, model.with_name("config.min.json")):
        shutil.copy(file, config / "models" / "file_types")
    return config


def run_example(server: TestServer, name: str, *words: str) -> str:
    """Run the script of an example; return what it prints."""
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words],
        env={**os.environ, "FLEET_BROKER_URL": server.url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def imported(file: Path) -> Any:
    """Import an example's module from its file, anew."""
    found = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    # Django looks for its views by this name.
    sys.modules[module.__name__] = module
    found.loader.exec_module(module)
    return module
