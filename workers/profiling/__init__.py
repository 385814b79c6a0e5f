"""`batchway profile`: finds what limits an engine's steps on this machine. Uses torch."""
