"""The checkpoints of a consumer group, of any fleet: move, copy, export and restore them. `eventpump checkpoints` as a
library.

What reads them is in `eventpump.lag`.
"""

from typing import TYPE_CHECKING

from eventpump import homes

if TYPE_CHECKING:
    from eventpump.checkpoints.editor import CheckpointEditor as CheckpointEditor
    from eventpump.checkpoints.export import CheckpointExport as CheckpointExport
    from eventpump.checkpoints.export import ExportedCheckpoint as ExportedCheckpoint
    from eventpump.checkpoints.plan import ChangeAction as ChangeAction
    from eventpump.checkpoints.plan import CheckpointChange as CheckpointChange
    from eventpump.checkpoints.plan import CheckpointOutcome as CheckpointOutcome
    from eventpump.checkpoints.plan import CheckpointPlan as CheckpointPlan
    from eventpump.storage.checkpoints.blob_writer import BlobCheckpointWriter as BlobCheckpointWriter
    from eventpump.storage.checkpoints.writing import CheckpointTarget as CheckpointTarget
    from eventpump.storage.checkpoints.writing import SqliteCheckpointWriter as SqliteCheckpointWriter
else:  # to checkers it would mean that every name exists
    __all__, __getattr__, __dir__ = homes.public(
        __name__,
        {
            "checkpoints.editor": "CheckpointEditor",
            "checkpoints.export": "CheckpointExport ExportedCheckpoint",
            "checkpoints.plan": "ChangeAction CheckpointChange CheckpointOutcome CheckpointPlan",
            "storage.checkpoints.blob_writer": "BlobCheckpointWriter",
            "storage.checkpoints.writing": "CheckpointTarget SqliteCheckpointWriter",
        },
    )
