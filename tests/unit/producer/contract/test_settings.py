"""Settings: what the environment says, checked, and never a password in a text."""

from __future__ import annotations

import math
import re
import ssl

import kombu.utils.json
import pytest
import redis

from producer.contract.app import celery_url, make_app
from producer.contract.errors import ConfigError
from producer.contract.settings import ANY_NUMBER, Server, Settings, redacted, redis_client


def test_a_url_gives_host_port_database_and_credentials() -> None:
    server = Server.from_url("redis://an%40na:p%2Fw@example.org:6400/3")

    assert (server.host, server.port, server.db) == ("example.org", 6400, 3)
    assert (server.username, server.password) == ("an@na", "p/w")


@pytest.mark.parametrize("url", ["redis://a", "rediss://a", "sentinel://a/mine"])
def test_no_pool_stops_at_a_number_of_connections_that_nobody_asked_for(url: str) -> None:
    backend = make_app(Settings(broker_url=url)).backend

    pools = [redis_client(url), backend.client, backend.waiter._client]

    assert {each.connection_pool.max_connections for each in pools} == {ANY_NUMBER}


@pytest.mark.parametrize("scheme", ["rediss", "fleets"])
def test_tls_is_verified_whatever_the_url_leaves_out(scheme: str) -> None:
    client = redis_client(f"{scheme}://example.org/0?ssl_ca_certs=/ca.pem")

    options = client.connection_pool.connection_kwargs
    assert issubclass(client.connection_pool.connection_class, redis.SSLConnection)
    assert options["ssl_cert_reqs"] == ssl.CERT_REQUIRED
    assert options["ssl_ca_certs"] == "/ca.pem"


def test_a_sentinel_url_names_the_sentinels_the_master_and_whose_passwords_are_whose() -> None:
    url = "sentinel://ana:p%40w@a:1,b,[::1]:3/mine/2?sentinel_username=s&sentinel_password=q%26"

    server = Server.from_url(url)

    assert (server.username, server.password, server.db) == ("ana", "p@w", 2)
    assert server.sentinels is not None
    assert server.sentinels.master == "mine"
    assert server.sentinels.addresses == (("a", 1), ("b", 26379), ("::1", 3))
    assert server.sentinels.options["username"] == "s"
    assert server.sentinels.options["password"] == "q&"


def test_tls_holds_for_the_sentinels_as_well_as_for_the_master() -> None:
    server = Server.from_url("sentinels://a/mine?ssl_ca_certs=/ca.pem")

    pool = redis.ConnectionPool(**server.pool_options())
    assert server.sentinels is not None
    for kind, options in (
        (server.sentinels.connection_class, server.sentinels.options),
        (pool.connection_class, pool.connection_kwargs),
    ):
        assert issubclass(kind, redis.SSLConnection)
        assert options["ssl_cert_reqs"] == ssl.CERT_REQUIRED
        assert options["ssl_check_hostname"]
        assert options["ssl_ca_certs"] == "/ca.pem"


def test_celery_gets_a_url_that_it_can_read_and_no_password_of_a_sentinel() -> None:
    url = "sentinels://ana:pw@a:1,b/mine/2?sentinel_password=secret"

    assert celery_url(url, scheme="fleet") == "fleets://ana:pw@a:1/2"


@pytest.mark.parametrize(
    "url",
    [
        "redis://ana:pw@a:1/2",
        "rediss://ana:pw@a:1/2?ssl_ca_certs=/ca.pem",
        "sentinels://ana:pw@a:1,b/mine/2?sentinel_password=secret",
    ],
)
def test_inspect_can_tell_of_the_connection_without_a_password(url: str) -> None:
    app = make_app(Settings(broker_url=url, blob_url="sftp://ana:pw@arrays"))

    info = app.connection_for_read().info()
    # As Celery's consumer does.
    info.pop("password")
    told = kombu.utils.json.dumps(info)

    assert "fleet_blobs" in told
    assert "pw" not in told
    assert "secret" not in told


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("rediss://example.org/0?ssl_cert_reqs=none", "certificate"),
        ("redis://example.org/0?ssl_ca_certs=/ca.pem", "do not know"),
        ("amqp://example.org", "not a Redis URL"),
        ("redis://example.org/jobs", "must be a number"),
        ("redis://example.org:port/0", "not a URL"),
        ("sentinel://a:1,b:2", "which master"),
        ("sentinel://a:1;sentinel://b:2/mine", "which master"),
        ("sentinel://a:1,b:port/mine", "not a URL"),
        ("sentinel://a:1/mine/jobs", "must be a number"),
        ("redis://a/0?sentinel_password=x", "do not know"),
    ],
)
def test_a_wrong_url_is_refused_with_what_to_write(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Settings(broker_url=url)


def test_a_password_is_in_no_text() -> None:
    url = "redis://user:sec/r@et@example.org:1/0"
    settings = Settings(broker_url="redis://user:secret@example.org:1/0")

    assert "secret" not in repr(settings)
    assert "secret" not in repr(Server.from_url(settings.broker_url))
    assert redacted(url) == "redis://user:***@example.org:1/0"
    by_sentinel = (
        "sentinel://user:secret@a:1,b:2/mine?sentinel_password=sec@ret&sentinel_username=s"
    )
    assert "ret" not in redacted(by_sentinel)
    assert "secret" not in repr(Server.from_url(by_sentinel.replace("@ret", "ret")))


@pytest.mark.parametrize("mark", list("/?#"))
@pytest.mark.parametrize("scheme", ["redis", "rediss", "fleet", "sentinel"])
@pytest.mark.parametrize(
    "secret", ["qzx{}jkv", "77{}jkv", "qzx@{}jkv", "qzx{}jkv=vjk", "qzx:{}jkv", "{}qzx", "qzx{}"]
)
def test_a_password_with_a_bare_mark_is_refused_and_no_piece_of_it_is_told(
    mark: str, scheme: str, secret: str
) -> None:
    url = f"{scheme}://:{secret.format(mark)}@example.org/{'mine/' * (scheme == 'sentinel')}0"

    with pytest.raises(ConfigError, match="%2F") as caught:
        Server.from_url(url)

    assert "***@example.org" in str(caught.value)
    assert not re.search("qzx|jkv|vjk|77", str(caught.value))


@pytest.mark.parametrize("secret", ["qzx[jkv", "qzx]jkv", "[qzx]jkv", "qzx[jkv]"])
def test_a_password_with_a_bare_bracket_is_refused_with_what_to_write(secret: str) -> None:
    with pytest.raises(ConfigError, match="%5B") as caught:
        Server.from_url(f"redis://:{secret}@example.org/0")

    assert not re.search("qzx|jkv", str(caught.value))


@pytest.mark.parametrize("password", ["qzx@jkv", "qzx:@=jkv", "@"])
def test_a_password_may_hold_what_cannot_be_misread(password: str) -> None:
    server = Server.from_url(f"redis://:{password}@example.org/3")

    assert (server.password, server.host, server.db) == (password, "example.org", 3)


def test_the_query_of_a_url_may_hold_an_at_sign() -> None:
    server = Server.from_url("rediss://example.org/0?ssl_ca_certs=/keys@home/ca.pem")

    assert server.tls_files == {"ssl_ca_certs": "/keys@home/ca.pem"}


def test_the_environment_is_read_and_the_rest_has_defaults() -> None:
    settings = Settings.from_env({"FLEET_BROKER_URL": "fleet://h:1/2", "FLEET_RESULT_TTL_S": "60"})

    assert settings.result_url == "fleet://h:1/2"
    assert settings.result_ttl_s == 60
    assert settings.one_server


def test_two_databases_are_two_servers() -> None:
    assert not Settings(broker_url="redis://h/0", result_url="redis://h/1").one_server


def test_the_order_of_the_sentinels_makes_no_other_server() -> None:
    one, two = "sentinel://a:1,b:2/mine", "sentinel://b:2,a:1/mine"

    assert Settings(broker_url=one, result_url=two).one_server
    assert not Settings(broker_url=one, result_url=f"{two}/1").one_server


def test_a_reply_is_waited_for_as_long_as_a_result_is_kept_or_as_told() -> None:
    assert Settings(result_ttl_s=60).reply_timeout_s == 60
    assert Settings.from_env({"FLEET_REPLY_TIMEOUT_S": "0.5"}).reply_timeout_s == 0.5
    assert Settings.from_env({"FLEET_REPLY_TIMEOUT_S": "inf"}).reply_timeout_s == math.inf


@pytest.mark.parametrize("url", ["/mnt/arrays", "memory://arrays", "simplecache::memory://arrays"])
def test_a_place_of_arrays_that_no_other_process_would_find_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"[Ww]rite file:///mnt/arrays"):
        Settings.from_env({"FLEET_BLOB_URL": url})


@pytest.mark.parametrize(
    "environ",
    [
        {"FLEET_RESULT_TTL_S": "soon"},
        {"FLEET_RESULT_TTL_S": "0"},
        {"FLEET_REPLY_TIMEOUT_S": "soon"},
        {"FLEET_REPLY_TIMEOUT_S": "-1"},
        {"FLEET_REPLY_TIMEOUT_S": "nan"},
    ],
)
def test_a_wrong_number_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        Settings.from_env(environ)
