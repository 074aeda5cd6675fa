"""Python that a model's file names as ``module:Class``: beside the file, or installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from producer.contract.errors import ConfigError
from workers.error_text import with_place
from workers.models import ModelSpec


def named_class(spec: ModelSpec, named: str, *, key: str) -> Any:
    """Return the class that ``key`` of the model's file names; ``ConfigError`` says why not.

    A module in the model's folder comes before an installed one.
    """
    module_name, _, class_name = named.partition(":")
    try:
        module = _module_beside(spec, module_name) or importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{spec.name}: {key} {named!r} cannot be imported: {with_place(error, spec.folder)}"
            f"{_how_to_import(spec, error)}"
        ) from error
    kind = getattr(module, class_name, None)
    if kind is None:
        raise ConfigError(f"{spec.name}: {module_name} holds no {class_name!r}.")
    return kind


def has_module(spec: ModelSpec, named: str) -> bool:
    """Return whether there is a module of the name, without running any of it."""
    module_name = named.partition(":")[0]
    if _lies_beside(spec.folder, module_name):
        return True
    return importlib.util.find_spec(module_name.partition(".")[0]) is not None


def _module_beside(spec: ModelSpec, module_name: str) -> ModuleType | None:
    """Return the module that lies in the model's folder, run anew, if there is one.

    The folder is a package of its own: two models may bring files of one name.
    """
    if not _lies_beside(spec.folder, module_name):
        return None
    package = f"fleet_model_{spec.name}"
    for name in list(sys.modules):
        if name == package or name.startswith(f"{package}."):
            del sys.modules[name]
    folder = ModuleType(package)
    folder.__path__ = [str(spec.folder)]
    sys.modules[package] = folder
    importlib.invalidate_caches()
    return importlib.import_module(f"{package}.{module_name}")


def _lies_beside(folder: Path, module_name: str) -> bool:
    path = Path(folder, *module_name.split("."))
    return path.with_name(f"{path.name}.py").is_file() or (path / "__init__.py").is_file()


def _how_to_import(spec: ModelSpec, error: BaseException) -> str:
    """Return what to write for an import that looked for a file of the folder elsewhere."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not _lies_beside(spec.folder, missing):
        return ""
    return f". It lies beside the model: write `from . import {missing}`."
