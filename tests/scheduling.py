"""How pytest-xdist shares the tests out to its workers, with `--dist loadfile`."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # it comes without types

_SPARK = "tests/spark/"


class FileScheduling(LoadFileScheduling):  # type: ignore[misc]  # as above
    """Gives whole files to workers; those of `tests/spark` all to one, since each has to start a JVM for them."""

    def _split_scope(self, nodeid: str) -> str:
        return _SPARK if nodeid.startswith(_SPARK) else str(super()._split_scope(nodeid))
