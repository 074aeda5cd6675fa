"""Tell the types of all files in a folder: python examples/file_types/run.py FOLDER."""

from __future__ import annotations

import collections
import sys
from pathlib import Path

from producer.client import Client
from producer.contract.errors import FleetError

#: The model looks at no more than this of a file's beginning and end.
END_BYTES = 4096


def ends(path: Path) -> bytes:
    """Return a file, or the two ends of a large one."""
    with path.open("rb") as file:
        first = file.read(2 * END_BYTES)
        if path.stat().st_size <= 2 * END_BYTES:
            return first
        file.seek(-END_BYTES, 2)
        return first[:END_BYTES] + file.read()


def main(folder: str) -> None:
    """Print a line for each file, in the order of the answers, and a count of each type."""
    client, found = Client(), collections.Counter[str]()
    paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    jobs = client.submit_many("file_types", ({"content": ends(path)} for path in paths))
    of = {job.id: path for job, path in zip(jobs, paths, strict=True)}
    for job in client.as_completed(jobs, timeout_s=60):
        try:
            label, score = job.reply().outputs["label"], f"{job.reply().outputs['score']:.4f}"
        except FleetError as error:
            label, score = "-", str(error)
        found[label] += 1
        print(f"{label:<16} {score:<6}  {of[job.id].relative_to(folder)}")
    print(f"\n{len(paths)} files: {', '.join(f'{n} {label}' for label, n in found.most_common())}")


if __name__ == "__main__":
    main(sys.argv[1])
