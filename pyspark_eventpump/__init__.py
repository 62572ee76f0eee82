"""Makes `format("eventpump")` known to Spark by itself: it imports every top-level module named `pyspark_*`."""

from eventpump.spark.data_source import EventPumpDataSource as DefaultSource

__all__ = ["DefaultSource"]
