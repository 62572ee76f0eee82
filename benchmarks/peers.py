"""The configurations of azure-eventhub that the benchmarks try, to compare with the best of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from benchmarks.comparing import PEER, TIMEOUT, Figures, Log, has_uvloop
from benchmarks.processes import BenchmarkError, run_side


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration of azure-eventhub.

    Args:
        client: `sync`, `aio`, or `aio on uvloop`.
        options: Of its call, by name.
    """

    client: str
    options: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """What the rows call it."""
        return ", ".join((self.client, *(f"{option} {value}" for option, value in self.options)))

    @property
    def peer(self) -> str:
        """The name with the package and its version."""
        return f"{PEER}, {self.name}"

    def run(self, function: str, **arguments: object) -> Figures:
        """Run its side.

        Raises:
            BenchmarkError: It failed.
        """
        name, loop = self.side(function)
        return run_side(name, TIMEOUT, loop, **arguments, **dict(self.options))

    def side(self, function: str) -> tuple[str, str]:
        """Return the name of its side's function, and the event loop, as `run_side` takes them."""
        module = "theirs_sync" if self.client == "sync" else "theirs"
        return f"{module}:{function}", "uvloop" if self.client.endswith("uvloop") else "asyncio"


def clients() -> list[Configuration]:
    """Return its clients with their defaults."""
    return [Configuration(client) for client in ("sync", "aio", *(("aio on uvloop",) if has_uvloop() else ()))]


def receivers() -> list[Configuration]:
    """Return its clients with every option that matters to receiving."""
    return [
        Configuration(client.client, (("prefetch", prefetch), ("max_batch_size", batch)))
        for client, prefetch, batch in product(clients(), (300, 3000), (300, 3000))
    ]


def is_plain(configuration: Configuration) -> bool:
    """Return whether a configuration of `receivers` is the one that short runs (`--quick`) try of each client."""
    return dict(configuration.options) == {"prefetch": 300, "max_batch_size": 300}


def try_all(
    configurations: Iterable[Configuration],
    run: Callable[[Configuration], Figures],
    log: Log,
    show: Callable[[Figures], str],
    by: str = "cost",
) -> dict[Configuration, Figures]:
    """Run each configuration once, shortly.

    Args:
        by: The figure they are compared by; the smallest is the best.

    Returns:
        Their figures, the best first. One that fails is logged and left out.

    Raises:
        BenchmarkError: All failed.
    """
    found: dict[Configuration, Figures] = {}
    failed: BenchmarkError | None = None
    for configuration in configurations:
        try:
            found[configuration] = run(configuration)
        except BenchmarkError as error:
            failed = error
            log(f"trying {configuration.name}: failed, and is left out: {error}")
        else:
            log(f"trying {configuration.name}: {show(found[configuration])}")
    if not found:
        raise failed or BenchmarkError("there is no configuration to try")
    return dict(sorted(found.items(), key=lambda each: each[1][by]))


def best_of_each_client(found: Mapping[Configuration, Figures]) -> list[Configuration]:
    """Return the best configuration of every client.

    Args:
        found: Of `try_all`.
    """
    best: dict[str, Configuration] = {}
    for configuration in found:
        best.setdefault(configuration.client, configuration)
    return list(best.values())


def others(found: Mapping[Configuration, Figures], by: str = "cost") -> str:
    """Return how many configurations were tried, and the figure of the best of each client that they are compared by.

    Args:
        found: Of `try_all`.
        by: The figure, as given to `try_all`.
    """
    unit = "ms at the median" if by == "p50" else "µs of CPU per event"
    best = ", ".join(f"{each.name} {found[each][by]:.1f}" for each in best_of_each_client(found))
    return f"of {len(found)} configurations tried, the best of each client, in {unit}: {best}"
