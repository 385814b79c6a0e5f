"""What `gguf_folder` uses of transformers beyond its documentation (transformers 5).

- `GgufHeader` and `read_gguf_metadata` read a file's header in milliseconds. What is documented
  reads whole files, and refuses by tracebacks.
- The two tables say which architectures are read; what is documented shows it by a page alone.

tests/workers/model/test_gguf_folder.py fails where a name is not there any more.
"""

from gguf import MODEL_ARCH_NAMES
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.integrations.gguf import GGUF_ARCHS, GgufHeader, read_gguf_metadata
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

__all__ = ["GgufHeader", "gguf_architectures", "read_gguf_metadata"]


def gguf_architectures() -> list[str]:
    """The decoders that transformers reads from GGUF, by llama.cpp's names."""
    names, found = set(MODEL_ARCH_NAMES.values()), set(GGUF_ARCHS)
    for kind in GGUF_SUPPORTED_ARCHITECTURES:
        if kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING:
            # Without mistral: such files say llama.
            found |= {kind, kind.replace("_", ""), kind.replace("_", "-")} & names
    return sorted(found)
