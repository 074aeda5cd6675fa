"""`make compose-test`: compose.yaml under a real Docker engine, and nothing may be lost.

Three worker containers, 2,000 jobs, one container killed and replaced, scaled to two, everything
stopped and started again. Flower must ask for its password, and a container that is stopped while
it starts must end in good order.

Needs Docker with either Compose, and nothing of Python but its standard library. The project has a
name, passwords and a port of its own, and is removed at the end.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
PROJECT: Final = "fleet-compose-test"
FILES: Final = ("compose.yaml", "tests/compose/compose.yaml")
JOBS: Final = 2000

#: Instances of one container, and jobs of one batch: what a killed container runs at most.
_IN_A_CONTAINER: Final = 2 * 4

_STREAM: Final = "fleet:stream:fleet.slow:normal"


class Failed(Exception):
    """What had to hold does not."""


class Compose:
    """One project under Docker, with what it is told through the environment."""

    def __init__(self, log: Path) -> None:
        self._command = _compose()
        self.port, self.password = _free_port(), secrets.token_hex(16)
        self._environ = {
            **os.environ,
            "REDIS_PASSWORD": secrets.token_hex(16),
            "FLOWER_PASSWORD": self.password,
            "FLOWER_PORT": str(self.port),
            "FLEET_TEST_LOG": str(log),
        }

    def __call__(self, *words: str, check: bool = True) -> str:
        """Run a command of Compose; return its standard output."""
        files = [word for name in FILES for word in ("-f", name)]
        place = ["-p", PROJECT, "--project-directory", "."]
        return self._run([*self._command, *files, *place, *words], check=check)

    def docker(self, *words: str) -> str:
        return self._run(["docker", *words], check=True)

    def containers(self, service: str, *options: str) -> list[str]:
        """Return the ids of the service's containers that run; with ``-a``, of all."""
        labels = (f"project={PROJECT}", f"service={service}", "oneoff=False")
        filters = [f"--filter=label=com.docker.compose.{label}" for label in labels]
        return self.docker("ps", "-q", *filters, *options).split()

    def inspect(self, container: str, template: str) -> str:
        return self.docker("inspect", "-f", template, container).strip()

    def waiting(self) -> int:
        """Return how many jobs have no outcome yet."""
        (redis,) = self.containers("redis")
        return int(self.docker("exec", redis, "redis-cli", "xlen", _STREAM))

    def _run(self, command: list[str], *, check: bool) -> str:
        ran = subprocess.run(
            command, cwd=ROOT, env=self._environ, capture_output=True, text=True, check=False
        )
        if check and ran.returncode:
            raise Failed(f"{' '.join(command)} exits with {ran.returncode}:\n{ran.stderr[-2000:]}")
        return ran.stdout


def main() -> None:
    """Run it; exit code 1 and one line say what did not hold."""
    with tempfile.TemporaryDirectory(prefix="fleet-compose-") as folder:
        log = Path(folder)
        # The containers' user is not ours.
        log.chmod(0o777)
        compose = Compose(log)
        compose("down", "-v", "--remove-orphans")
        try:
            _run(compose, log / "starts")
        except Failed as failed:
            print(compose("logs", "--tail=40", check=False))
            sys.exit(f"compose-test: {failed}")
        finally:
            with _step("down -v"):
                compose("down", "-v", "--remove-orphans")
    print("Nothing was lost.")


def _run(compose: Compose, log: Path) -> None:
    with _step("build"):
        compose("build")
    with _step("up -d --scale workers=3"):
        compose("up", "-d", "--scale", "workers=3")
    with _step("until every container is healthy"):
        _wait(lambda: _healthy(compose, 3), "healthy containers", within_s=120)
    _say(_own_words(compose))
    _stopped_at_once(compose)

    with _step(f"{JOBS} jobs sent"):
        _app(compose, "send")
    _wait_answered(compose, 300)
    with _step("docker kill -s KILL of one worker container"):
        compose.docker("kill", "-s", "KILL", compose.containers("workers")[0])
    _wait_answered(compose, 600)
    with _step("up -d --scale workers=3"):
        compose("up", "-d", "--scale", "workers=3")
    _wait_answered(compose, 800)
    with _step("scale workers=2"):
        compose("scale", "workers=2")
    if (left := len(compose.containers("workers"))) != 2:
        raise Failed(f"{left} worker containers run.")
    _wait_answered(compose, 1000)
    _flower(compose)
    with _step("stop"):
        compose("stop")
    _ended_well(compose)
    with _step("up -d --scale workers=2"):
        compose("up", "-d", "--scale", "workers=2")
    _say(f"{compose.waiting()} jobs wait")
    with _step("every answer read"):
        found = _app(compose, "collect")
    _nothing_lost(found, log)


def _app(compose: Compose, what: str) -> dict[str, Any]:
    """Run the app's part in a container beside the workers."""
    python = ("run", "--rm", "-T", "--no-deps", "--entrypoint", "python", "workers")
    printed = compose(*python, "-m", "tests.compose.app", what, str(JOBS))
    return dict(json.loads(printed)) if printed.strip() else {}


def _healthy(compose: Compose, workers: int) -> bool:
    found = {
        service: [
            compose.inspect(container, "{{.State.Health.Status}}")
            for container in compose.containers(service)
        ]
        for service in ("redis", "workers", "flower")
    }
    want = {"redis": 1, "workers": workers, "flower": 1}
    return found == {service: ["healthy"] * count for service, count in want.items()}


def _own_words(compose: Compose) -> str:
    """Return what the health check of each container printed last."""
    template = "{{range .State.Health.Log}}{{.Output}}{{end}}"
    said = [compose.inspect(container, template) for container in compose.containers("workers")]
    if len({words.split(":")[0] for words in said}) != len(said):
        raise Failed(f"Two containers answer for one node: {said}")
    return "\n".join(words.splitlines()[-1] for words in said)


def _stopped_at_once(compose: Compose) -> None:
    """Stop a container in the first moments of its process 1."""
    container = compose("run", "-d", "--no-deps", "workers").split()[-1]
    began_s = time.monotonic()
    compose.docker("stop", "-t", "30", container)
    took_s, status = time.monotonic() - began_s, compose.inspect(container, "{{.State.ExitCode}}")
    compose.docker("rm", container)
    if status != "0" or took_s > 10:
        raise Failed(f"Stopped while it starts: exit code {status} after {took_s:.1f} s.")
    _say(f"a container stopped while it starts: exit code 0 after {took_s:.1f} s")


def _wait_answered(compose: Compose, count: int) -> None:
    answered = _wait(
        lambda: done if (done := JOBS - compose.waiting()) >= count else 0,
        f"{count} answered jobs",
        within_s=120,
    )
    _say(f"{answered} jobs answered")


def _flower(compose: Compose) -> None:
    """Flower must refuse whoever has no password, on every kind of page, and know the workers."""
    pages = ("/", "/tasks", "/api/workers", "/api/tasks", "/metrics")
    for login in ("", "fleet:", "fleet:wrong"):
        for page in pages:
            if (status := _get(compose.port, page, login)[0]) != 401:
                raise Failed(f"Flower answers {page} with {status} for the login {login!r}.")
    login = f"fleet:{compose.password}"
    for page in pages:
        if (status := _get(compose.port, page, login)[0]) != 200:
            raise Failed(f"Flower answers {page} with {status} for its own password.")
    shown = json.loads(_get(compose.port, "/api/workers?status=1", login)[1])
    running = {f"celery@{container}" for container in compose.containers("workers")}
    if not running <= {node for node, alive in shown.items() if alive}:
        raise Failed(f"Flower shows {shown}, and {running} run.")
    _say(f"Flower: 401 without its password, 200 with it; {len(running)} workers online")


def _get(port: int, page: str, login: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{page}")
    if login:
        credentials = base64.b64encode(login.encode()).decode()
        request.add_header("Authorization", f"Basic {credentials}")
    try:
        with urllib.request.urlopen(request, timeout=15) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError as error:
        raise Failed(f"Flower does not answer {page}: {error}") from error


def _ended_well(compose: Compose) -> None:
    template = "{{.Name}} {{.State.ExitCode}}"
    ends = [
        compose.inspect(container, template)
        for service in ("redis", "workers", "flower")
        for container in compose.containers(service, "-a")
    ]
    if bad := [end for end in ends if not end.endswith(" 0")]:
        raise Failed(f"Not every container ended with 0: {', '.join(bad)}")
    _say(f"all {len(ends)} containers ended with exit code 0")


def _nothing_lost(found: dict[str, Any], log: Path) -> None:
    starts = collections.Counter(
        line.split()[1] for line in log.read_text().splitlines() if line.startswith("start ")
    )
    again = sum(times > 1 for times in starts.values())
    _say(f"{json.dumps(found)}\nstarted: {len(starts)} jobs, {again} of them a second time")
    expected = {"answered": JOBS, "wrong": []}
    if found != {**dict.fromkeys(found, 0), **expected}:
        raise Failed(f"There should be {JOBS} right answers, and nothing besides.")
    if len(starts) != JOBS or max(starts.values()) > 2 or again > _IN_A_CONTAINER:
        raise Failed("Jobs were started again that no killed container had begun.")


@contextlib.contextmanager
def _step(text: str) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    _say(f"{text}: {time.monotonic() - began_s:.1f} s")


def _say(text: str) -> None:
    print(text, flush=True)


def _wait(look: Callable[[], int | bool], what: str, *, within_s: float) -> int | bool:
    deadline_s = time.monotonic() + within_s
    while not (found := look()):
        if time.monotonic() > deadline_s:
            raise Failed(f"Waited {within_s:g} s in vain for {what}.")
        time.sleep(0.5)
    return found


def _compose() -> list[str]:
    plugin = ["docker", "compose"]
    with contextlib.suppress(OSError):
        ran = subprocess.run([*plugin, "version"], capture_output=True, check=False)
        return plugin if ran.returncode == 0 else ["docker-compose"]
    sys.exit("compose-test: there is no `docker` command here.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
