"""How output is constrained to a grammar; the same where it is checked and where it is applied."""

from typing import Any

# Arguments of llguidance's LLParserLimits: for one grammar at most about 40 MB, and about 15 ms
# of a step. Its errors must not quote the output.
LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 200_000,
    "step_max_items": 30_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}

MAX_GRAMMAR_BYTES = 128 * 1024  # serialised, as a job carries it
