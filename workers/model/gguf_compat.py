"""What `gguf_folder` uses of transformers beyond its documentation (transformers 5).

- The functions of `reader` read a file's header in milliseconds. What is documented, gguf's reader,
  makes an array of each token and takes seconds.
- Two tables say which architectures are read; what is documented names them on a page alone.

tests/workers/model/test_gguf_folder.py fails where a name is not there any more.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
from transformers.integrations.gguf.reader import _mapped, _read_metadata, _read_tensor_table
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES


class Header(NamedTuple):
    """`metadata`: without long lists. `num_weights` and `data` (bytes, on the disk): by tensor."""

    metadata: dict[str, Any]
    num_weights: dict[str, int]
    data: dict[str, np.ndarray]


def read_header(file: Path) -> Header:
    """Raises ValueError for a file that is cut off, and errors of any class for damaged ones."""
    blob = _mapped(str(file))
    metadata, num_tensors, position = _read_metadata(blob, str(file))
    entries, position = _read_tensor_table(blob, num_tensors, position)
    alignment = metadata.get("general.alignment", 32)  # bytes
    start = math.ceil(position / alignment) * alignment
    num_weights, data = dict[str, int](), dict[str, np.ndarray]()
    for name, shape, kind, offset in entries:
        num_weights[name] = math.prod(shape)
        block_weights, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        end = start + offset + num_weights[name] // block_weights * block_bytes
        if end > len(blob):
            raise ValueError(f"it ends at byte {len(blob)}, before the end of {name} at {end}")
        data[name] = blob[start + offset : end]
    return Header(metadata, num_weights, data)


def gguf_architectures() -> list[str]:
    """The decoders that transformers reads from GGUF, by llama.cpp's names."""
    names, found = set(MODEL_ARCH_NAMES.values()), set(GGUF_ARCHS)
    for kind in GGUF_SUPPORTED_ARCHITECTURES:
        if kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING:
            # Without mistral: such files say llama.
            found |= {kind, kind.replace("_", ""), kind.replace("_", "-")} & names
    return sorted(found)
