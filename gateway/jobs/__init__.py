"""Jobs as callers see them: routes, lists, quotes, streams, callbacks."""
