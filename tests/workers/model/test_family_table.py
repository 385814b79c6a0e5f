"""The table of docs/models.md: how every causal model of the installed transformers is served."""

import pytest
import transformers

from bench.families import (
    ALONE,
    BATCHED,
    NOT_MADE,
    PAGE,
    REFUSED,
    Family,
    model_types,
    read_table,
    table_of,
    try_apart,
    try_family,
    with_table,
)
from tests.tiny_families import BATCHED_SINCE_5_24, PAGED, SEQUENTIAL
from tests.tiny_models import make_config

# Of each way to be served; in one batch also with keys and values in sizes by layer or shared, and
# with states.
A_FEW = [
    "afmoe",
    "bert",
    "bloom",
    "camembert",
    "dbrx",
    "deepseek_v2",
    "falcon_h1",
    "gemma3n_text",
    "gemma4_text",
    "mamba",
]


def test_the_page_has_every_causal_model() -> None:
    """`python -m bench.families --write` makes the table."""
    assert model_types().keys() <= read_table(PAGE.read_text("utf-8")).keys()


@pytest.mark.parametrize("model_type", A_FEW)
def test_a_family_is_served_as_the_page_says(model_type: str) -> None:
    """With the reason; in one batch and one at a time its tokens are those of `generate`."""
    found = read_table(table_of([try_family(model_type)]))

    assert found[model_type] == read_table(PAGE.read_text("utf-8"))[model_type]


def test_the_page_agrees_with_the_families_of_other_tests() -> None:
    """What they load as paged is in one batch; what they load as sequential is not."""
    table = read_table(PAGE.read_text("utf-8"))
    since = BATCHED_SINCE_5_24  # the page is that of a later version
    for families, served in ((PAGED.keys() | since, BATCHED), (SEQUENTIAL.keys() - since, ALONE)):
        found = {family: table[make_config(family).model_type].served for family in families}
        assert found == dict.fromkeys(families, served)


def test_a_table_is_read_as_it_was_written() -> None:
    """Models are grouped by how they are served and by a reason that names none of them."""
    families = [
        Family("a", BATCHED),
        Family("b-2", ALONE, "BForCausalLM attends twice; in chunks"),
        Family("c", ALONE, "CForCausalLM attends twice; in chunks"),
        Family("d", REFUSED, "the d | e is none"),
        Family("f", NOT_MADE, "KeyError: 'f'"),
    ]
    page = "before\n<!-- families: begin -->\nold\n<!-- families: end -->\nafter\n"

    written = with_table(page, families)

    assert "old" not in written
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")
    assert "`b-2`, `c`" in written
    table = read_table(written)
    assert {name: family.served for name, family in table.items()} == {
        family.model_type: family.served for family in families
    }
    assert table["b-2"].why == "it attends twice; in chunks"


@pytest.mark.campaign
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_causal_model_is_served_as_the_page_says() -> None:
    """None ends in a traceback or gives other tokens. The page's version must be the installed."""
    page = PAGE.read_text("utf-8")
    assert f"With transformers {transformers.__version__}," in page
    assert with_table(page, [try_apart(name) for name in model_types()]) == page
