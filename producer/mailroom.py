"""What the Clients of one process share where they have the same settings.

One thread receives all replies, one sends for all coroutines, over a few connections. So a Client
for each request of a web server costs next to nothing. They last as long as there is a Client.
"""

from __future__ import annotations

import os
import uuid
import weakref
from typing import Final

from producer.asking import Asking
from producer.contract.app import make_app
from producer.contract.settings import Settings
from producer.inbox import Inbox
from producer.outbox import Outbox
from producer.publisher import Publisher
from producer.sending import Sending
from producer.tasks import register


class Mailroom:
    """The way out and the way in; for the process that made it alone."""

    def __init__(self, settings: Settings) -> None:
        app = make_app(settings)
        infer = register(app)
        self.publisher = infer.publisher
        inbox_id = uuid.uuid4().hex
        self.sending = Sending(infer, inbox_id)
        self.inbox = Inbox(app, inbox_id)
        self.outbox = Outbox(self.sending, self.inbox, self.publisher)
        self.asking = Asking(settings)
        weakref.finalize(self, _let_go, os.getpid(), self.inbox, self.outbox, self.publisher)


#: By process, because a forked child has neither the threads nor the parent's jobs.
_mailrooms: Final[weakref.WeakValueDictionary[tuple[int, Settings], Mailroom]] = (
    weakref.WeakValueDictionary()
)


def mailroom(settings: Settings) -> Mailroom:
    """Return the mailroom of this process for ``settings``; it closes when nobody holds it."""
    key = os.getpid(), settings
    found = _mailrooms.get(key)
    # Of two threads that make the first one, both get the one that was noted first.
    return found if found is not None else _mailrooms.setdefault(key, Mailroom(settings))


def _let_go(pid: int, inbox: Inbox, outbox: Outbox, publisher: Publisher) -> None:
    """Close what a mailroom has open. Takes no lock: the garbage collector may call it anywhere."""
    if pid == os.getpid():
        inbox.stop()
        outbox.stop()
        publisher.close()
