"""Observes what docs/protocol.md does not know of the service: what `eventpump probe` does."""
