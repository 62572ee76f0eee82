"""The Spark pipeline: a streaming source and a foreachBatch producer. Needs the extra `eventpump[spark]`."""
