"""The process that owns the device and runs the engine's loop."""
