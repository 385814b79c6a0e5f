"""What `gguf_folder` uses of transformers beyond its documentation (transformers 5).

- `GgufHeader`, `read_gguf_metadata` and `load_gguf_state_dict` read a file's header in
  milliseconds, and a tensor when it is asked for. What is documented reads whole files.
- Two tables say which architectures are read; what is documented names them on a page alone.

tests/workers/model/test_gguf_folder.py fails where a name is not there any more.
"""

from gguf import MODEL_ARCH_NAMES
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
from transformers.integrations.gguf.reader import (
    GgufHeader,
    load_gguf_state_dict,
    read_gguf_metadata,
)
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

__all__ = ["GgufHeader", "gguf_architectures", "load_gguf_state_dict", "read_gguf_metadata"]


def gguf_architectures() -> list[str]:
    """The decoders that transformers reads from GGUF, by llama.cpp's names."""
    names, found = set(MODEL_ARCH_NAMES.values()), set(GGUF_ARCHS)
    for kind in GGUF_SUPPORTED_ARCHITECTURES:
        if kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING:
            # Without mistral: such files say llama.
            found |= {kind, kind.replace("_", ""), kind.replace("_", "-")} & names
    return sorted(found)
