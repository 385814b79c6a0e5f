"""Programs for the other engines' Python: read a workload, write the fields of `bench engine`."""
