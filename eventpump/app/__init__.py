"""Subscribers and publishers as decorated functions: thin sugar over hosts, processors and producers."""
