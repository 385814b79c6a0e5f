"""Programs that a peer's own Python runs: a workload in, the fields of `bench engine` out."""
