"""A user's own measure of answers: ``module:function``, beside the model or installed."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from producer.contract.errors import ConfigError
from workers.batching.stacking import Array
from workers.build.options import is_metric
from workers.build.store import digest
from workers.error_text import one_line


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A function of all outputs and of everything in the test file, which returns a number."""

    name: str
    #: The digest of its file, so that another function is another build.
    sha256: str
    _function: Callable[[Mapping[str, Array], Mapping[str, Array]], Any]

    def of(self, outputs: Mapping[str, Array], data: Mapping[str, Array]) -> float:
        """Return what the user's function says; ConfigError when it says no number."""
        try:
            return float(self._function(outputs, data))
        except Exception as error:
            raise ConfigError(f"metric {self.name} failed: {one_line(error)}") from error


def load_metric(name: str, folder: Path) -> Metric:
    """Return the metric that ``name`` means; a module in the model's folder comes first."""
    if not is_metric(name):
        raise ConfigError(f'metric must be "module:function", not {name!r}.')
    module_name, _, function_name = name.partition(":")
    beside = folder / f"{module_name}.py"
    try:
        if beside.is_file():
            found = importlib.util.spec_from_file_location(f"fleet_metric_{module_name}", beside)
            assert found is not None
            assert found.loader is not None
            module = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
        function = getattr(module, function_name)
    except Exception as error:
        raise ConfigError(f"metric {name} cannot be loaded: {one_line(error)}") from error
    file = getattr(module, "__file__", None)
    return Metric(name=name, sha256=digest(Path(file)) if file else "", _function=function)
