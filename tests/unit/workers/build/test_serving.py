"""Which file a worker serves: what [engines] lists, else what was built of the source it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from producer.contract.errors import ConfigError
from tests.support.building import built, digits_folder
from workers.build.store import variants_folder
from workers.models import load_model


def serve(folder: Path, precision: str, ladder: str = "") -> None:
    """Let the model's file ask for ``precision``."""
    lines = (folder / "model.toml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("precision =", "ladder ="))]
    asked = [f'precision = "{precision}"', *([f'ladder = ["{ladder}"]'] if ladder else [])]
    (folder / "model.toml").write_text("\n".join([*asked, *kept]) + "\n")


def test_what_is_asked_for_is_served_and_nothing_else_is_loaded(tmp_path: Path) -> None:
    folder = digits_folder(tmp_path)
    built(folder, "fp16", "int8", "fp8")

    serve(folder, "int8", ladder="fp16/2")
    with_ladder = load_model(folder)
    serve(folder, "fp8", ladder="fp8/2")
    alone = load_model(folder)

    assert set(with_ladder.engines) == {"int8", "fp16"}
    assert set(alone.engines) == {"fp8"}


def test_a_built_fp16_becomes_the_default_ladder(tmp_path: Path) -> None:
    folder = digits_folder(tmp_path)
    serve(folder, "fp32")
    before = load_model(folder).ladder

    built(folder, "fp16")

    assert before == ("same/2",)
    assert load_model(folder).ladder == ("fp16/2",)


def test_a_listed_file_is_served_whatever_is_built(tmp_path: Path) -> None:
    folder = digits_folder(tmp_path)
    built(folder, "int8")
    serve(folder, "fp32", ladder="int8/2")
    text = (folder / "model.toml").read_text()
    twin = '\n[engines]\nint8 = "digits.onnx"'

    (folder / "model.toml").write_text(text.replace("\n[engines]", twin))

    assert load_model(folder).engines["int8"] == folder / "digits.onnx"


@pytest.mark.parametrize(
    ("spoil", "says"), [("source", "was not built from"), ("variant", "is not as it was built")]
)
def test_a_variant_of_another_file_or_a_changed_one_is_refused(
    tmp_path: Path, spoil: str, says: str
) -> None:
    folder = digits_folder(tmp_path)
    built(folder, "fp16")
    path = folder / "digits.onnx"
    if spoil == "variant":
        (path,) = variants_folder(folder).glob("fp16-*.onnx")
    content = bytearray(path.read_bytes())
    content[-100] ^= 1

    path.write_bytes(content)

    with pytest.raises(ConfigError, match=says) as error:
        load_model(folder)
    assert str(error.value).endswith("Build it again: fleet build digits --precision fp16")


def test_a_ladder_of_what_nobody_built_says_how_to_build_it(tmp_path: Path) -> None:
    folder = digits_folder(tmp_path)
    serve(folder, "fp32", ladder="int8/2")

    with pytest.raises(
        ConfigError, match=r"ladder names int8, but .* Build it with `fleet build digits"
    ):
        load_model(folder)


def test_a_variant_of_before_that_the_ladder_does_not_name_is_not_looked_at(tmp_path: Path) -> None:
    folder = digits_folder(tmp_path)
    built(folder, "fp16")
    with (folder / "digits.onnx").open("ab") as source:
        # An empty producer_version: another file, the same model.
        source.write(b"\x1a\x00")

    serve(folder, "fp32", ladder="same/2")

    assert set(load_model(folder).engines) == {"fp32"}


@pytest.mark.parametrize(
    "content",
    ["{", '{"format": 1}', '{"format": 1, "key": "k", "file": 3, "text": "", "files": {}}'],
)
def test_a_manifest_that_is_no_manifest_counts_as_not_built(tmp_path: Path, content: str) -> None:
    folder = digits_folder(tmp_path)
    built(folder, "int8")
    serve(folder, "int8", ladder="int8/2")

    (variants_folder(folder) / "int8.json").write_text(content)

    with pytest.raises(ConfigError, match=r"no such entry\. Build it with `fleet build "):
        load_model(folder)
    assert [one.state for one in built(folder, "int8")] == ["built"]


def test_links_that_lead_in_a_circle_are_a_folder_that_nothing_lies_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "circle"))
    folder = digits_folder(tmp_path / "config")

    with pytest.raises(ConfigError, match="symbolic links; no variant was changed"):
        built(folder, "fp16")
    serve(folder, "fp32")
    assert load_model(folder).ladder == ("same/2",)


def test_the_cache_lies_where_fleet_cache_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "elsewhere"))
    folder = digits_folder(tmp_path / "config")

    built(folder, "fp16")
    serve(folder, "fp16")

    path = load_model(folder).engines["fp16"]
    assert path is not None
    assert path.parent == tmp_path / "elsewhere" / "variants" / "digits"
