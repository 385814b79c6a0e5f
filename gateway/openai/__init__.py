"""OpenAI's API: request bodies, prompts and tokens, responses."""
