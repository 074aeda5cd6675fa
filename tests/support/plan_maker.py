"""A process of its own that makes a model's plans, as an instance does at its start.

    python -m tests.support.plan_maker FOLDER [LARGEST_FILE_BYTES | hold]

It begins with the first line on its standard input, prints its progress, and last one JSON line:
what was built and why, or the error. With ``hold`` it stands still in the middle of a build until
its standard input is closed.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import warnings
from pathlib import Path

from producer.contract.errors import FleetError
from tests.support.tensorrt_builder import workshop
from workers import children
from workers.models import load_model
from workers.plans.making import make_plans


def main() -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    hold = sys.argv[2:] == ["hold"]
    if sys.argv[2:] and not hold:
        # Stands for a full disk: a larger file is refused while it is written.
        largest = int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    def tell(text: str) -> None:
        print(text, flush=True)
        if hold and not text.endswith(" 0%"):
            sys.stdin.read()

    spec = load_model(Path(sys.argv[1]))
    with children.ended_by_signals():
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            made = make_plans(spec, workshop(), tell=tell)
        except FleetError as error:
            print(json.dumps({"error": str(error)}))
        else:
            print(json.dumps([dataclasses.asdict(each) for each in made], default=str))


if __name__ == "__main__":
    main()
