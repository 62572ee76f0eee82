"""The kinds of histories, and how one is run."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from tests.faults.histories.app import PROFILES as APP_PROFILES
from tests.faults.histories.app import app_history
from tests.faults.histories.consumer import PROFILES as CONSUMER_PROFILES
from tests.faults.histories.consumer import consumer_history
from tests.faults.histories.keyed import PROFILES as KEYED_PROFILES
from tests.faults.histories.keyed import STREAMS, keyed_history, keyed_streams_history
from tests.faults.histories.keyed_reader import keyed_reader_history
from tests.faults.histories.keyed_rewinds import PROFILES as KEYED_REWINDS_PROFILES
from tests.faults.histories.keyed_rewinds import keyed_rewind_history
from tests.faults.histories.mixed import PROFILES as MIXED_PROFILES
from tests.faults.histories.mixed import mixed_history
from tests.faults.histories.producer import PROFILES as PRODUCER_PROFILES
from tests.faults.histories.producer import producer_history
from tests.faults.histories.publishers import PROFILES as PUBLISHERS_PROFILES
from tests.faults.histories.publishers import publishers_history
from tests.faults.histories.reader import reader_history
from tests.faults.histories.rewinds import PROFILES as REWINDS_PROFILES
from tests.faults.histories.rewinds import rewind_history
from tests.faults.histories.sharing import HUBS, SHARED, hubs_history, shared_history
from tests.faults.histories.subscribers import PROFILES as SUBSCRIBERS_PROFILES
from tests.faults.histories.subscribers import subscribers_history
from tests.faults.histories.world import Verdict, World, live

SIZE = 40
"""Steps of trouble in a history, unless it is asked for more."""

KINDS: dict[str, Callable[[World, int], Coroutine[Any, Any, None]]] = {
    **{f"app:{name}": app_history for name in APP_PROFILES},
    **{f"app:{name}": publishers_history for name in PUBLISHERS_PROFILES},
    **{f"consumer:{name}": consumer_history for name in CONSUMER_PROFILES},
    **{f"hubs:{name}": hubs_history for name in HUBS},
    **{f"keyed:{name}": keyed_history for name in KEYED_PROFILES},
    **{f"keyed:{name}": keyed_streams_history for name in STREAMS},
    **{f"keyed:{name}": keyed_rewind_history for name in KEYED_REWINDS_PROFILES},
    **{f"mixed:{name}": mixed_history for name in MIXED_PROFILES},
    **{f"producer:{name}": producer_history for name in PRODUCER_PROFILES},
    **{f"shared:{name}": shared_history for name in SHARED},
    **{f"subscribers:{name}": subscribers_history for name in SUBSCRIBERS_PROFILES},
    **{f"rewinds:{name}": rewind_history for name in REWINDS_PROFILES},
    "reader": reader_history,
    "reader:large": reader_history,
    "reader:keyed": keyed_reader_history,
}


def run_history(kind: str, seed: int, size: int = SIZE) -> Verdict:
    """Live a history.

    Args:
        kind: One of `KINDS`.
        size: Steps of trouble.
    """
    return live(kind, seed, size, KINDS[kind])
