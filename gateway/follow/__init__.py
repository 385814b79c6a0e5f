"""From a job's log to its answer, whole or as a stream."""
