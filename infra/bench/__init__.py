"""`batchway bench` and `batchway compare`: load, workloads, reports and plots."""
