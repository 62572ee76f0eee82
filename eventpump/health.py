"""A small HTTP server for what watches a program: probes, metrics and lag."""

from typing import TYPE_CHECKING

from eventpump import homes

if TYPE_CHECKING:
    from eventpump.net.health import Health as Health
    from eventpump.net.health import HealthServer as HealthServer
    from eventpump.net.health import Metric as Metric
    from eventpump.net.health import Monitored as Monitored
    from eventpump.net.health import Sample as Sample
else:  # to checkers it would mean that every name exists
    __all__, __getattr__, __dir__ = homes.public(
        __name__, {"net.health": "Health HealthServer Metric Sample Monitored"}
    )
