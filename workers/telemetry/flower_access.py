"""Who may look at Flower: a user and a password are always asked for, on every page.

Knows nothing of Flower until `close_every_page`, so that `fleet up` can use the rest.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any, Final

from producer.contract.errors import ConfigError

#: ``user:password``, or several with commas between; Flower's own variable.
VARIABLE: Final = "FLOWER_BASIC_AUTH"

_USER: Final = "fleet"
_PASSWORD_BYTES: Final = 15


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The users and passwords of one Flower."""

    #: ``user:password`` each.
    logins: tuple[str, ...] = dataclasses.field(repr=False)
    #: Made up for this run; nobody knows it unless it is printed.
    made_up: bool

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Access:
        """Read FLOWER_BASIC_AUTH, or make up a password where it is not set or empty."""
        text = environ.get(VARIABLE, "")
        if not text:
            login = f"{_USER}:{secrets.token_urlsafe(_PASSWORD_BYTES)}"
            return cls(logins=(login,), made_up=True)
        logins = tuple(text.split(","))
        if not all(map(_is_login, logins)):
            # Without the text itself: it is a secret, however wrong.
            raise ConfigError(
                f"{VARIABLE} must be user:password, or several with commas between; neither may "
                "be empty or hold anything but ASCII."
            )
        return cls(logins=logins, made_up=False)

    @property
    def variable(self) -> dict[str, str]:
        """Return the variable that gives a Flower beside us these logins."""
        return {VARIABLE: ",".join(self.logins)}

    def how_to_log_in(self) -> str:
        """Return a line for the one who started this Flower; it holds a made-up password."""
        users = ", ".join(login.partition(":")[0] for login in self.logins)
        if self.made_up:
            user, _, password = self.logins[0].partition(":")
            return f"user {user}, password {password} (of this run; {VARIABLE} sets one)"
        return f"user {users}, password as {VARIABLE} says"


def _is_login(text: str) -> bool:
    user, _, password = text.partition(":")
    # Flower compares texts in constant time, which Python does for ASCII alone.
    return bool(user and password) and text.isascii() and text.isprintable()


def close_every_page() -> None:
    """Ask for the password also where Flower itself does not, such as /metrics and /healthcheck.

    Two kinds stay open, and tell nothing of the fleet: files below /static, and the empty answer
    to the method OPTIONS.
    """
    from flower.views import BaseHandler
    from tornado.web import HTTPError

    stock = BaseHandler.get_current_user

    def get_current_user(handler: Any) -> Any:
        # The command line has the last word on the option, and an empty one would open all.
        logins = handler.application.options.basic_auth
        if not logins or not all(map(_is_login, logins)):
            raise HTTPError(401)
        return stock(handler)

    def prepare(handler: Any) -> None:
        # Looking at it raises 401 where the password is missing or wrong.
        if handler.request.method != "OPTIONS":
            _ = handler.current_user

    BaseHandler.get_current_user = get_current_user
    BaseHandler.prepare = prepare
