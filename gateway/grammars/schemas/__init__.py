"""JSON schemas as callers send them, made into what llguidance enforces. Nothing here needs
llguidance, which the process of gateway/grammars/compiled.py alone imports."""
