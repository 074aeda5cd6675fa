"""A storm of seeded faults over a fleet that works: ``python -m tests.chaos.storm``.

With ``--rounds`` clients send jobs in each round, one fault strikes while at least 200 of them are
unfinished, and the fleet becomes whole again. With ``--minutes`` a steady load goes on for so long
while faults strike now and then, and memory is looked at. At the end every job is judged.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from tests.chaos.faults import KILLS, drawn, drawn_with_pairs
from tests.chaos.fleet import Shape
from tests.chaos.rounds import Rounds
from tests.chaos.soak import Soak
from tests.chaos.table import Report, markdown
from tests.chaos.trial import trial

#: In a soak results and fences go as fast as they come, so that memory can be flat.
_SOAK_TTL_S = 60


def main() -> int:
    """Run what the command line says; 1 when an invariant is broken."""
    given = _arguments()
    print(f"seed {given.seed}", flush=True)
    report = _soak(given) if given.minutes else _rounds(given)
    print(markdown(report))
    for text, times in report.troubles.items():
        print(f"clients met {times} times: {text}")
    if given.json:
        given.json.write_text(json.dumps(report.as_json(), indent=1))
    for line in report.broken:
        print(f"BROKEN {line}")
    return int(bool(report.broken))


def _rounds(given: Any) -> Report:
    with trial(Shape(code=_code(given)), given.seed) as on_trial:
        if given.faults == "kill":
            faults = drawn(KILLS, given.rounds, on_trial.chance)
        else:
            faults = drawn_with_pairs(given.rounds, on_trial.chance)
        return Rounds(on_trial, faults, jobs_a_round=given.jobs_per_round).run(_tell)


def _soak(given: Any) -> Report:
    shape = Shape(result_ttl_s=_SOAK_TTL_S, fence_ttl_s=_SOAK_TTL_S, code=_code(given))
    with trial(shape, given.seed) as on_trial:
        soak = Soak(
            on_trial, minutes=given.minutes, fault_every_s=given.fault_every_s, load=given.load
        )
        return soak.run(_tell)


def _code(given: Any) -> str | None:
    return "tests.support.hooks:Through" if given.hooks else None


def _tell(line: str) -> None:
    print(line, flush=True)


def _arguments() -> Any:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.storm", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--jobs-per-round", type=int, default=1000)
    parser.add_argument("--faults", choices=("kill", "all"), default="kill")
    parser.add_argument("--minutes", type=float, help="a steady load for so long, not rounds")
    parser.add_argument("--fault-every-s", type=float, default=60.0)
    parser.add_argument("--load", type=float, default=0.5, help="part of the full rate")
    parser.add_argument("--hooks", action="store_true", help="with code around the model")
    parser.add_argument("--json", type=Path, help="write what was measured into this file")
    return parser.parse_args()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    # What a developer has set for a fleet of their own must not reach this one.
    for name in [name for name in os.environ if name.startswith("FLEET_")]:
        if name != "FLEET_TEST_SERVER":
            del os.environ[name]
    # A client that loses its server says so; here it is taken away on purpose.
    logging.getLogger("producer").setLevel(logging.ERROR)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
