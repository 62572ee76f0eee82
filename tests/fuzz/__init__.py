"""Hostile bytes: captures of real conversations, mutated, through everything that reads what a peer wrote.

* `captures` loads the conversations; `python -m tests.fuzz.record` records them again.
* `mutations` makes strings of them: by bytes, by AMQP's values, and by frames.
* `entries` has one entry per reader: what it is given, the errors it may raise, and what must hold besides.
* `test_fuzz` runs a few thousand strings per entry, from a seed by date that the header of the run shows, and a
  million in all with `--long`.
* `python -m tests.fuzz ENTRY SEED [--count N]` makes the same string of the same seed again, and shows what fails.
"""
