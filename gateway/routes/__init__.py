"""The routes of the API: from a request to its response."""
