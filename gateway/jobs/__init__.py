"""Jobs in the API: routes, lists, quotes, streams, callbacks."""
