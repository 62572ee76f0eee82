"""What there is to see of the hosts' demo."""

from __future__ import annotations

from eventpump.demo.fleet import Fleet, Meter
from eventpump.demo.view import Board, Column, Row

_COLORS = ("cyan", "green", "magenta", "yellow", "blue")
_STATES = {"running": "green", "killed": "bold red", "stopped": "dim"}
_PARTITIONS = (
    Column("partition"),
    Column("owner", is_number=False, width=17),
    Column("epoch", width=5, rank=4),
    Column("position"),
    Column("lag", rank=2),
    Column("events/s", rank=3),
    Column("archive lag", width=11),
)
_HOSTS = (
    Column("host", is_number=False),
    Column("process", rank=2),
    Column("state", is_number=False),
    *(Column(name, width=9) for name in ("partitions", "processed")),
    Column("events/s", width=9, rank=1),
)


class FleetScene:
    """Owners of partitions, and hosts."""

    title = "eventpump demo"

    def __init__(self, fleet: Fleet, total: int) -> None:
        self.fleet = fleet
        self.total = total
        self.published = 0
        self.compared: int | None = None
        """Events that were read from the hub again, to compare them; None before."""
        self.meters: dict[str, Meter] = {str(each): Meter() for each in range(fleet.partitions)}
        self._last_owner: dict[str, str] = {}
        self._final: tuple[list[tuple[str, ...]], list[tuple[str, ...]]] | None = None

    def freeze(self) -> None:
        """Keep showing owners and hosts as they are now: the stream is over, and they are about to stop."""
        self._final = self._partition_rows(), self._host_rows()

    @property
    def processed(self) -> int:
        """Events processed by all hosts, those of a killed one as far as it said."""
        return sum(host.processed for host in self.fleet.hosts)

    @property
    def archive_lag(self) -> int:
        """Events that the second subscription is behind, of the partitions whose lag is known."""
        running = [host for host in self.fleet.hosts if host.is_running]
        return sum(status["lag"] or 0 for host in running for status in host.archived.values())

    def head(self) -> list[tuple[str, str]]:
        processed = ("processed", f"{self.processed:,}")
        if self.compared is None:
            return [("published", f"{self.published:,} of {self.total:,}"), processed]
        return [("published", f"{self.published:,}"), processed, ("compared", f"{self.compared:,}")]

    def boards(self) -> list[Board]:
        names = {host.name: _COLORS[index % len(_COLORS)] for index, host in enumerate(self.fleet.hosts)}
        partitions: list[Row] = [
            (partition_id, (owner, names.get(owner, "dim red")), *rest)
            for partition_id, owner, *rest in self._partition_rows()
        ]
        hosts: list[Row] = [
            (host, process, (state, _STATES[state]), *rest) for host, process, state, *rest in self._host_rows()
        ]
        return [Board(_PARTITIONS, partitions), Board(_HOSTS, hosts)]

    def line(self) -> str:
        owners = " ".join(f"{row[0]}:{row[1].replace(' ', '_')}" for row in self._partition_rows())
        behind = f"archive behind {self.archive_lag:,}"
        if self.compared is not None:
            behind += f" compared {self.compared:,}"
        return f"published {self.published:,} processed {self.processed:,} {behind}  {owners}"

    def _host_rows(self) -> list[tuple[str, ...]]:
        """One row a host: name, process id, state, partitions, events processed, events a second."""
        if self._final is not None:
            return self._final[1]
        return [
            (
                host.name,
                str(host.process.pid),
                host.state,
                str(len(host.partitions)) if host.is_running else "",
                f"{host.processed:,}",
                f"{host.meter.rate:,.0f}" if host.is_running else "",
            )
            for host in self.fleet.hosts
        ]

    def _partition_rows(self) -> list[tuple[str, ...]]:
        """One row a partition: id, owner, epoch, position, lag, events a second, the lag of the archive."""
        if self._final is not None:
            return self._final[0]
        rows: list[tuple[str, ...]] = []
        for partition_id, meter in self.meters.items():
            owner = self.fleet.owner(partition_id)
            if owner is None:
                last = self._last_owner.get(partition_id)
                rows.append((partition_id, f"none (was {last})" if last else "none", *[""] * 5))
                continue
            self._last_owner[partition_id] = owner.name
            status = owner.partitions[partition_id]
            position, lag = status["position"], status["lag"]
            archived = owner.archived.get(partition_id, {}).get("lag")
            if position is not None:
                meter.note(position)
            rows.append(
                (
                    partition_id,
                    owner.name,
                    str(status["epoch"]),
                    "" if position is None else f"{position:,}",
                    "" if lag is None else f"{lag:,}",
                    f"{meter.rate:,.0f}",
                    "" if archived is None else f"{archived:,}",
                )
            )
        return rows
