"""A small HTTP server for what watches a program: probes, metrics and lag."""

from typing import TYPE_CHECKING

from eventpump import homes

if TYPE_CHECKING:
    from eventpump.core.monitoring import Health as Health
    from eventpump.core.monitoring import Metric as Metric
    from eventpump.core.monitoring import Sample as Sample
    from eventpump.core.monitoring import exposition as exposition
    from eventpump.net.health import Describable as Describable
    from eventpump.net.health import HealthServer as HealthServer
    from eventpump.net.health import Monitored as Monitored
else:  # to checkers it would mean that every name exists
    __all__, __getattr__, __dir__ = homes.public(
        __name__,
        {"core.monitoring": "Health Metric Sample exposition", "net.health": "Describable HealthServer Monitored"},
    )
