"""The rules by which a gateway counts an image's tokens are those of transformers' processors."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contract.model_cards import ImageTokens

# transformers is imported where it is used: the contract's tests do without.
SIDES = st.integers(1, 4096)


@pytest.fixture(scope="module")
def patches() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    return smart_resize


@pytest.fixture(scope="module")
def tiles() -> Any:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    processor: Any = Idefics3ImageProcessorPil
    return {
        sizes: processor(size={"longest_edge": sizes[0]}, max_image_size={"longest_edge": sizes[1]})
        for sizes in ((1456, 364), (2048, 512), (364, 364), (168, 56), (1000, 300))
    }


@pytest.mark.parametrize(
    ("cell", "least", "most"),
    [(28, 3136, 12_845_056), (28, 3136, 50_176), (32, 65_536, 16_777_216), (32, 1, 4096)],
)
@given(width=SIDES, height=SIDES)
@example(width=1, height=1)
@example(width=14, height=42)
def test_a_grid_is_that_of_qwen2_vl(
    patches: Any, cell: int, least: int, most: int, width: int, height: int
) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    rule = ImageTokens(placeholder="x", layout="grid", cell=cell, least=least, most=most)
    scaled = patches(height, width, factor=cell, min_pixels=least, max_pixels=most)
    assert rule.cells(width, height) == tuple(side // cell for side in scaled)


@given(width=SIDES, height=SIDES)
@example(width=1, height=1)
@example(width=4096, height=21)
def test_tiles_are_those_of_idefics3(tiles: Any, width: int, height: int) -> None:
    for (most, cell), processor in tiles.items():
        rule = ImageTokens(placeholder="x", layout="tiles", cell=cell, most=most)
        _, rows, columns = processor.get_number_of_image_patches(height, width)
        assert rule.cells(width, height) == ((rows, columns) if rows else (1, 1))


def test_numbers_of_tokens_are_of_the_image_its_rows_and_its_cells() -> None:
    """None is negative, whatever a worker publishes."""
    rule = ImageTokens(
        placeholder="x", layout="grid", cell=10, most=10**6, of_image=5, of_row=3, of_cell=1
    )
    sizes = [(10, 10), (10, 20), (30, 20)]
    assert [rule.num_tokens(*size) for size in sizes] == [9, 13, 17]
    assert ImageTokens(placeholder="x", of_image=4).num_tokens(900, 1) == 4
    negative = ImageTokens(placeholder="x", layout="grid", cell=10, most=10**6, of_cell=-9)
    assert negative.num_tokens(90, 90) == 0
