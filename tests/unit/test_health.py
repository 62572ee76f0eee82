"""Prometheus' text format, and the server's addresses."""

from __future__ import annotations

import math

import pytest

from eventpump.errors import ConfigurationError
from eventpump.net.health import Health, HealthServer, Metric, Sample, exposition


class Nothing:
    """Something that is well, and has nothing to report."""

    def health(self) -> Health:
        return Health(live=True, ready=False, reasons=("not yet",))

    def metrics(self) -> tuple[Metric, ...]:
        return ()

    def lag(self) -> None:
        return None


def test_metrics_are_written_in_the_text_format() -> None:
    """Labels are quoted, one HELP and TYPE for each name, and a metric without values is left out."""
    made = [
        Metric("a", "gauge", "What\nit is.", [Sample({"hub": 'x"\\\n'}, 3), Sample({}, 0.5), Sample({}, math.inf)]),
        Metric("b", "counter", "None.", []),
    ]
    assert exposition(made) == '# HELP a What\\nit is.\n# TYPE a gauge\na{hub="x\\"\\\\\\n"} 3\na 0.5\na +Inf\n'


async def test_port_in_use_is_a_configuration_error() -> None:
    """It names address and port."""
    async with HealthServer(Nothing(), port=0) as server:
        with pytest.raises(ConfigurationError, match=str(server.port)):
            await HealthServer(Nothing(), port=server.port).start()
