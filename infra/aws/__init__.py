"""batchway's machines on AWS: the size of the pool, and a worker's life in a container of ECS."""
