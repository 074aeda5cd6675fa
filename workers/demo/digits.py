"""The held-out digits: 8 by 8 images that the model never saw, and what they show."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

MODEL: Final = "digits"

#: From empty to full; an image holds 0 to 1.
_SHADES: Final = " .:-=+*#%@"

_FILE: Final = "heldout.npz"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Images and labels, in the same order."""

    #: One job each: one row of one channel, 8 by 8.
    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


def held_out(config_dir: Path) -> Digits:
    """Read the images that were kept away from the model while it was made."""
    with np.load(config_dir / "models" / MODEL / _FILE) as file:
        images, labels = file["images"], file["labels"]
    # As stored, a pixel is 0 to 16.
    pixels = (images / 16).astype(np.float32)
    return Digits(images=pixels.reshape(-1, 1, 1, 8, 8), labels=labels.astype(np.int64))


def picture(image: npt.NDArray[np.float32]) -> list[str]:
    """Return the image as lines of text, two characters a pixel."""
    rows = image.reshape(8, 8) / max(float(image.max()), 1e-6)
    levels = (rows * (len(_SHADES) - 1)).round().astype(int)
    return ["".join(_SHADES[level] * 2 for level in row) for row in levels]


def shown(
    answers: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], *, count: int
) -> list[int]:
    """Return which digits to show: at most half of ``count`` wrong ones, then the first right."""
    wrong = np.flatnonzero(answers != labels)[: count // 2]
    right = np.flatnonzero(answers == labels)[: count - len(wrong)]
    return [int(index) for index in (*right, *wrong)]
