"""The cases of the check of a device: they cover what is public, and the definition that they are compared with is right."""

from __future__ import annotations

import pytest
import torch

import polyhead
from polyhead import Neighbourhood, Position, Score, attend
from polyhead.device_check import graphs, grids, modules, sequences
from polyhead.device_check.cases import CPU, list_cases
from polyhead.device_check.devices import full_fp32_precision, refuse_waits, supported_dtypes
from polyhead.device_check.operands import SEED
from polyhead.device_check.run import run_case
from polyhead.neighbourhood import intersection_parts


def public(kind: type) -> set[type]:
    return {x for x in vars(polyhead).values() if isinstance(x, type) and issubclass(x, kind)} - {kind}


def all_operands():
    for table in (sequences, grids, graphs):
        for _, dtype, make in table.device_rows([torch.float32]):
            torch.manual_seed(0)
            yield make()
            assert dtype == torch.float32


def test_every_public_neighbourhood_score_and_position_is_in_a_case():
    every = list(all_operands())
    assert public(Neighbourhood) <= {type(part) for x in every for part in intersection_parts(x.over)}
    assert public(Score) <= {type(x.score) for x in every}
    assert public(Position) <= {type(x.position) for x in every}


def test_every_pair_of_a_neighbourhood_and_an_option_is_in_a_case():
    variants = sequences.VARIANTS.values()
    assert {v.position for v in variants} | {"rotary-partial"} == set(sequences.POSITIONS)
    options = {name for v in variants for name, value in vars(v.option).items() if value}
    assert options | {"scale"} == {
        name for option in sequences.OPTIONS.values() for name, value in vars(option).items() if value
    }
    layouts = [v.layout for v in variants]
    assert any(at.key_heads < at.heads for at in layouts)
    assert any(at.value_dim > at.dim for at in layouts) and any(at.value_dim < at.dim for at in layouts)
    names = [case.name for case in list_cases([torch.float32])]
    assert {f"{n}: {v}" for n in sequences.NEIGHBOURHOODS for v in sequences.VARIANTS} <= set(names)
    assert len(set(names)) == len(names)


def test_every_dtype_that_a_device_has_is_checked():
    dtypes = supported_dtypes(CPU)
    assert {torch.float64, torch.float32} <= set(dtypes)
    assert {case.dtype for case in list_cases(dtypes)} == set(dtypes)
    assert {case.dtype for case in list_cases([torch.float32])} == {torch.float32}


def test_operands_are_cast_to_the_same_numbers():
    torch.manual_seed(0)
    made = graphs.make_operands("random", graphs.VARIANTS["GATv2, edge features, edge weights, dropout"])
    narrow = made.cast(CPU, torch.bfloat16)
    exact = narrow.cast(CPU, torch.float64)
    for name, x in exact.leaves().items():
        assert x.is_leaf and x.requires_grad and x.dtype == torch.float64
        assert torch.equal(x.bfloat16(), narrow.leaves()[name])
        assert x.stride() == made.leaves()[name].stride()
    assert set(exact.leaves()) == {"q", "k", "v", "edge features", "edge weights", "score.weight", "score.edge"}


def test_values_that_are_the_keys_stay_the_keys():
    made = graphs.make_operands("random", graphs.VARIANTS["GAT, values are keys"]).cast(CPU, torch.float64)
    assert made.v is made.k and "v" not in made.leaves()


@pytest.mark.parametrize("variant", graphs.VARIANTS)
def test_edges_as_keys_are_the_graph(variant: str):
    """Where the reference takes the graph itself, both give the same: duplicates, features, weights and biases aside."""
    torch.manual_seed(0)
    options = graphs.VARIANTS[variant]._replace(features=False, weights=False, bias=False)
    x = graphs.make_operands("random", options).cast(CPU, torch.float64)
    seed = SEED if x.dropout else None
    by_mask = attend(
        x.q, x.k, x.v, over=x.over, score=x.score, sink=x.sink, dropout=x.dropout, seed=seed, kernel="reference"
    )
    torch.testing.assert_close(x.run_reference(), by_mask, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    "name", ["plain (float32)", "few keys (float32)", "GAT, values are keys (float32)", "layer (float64)"]
)
def test_cases_pass_on_the_cpu(name: str):
    results = [run_case(case, CPU) for case in list_cases([torch.float64, torch.float32], only=name)]
    assert results
    assert not [result for result in results if not result.passed]


def test_the_precision_of_products_is_restored():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with full_fp32_precision() as replaced:
            assert torch.get_float32_matmul_precision() == "highest" and replaced == "high"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_waits_of_the_host_are_refused_on_cuda(monkeypatch: pytest.MonkeyPatch):
    """Shown without a GPU: the cases are listed for it, the warm-up comes first, and torch's setting is restored."""
    names = [case.name for case in list_cases([torch.float32], "no waits", torch.device("cuda"))]
    assert names == [*modules.ON_CUDA] and not list_cases([torch.float32], "no waits")
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: "before")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", said.append)
    with refuse_waits(torch.device("cuda")):
        assert said == ["error"]
    assert said == ["error", "before"]
    with refuse_waits(CPU):
        assert said == ["error", "before"]


@pytest.mark.parametrize("name", modules.ON_CUDA)
def test_a_second_call_of_a_layer_gives_the_same(name: str):
    torch.manual_seed(0)
    once = modules.MODULES[name.partition(",")[0]](CPU, torch.float64)
    torch.manual_seed(0)
    again = modules.ON_CUDA[name](CPU, torch.float64)
    assert once.results.keys() == again.results.keys()
    assert all(torch.equal(once.results[key], again.results[key]) for key in once.results)
