"""Arguments of capture: layers, heads and metrics, and their error messages."""

import pytest
import torch
from capture_examples import NAMES, TRANSFORMERS, Nested, Own, record
from torch import nn
from torch.testing import assert_close

from polyhead.inspection.capture.capture import capture
from polyhead.inspection.capture.head_metrics import METRICS


def test_layers_and_heads_select_calls_and_heads():
    model = TRANSFORMERS["bert"]().eval()
    ids = torch.randint(0, 89, (2, 7))
    with capture(model) as everything:
        model(ids)
    for layers, expected in (([1], [1]), ([NAMES["bert"].format(0)], [0]), (["*.1.*"], [1]), ([], [])):
        with capture(model, layers=layers, heads=[2, 0]) as seen:
            model(ids)
        assert list(seen) == [NAMES["bert"].format(n) for n in expected]
        for name, heads in seen.items():
            assert_close(heads.weights, everything[name].weights[:, [2, 0]])


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_kept_metrics_equal_those_of_views(kind):
    """HeadMetrics has the metrics of the view, and holds no view."""
    model = TRANSFORMERS[kind]().eval()
    ids = torch.randint(0, 89, (2, 11))
    marked = torch.rand(2, 11) < 0.5
    metrics = [*[m for m in METRICS if m != ("top", 5)], ("top", 3), ("mass", marked), ("contribution", "mass", marked)]
    with capture(model) as views:
        model(ids)
    with capture(model, metrics=metrics) as seen:
        model(ids)
    assert list(seen) == list(views)
    for name, kept in seen.items():
        view = views[name]
        assert kept.shape == view.shape
        for read in (
            lambda x: x.entropy(), lambda x: x.distance(), lambda x: x.received(), lambda x: x.mass("previous"),
            lambda x: x.mass("first"), lambda x: x.mass(marked), lambda x: x.top(3)[0], lambda x: x.heatmap(),
            lambda x: x.contribution().received(), lambda x: x.contribution().heatmap(64),
            lambda x: x.contribution().mass(marked),
        ):  # fmt: skip
            assert_close(read(kept), read(view), atol=1e-5, rtol=1e-5)
        with pytest.raises(ValueError, match=r"metrics: 'diversity' was not kept; kept are 'entropy'"):
            kept.diversity()
        assert not any(isinstance(value, type(view)) for value in vars(kept).values())


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda: capture(lambda x: x).__enter__(), "model must be a torch.nn.Module, got function"),
        (lambda: record(Own())["out"], "'out' made no attention call that was recorded; there are Own, Own#1"),
        (lambda: record(nn.Linear(20, 20))["x"], "no attention call seen.*attn_implementation='sdpa'"),
        (
            lambda: record(TRANSFORMERS["bert"](), torch.ones(1, 3, dtype=torch.long))["encoder"],
            "'encoder' made 2 attention calls: encoder.layer.0.attention.self, ",
        ),
        (lambda: record(Own())["Own"].edit(lambda x: x, of="v"), "of must be 'outputs' or 'weights', got 'v'"),
        (lambda: record(Own())["Own"].edit(3), "change must be a function from a tensor to a tensor, got int"),
        (
            lambda: record_wrong_edit(),
            r"change must return outputs of shape \(2, 5, 6, 4\), got \(1, 4\) for Own",
        ),
        (lambda: record(Own(), heads=[7]), r"heads must be integers in \[-5, 4\], for there are 5, got \[7\]"),
        (lambda: record(Own(), metrics=["spread"]), "metrics must be among 'entropy', .*, got 'spread'"),
    ],
)
def test_error_messages(act, message):
    with pytest.raises((ValueError, KeyError), match=message):
        act()


def record_wrong_edit():
    model = Own()
    with capture(model) as seen:
        seen.edit("Own", lambda x: torch.zeros(1, 4))
        model(torch.randn(2, 6, 20))


@pytest.mark.parametrize("causal", [False, True])
def test_metrics_do_not_change_the_output(causal):
    """With metrics, capture calls the operator below SDPA to get its log-sum-exp: the output is bit for bit the same."""
    model, x = Own(causal=causal), torch.randn(2, 300, 20)
    plain = model(x)
    with capture(model, metrics=["entropy"]) as seen:
        assert torch.equal(model(x), plain)
    with capture(model) as views:
        model(x)
    for kept, view in zip(seen.values(), views.values(), strict=True):
        w = view.weights.double()
        assert_close(kept.entropy().double(), -torch.special.xlogy(w, w).sum(-1), atol=1e-5, rtol=1e-5)


def test_layers_by_the_enclosing_module():
    model, x = nn.Sequential(Own(), Nested()), torch.randn(2, 6, 20)
    for layers, expected in ((["0"], ["0", "0#1"]), (["1.inner"], ["1.inner", "1.inner#1"]), ([4], ["1"])):
        assert list(record(model, x, layers=layers)) == expected
    with pytest.raises(KeyError, match="'0' was not recorded: layers chose none of 0, 0#1"):
        record(model, x, layers=[9])["0"]
    with pytest.raises(
        ValueError,
        match=r"layers\[0\] must be the name of a module of the model, in which \* matches anything, got '2'; there are Sequential, 0, 0\.packed and more",
    ):
        record(model, x, layers=["2"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layers": "1.*"}, r"layers must be a list of numbers from 0, or names, got '1.\*'"),
        ({"layers": [-1]}, r"layers\[0\] must be an integer in \[0, 2147483647\], got -1"),
        ({"layers": 3}, "layers must be a list of numbers from 0, or names, got 3"),
        ({"heads": 2}, r"heads must be a list of integers in \[-1048576, 1048576\], got 2"),
        (
            {"metrics": "entropy"},
            "metrics must be a list of names of metrics, or tuples of a name and arguments, got 'entropy'",
        ),
    ],
)
def test_arguments_are_lists(options, message):
    with pytest.raises(ValueError, match=message):
        record(Own(), **options)
