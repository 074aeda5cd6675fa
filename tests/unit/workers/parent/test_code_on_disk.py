"""What tells a worker that its code on disk is not what it runs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from workers.parent.code_on_disk import ROOT, SPOKEN, CodeOnDisk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("birth.py", "hello.py", "orders.py", "status.py", "runner.py"):
        (tmp_path / "workers").mkdir(exist_ok=True)
        (tmp_path / "workers" / name).write_text(f"# {name}\n")
    (tmp_path / "workers" / "claim.lua").write_text("-- claim\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "speaks_otherwise"),
    [("hello.py", True), ("status.py", True), ("runner.py", False), ("claim.lua", False)],
)
def test_other_text_in_a_file_is_a_change_and_in_some_another_language(
    root: Path, name: str, speaks_otherwise: bool
) -> None:
    code = CodeOnDisk(root)

    (root / "workers" / name).write_text("# new\n")

    assert code.has_changed
    assert code.speaks_otherwise is speaks_otherwise


def test_a_file_that_is_gone_is_a_change(root: Path) -> None:
    code = CodeOnDisk(root)

    (root / "workers" / "birth.py").unlink()

    assert code.has_changed
    assert code.speaks_otherwise


def test_folders_may_come_and_go_while_it_is_looked(root: Path) -> None:
    code = CodeOnDisk(root)
    rooms = [root / "workers" / name for name in ("loop", "memory", "up")]
    over = threading.Event()

    def update() -> None:
        while not over.is_set():
            for room in rooms:
                room.mkdir()
            for room in rooms:
                room.rmdir()

    updating = threading.Thread(target=update)
    updating.start()
    try:
        # Whether it has is for the moment to say.
        assert {code.has_changed for _ in range(1000)} <= {True, False}
    finally:
        over.set()
        updating.join()


def test_what_is_no_code_is_no_change(root: Path) -> None:
    code = CodeOnDisk(root)

    (root / "workers" / "notes.md").write_text("new\n")

    assert not code.has_changed


def test_each_file_that_a_parent_and_its_instance_share_is_where_it_is_looked_for() -> None:
    assert [path for path in SPOKEN if not (ROOT / path).is_file()] == []
