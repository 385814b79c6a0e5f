"""HTTP: the app, its server, middleware, limits, errors, health and metrics."""
