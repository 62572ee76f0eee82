"""The sides of the benchmarks, each run in a process of its own. A side imports only what it measures."""
