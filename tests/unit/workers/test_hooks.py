"""The code around a model: how it is found, and what becomes of what it raises or returns."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from producer.contract.errors import BadRequest, ConfigError, FleetError, ModelCodeFailed
from tests import onnx_models
from workers.hooks import Hooks, load_hooks
from workers.loop.hooked import start_preprocess
from workers.models import ModelSpec, load_model

TOML = 'code = "around:Around"\n[engines]\nfp32 = "model.onnx"\n'


def spec_with(tmp_path: Path, code: str, toml: str = TOML) -> ModelSpec:
    folder = tmp_path / "hooked"
    folder.mkdir()
    onnx_models.linear(folder / "model.onnx")
    (folder / "model.toml").write_text(toml)
    (folder / "around.py").write_text(code)
    return load_model(folder)


def hooks_of(preprocess: Any = None, postprocess: Any = None) -> Hooks:
    made = type("Made", (), {})()
    if preprocess:
        made.preprocess = preprocess
    if postprocess:
        made.postprocess = postprocess
    return Hooks(made, model="m", threads=1)


def raising(error: BaseException) -> Any:
    def hook(*_: object) -> object:
        raise error

    return hook


def test_the_class_beside_the_file_is_found(tmp_path: Path) -> None:
    spec = spec_with(
        tmp_path, "class Around:\n    def preprocess(self, inputs):\n        return {'x': 1}\n"
    )

    hooks = load_hooks(spec)

    assert hooks is not None
    assert hooks.names == ["preprocess"]
    assert hooks.preprocess({"text": "a"}) == {"x": 1}
    assert hooks.postprocess({"y": 2}, {}) == {"y": 2}


def test_the_code_may_be_several_files_and_each_model_has_its_own(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        spec = spec_with(
            tmp_path / name,
            "from . import words\nfrom .parts.deep import SIGN\n\n"
            "class Around:\n    def preprocess(self, inputs):\n"
            "        return {'x': words.WORD + SIGN}\n",
        )
        spec = dataclasses.replace(spec, name=name)
        (spec.folder / "words.py").write_text(f"WORD = {name!r}")
        (spec.folder / "parts").mkdir()
        (spec.folder / "parts" / "deep.py").write_text("SIGN = '!'")

        made.append(load_hooks(spec))

    assert [hooks and hooks.preprocess({}) for hooks in made] == [{"x": "one!"}, {"x": "two!"}]


def test_a_package_beside_the_file_may_be_the_code(tmp_path: Path) -> None:
    spec = spec_with(tmp_path, "", TOML.replace("around:", "tokens.around:"))
    (spec.folder / "tokens").mkdir()
    (spec.folder / "tokens" / "around.py").write_text(
        "class Around:\n    def preprocess(self, inputs):\n        return {'x': 1}\n"
    )

    hooks = load_hooks(spec)

    assert hooks is not None
    assert hooks.preprocess({}) == {"x": 1}


def test_the_import_of_a_file_of_the_folder_by_its_bare_name_is_told_how_to_write_it(
    tmp_path: Path,
) -> None:
    spec = spec_with(tmp_path, "import words_of_ours")
    (spec.folder / "words_of_ours.py").write_text("")

    with pytest.raises(ConfigError, match=r"write `from \. import words_of_ours`"):
        load_hooks(spec)


def test_code_that_was_mended_is_run_anew(tmp_path: Path) -> None:
    spec = spec_with(tmp_path, "from .words import WORD")
    (spec.folder / "words.py").write_text("raise RuntimeError('broken')")
    with pytest.raises(ConfigError, match="broken"):
        load_hooks(spec)

    (spec.folder / "words.py").write_text("WORD = 1")

    with pytest.raises(ConfigError, match="holds no 'Around'"):
        load_hooks(spec)


def test_a_model_without_code_has_no_hooks(tmp_path: Path) -> None:
    spec = spec_with(tmp_path, "", '[engines]\nfp32 = "model.onnx"\n')

    assert load_hooks(spec) is None


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_module", "cannot be imported: ModuleNotFoundError: .*no_such_module"),
        ("def broken(:", "cannot be imported: SyntaxError"),
        ("import sys\nsys.exit('no licence')", "cannot be imported: SystemExit: no licence"),
        ("x = 1", "around holds no 'Around'"),
        ("class Around: pass", "Around has neither preprocess nor postprocess"),
        ("class Around:\n    preprocess = 3", "preprocess of Around is no method"),
        ("class Around:\n    def __init__(self, path): pass", "cannot be made: TypeError"),
    ],
)
def test_code_that_cannot_be_loaded_says_why(tmp_path: Path, code: str, says: str) -> None:
    spec = spec_with(tmp_path, code)

    with pytest.raises(ConfigError, match=says):
        load_hooks(spec)


@pytest.mark.parametrize("code", ["around", ":Around", "around:not a name"])
def test_code_must_name_a_class(tmp_path: Path, code: str) -> None:
    with pytest.raises(ConfigError, match=r'code must be "module:Class"'):
        spec_with(tmp_path, "", TOML.replace("around:Around", code))


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (ValueError("not a picture"), BadRequest, "refused the job: ValueError: not a picture"),
        (KeyError("width"), ModelCodeFailed, "raised KeyError: 'width'"),
        (SystemExit(3), ModelCodeFailed, "raised SystemExit: 3"),
        (MemoryError(), ModelCodeFailed, "raised MemoryError"),
    ],
)
def test_what_a_hook_raises_is_the_error_of_its_job(
    error: BaseException, kind: type[FleetError], says: str
) -> None:
    hooks = hooks_of(raising(error), raising(error))

    with pytest.raises(kind, match=f"preprocess {says}"):
        hooks.preprocess({})
    with pytest.raises(kind, match=f"postprocess {says}"):
        hooks.postprocess({}, {})


def test_an_error_without_a_text_is_told_by_its_class() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    with pytest.raises(ModelCodeFailed, match=r"preprocess raised Mute$"):
        hooks_of(raising(Mute())).preprocess({})


def test_preprocess_must_return_a_dict() -> None:
    with pytest.raises(ModelCodeFailed, match="a dict of arrays; it returned a list that is not"):
        hooks_of(lambda inputs: [1]).preprocess({})


@pytest.mark.parametrize(
    "reply", ["cat", None, 0.5, ["cat", {"score": [1, None]}], {"raw": b"\xff"}, [True, 2**63]]
)
def test_postprocess_may_return_what_json_has(reply: object) -> None:
    assert hooks_of(None, lambda outputs, inputs: reply).postprocess({}, {}) == reply


@pytest.mark.parametrize("reply", [object(), {1, 2}, 2**80, np.array(["text"]), "\ud800"])
def test_what_cannot_be_sent_fails_its_job_by_its_type_alone(reply: object) -> None:
    hooks = hooks_of(None, lambda outputs, inputs: {"label": reply})

    with pytest.raises(ModelCodeFailed, match="it returned a dict that is not"):
        hooks.postprocess({}, {})


def test_a_reply_that_holds_itself_fails_its_job() -> None:
    reply: list[object] = []
    reply.append(reply)

    with pytest.raises(ModelCodeFailed, match="it returned a list"):
        hooks_of(None, lambda outputs, inputs: reply).postprocess({}, {})


def test_a_hook_may_change_what_it_is_given() -> None:
    shared, inputs = np.ones(3), {"text": "a"}

    def postprocess(outputs: dict[str, Any], inputs: dict[str, Any]) -> object:
        outputs["y"] *= 0
        inputs.clear()
        return outputs["y"].tolist()

    assert hooks_of(None, postprocess).postprocess({"y": shared}, inputs) == [0, 0, 0]
    assert (shared.tolist(), inputs) == ([1, 1, 1], {"text": "a"})


def test_two_models_may_bring_files_of_one_name(tmp_path: Path) -> None:
    code = "class Around:\n    def preprocess(self, inputs):\n        return {'x': %d}\n"
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = load_hooks(spec_with(tmp_path / "a", code % 1))
    second = load_hooks(spec_with(tmp_path / "b", code % 2))

    assert first is not None
    assert second is not None
    assert (first.preprocess({}), second.preprocess({})) == ({"x": 1}, {"x": 2})
    assert "around" not in sys.modules


def test_what_the_code_keeps_is_not_what_the_next_job_sees() -> None:
    kept, answer = np.zeros((1, 3), np.float32), {"n": 0}

    def preprocess(inputs: Any) -> Any:
        kept[...] = inputs["n"]
        return {"x": kept}

    def postprocess(outputs: Any, inputs: Any) -> Any:
        answer["n"] = inputs["n"]
        return answer

    hooks = hooks_of(preprocess, postprocess)

    given = [hooks.preprocess({"n": n}) for n in (1, 2)]
    replies = [hooks.postprocess({}, {"n": n}) for n in (1, 2)]

    assert [float(each["x"][0, 0]) for each in given] == [1, 2]
    assert replies == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("key", [np.int64(3), (1, 2)], ids=["a number of numpy's", "a tuple"])
def test_a_reply_that_nobody_could_read_is_the_fault_of_the_code(key: object) -> None:
    hooks = hooks_of(postprocess=lambda outputs, inputs: {"found": {key: 1}})

    with pytest.raises(ModelCodeFailed):
        hooks.postprocess({}, {})


class Untold(Exception):
    def __str__(self) -> str:
        raise SystemExit("asked for its text")


class Unread(dict[str, Any]):
    def items(self) -> Any:
        raise SystemExit("asked for its arrays")


@pytest.mark.parametrize("hook", [raising(Untold()), lambda inputs: Unread(x=1)])
def test_not_even_what_a_hook_hands_over_ends_the_process(hook: Any) -> None:
    runner: Any = SimpleNamespace(hooks=hooks_of(hook))
    job: Any = SimpleNamespace(inputs={}, fault=None)

    for going in start_preprocess(runner, [job]):
        going.result(5)

    assert isinstance(job.fault, ModelCodeFailed)
