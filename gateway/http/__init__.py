"""HTTP below the routes: connections, limits, errors, events, middleware."""
