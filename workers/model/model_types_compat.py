"""Whether the installed transformers knows a model type, read from the source of its registry. The
documented way, `AutoConfig`, imports torch, which takes seconds.

tests/workers/model/test_transformers_compat.py fails where the source tells less than `AutoConfig`.
"""

import re
from importlib.util import find_spec
from pathlib import Path

_FILES = ("auto_mappings.py", "configuration_auto.py")


def knows_model_type(model_type: str) -> bool:
    """False only if the registry is there and lacks the type; else `AutoConfig` decides."""
    found = find_spec("transformers")
    places = found.submodule_search_locations if found is not None else None
    files = [Path(places[0], "models", "auto", name) for name in _FILES] if places else []
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    entry = re.compile(rf'"{re.escape(model_type)}"[,:] "\w+Config"')
    return not texts or any(map(entry.search, texts))
