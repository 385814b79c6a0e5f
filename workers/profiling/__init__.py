"""`batchway profile`: what bounds the steps of an engine on this machine. Uses torch."""
