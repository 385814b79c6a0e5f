"""The process that owns Redis, leases, text and signals. Without torch."""
