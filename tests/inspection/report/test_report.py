"""The report's data, and the file that it becomes."""

import base64
import importlib
import json
import re
import zlib

import numpy as np
import pytest
import torch
from report_examples import CARDS, ROLES, TEXT, layer

from polyhead import ALiBi, Causal, Graph, MultiHeadAttention, Padding, Window
from polyhead.inspection import measured_heads
from polyhead.inspection.report import page_data
from polyhead.inspection.report.report import report
from polyhead.inspection.roles.role_cards import Card
from polyhead.models import Tokens


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def content(page):
    """The record inside a page."""
    return json.loads(re.search(r'id="record">(.*?)</script>', page.html, re.S)[1])


def array(page, ref):
    """An array of a page, decoded as the page decodes it."""
    packed = re.search(rf'id="blob-{ref["blob"]}">([^<]*)<', page.html)[1]
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<" + ref["kind"]).reshape(ref["shape"])


def page_weights(page, given, head):
    """The weights of a head as the page computes them from q, k and lse."""
    exact = {name: array(page, ref).astype("f4") for name, ref in given["exact"][str(head)].items()}
    first, stop = array(page, given["arrays"]["reach"])[..., None]
    key = np.arange(given["keys"])
    inside = (key >= first) & (key < stop)
    with np.errstate(over="ignore"):
        return np.where(inside, np.exp(exact["q"] @ exact["k"].T * given["scale"] - exact["lse"][:, None]), 0)


def test_a_sentence_is_there_whole(seen):
    page = report(
        seen, texts=TEXT, initial_head=(1, 3), cards=CARDS, roles=ROLES, title="t", finding="f", notes=["n"], batch=1
    )
    given = content(page)
    assert (given["title"], given["finding"], given["notes"], given["initial_head"]) == ("t", "f", ["n"], [1, 3])
    assert [one["name"] for one in given["layers"]] == list(seen)
    assert len(given["texts"]) == 1
    for one, heads in zip(given["layers"], seen.values(), strict=True):
        assert np.allclose(array(page, one["arrays"]["weights"]), heads.weights[1], atol=1e-6)
        assert np.allclose(array(page, one["arrays"]["outputs"]), heads.outputs[1], atol=2e-3)
        moved = torch.tensor(array(page, one["arrays"]["contribution_norms"]))
        assert np.allclose(heads.weights[1] * moved[:, None], heads.contribution().weights[1], atol=1e-5)
        assert np.allclose(page_weights(page, one, 2), heads.weights[1, 2], atol=1e-5)
        words = [1, 2, 3, 4, 5, 6]
        assert np.allclose(one["stats"]["entropy"], heads.entropy()[1][:, words].mean(-1), atol=1e-4)
        assert np.allclose(one["stats"]["distance"], heads.distance()[1][:, words].mean(-1), atol=1e-4)
        for on in ("self", "previous", "next", "first"):
            assert np.allclose(one["stats"]["weight"][on], heads.mass(on)[1][:, words].mean(-1), atol=1e-4), on
        special = heads.mass(torch.tensor(TEXT.special))[1][:, words].mean(-1)
        assert np.allclose(one["stats"]["weight"]["special"], special, atol=1e-4)
        share = heads.contribution().weights[1] / heads.contribution().weights[1].sum(-1, keepdim=True)
        assert np.allclose(one["stats"]["share"]["first"], share[:, words, 0].mean(-1), atol=1e-4)


def test_the_output_is_the_layers_without_its_bias():
    mha = layer(bias=False)
    output, heads = mha(torch.randn(5, 32))
    page = report(heads)
    assert np.allclose(array(page, content(page)["layers"][0]["arrays"]["output"]), output, atol=2e-3)


@pytest.mark.parametrize("over", [None, Causal(), Window(9), Padding(torch.tensor([71, 40]))], ids=repr)
def test_weights_from_q_and_k_are_right(over):
    length = 71
    _, heads = layer(sharp=12.0, kv_heads=2)(torch.randn(2, length, 32), over=over)
    page = report(heads, batch=1)
    given = content(page)["layers"][0]
    assert given["plain"] and "weights" not in given["arrays"]
    for head in range(4):
        assert np.abs(page_weights(page, given, head) - heads.weights[1, head].numpy()).max() < 0.01


def test_large_scores_keep_more_bits():
    _, heads = layer(sharp=3000.0)(torch.randn(80, 32))
    page = report(heads)
    given = content(page)["layers"][0]
    assert "f4" in {ref["q"]["kind"] for ref in given["exact"].values()}
    for head in range(4):
        assert np.abs(page_weights(page, given, head) - heads.weights[head].numpy()).max() < 0.01


def test_a_cell_of_a_map_is_the_share_that_falls_on_its_keys(monkeypatch):
    monkeypatch.setattr(measured_heads, "MAX_HEATMAPS_BYTES", 2 * 4 * 48 * 48)
    _, heads = layer()(torch.randn(101, 32))
    page = report(heads)
    given = content(page)["layers"][0]
    seen = array(page, given["arrays"]["weight map"]).astype("f4") ** 2 / 255**2
    sizes = np.bincount(np.arange(101) * 48 // 101)
    assert np.abs(seen - heads.heatmap(48).numpy() * sizes).max() < 0.005
    assert np.allclose(seen.sum(-1), 1, atol=0.05)


@pytest.mark.parametrize("kind", ["gat", "gatv2", "position", "sink", "mask"])
def test_scores_beyond_the_dot_product_fall_back_to_maps(kind):
    options = {"score": kind} if "gat" in kind else {"position": ALiBi(4)} if kind == "position" else {}
    options |= {"sink": 0.5} if kind == "sink" else {}
    over = torch.rand(80, 80) > 0.3 if kind == "mask" else None
    _, heads = layer(**options)(torch.randn(80, 32), over=over)
    page = report(heads)
    given = content(page)["layers"][0]
    assert not given["plain"]
    assert set(given["exact"]["0"]) == {"top", "keys"}
    values, keys = heads.top(8)
    assert np.allclose(array(page, given["exact"]["2"]["top"]), values[2], atol=1e-3)
    assert np.array_equal(array(page, given["exact"]["2"]["keys"]), keys[2])


def test_beyond_the_budget_the_star_and_the_cards_come_first(monkeypatch):
    monkeypatch.setattr(page_data, "QK_BYTES", 2 * (2 * 2 * 100 * 8 + 4 * 100))
    _, heads = layer()(torch.randn(100, 32))
    page = report(heads, initial_head=(0, 3), cards=[Card(0, 1, "broad", 0.5, 0.1, 3, 0.4, 0.6)])
    exact = content(page)["layers"][0]["exact"]
    assert {head for head, ref in exact.items() if "q" in ref} == {"3", "1"}
    assert exact["0"]["top"]["shape"] == [100, 8]
    monkeypatch.setattr(page_data, "TOP_KEYS_BYTES", 6 * 100 * 4 + 5)
    exact = content(report(heads, initial_head=(0, 3)))["layers"][0]["exact"]
    assert {ref["top"]["shape"][1] for ref in exact.values() if "top" in ref} == {1}


def test_sizes_of_pages():
    """The default model is six layers of twelve heads, 384 wide."""
    for length, most in ((10, 1.5e6), (512, 10e6)):
        heads = MultiHeadAttention(384, 12)(torch.randn(length, 384))[1]
        page = report({f"layer.{i}": heads for i in range(6)}, texts=Tokens.from_pieces(["token"] * length))
        assert len(page.html.encode()) <= most


def test_one_view_is_one_layer_and_a_star_is_found():
    _, heads = layer()(torch.randn(7, 32))
    given = content(report(heads))
    assert [(one["name"], one["kind"], one["rows"]) for one in given["layers"]] == [("attention", "self", None)]
    assert given["initial_head"][0] == 0 and given["initial_head"][1] in range(4)


def test_some_heads_keep_their_numbers():
    _, heads = layer()(torch.randn(7, 32))
    page = report(heads.select(heads=[1, 3]))
    given = content(page)["layers"][0]
    assert given["heads"] == [1, 3] and set(given["exact"]) == {"1", "3"}
    assert np.allclose(array(page, given["arrays"]["weights"]), heads.weights[[1, 3]], atol=1e-6)
    assert np.allclose(array(page, given["arrays"]["outputs"]), heads.outputs[[1, 3]], atol=2e-3)
    assert np.allclose(page_weights(page, given, 3), heads.weights[3], atol=1e-5)


def test_some_queries_and_keys():
    _, heads = layer()(torch.randn(9, 32))
    view = heads.select(queries=[2, 5, 7], keys=slice(3, 8))
    page = report(view)
    given = content(page)["layers"][0]
    assert np.allclose(array(page, given["arrays"]["weights"]), view.weights, atol=1e-6)
    exact = {name: array(page, ref) for name, ref in given["exact"]["1"].items()}
    call = heads._part.call
    assert np.allclose(exact["q"], call.q[1, [2, 5, 7]]) and np.allclose(exact["k"], call.k[1, 3:8])
    assert np.allclose(
        np.exp(exact["q"] @ exact["k"].T * given["scale"] - exact["lse"][:, None]), view.weights[1], atol=1e-5
    )
    assert array(page, given["arrays"]["output"]).shape == (3, 32)


def test_cross_attention_has_two_texts():
    rows, columns = Tokens.from_pieces("abc"), Tokens.from_pieces("defgh")
    _, heads = layer()(torch.randn(3, 32), torch.randn(5, 32))
    given = content(report(heads, texts=(rows, columns)))
    assert given["layers"][0]["kind"] == "cross"
    assert [given["texts"][given["layers"][0][side]]["pieces"] for side in ("rows", "columns")] == [
        list("abc"),
        list("defgh"),
    ]


def test_with_a_cache_the_queries_are_the_last_keys():
    mha = layer()
    cache = mha.cache(None, 6)
    mha(torch.randn(4, 32), over=Causal(), cache=cache)
    _, heads = mha(torch.randn(2, 32), over=Causal(), cache=cache)
    given = content(report(heads, texts=Tokens.from_pieces("abcdef")))
    assert given["texts"][given["layers"][0]["rows"]]["pieces"] == ["e", "f"]


def test_a_graph_has_edges(monkeypatch):
    edges = torch.tensor([[0, 1, 2, 2, 4], [1, 2, 1, 2, 4]])
    _, heads = layer()(torch.randn(2, 5, 32), over=Graph(edges, 5))
    page = report(heads, texts=Tokens.from_pieces("abcde"), batch=1)
    given = content(page)["layers"][0]
    assert (given["kind"], given["edges"], given["queries"]) == ("graph", 5, 5)
    assert np.array_equal(array(page, given["arrays"]["edges"]), edges.numpy())
    assert np.allclose(array(page, given["arrays"]["weights"]), heads.weights[1], atol=1e-6)
    monkeypatch.setattr(page_data, "MAX_EDGES", 3)
    monkeypatch.setattr(importlib.import_module("polyhead.inspection.report.report"), "MAX_EDGES", 3)
    cut = content(report(heads))
    assert cut["layers"][0]["arrays"]["weights"]["shape"] == [4, 3]
    assert cut["notes"] == ["attention: the 3 strongest of 5 edges were kept."]


def test_no_text_breaks_out():
    words = ("</script>", "<!--", "<b>", "&amp;", "\u2028", '"', "\\", "{{title}}", "שלום", "🙂")
    _, heads = layer()(torch.randn(len(words), 32))
    page = report(heads, texts=Tokens.from_pieces(words), title="</title><script>", finding="</script>", notes=["<!--"])
    assert content(page)["texts"][0]["pieces"] == list(words)
    assert "</title><script>" not in page.html
    inside = re.search(r'id="record">(.*?)</script>', page.html, re.S)[1]
    assert not set("<>&\u2028\u2029") & set(inside)
    frame = page._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and frame.count("<") == 2


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    _, heads = layer()(torch.randn(3, 32))
    path = tmp_path / "heads.html"
    page = report(heads, path)
    assert path.read_text(encoding="utf-8") == page.html
    path.write_text("old")
    broken = lambda self, *given, **options: (_ for _ in ()).throw(OSError("no space left"))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr("pathlib.Path.replace", broken)
        page.write(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["heads.html"]
    with pytest.raises(OSError):
        page.write(tmp_path / "no such folder" / "heads.html")


def test_invalid_arguments():
    mha = layer()
    _, heads = mha(torch.randn(3, 32))
    with pytest.raises(ValueError, match="heads must have at least one layer, got an empty mapping"):
        report({})
    with pytest.raises(ValueError, match=r"heads\['a'\] must be a Heads, got Tensor"):
        report({"a": torch.zeros(3)})
    with pytest.raises(
        ValueError, match=r"heads\['attention'\] must have heads, queries and keys, got shape \(4, 0, 0\)"
    ):
        report(mha(torch.randn(0, 32))[1])
    with pytest.raises(ValueError, match="must have 3 pieces, one per query, got 2"):
        report(heads, texts=Tokens.from_pieces("ab"))
    with pytest.raises(ValueError, match=r"initial_head must be \(layer, head\) of one of 1 layers, got \(0, 7\)"):
        report(heads, initial_head=(0, 7))
    with pytest.raises(ValueError, match=r"cards\[0\] must be about a head of the .* layers, got L2H0"):
        report(heads, cards=[Card(2, 0, "broad", 0.5, 0.1, 3, 0.4, 0.6)])
    with pytest.raises(ValueError, match=r"batch must be an integer in \[0, 0\], got 1"):
        report(heads, batch=1)
    with pytest.raises(ValueError, match="must be a view on weights, got one on contributions"):
        report(heads.contribution())


@pytest.mark.parametrize("score", ["dot", "gat", "gatv2"])
def test_heads_in_the_middle_of_training(score):
    """Views with gradients are shown as they are."""
    layer = MultiHeadAttention(8, 2, score=score)
    x = torch.randn(3, 8, requires_grad=True)
    graph = Graph(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3)
    assert "blob-0" in report(layer(x)[1]).html
    assert "blob-0" in report(layer(x, over=graph)[1]).html


def test_parallel_edges_are_one_line_of_all_their_weight():
    torch.manual_seed(0)
    graph = Graph(torch.tensor([[1, 2, 2, 2], [0, 0, 0, 0]]), 3)
    _, heads = MultiHeadAttention(8, 1, score="gatv2")(torch.randn(3, 8), over=graph)
    page = report(heads)
    assert "parallel edges are shown as one" in page.html


@pytest.mark.parametrize(
    "give, message",
    [
        (
            lambda heads: report(MultiHeadAttention(8, 2)),
            "heads must be a Heads, or a mapping.* got MultiHeadAttention",
        ),
        (lambda heads: report(heads, texts="abc"), "texts must be Tokens, .*got str"),
        (lambda heads: report(heads, texts=["a"]), "must have 3 pieces, one per query, got 1"),
    ],
)
def test_what_a_text_may_be(give, message):
    _, heads = MultiHeadAttention(8, 2)(torch.randn(3, 8))
    assert "blob-0" in report(heads, texts=["a", "b", "c"]).html
    with pytest.raises(ValueError, match=message):
        give(heads)
