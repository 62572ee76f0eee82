"""How far a consumer group is behind, by the checkpoints of any fleet: `eventpump lag` as a library.

Nothing is written, no lease is taken, and no event is read but with `reader_group`.
"""

from typing import TYPE_CHECKING

from eventpump import homes

if TYPE_CHECKING:
    from eventpump.lag.group import GroupLag as GroupLag
    from eventpump.lag.group import LagState as LagState
    from eventpump.lag.group import PartitionProgress as PartitionProgress
    from eventpump.lag.reader import LagReader as LagReader
    from eventpump.spark.source.checkpoints import SparkCheckpointReader as SparkCheckpointReader
    from eventpump.storage.checkpoints.blobs import BlobCheckpointReader as BlobCheckpointReader
    from eventpump.storage.checkpoints.leases import LeaseStoreCheckpointReader as LeaseStoreCheckpointReader
    from eventpump.storage.checkpoints.leases import SqliteCheckpointReader as SqliteCheckpointReader
    from eventpump.storage.checkpoints.stored import CheckpointReader as CheckpointReader
    from eventpump.storage.checkpoints.stored import GroupCheckpoints as GroupCheckpoints
    from eventpump.storage.checkpoints.stored import StoredCheckpoint as StoredCheckpoint
else:  # to checkers it would mean that every name exists
    __all__, __getattr__, __dir__ = homes.public(
        __name__,
        {
            "lag.group": "GroupLag LagState PartitionProgress",
            "lag.reader": "LagReader",
            "spark.source.checkpoints": "SparkCheckpointReader",
            "storage.checkpoints.blobs": "BlobCheckpointReader",
            "storage.checkpoints.leases": "LeaseStoreCheckpointReader SqliteCheckpointReader",
            "storage.checkpoints.stored": "CheckpointReader GroupCheckpoints StoredCheckpoint",
        },
    )
