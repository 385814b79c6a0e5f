"""What can be seen of a running installation: names of metrics, how they are counted and shown."""
