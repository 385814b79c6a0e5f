"""Rules of grammars: how a model writes reasoning, answers and tool calls, in Lark as text. Nothing
here needs llguidance, which the process of gateway/grammars/compiled.py alone imports."""
