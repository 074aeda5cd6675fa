"""A server that speaks S3, in an environment of its own, behind a proxy that can go away."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests.support.environments import Environment, make_environment
from tests.support.ports import kept_port
from tests.support.proxy import Proxy, running_proxy
from tests.support.waiting import wait_until
from tests.support.worker import ROOT

BUCKET: Final = "arrays"

#: Makes a user, its key and the bucket; of these four calls alone the server asks for no rights.
_SETUP: Final = """
import boto3, json, sys
at = dict(endpoint_url=sys.argv[1], region_name="us-east-1",
          aws_access_key_id="anybody", aws_secret_access_key="anything")
iam = boto3.client("iam", **at)
iam.create_user(UserName="fleet")
may = [{"Effect": "Allow", "Action": ["s3:*"], "Resource": "*"}]
iam.put_user_policy(UserName="fleet", PolicyName="all",
                    PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": may}))
key = iam.create_access_key(UserName="fleet")["AccessKey"]
boto3.client("s3", **at).create_bucket(Bucket=sys.argv[2])
print(key["AccessKeyId"], key["SecretAccessKey"])
"""

#: Prints the keys of a bucket, or deletes them.
_LOOK: Final = """
import boto3, sys
s3 = boto3.client("s3", endpoint_url=sys.argv[1])
if sys.argv[2] == "buckets":
    print(*(each["Name"] for each in s3.list_buckets()["Buckets"]))
else:
    keys = [each["Key"] for each in s3.list_objects_v2(Bucket=sys.argv[3]).get("Contents", ())]
    print(*keys)
    for key in keys if sys.argv[2] == "delete" else ():
        s3.delete_object(Bucket=sys.argv[3], Key=key)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The server, with one bucket."""

    proxy: Proxy
    key_id: str
    secret: str
    _port: int
    _process: subprocess.Popen[bytes]
    _environment: Environment
    #: Where s3fs is.
    _packages: Path

    @property
    def environ(self) -> dict[str, str]:
        """What tells a process of the fleet where arrays are, and gives it s3fs."""
        return {
            "FLEET_BLOB_URL": f"s3://{BUCKET}/fleet",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": self.key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(self._packages))),
        }

    def keys(self) -> list[str]:
        return self._look("list", BUCKET)

    def delete_all(self) -> None:
        self._look("delete", BUCKET)

    def names(self) -> list[str]:
        """Return the buckets there are."""
        return self._look("buckets")

    def assert_no_secret_in(self, text: str) -> None:
        assert self.secret not in text
        assert self.key_id not in text

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Refuse every connection for the length of the block."""
        self.proxy.refusing = True
        self.proxy.cut()
        try:
            yield
        finally:
            self.proxy.refusing = False

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Let the server stand still for the length of the block."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _look(self, *what: str) -> list[str]:
        said = _say(self._environment, _LOOK, f"http://127.0.0.1:{self._port}", *what, **self._as())
        return said.split()

    def _as(self) -> dict[str, str]:
        names = ("AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        return {name: self.environ[name] for name in names}


@contextlib.contextmanager
def running_buckets(folder: Path) -> Iterator[Buckets]:
    """Run the server for the length of the block; skips the test where pip reaches no packages."""
    ours, theirs = make_environment(folder / "s3fs"), make_environment(folder / "moto")
    fsspec = importlib.metadata.version("fsspec")
    ours.install(f"fsspec=={fsspec}", "s3fs")
    theirs.install("moto[server]")
    with kept_port() as port, _running_moto(theirs, port) as process:
        key_id, secret = _say(theirs, _SETUP, f"http://127.0.0.1:{port}", BUCKET).split()
        with running_proxy(port) as proxy:
            yield Buckets(
                proxy=proxy,
                key_id=key_id,
                secret=secret,
                _port=port,
                _process=process,
                _environment=theirs,
                _packages=ours.packages,
            )


@contextlib.contextmanager
def _running_moto(theirs: Environment, port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [theirs.python, "-m", "moto.server", "-p", str(port)],
        env={**_plain(), "INITIAL_NO_AUTH_ACTION_COUNT": "4"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: _is_open(port), what="the server to answer", timeout_s=60)
        yield process
    finally:
        process.kill()
        process.wait(timeout=30)


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _say(environment: Environment, code: str, *arguments: str, **environ: str) -> str:
    done = subprocess.run(
        [environment.python, "-c", code, *arguments],
        env={**_plain(), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _plain() -> Mapping[str, Any]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
