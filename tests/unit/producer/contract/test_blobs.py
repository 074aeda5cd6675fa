"""What is said of where large arrays lie."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

from producer.contract.blobs import Blobs
from producer.contract.settings import Settings

URL = "s3://key:secret@host/arrays/"


def test_places_are_told_apart_without_their_passwords() -> None:
    one, same, other = (repr(Blobs.of(Settings(blob_url=url))) for url in (URL, URL, f"{URL}more/"))

    assert one == same
    assert one != other
    assert "secret" not in one


def test_what_is_said_of_a_place_confirms_no_guess_of_its_password() -> None:
    code = (
        "from producer.contract.blobs import Blobs; from producer.contract.settings import Settings"
        f"; print(Blobs.of(Settings(blob_url={URL!r})).place)"
    )

    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    blobs = Blobs.of(Settings(blob_url=URL))
    assert len(said.stdout.strip()) == len(blobs.place)
    assert said.stdout.strip() != blobs.place
    assert dataclasses.replace(blobs).place == blobs.place
