"""From a call's body to its job: checks, templates, tokens, grammars, admission."""
