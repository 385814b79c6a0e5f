"""Prefill-only models: embeddings, classifiers, rerankers. They need no KV cache."""
