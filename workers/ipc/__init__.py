"""The messages between supervisor and engine process, and the socket that carries them."""
