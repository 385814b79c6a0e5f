"""Size of a checkpoint's weights by the headers of its files. Imports no torch."""

from pathlib import Path

from huggingface_hub import get_local_safetensors_metadata
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

_MOST_PER_BYTE = 2  # parameters of the smallest type
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def least_weight_bytes(model_path: str, dtype: str, quantization: str, *, on_gpu: bool) -> int:
    """Bytes that the weights of a folder take at least, once loaded as `dtype` (auto: float32 on a
    CPU, a half type on a GPU); 0 if unknown, as for a model of the Hub."""
    folder = Path(model_path).expanduser()
    if not folder.is_dir():
        return 0
    try:
        metadata = get_local_safetensors_metadata(folder)
        num_stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    except (OSError, RecursionError, NotASafetensorsRepoError, SafetensorsParsingError):
        return 0  # the loader says what is wrong
    num_parameters = sum(metadata.parameter_count.values())
    if num_parameters > _MOST_PER_BYTE * num_stored:
        return 0  # a damaged header
    if quantization == "int8":
        return num_parameters
    return num_parameters * _BYTES.get(dtype, 2 if on_gpu else 4)
