"""Capture leaves models, threads, transforms and backends as they were."""

import copy
import threading

import pytest
import torch
from capture_examples import Own
from torch import nn
from torch.testing import assert_close

from polyhead.inspection.capture.capture import capture


def test_the_latest_forward_is_recorded_and_hooks_are_removed():
    model = Own()
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    with capture(model) as seen:
        model(torch.randn(2, 6, 20))
        model(torch.randn(1, 4, 20))
    assert [tuple(heads.shape) for heads in seen.values()] == [(1, 5, 4, 4)] * 2
    assert hooks() == 0
    with pytest.raises(RuntimeError, match=r"must match|mat1 and mat2"), capture(model):
        model(torch.randn(2, 6, 19))
    assert hooks() == 0
    assert torch.overrides._get_current_function_mode_stack() == []


def test_detached_copies_keep_the_weights():
    model = Own()
    x = torch.randn(2, 6, 20)
    with capture(model) as seen:
        model(x)
    permanent = seen["Own"].detach()
    assert torch.equal(permanent.weights, seen["Own"].weights)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_works_during_capture():
    model, x = Own(), torch.randn(3, 2, 6, 20)
    expected = torch.vmap(model)(x)
    with capture(model):
        assert_close(torch.vmap(model)(x), expected)


def test_copies_and_other_threads_are_not_recorded():
    model, x = Own(), torch.randn(2, 6, 20)
    failures = []

    def run_in_thread():
        try:
            for _ in range(20):
                model(x)
        except Exception as error:
            failures.append(error)

    with capture(model) as seen:
        thread = threading.Thread(target=run_in_thread)
        thread.start()
        model(x)
        thread.join()
        other = copy.deepcopy(model)
    assert not failures and list(seen) == ["Own", "Own#1"]
    other(x)
    assert len(seen) == 2


def test_a_hook_that_raises_does_not_break_capture():
    class Fallback(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Own()

        def forward(self, x):
            try:
                return self.part(x)
            except ZeroDivisionError:
                return x

    def refuse(module, arguments):
        raise ZeroDivisionError

    model = Fallback()
    model.part.register_forward_pre_hook(refuse)
    x = torch.randn(2, 6, 20)
    with capture(model):
        assert torch.equal(model(x), x)


def test_contribution_of_views_from_inference_mode():
    model, x = Own(), torch.randn(2, 6, 20)
    with torch.inference_mode(), capture(model) as seen:
        model(x)
    with torch.enable_grad():
        assert seen["Own"].contribution().received().shape == (2, 5, 6)


def test_the_selected_sdpa_backend_is_used():
    model, x = Own(), torch.randn(2, 200, 20)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = model(x)
        with capture(model, metrics=["entropy"]):
            assert torch.equal(model(x), plain)
