"""OpenAI's Files API over the object store."""
