"""The models that would be served: whether each has its files, and whether these can be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from producer.contract.errors import ConfigError
from workers.beside import has_module
from workers.doctor import code
from workers.finding import Finding, State
from workers.models import MODEL_FILE, RUNTIMES, ModelSpec, load_models, model_names
from workers.settings import WorkerSettings

#: Characters of a checker's words that are shown.
_LONGEST: Final = 200


def look(settings: WorkerSettings) -> Iterator[tuple[Finding, ModelSpec | None]]:
    """Yield a finding for each model, with what its file says where that can be served."""
    folder = settings.config_dir / "models"
    try:
        names = model_names(settings.config_dir, settings.models or None)
    except ConfigError as error:
        yield _refused("models", error, f"Put models into {folder}, or mend `models`."), None
        return
    for name in names:
        check = f"model {name}"
        try:
            spec = load_models(settings.config_dir, [name])[name]
        except ConfigError as error:
            yield _refused(check, error, f"Mend {folder / name / MODEL_FILE}."), None
        else:
            yield _code(_files(check, spec), spec, settings.config_dir), spec


def _refused(check: str, error: ConfigError, otherwise: str) -> Finding:
    return Finding(check, State.ERROR, error.problem, error.do or otherwise)


def _files(check: str, spec: ModelSpec) -> Finding:
    """Return whether every file of a model can be read to its end."""
    files = [path for path in spec.engines.values() if path and path.suffix == ".onnx"]
    for path in files:
        if problem := why_not_readable(path):
            do = "Export or copy it again; what `fleet build` made is made again by it."
            return Finding(check, State.ERROR, f"{path} {problem}.", do)
    for path in files:
        if problem := why_not_sound(path):
            do = "Export it again, unless workers load it all the same."
            return Finding(check, State.WARNING, f"{path}: {problem}", do)
    ladder = ", ".join(spec.ladder)
    text = f"{spec.precision}, and when memory runs out {ladder}; its files can be read."
    return Finding(check, State.OK, text)


def _code(files: Finding, spec: ModelSpec, config_dir: Path) -> Finding:
    """Return what there is to say of a model's own Python, where its files are well."""
    if files.state is not State.OK or not code.names_code(spec):
        return files
    if spec.code and not has_module(spec, spec.code):
        module = spec.code.partition(":")[0]
        text = f"code {spec.code!r}: {module} is neither in {spec.folder} nor installed."
        return Finding(files.check, State.ERROR, text, f"Put {module}.py there, or mend `code`.")
    own_runtime = None if spec.runtime in RUNTIMES else spec.runtime
    named = " and ".join(filter(None, (spec.code, own_runtime)))
    if why := code.why_not_loaded(spec, config_dir):
        text = why.removeprefix(f"{spec.name}: ")
        return Finding(files.check, State.ERROR, text, f"Mend {named}, then ask again.")
    return dataclasses.replace(files, text=f"{files.text} Its code, {named}, can be loaded.")


def why_not_readable(path: Path) -> str:
    """Return what is wrong with an ONNX file that has the outer form of one, or nothing."""
    from workers.build.graph import external_files

    try:
        beside = external_files(path)
    except Exception as error:  # noqa: BLE001 - protobuf has errors of its own
        return f"is damaged: {type(error).__name__}"
    missing = [each.name for each in beside if not each.is_file()]
    return f"keeps weights in {', '.join(missing)}, which is not there" if missing else ""


def why_not_sound(path: Path) -> str:
    """Return what breaks the rules of ONNX in a file; a runtime may be more lenient."""
    import onnx

    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        return f"ONNX's checker says: {' '.join(str(error).split())[:_LONGEST]}"
    return ""
