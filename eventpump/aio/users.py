"""Which clients use an object that a program may give to several of them, such as a store."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet


class Users:
    """Records which clients use which objects, of all event loops of the process.

    A client that was collected without being closed uses nothing any more.
    """

    def __init__(self) -> None:
        # By identity: such an object need be neither hashable nor weakly referable. A client keeps the object, so that
        # no other one has its identity while there is a client.
        self._users: dict[int, WeakSet[Any]] = {}
        self._lock = threading.Lock()

    def enter(self, shared: object, client: object) -> bool:
        """Record that a client uses an object. Return whether it is the only one."""
        with self._lock:
            users = self._users.setdefault(id(shared), WeakSet())
            users.add(client)
            return len(users) == 1

    def leave(self, shared: object, client: object) -> bool:
        """Record that a client uses an object no longer. Return whether it was the last one."""
        with self._lock:
            users = self._users.get(id(shared), WeakSet())
            if client not in users:
                return False
            users.remove(client)
            if not users:
                del self._users[id(shared)]
            return not users
