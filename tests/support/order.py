"""The order in which the test files start."""

from __future__ import annotations

LONGEST = (
    *(f"spark/{name}.py" for name in ("test_sink", "test_source_queries", "test_demo", "test_source_readers")),
    *(f"spark/{name}.py" for name in ("test_sink_faults", "test_sink_encode", "test_java", "test_example")),
    "spark/test_cluster_histories.py",
    "spark/test_cluster.py",
    "test_pythons.py",  # makes an environment of another Python, and runs unit tests in it: one test
    "test_house.py",  # mypy without its cache, as in a clean checkout
    "test_site.py",  # builds the documentation, which imports Spark
    "integration/test_cli_send_tail.py",  # sixty processes, each a second of imports
    "integration/test_programs.py",  # the demo, three times eight seconds of publishing and a takeover
    "contract/test_lease_stores.py",  # leases of Azurite's have to end, after 15 seconds
    "unit/consumer/record/test_subscriptions.py",  # twelve random histories
    "interop/test_fleet.py",  # processes of three SDKs, ownerships that have to expire
    "faults/test_sink.py",
    "interop/test_javascript.py",
    "contract/test_transports.py",
    "faults/test_connection.py",
    "faults/test_histories.py",
    "faults/test_subscriptions.py",
    "faults/test_stores.py",  # leases of three seconds have to end
    "interop/test_rhea.py",
    "faults/test_hosts.py",
    "test_builds.py",
    "integration/test_service_examples.py",
    "faults/test_idempotent.py",
    "integration/test_parked.py",
    "integration/test_buffered.py",  # half of it over uamqp, which takes ten times as long
    "unit/consumer/bounds/test_computing.py",
    "faults/test_networks.py",
    "fuzz/test_fuzz.py",
    "unit/core/test_balancer.py",
    "integration/test_emulator.py",
    "unit/consumer/bounds/test_limits.py",
    "integration/test_emulator_command.py",
    "interop/test_javascript_receives.py",
    "integration/test_killed_publishers.py",
    "contract/test_blob_leases.py",
    "faults/test_leases.py",
    "interop/test_azure_sends.py",
    "unit/producer/test_overlapping.py",
    "faults/test_processors.py",
    "integration/test_producer_programs.py",  # processes, killed on the way
    "interop/test_azure_receives.py",
    "integration/test_identity.py",
    "unit/amqp/test_codec.py",
    "unit/consumer/link/test_silence.py",
    "interop/test_matrix.py",
    "unit/benchmarks/test_canned.py",
    "integration/test_bad_input.py",
    "interop/test_azure_epochs.py",
    "test_coverage.py",
    "unit/consumer/link/test_buffered_bytes.py",
    "faults/test_rewinds.py",
    "unit/net/test_stream.py",
    "test_leaks.py",
    "unit/transport/test_outages.py",
    "unit/emulator/test_bounds.py",
    "interop/test_azure_recovers.py",
    "contract/test_publisher_states.py",
    "contract/test_sources.py",
    "unit/consumer/pump/test_rewind.py",
    "integration/test_emulator_idempotence.py",
    "integration/test_producer.py",
    "integration/test_emulator_data.py",
    "test_documents.py",
    "unit/benchmarks/test_fanout.py",
    "integration/test_app.py",
    "integration/test_uamqp_transport.py",
    "unit/consumer/host/test_manager.py",
    "contract/test_blob_subscriptions.py",
    "faults/test_emulator_killed.py",
    "unit/test_core.py",
    "integration/test_websockets.py",
)
"""The files that take ten seconds or more, the longest first, as measured with four workers; and Spark's, which all run
in one worker one after another.

A worker of pytest-xdist that is free takes the next file. One of these, taken last, would leave the other workers with
nothing to do.
"""
