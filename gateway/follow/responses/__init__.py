"""OpenAI's Responses API: from logs to answers."""
