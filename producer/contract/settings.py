"""Where Redis is and how both sides talk to it: read from ``FLEET_*``, checked, secrets hidden."""

from __future__ import annotations

import dataclasses
import os
import re
import ssl
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from producer.contract.errors import ConfigError
from producer.contract.local_broker import local_broker_url
from producer.contract.sentinel import (
    DEFAULT_PORT,
    Address,
    MasterConnection,
    MasterTlsConnection,
    Sentinels,
)

DEFAULT_BROKER_URL: Final = "redis://127.0.0.1:6379/0"

#: Connecting may take this long, so that an absent server is reported well within 5 s.
CONNECT_TIMEOUT_S: Final = 2.0
#: No answer in this time is a dead connection.
SOCKET_TIMEOUT_S: Final = 10.0
#: A connection that was idle for longer is asked for a PONG before it is used.
HEALTH_CHECK_INTERVAL_S: Final = 5
#: What a pool may open: threads that wait at once are as many as an app has. Where nothing is said,
#: redis-py 8.1 stops at 100.
ANY_NUMBER: Final = sys.maxsize
#: A look at results that gets no answer in this time is given up: the next one follows soon.
_LOOK_TIMEOUT_S: Final = 2.0

#: Arrays are not looked for in packed bytes below this: their heads are told apart by their size.
LEAST_INLINE_BYTES: Final = 64 * 1024

#: A week is how long a job may wait for somebody who is away.
BLOB_TTL_S: Final = 7 * 86_400

#: Each with what it is called with TLS.
_SCHEMES: Final = {"redis": "rediss", "fleet": "fleets", "sentinel": "sentinels"}
_SENTINEL: Final = ("sentinel", "sentinels")
_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_SENTINEL_LOGIN: Final = ("sentinel_username", "sentinel_password")
#: All that a URL's query may say.
_OPTIONS: Final = frozenset({"ssl_cert_reqs", *_TLS_FILES, *_SENTINEL_LOGIN})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One Redis server and database, as a URL names it."""

    #: Of the first Sentinel where there are some: what has room for one address shows that.
    host: str
    port: int
    db: int
    username: str | None = None
    password: str | None = dataclasses.field(default=None, repr=False)
    tls: bool = False
    #: ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile`` of the URL's query.
    tls_files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: Who says where the server is; None where the URL does.
    sentinels: Sentinels | None = None

    @classmethod
    def from_url(cls, url: str) -> Server:
        """Read a URL, in one of these forms; ``rediss``, ``fleets`` and ``sentinels`` mean TLS.

        - ``redis://[user:password@]host[:port][/db]``; ``fleet://`` means the same
        - ``sentinel://[user:password@]host[:port][,host[:port]...]/master[/db]``: the hosts are
          Sentinels, ``master`` is the name they know the master by, the user is the master's.
          The Sentinels' own user is ``?sentinel_username=`` and ``&sentinel_password=``.
        """
        parts = _parts(url)
        tls = parts.scheme in _SCHEMES.values()
        if not tls and parts.scheme not in _SCHEMES:
            raise ConfigError(
                f"{redacted(url)} is not a Redis URL. Write redis://host:port/db, or rediss:// "
                "for TLS; with Sentinels, sentinel://host:port,host:port/master/db."
            )
        by_sentinel = parts.scheme in _SENTINEL
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        login = {name: query.pop(name, None) for name in _SENTINEL_LOGIN} if by_sentinel else {}
        master, db = _master_and_db(url, parts.netloc, parts.path, by_sentinel=by_sentinel)
        addresses = _addresses(url, parts.netloc, by_sentinel=by_sentinel)
        server = cls(
            host=addresses[0][0],
            port=addresses[0][1],
            db=db,
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            tls=tls,
            tls_files=_tls_files(url, query, tls=tls),
        )
        if not by_sentinel:
            return server
        return dataclasses.replace(server, sentinels=server._told_by(addresses, master, login))

    def _told_by(
        self, addresses: tuple[Address, ...], master: str, login: Mapping[str, str | None]
    ) -> Sentinels:
        """Return how to ask the Sentinels at ``addresses``: with TLS where the server has it."""
        return Sentinels(
            addresses=addresses,
            master=master,
            connection_class=redis.SSLConnection if self.tls else redis.Connection,
            options={
                "username": login["sentinel_username"],
                "password": login["sentinel_password"],
                "socket_timeout": CONNECT_TIMEOUT_S,
                "socket_connect_timeout": CONNECT_TIMEOUT_S,
                "retry": Retry(NoBackoff(), 0),
                **self.tls_options,
            },
        )

    @property
    def place(self) -> tuple[object, ...]:
        """What makes two URLs the same server and the same database."""
        if self.sentinels is None:
            return (self.host, self.port, self.db)
        return (frozenset(self.sentinels.addresses), self.sentinels.master, self.db)

    @property
    def tls_options(self) -> dict[str, Any]:
        """Return the options that force TLS with a verified certificate; empty without TLS."""
        if not self.tls:
            return {}
        return {**self.tls_files, "ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}

    def pool_options(self) -> dict[str, Any]:
        """Return the arguments of a redis-py connection pool for this server."""
        return {
            "host": self.host,
            "port": self.port,
            "db": self.db,
            "username": self.username,
            "password": self.password,
            "socket_timeout": SOCKET_TIMEOUT_S,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_keepalive": True,
            "health_check_interval": HEALTH_CHECK_INTERVAL_S,
            # redis-py would repeat a command three times, with pauses of seconds between.
            "retry": Retry(NoBackoff(), 0),
            "max_connections": ANY_NUMBER,
            **self.tls_options,
            **self.connection(),
        }

    def connection(self) -> dict[str, Any]:
        """Return the class of a pool's connections, and what that class asks for."""
        if self.sentinels is None:
            return {"connection_class": redis.SSLConnection if self.tls else redis.Connection}
        return {
            "connection_class": MasterTlsConnection if self.tls else MasterConnection,
            "sentinels": self.sentinels,
        }


def _parts(url: str) -> SplitResult:
    """Split ``url``; no message quotes a piece of it, which may be one of a password."""
    told = (
        f"{redacted(url)} cannot be read. In a user or password write / as %2F, ? as %3F, # as "
        "%23, @ as %40, [ as %5B and ] as %5D."
    )
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(told if "@" in url else f"{redacted(url)} is not a URL.") from None
    options = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
    misread = "@" in parts.path or ("@" in parts.query and not options <= _OPTIONS)
    if parts.fragment or misread:
        raise ConfigError(told)
    return parts


def _addresses(url: str, netloc: str, *, by_sentinel: bool) -> tuple[Address, ...]:
    """Return the hosts and ports of ``url``: one, or with Sentinel at least one."""
    places = netloc.rpartition("@")[2]
    default_port = DEFAULT_PORT if by_sentinel else 6379
    found = []
    for place in places.split(",") if by_sentinel else [places]:
        try:
            parts = urlsplit(f"//{place}")
            found.append((parts.hostname or "127.0.0.1", parts.port or default_port))
        except ValueError:
            raise ConfigError(
                f"{redacted(url)} is not a URL: a port must be a number, 65535 at most."
            ) from None
    return tuple(found)


def _master_and_db(url: str, netloc: str, path: str, *, by_sentinel: bool) -> tuple[str, int]:
    """Return the name of the master, which is empty without Sentinels, and the database."""
    names = path.strip("/").split("/")
    master = unquote(names.pop(0)) if by_sentinel else ""
    if by_sentinel and (not master or ";" in netloc):
        raise ConfigError(
            f"{redacted(url)} does not say which master. Write sentinel://host:port,host:port/"
            "master/db, where master is its name in the Sentinels' configuration."
        )
    database = "/".join(names) or "0"
    if not database.isdecimal():
        raise ConfigError(f"{redacted(url)} names database {database!r}. It must be a number.")
    return master, int(database)


def _tls_files(url: str, query: dict[str, str], *, tls: bool) -> dict[str, str]:
    """Check the query of ``url`` and return the certificate files it names."""
    wanted = query.pop("ssl_cert_reqs", "required").lower().removeprefix("cert_")
    if wanted != "required":
        raise ConfigError(
            f"{redacted(url)} turns certificate checks off. Name the authority that signed the "
            "server's certificate instead: ?ssl_ca_certs=/path/to/ca.pem"
        )
    unknown = sorted(set(query) - set(_TLS_FILES))
    if unknown or (query and not tls):
        raise ConfigError(
            f"{redacted(url)} has options we do not know: {', '.join(unknown or sorted(query))}. "
            f"A rediss:// URL may have {', '.join(_TLS_FILES)}, a sentinel:// URL "
            f"{' and '.join(_SENTINEL_LOGIN)}; a redis:// URL none."
        )
    return query


def redacted(url: str) -> str:
    """Return ``url`` fit for messages and logs: without its passwords."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "(not a URL)"
    rest = re.sub(r"(password=)[^&]*", r"\1***", rest)
    # The last @ ends the credentials: a password may hold one, and a slash too.
    credentials, at, place = rest.rpartition("@")
    if not at:
        return f"{scheme}://{rest}"
    username = credentials.partition(":")[0]
    return f"{scheme}://{username}:***@{place}"


def redis_client(url: str, **options: Any) -> redis.Redis:
    """Return a client for ``url`` with our timeouts, and with no hidden repeats of commands.

    Closing it closes its connections. ``options`` go to the connection pool and win over the
    defaults.
    """
    pool = redis.ConnectionPool(**{**Server.from_url(url).pool_options(), **options})
    return redis.Redis.from_pool(pool)


def reading_options() -> dict[str, Any]:
    """Return the pool options of whoever waits for results: it looks again, so it gives up early.

    Nor are connections asked for a PONG before they are used, which a subscription does in its own
    way.
    """
    return {
        "socket_timeout": _LOOK_TIMEOUT_S,
        "health_check_interval": 0,
        "max_connections": ANY_NUMBER,
        "decode_responses": False,
        "retry": Retry(NoBackoff(), 0),
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What app and workers must agree on, and where the servers are."""

    broker_url: str = dataclasses.field(default=DEFAULT_BROKER_URL, repr=False)
    #: Where results are stored; empty means the broker.
    result_url: str = dataclasses.field(default="", repr=False)
    #: How long a result that nobody reads is kept.
    result_ttl_s: int = 3600
    #: How long a read result is remembered, so that its job id is not run again.
    fence_ttl_s: int = 60
    #: How long a reply is waited for where the caller does not say; infinity is for ever. 0: as
    #: long as a result is kept.
    reply_timeout_s: float = 0.0
    #: Put before every key of the fleet.
    prefix: str = ""
    #: The largest packed job; a larger one is refused where it is sent.
    max_body_bytes: int = 64 * 1024 * 1024
    #: The largest array that travels within its job or reply; a larger one lies beside the queue,
    #: and the message refers to it.
    inline_max_bytes: int = 64 * 1024
    #: How long a large array waits for its job to begin. A queue has no expiry, but an array
    #: without one could be left for ever.
    blob_ttl_s: int = BLOB_TTL_S
    #: A folder or bucket for large arrays, as fsspec names it, for example file:///mnt/arrays or
    #: s3://bucket/arrays; empty means Redis.
    blob_url: str = dataclasses.field(default="", repr=False)
    #: New jobs are refused while the broker uses more than this part of its maxmemory. The rest is
    #: for what workers write to get rid of the jobs that wait: results, fences, callbacks, their
    #: own status. A full server refuses some of it. 1: jobs are refused only by a full server.
    memory_watermark: float = 0.9

    def __post_init__(self) -> None:
        if not self.result_url:
            object.__setattr__(self, "result_url", self.broker_url)
        if not self.reply_timeout_s:
            object.__setattr__(self, "reply_timeout_s", float(self.result_ttl_s))
        Server.from_url(self.broker_url)
        Server.from_url(self.result_url)
        positive = ("result_ttl_s", "fence_ttl_s", "blob_ttl_s", "max_body_bytes")
        for name in (*positive, "reply_timeout_s", "memory_watermark"):
            # Not <= 0, which lets NaN through.
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}. It must be greater than 0.")
        if self.inline_max_bytes < LEAST_INLINE_BYTES:
            raise ConfigError(
                f"inline_max_bytes is {self.inline_max_bytes}. It must be at least "
                f"{LEAST_INLINE_BYTES:,}: smaller arrays cost less within their message."
            )
        if self.blob_url and "://" not in self.blob_url:
            raise ConfigError(
                "blob_url is no URL. Write file:///mnt/arrays, s3://bucket/arrays, or whatever "
                "fsspec takes."
            )
        if self.blob_url.rpartition("::")[2].startswith("memory:"):
            raise ConfigError(
                "blob_url is memory://, which each process has for itself. Leave it empty, and "
                "large arrays lie in Redis; or write file:///mnt/arrays or s3://bucket/arrays."
            )
        if self.memory_watermark > 1:
            raise ConfigError(
                f"memory_watermark is {self.memory_watermark:g}. It is a part of maxmemory: 1 at "
                "most."
            )

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.repr
        )
        broker, results = redacted(self.broker_url), redacted(self.result_url)
        return f"Settings(broker_url={broker!r}, result_url={results!r}, {shown})"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read FLEET_BROKER_URL and the other variables; what is not set has its default."""
        found: dict[str, Any] = {}
        for variable, (name, read) in _VARIABLES.items():
            text = environ.get(variable)
            if not text:
                continue
            try:
                found[name] = read(text)
            except ValueError:
                kind = "whole number" if read is int else "number"
                raise ConfigError(f"{variable} is {text!r}. It must be a {kind}.") from None
        # Where `fleet up` runs from this clone, a prompt beside it needs to set nothing.
        if "broker_url" not in found and (url := local_broker_url()):
            found["broker_url"] = url
        return cls(**found)

    @property
    def one_server(self) -> bool:
        """Return whether jobs and results lie in the same database of the same server."""
        return Server.from_url(self.broker_url).place == Server.from_url(self.result_url).place


_VARIABLES: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "FLEET_BROKER_URL": ("broker_url", str),
    "FLEET_RESULT_URL": ("result_url", str),
    "FLEET_RESULT_TTL_S": ("result_ttl_s", int),
    "FLEET_FENCE_TTL_S": ("fence_ttl_s", int),
    "FLEET_REPLY_TIMEOUT_S": ("reply_timeout_s", float),
    "FLEET_PREFIX": ("prefix", str),
    "FLEET_MAX_BODY_BYTES": ("max_body_bytes", int),
    "FLEET_INLINE_MAX_BYTES": ("inline_max_bytes", int),
    "FLEET_BLOB_TTL_S": ("blob_ttl_s", int),
    "FLEET_BLOB_URL": ("blob_url", str),
    "FLEET_MEMORY_WATERMARK": ("memory_watermark", float),
}
