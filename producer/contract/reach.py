"""Whether a Redis server can be used: asked once at the start, and told in one line if not."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import redis

from producer.contract.errors import ConfigError
from producer.contract.greeting import SUPPORTED, greet, refuse_cluster
from producer.contract.settings import Server, redacted, redis_client

#: A person waits for the answer.
ANSWER_WITHIN_S: Final = 3.0


def reach(url: str, *, variable: str = "FLEET_BROKER_URL") -> redis.Redis:
    """Return a client that was answered, by no cluster; ConfigError says why not, and names
    ``variable``.
    """
    client = redis_client(
        url, socket_timeout=ANSWER_WITHIN_S, socket_connect_timeout=ANSWER_WITHIN_S
    )
    try:
        client.ping()
        refuse_cluster(greet(client), url, variable=variable)
    except ConfigError:
        client.close()
        raise
    except (redis.RedisError, OSError, UnicodeError) as error:
        client.close()
        raise ConfigError(why_not(error, url, variable=variable)) from error
    return client


def why_not(error: Exception, url: str, *, variable: str = "FLEET_BROKER_URL") -> str:
    """Return what ``error`` means for somebody who set ``variable`` to ``url``."""
    return _trouble_with_tls(error, url) or _trouble(error, url, variable=variable)


def _trouble(error: Exception, url: str, *, variable: str) -> str:
    where = redacted(url)
    match error:
        case redis.AuthenticationError() | redis.exceptions.NoPermissionError():
            return f"{where} refuses the user or the password ({error}) Check {variable}."
        case redis.TimeoutError():
            return (
                f"{where} does not answer within {ANSWER_WITHIN_S:g} s. Check {variable}, and "
                "whether a firewall lies between."
            )
        case redis.exceptions.BusyLoadingError():
            return f"{where} still loads its file. Try again in a moment."
        case redis.ConnectionError() | OSError():
            return (
                f"There is no Redis at {where} ({error}) Check {variable}. Where FLEET_BROKER_URL "
                "is not set, `fleet up` brings a server of its own."
            )
        case redis.ResponseError() if "HELLO" in str(error):
            return f"{where} is older than Redis 6.0, or no Redis ({error}) {SUPPORTED}."
        case _:
            return f"{where} cannot be used ({error}) Check {variable}."


def _trouble_with_tls(error: Exception, url: str) -> str | None:
    """Return why no verified connection came about, where it is the certificate's fault."""
    server, where = Server.from_url(url), redacted(url)
    missing = sorted(path for path in server.tls_files.values() if not Path(path).is_file())
    if missing:
        return f"{where} names files that cannot be read here: {', '.join(missing)}"
    _, refused, reason = str(error).partition("certificate verify failed: ")
    if refused:
        return (
            f"{where} shows a certificate that is refused: "
            f"{reason.partition(' (_ssl')[0].rstrip('.')}. Name the authority that signed it with "
            "?ssl_ca_certs=/path/to/ca.pem, and the host as the certificate does."
        )
    if server.tls and isinstance(error, redis.TimeoutError):
        return (
            f"{where} does not answer within {ANSWER_WITHIN_S:g} s. Does it speak TLS on this port?"
        )
    return None
