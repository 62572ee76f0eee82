"""Clients that use one object."""

from __future__ import annotations

import gc

from eventpump.aio.users import Users


class _Client:
    """Stands for a host or a producer."""


def test_first_user_is_the_only_one_and_the_last_one_is_the_last() -> None:
    """Per object, whatever it can be compared with; and a client that has left, or never came, was not the last."""
    users, store, other = Users(), [1], [1]
    first, second = _Client(), _Client()
    assert [users.enter(store, first), users.enter(store, second), users.enter(other, second)] == [True, False, True]
    assert [users.leave(store, first), users.leave(store, first), users.leave(store, second)] == [False, False, True]
    assert not users.leave(store, second)
    assert users.enter(store, second)


def test_client_that_is_gone_uses_nothing() -> None:
    """A host that was dropped without being closed keeps no other one from a store."""
    users, store = Users(), object()
    users.enter(store, _Client())
    gc.collect()
    assert users.enter(store, client := _Client())
    assert users.leave(store, client)
