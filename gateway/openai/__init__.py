"""OpenAI's surface: bodies in, prompts and tokens, answers out."""
