"""OpenAI's Responses API: each response is a job, and each event follows from its log."""
