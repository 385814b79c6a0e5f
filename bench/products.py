"""Times a decoder's matrix products by rows, in each type: python -m bench.products --model DIR

All linear layers of the model's shape but the head, with random weights, in a step's order, by the
fastest product. The minimum of some alternating rounds.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from infra.tables import markdown_table
from workers.engine.interface import ModelRefused
from workers.model.backend import choose_backend
from workers.model.checkpoint import read_config
from workers.model.huge_pages import use_huge_pages
from workers.model.quantization import rounded

ROWS = (1, 2, 4, 8, 16, 32, 96, 192, 256)
_CPU = torch.device("cpu")
_DTYPES = (torch.float32, torch.bfloat16)


def products_of(
    model: str, dtype: torch.dtype, *, is_int8: bool
) -> list[Callable[[Tensor], Tensor]]:
    """The products of all layers. Each multiplies the first `in` columns of its argument, where
    `in` is its number of inputs. Raises ModelRefused."""
    config = read_config(model).get_text_config()
    backend = choose_backend("auto", dtype, _CPU, 16, lambda text: None, fused=True)
    layout = backend.layout
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes = [(heads + 2 * kv_heads, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]

    def product(num_out: int, num_in: int) -> Callable[[Tensor], Tensor]:
        weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
        multiply = layout.linear(rounded(weight) if is_int8 else weight, None)
        return lambda x: multiply(x[:, :num_in])

    generator = torch.Generator().manual_seed(0)
    return [product(*shape) for _ in range(config.num_hidden_layers) for shape in shapes]


@torch.inference_mode()
def measure(model: str, rows: Seq[int], num_rounds: int) -> Mapping[str, Mapping[int, float]]:
    """Returns the name of a type -> rows -> seconds. Raises ModelRefused."""
    kinds = {
        ("int8, " if is_int8 else "") + str(dtype).removeprefix("torch."): (
            dtype,
            products_of(model, dtype, is_int8=is_int8),
        )
        for dtype in _DTYPES
        for is_int8 in (False, True)
    }
    use_huge_pages(())
    config = read_config(model).get_text_config()
    widest = max(config.hidden_size, config.intermediate_size)
    found: dict[str, dict[int, float]] = {name: {} for name in kinds}
    for num_rows in rows:
        for _ in range(num_rounds):
            for name, (dtype, products) in kinds.items():
                x = torch.randn(num_rows, widest).to(dtype)
                products[0](x)
                start_s = time.perf_counter()
                for product in products:
                    product(x)
                wall_s = time.perf_counter() - start_s
                found[name][num_rows] = min(wall_s, found[name].get(num_rows, wall_s))
    return found


def table(found: Mapping[str, Mapping[int, float]]) -> str:
    """Formats a row per type and a column per number of rows; milliseconds."""
    rows = list(next(iter(found.values())))
    cells = [[name, *(f"{1000 * times[n]:.1f}" for n in rows)] for name, times in found.items()]
    return markdown_table([["rows", *map(str, rows)], *cells])


def main(argv: Seq[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.products", description=__doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--threads", type=int, help="of torch and the kernels (default: all cores)")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, metavar="N")
    parser.add_argument("--rounds", type=int, default=12, metavar="N")
    given = parser.parse_args(argv)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    try:
        found = measure(given.model, given.rows, given.rounds)
    except ModelRefused as exc:
        print(f"bench.products: {exc}", file=sys.stderr)
        return 1
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
