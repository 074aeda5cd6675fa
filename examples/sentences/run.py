"""Find what a text says about a question: python examples/sentences/run.py QUESTION FILE..."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

from producer.client import Client


def sentences(path: str) -> list[str]:
    """Return the sentences of a text file."""
    found = re.split(r"(?<=[.!?:])\s+|\n{2,}", Path(path).read_text(encoding="utf-8"))
    return [" ".join(sentence.split()) for sentence in found if len(sentence.split()) > 3]


def main(question: str, *paths: str) -> None:
    """Print the five sentences whose vectors are nearest to the question's."""
    client = Client()
    texts = [question, *(sentence for path in paths for sentence in sentences(path))]
    jobs = client.submit_many("sentences", ({"text": text} for text in texts))
    replies = [job.reply(timeout_s=120) for job in jobs]
    asked, *vectors = (reply.outputs["vector"] for reply in replies)
    likeness = np.stack(vectors) @ asked
    for place in likeness.argsort()[::-1][:5]:
        print(f"{likeness[place]:.3f}  {texts[1 + place]}")
    runs = sum(1 / reply.batch_size for reply in replies)
    print(f"\n{len(texts)} sentences, {len(texts) / runs:.0f} in a run")


if __name__ == "__main__":
    main(*sys.argv[1:])
