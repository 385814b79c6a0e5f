"""Compiles schemas, tools, expressions and choices to grammars of outputs."""
