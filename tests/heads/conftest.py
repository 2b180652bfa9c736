"""Neighbourhoods by name."""

import pytest
from view_examples import NEIGHBOURHOODS


@pytest.fixture(params=NEIGHBOURHOODS)
def over(request):
    return request.param
