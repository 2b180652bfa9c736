"""A page to test in the browser, and no gradients."""

import pytest
import torch
from report_examples import CARDS, ROLES, TEXT

from polyhead.inspection.report.report import report


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def page(seen, opened):
    return opened(
        report(
            seen,
            texts=TEXT,
            initial_head=(1, 3),
            cards=CARDS,
            roles=ROLES,
            title="A cat",
            finding="The cat ran.",
            notes=["A note."],
        )
    )
