"""OpenAI's Responses API: from bodies to jobs."""
