"""Marks of tests."""

import pytest

# Of cases that CI leaves out, because others show the same.
LONG = (pytest.mark.campaign, pytest.mark.long)
