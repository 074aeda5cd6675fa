"""Python that a model's file names as ``module:Class``: beside the file, or installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from producer.contract.errors import ConfigError
from workers.error_text import one_line
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
            f"{spec.name}: {key} {named!r} cannot be imported: {one_line(error)}"
        ) from error
    kind = getattr(module, class_name, None)
    if kind is None:
        raise ConfigError(f"{spec.name}: {module_name} holds no {class_name!r}.")
    return kind


def _module_beside(spec: ModelSpec, module_name: str) -> ModuleType | None:
    """Return the module that lies in the model's folder, run anew, if there is one."""
    path = Path(spec.folder, f"{module_name}.py")
    if not path.is_file():
        return None
    # Two models may bring files of one name, so the folder's name is a part of it.
    name = f"fleet_model_{spec.name}_{module_name}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        return None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module
