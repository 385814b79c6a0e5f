"""Whether the installed transformers knows a model type, read from the source of its registry. The
documented way, `AutoConfig`, imports torch, which takes seconds.

tests/workers/model/test_transformers_compat.py fails where the source tells less than `AutoConfig`.
"""

import re
from importlib.metadata import distribution
from pathlib import Path

_FILES = ("auto_mappings.py", "configuration_auto.py")


def knows_model_type(model_type: str) -> bool:
    """False only if the registry is there and lacks the type; else `AutoConfig` decides."""
    folder = Path(str(distribution("transformers").locate_file("transformers/models/auto")))
    texts = [(folder / name).read_text("utf-8") for name in _FILES if (folder / name).is_file()]
    entry = re.compile(rf'"{re.escape(model_type)}"[,:] "\w+Config"')
    return not texts or any(map(entry.search, texts))
