"""Every architecture of transformers works with polyhead's attention or is refused: a sample of the table."""

from __future__ import annotations

import functools
import warnings

import pytest

pytest.importorskip("transformers")

import transformers
from huggingface_zoo import TABLE, Verdict, architectures, read_table, verdict
from transformers import PreTrainedModel

from polyhead.interop import huggingface

KNOWN = read_table()
REFUSED = [name for name, known in KNOWN.items() if known.status == "refused"]
# every eighth of the working ones, except those that take seconds
SLOW = {"maskformer", "sam2_vision_model", "videoprism", "vivit"}
WORKING = [name for name, known in KNOWN.items() if known.status == "works" and name not in SLOW][::8]


@functools.cache
def kinds() -> dict[str, type[PreTrainedModel]]:
    huggingface.register()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    return architectures()


def test_the_table_lists_all_architectures() -> None:
    head, version = TABLE.read_text().splitlines()[0], transformers.__version__
    assert {known.status for known in KNOWN.values()} == {"works", "refused", "not run"}
    if f"transformers {version}:" not in head:
        pytest.skip(f"the table is for another version than {version}: python tests/interop/huggingface_zoo.py --write")
    assert set(KNOWN) == set(kinds())


@pytest.mark.parametrize("name", REFUSED + WORKING)
def test_an_architecture_works_or_is_refused(name: str) -> None:
    kind = kinds().get(name)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert verdict(name, kind) == KNOWN[name]


def test_a_wrong_result_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_zoo import WrongError

    from polyhead.interop.huggingface import attention as module

    right = module.polyhead_attention_forward
    wrong = lambda *args, **options: (1.01 * right(*args, **options)[0], None)
    monkeypatch.setattr("huggingface_zoo.polyhead_attention_forward", wrong)
    with pytest.raises(WrongError, match="LlamaModel: differs by"):
        verdict("llama", kinds()["llama"])
    assert verdict("bloom", kinds()["bloom"]).status == "refused"
    monkeypatch.undo()
    assert verdict("llama", kinds()["llama"]) == Verdict("works")
