"""How much is measured: on a GPU, and on tiny shapes to try the check itself."""

from dataclasses import dataclass

from bench.gpu_check.shapes import LLAMA2_7B, QWEN3_8B, TINY_QWEN3, Shape


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts of streams, tokens, steps and repeats."""

    decoding: Shape
    strategies: Shape
    streams: tuple[int, ...]
    num_in: int
    num_out: int
    num_repeats: int
    steady_steps: int  # a repeat's steps, where streams are timed in the middle of their output
    prefill: tuple[int, int]  # prompts, tokens of each
    closed: tuple[int, int, int]  # requests, prompt tokens, output tokens, beside transformers
    checked: tuple[int, int, int]  # the same, of the tokens held against transformers'
    killed: tuple[int, int, int]  # the same, of the streams whose worker is killed
    num_requests: int  # of the strategies
    lengths: tuple[int, int]  # of their prompts and outputs, log-uniform
    batch_size: int  # of static and dynamic batches


FULL = Sizes(
    decoding=QWEN3_8B,
    strategies=LLAMA2_7B,
    streams=(1, 32, 256),
    num_in=128,
    num_out=1024,
    num_repeats=3,
    steady_steps=20,
    prefill=(16, 2048),
    closed=(128, 512, 128),
    checked=(4, 512, 32),
    killed=(32, 128, 1024),
    num_requests=256,
    lengths=(16, 512),
    batch_size=32,
)
SMALL = Sizes(
    decoding=TINY_QWEN3,
    strategies=TINY_QWEN3,
    streams=(1, 2),
    num_in=6,
    num_out=5,
    num_repeats=1,
    steady_steps=1,
    prefill=(2, 6),
    closed=(2, 8, 3),
    checked=(2, 9, 4),
    killed=(2, 6, 400),
    num_requests=3,
    lengths=(2, 5),
    batch_size=2,
)
