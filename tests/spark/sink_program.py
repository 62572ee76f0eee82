"""A driver to be killed: runs a query through the sink, in a process of its own. One argument: its settings, as JSON.

Prints `batch ID COUNT` for every receipt, and at the end `done`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from eventpump.spark import BatchReceipt, foreach_batch_producer
from eventpump.spark.local import local_session
from tests.spark.sinks import StumblingLedger, die_here, numbered_stream


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201 - what this program is for


def write_receipt(receipt: BatchReceipt) -> None:
    say("batch", receipt.batch_id, receipt.count)


def main(settings: dict[str, Any]) -> None:
    directory = Path(settings["directory"])
    directory.mkdir(exist_ok=True)
    kept: str | StumblingLedger = settings["ledger"]
    if settings["die_at"] is not None:
        record, moment = settings["die_at"]
        kept = StumblingLedger(Path(settings["ledger"]), record, moment, die_here)
    producer = foreach_batch_producer(
        settings["connection_string"],
        settings["hub"],
        sink_id="sink",
        ledger=kept,
        on_receipt=write_receipt,
        **{"order_by": "n", **settings["options"]},
    )
    spark = local_session(directory, master=settings["master"], settings=settings["spark"])
    writing = numbered_stream(spark, settings["rows"], tasks=2).writeStream.foreachBatch(producer)
    query = writing.option("checkpointLocation", settings["checkpoint"]).trigger(availableNow=True).start()
    query.awaitTermination()
    spark.stop()
    say("done")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
