"""What a gateway needs of each model: tokenizers, templates, cards."""
