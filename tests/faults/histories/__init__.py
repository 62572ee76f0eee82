"""Random histories on virtual time: what a fleet or its producers live through, made from a seed, and what must hold.

`python -m tests.faults.histories <kind> <seed>` runs one again and prints its trace.
"""
