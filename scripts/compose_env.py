"""`make compose-up`: write .env for compose.yaml, with random passwords, when there is none.

What has no secret in it is taken over from .env.example as it stands.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]

#: A line of .env.example whose value is to be made up.
_EMPTY_PASSWORD: Final = re.compile(r"^(\w+_PASSWORD)=$", re.MULTILINE)


def with_passwords(example: str) -> str:
    """Return the text with a password of its own for every empty one."""
    # Hexadecimal: safe in a URL, in a command and in what Compose makes of the file.
    return _EMPTY_PASSWORD.sub(lambda line: f"{line[1]}={secrets.token_hex(24)}", example)


def write(path: Path, text: str) -> bool:
    """Write a file that only its owner may read; False when one is there already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return True


def main() -> None:
    """Write it, and say so."""
    text = with_passwords((ROOT / ".env.example").read_text(encoding="utf-8"))
    if write(ROOT / ".env", text):
        sys.stderr.write("compose-up: wrote .env with new passwords; only you can read it.\n")


if __name__ == "__main__":
    main()
