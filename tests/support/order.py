"""The order in which the test files start."""

from __future__ import annotations

LONGEST = (
    "test_pythons.py",  # makes an environment of another Python, and runs unit tests in it: one test
    "test_house.py",  # mypy without its cache, as in a clean checkout
    *(f"spark/{name}.py" for name in ("test_sink", "test_source_queries", "test_demo", "test_source_readers")),
    *(f"spark/{name}.py" for name in ("test_sink_faults", "test_sink_encode", "test_java", "test_example")),
    "test_site.py",  # builds the documentation, which imports Spark
    "integration/test_programs.py",  # the demo, three times eight seconds of publishing and a takeover
    "integration/test_cli_send_tail.py",  # sixty processes, each a second of imports
    "integration/test_producer_programs.py",  # the same, and killed on the way
    "faults/test_stores.py",  # leases of three seconds have to end
    "faults/test_hosts.py",
    "faults/test_histories.py",
    "faults/test_sink.py",
    "faults/test_idempotent.py",
    "fuzz/test_fuzz.py",
    "interop/test_azure_receives.py",
    "interop/test_javascript.py",
    "integration/test_emulator_command.py",
    "integration/test_emulator_data.py",
    "integration/test_bad_input.py",
    "integration/test_buffered.py",  # half of it over uamqp, which takes ten times as long
    "contract/test_transports.py",
    "contract/test_lease_stores.py",  # leases of Azurite's have to end, after 15 seconds
    "integration/test_parked.py",
    "integration/test_emulator_idempotence.py",
    "test_documents.py",
    "faults/test_networks.py",
    "faults/test_emulator_killed.py",
    "faults/test_subscriptions.py",
    "unit/core/test_balancer.py",
    "unit/consumer/test_limits.py",
)
"""The files that take longest, roughly in order: half a minute to some minutes each.

A worker of pytest-xdist that is free takes the next file. One of these, taken last, would leave the other worker with
nothing to do.
"""
