"""What the documents point at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from producer.contract import errors
from tests.support.worker import ROOT

DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*/README.md"),
    ]
)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
_PATH = re.compile(
    r"`((?:producer|workers|tests|configs|docs|benchmarks|scripts|examples)/[\w/.-]+)`"
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_and_path_of_a_document_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [document.parent / target for target in _LINK.findall(text)]
    paths = [ROOT / target for target in _PATH.findall(text) if "*" not in target]

    missing = [str(path) for path in (*links, *paths) if not path.exists()]

    assert missing == []


def test_every_make_target_that_the_readme_names_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    named = set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text()))

    assert named - targets == set()


def commands_of(readme: Path) -> list[str]:
    """Return the lines of code of a README, without what is said of them."""
    fenced = False
    lines = []
    for line in readme.read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        if fenced or line.startswith("    "):
            lines.append(line.split(" #")[0].rstrip())
    return [line for line in lines if line.strip() and not line.strip().startswith("#")]


def test_both_readmes_have_the_same_commands() -> None:
    english = commands_of(ROOT / "README.md")

    assert len(english) > 50
    assert commands_of(ROOT / "README.zh-CN.md") == english


def test_the_table_of_statuses_has_every_error_once() -> None:
    text = (ROOT / "docs" / "for-celery-users.md").read_text()
    rows = re.findall(r"^\| (\d{3}) \| ([A-Z_, ]+) \|", text, re.M)

    told = [(code, int(status)) for status, codes in rows for code in codes.split(", ")]

    known: list[type[errors.FleetError]] = [errors.FleetError]
    known += errors.FleetError.__subclasses__()
    assert sorted(told) == sorted({(error.code, error.http_status) for error in known})
