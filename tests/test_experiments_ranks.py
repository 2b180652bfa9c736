"""The picture of what ranks send to each other."""

import pytest
from experiment_helpers import assert_is_png

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytestmark = pytest.mark.usefixtures("experiments")


def test_rank_messages(tmp_path):
    import rank_messages

    from polyhead.distributed.item_layout import ItemLayout
    from polyhead.distributed.item_plan import Layouts

    out = tmp_path / "picture.png"
    assert rank_messages.main(["--length", "40", "--out", str(out)]) == 0
    assert_is_png(out)
    over, order = rank_messages.cases(40)["causal window"]
    layout = ItemLayout(40, rank_messages.RANKS, order)
    sent = rank_messages.sent_keys(over, Layouts(layout, layout))
    # the last four keys before each of three boundaries
    assert sent.diagonal(1).tolist() == [4, 4, 4] and int(sent.sum()) == 12
