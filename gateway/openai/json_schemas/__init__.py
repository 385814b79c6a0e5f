"""JSON schemas as callers send them, made into what llguidance enforces. Nothing here needs
llguidance, which the process of gateway/openai/grammar_child.py alone imports."""
