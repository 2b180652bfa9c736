"""The benchmarks compare before they time, write files atomically and have clear names. No test asserts on a time."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import graph, graph_parts, graphs, measure, tables
from benchmarks.__main__ import main, write
from benchmarks.case import Case, CaseError, Sides, grad, inference, training
from benchmarks.measure import Line, largest_difference
from benchmarks.memory import peak_in_child, peak_mb
from polyhead import Graph
from polyhead.device_check import timing

ROOT = Path(__file__).resolve().parent.parent
KEYS = [
    "case", "ours_ms", "peer", "peer_ms", "ratio", "floor_ms", "ours_peak_mb", "peer_peak_mb", "max_abs_diff", "device",
]  # fmt: skip


def fixed(value: Tensor) -> Sides:
    """Ours returns `value`, the peer and the floor return zeros."""
    zeros = torch.zeros(3)
    return Sides(inference(lambda: value), inference(lambda: zeros), (inference(lambda: zeros),))


def trained(factor: float) -> Sides:
    """Two sides with the same output, whose gradients differ by a factor."""
    x = torch.linspace(1, 2, 5, requires_grad=True)
    same = lambda: factor * x + (1 - factor) * x.detach()
    gradients = lambda: {"x": grad(x)}
    return Sides(training(same, [x], gradients), training(lambda: 1 * x, [x], gradients))


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "peak_memory", lambda case, sides, side: 1.5)


def test_a_wrong_result_gives_an_error_instead_of_a_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, no_children: None
) -> None:
    cases = (
        Case("bad-case", "zeros", lambda: fixed(torch.full((3,), 0.01)), 1e-3),
        Case("good-case", "zeros", lambda: fixed(torch.full((3,), 1e-5)), 1e-3),
    )
    monkeypatch.setitem(tables.TABLES, "made-up", cases)
    file = tmp_path / "lines.json"
    assert main(["made-up", "--repeats", "1", "--json", str(file)]) == 1
    said = capsys.readouterr()
    assert "error: bad-case: the output differs by 0.01; the tolerance is 0.001" in said.err
    assert "bad-case" not in said.out
    assert "good-case" in said.out
    assert not file.exists()


def test_the_error_of_a_crash_names_the_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash() -> Sides:
        raise RuntimeError("out of luck")

    monkeypatch.setitem(tables.TABLES, "made-up", (Case("crashing-case", "none", crash),))
    assert main(["made-up"]) == 1
    said = capsys.readouterr().err
    assert "error: crashing-case" in said
    assert "out of luck" in said


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        (fixed(torch.tensor([0.0, torch.nan, 0.0])), "the output differs by nan"),
        (fixed(torch.zeros(1)), r"the output is \(1,\) on our side and \(3,\) on another"),
        (trained(1.01), "the gradient of x differs by 0.01"),
    ],
)
def test_differing_results_are_rejected(sides: Sides, message: str) -> None:
    with pytest.raises(CaseError, match=f"^{message}"):
        largest_difference(sides, 1e-3)


def test_a_floor_is_compared_too() -> None:
    good, bad = (inference(lambda x=x: x) for x in (torch.zeros(3), torch.ones(3)))
    sides = Sides(good, good, (good, bad))
    with pytest.raises(CaseError, match="differs by 1"):
        largest_difference(sides, 1e-3)


def test_a_bound_is_timed_and_not_compared(monkeypatch: pytest.MonkeyPatch, no_children: None) -> None:
    zeros = inference(lambda: torch.zeros(3))
    sides = Sides(zeros, zeros, bounds=(lambda: torch.ones(2),))
    assert largest_difference(sides, 1e-3) == 0
    monkeypatch.setattr(measure, "interleaved", lambda runs, *_, **__: [[float(i)] for i, _ in enumerate(runs, 1)])
    assert measure.measured(Case("a", "b", lambda: sides)).floor_ms == 3000.0


def test_a_case_with_a_missing_requirement_is_skipped_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, no_children: None
) -> None:
    same = lambda: fixed(torch.zeros(3))
    monkeypatch.setitem(
        tables.TABLES,
        "made-up",
        (
            Case("a-case", "zeros", same),
            Case("moon-case", "zeros", same, lacks=lambda: "there is no moon"),
            Case("tide-case", "zeros", same, lacks=lambda: "there is no moon"),
        ),
    )
    file = tmp_path / "lines.json"
    assert main(["made-up", "--repeats", "1", "--json", str(file)]) == 0
    said = capsys.readouterr()
    assert said.err == "SKIPPED: moon-case, tide-case\n  there is no moon\n"
    assert [line["case"] for line in json.loads(file.read_text())] == ["a-case"]
    assert main(["moon-case"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith("error: none of these cases can run here\n")


def test_equal_gradients_pass() -> None:
    sides = trained(1.0)
    assert largest_difference(sides, 1e-3) < 1e-6


def test_json_has_the_documented_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_children: None) -> None:
    monkeypatch.setitem(tables.TABLES, "made-up", (Case("a", "zeros", lambda: fixed(torch.zeros(3))),))
    file = tmp_path / "lines.json"
    assert main(["made-up", "--repeats", "2", "--json", str(file)]) == 0
    (line,) = json.loads(file.read_text())
    assert list(line) == KEYS
    assert [line["case"], line["peer"], line["ours_peak_mb"], line["max_abs_diff"]] == ["a", "zeros", 1.5, 0.0]
    assert [path.name for path in tmp_path.iterdir()] == ["lines.json"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "lines.json"
    line = Line("a", 1.0, "b", 2.0, 2.0, None, 0.0, 0.0, 0.0)
    write(file, [line])
    before = file.read_text()
    with pytest.raises(TypeError):
        write(file, [line, dataclasses.replace(line, ratio=object())])  # type: ignore[arg-type]
    assert file.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["lines.json"]


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["dense", "nonsense"])
    assert leaving.value.code == 2
    said = capsys.readouterr().err
    assert "unknown table or case 'nonsense'" in said
    assert "dense: layer-inference-2x10x512x8 " in said
    assert "cache-step-4096" in said


def test_a_missing_folder_is_rejected_before_anything_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["dense", "--json", str(tmp_path / "missing" / "lines.json")])
    assert "--json must be in a folder that exists" in capsys.readouterr().err


def test_names_select_tables_and_cases() -> None:
    assert tables.chosen([]) == [case for cases in tables.TABLES.values() for case in cases]
    assert tables.chosen(["dense"]) == list(tables.TABLES["dense"])
    names = [case.name for case in tables.chosen(["step-512", "default-call-training"])]
    assert names == ["default-call-training-1x2048x768x12", "cache-step-512"]


def test_case_names_are_unique() -> None:
    names = [case.name for cases in tables.TABLES.values() for case in cases]
    assert len(names) == len(set(names))


def test_sides_are_interleaved_in_rotating_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    runs = [lambda i=i: order.append(i) for i in range(3)]
    monkeypatch.setattr(timing, "_calls_per_sample", lambda run, device: 2)
    samples = timing.interleaved(runs, torch.device("cpu"), budget=1.0, rounds=3)
    assert order == [0, 0, 1, 1, 2, 2, 1, 1, 2, 2, 0, 0, 2, 2, 0, 0, 1, 1]
    assert [len(own) for own in samples] == [3, 3, 3]


def test_a_line_has_medians(monkeypatch: pytest.MonkeyPatch, no_children: None) -> None:
    taken = [[1.0, 2.0, 4.0], [6.0, 4.0, 4.0], [9.0, 9.0, 9.0], [3.0, 0.5, 0.5]]
    monkeypatch.setattr(measure, "interleaved", lambda runs, *_, **__: taken)
    line = measure.measured(Case("a", "b", lambda: fixed(torch.zeros(3))))
    assert (line.ours_ms, line.peer_ms, line.ratio, line.floor_ms) == (2000.0, 4000.0, 2.0, 500.0)


def test_the_peak_includes_memory_freed_during_the_call() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak cannot be reset here")
    assert 120 < peak_mb(lambda: torch.ones(2**25).sum()) < 160


def test_a_real_case_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "lines.json"
    command = [sys.executable, "-m", "benchmarks", "layer-inference-2x10", "--repeats", "1", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    header, names, row = done.stdout.splitlines()
    assert f"torch {torch.__version__}" in header
    assert set(KEYS) - {"device"} <= set(names.split())
    (line,) = json.loads(file.read_text())
    assert list(line) == KEYS
    assert row.startswith(line["case"] + " ")
    assert line["case"] == "layer-inference-2x10x512x8"
    assert line["max_abs_diff"] < 1e-5
    assert all(line[key] > 0 for key in ("ours_ms", "peer_ms", "floor_ms", "ratio"))


def test_the_cpu_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_children: None) -> None:
    """With and without --device, and without a mode in between, which would slow every call down."""
    modes = []

    def setup() -> Sides:
        modes.append(torch._C._len_torch_function_stack())
        return fixed(torch.zeros(3))

    monkeypatch.setitem(tables.TABLES, "made-up", (Case("a", "zeros", setup),))
    file = tmp_path / "lines.json"
    for arguments in ([], ["--device", "cpu"]):
        assert main(["made-up", "--repeats", "1", "--json", str(file), *arguments]) == 0
        (line,) = json.loads(file.read_text())
        assert line["device"] == "cpu"
    assert modes == [0, 0]


TINY = (graphs.random_graph(29, 211, 3, 8), graphs.hub_graph(31, 127, 8, 16), graphs.random_graph(13, 29, 1, 8))


@pytest.fixture
def kernels() -> None:
    reason = graphs.no_kernels()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def pyg(kernels: None) -> None:
    reason = graph.no_pyg()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Small files in the format of the data sets: 11 nodes with 13 words, the last node without any, and no self-loops."""
    random = np.random.default_rng(0)
    words = random.random((11, 13)) < 0.3
    words[10] = False
    source = random.integers(11, size=37)
    edge_index = np.stack((source, (source + random.integers(1, 11, size=37)) % 11))
    np.savez(
        tmp_path / "cora.npz",
        edge_index=edge_index,
        features_data=np.ones(words.sum(), np.float32),
        features_indices=words.nonzero()[1].astype(np.int32),
        features_indptr=np.concatenate(([0], words.sum(1).cumsum())),
        features_shape=np.array(words.shape),
    )
    np.savez(tmp_path / "amazon-computers.npz", edge_index=edge_index.astype(np.int32), nodes=np.array(11))
    monkeypatch.setenv(graphs.FOLDER, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("workload", TINY, ids=lambda workload: workload.name)
@pytest.mark.parametrize("kind", graph.KINDS, ids=lambda kind: kind.score)
def test_tiny_graphs_are_equal(
    kind: graph.Kind, workload: graphs.Workload, pyg: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [graph.case(kind, workload, train) for train in (False, True)]
    made.append(graph.case_of_new_graphs(kind, workload))
    # torch's compiler takes a minute
    monkeypatch.setattr(torch, "compile", lambda conv: conv)
    made.append(graph.case(kind, workload, True, compiled=True))
    for case in made:
        sides = case.setup()
        assert largest_difference(sides, case.tolerance) < 1e-5
        assert len(sides.bounds) == ("inference" in case.name)
        assert all(bound().shape == (len(workload.make().x), workload.heads * workload.dim) for bound in sides.bounds)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", graph.KINDS, ids=lambda kind: kind.score)
def test_a_changed_weight_is_detected(
    kind: graph.Kind, train: bool, pyg: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = graph.pyg_layer

    def changed(*args: object) -> object:
        conv = made(*args)  # type: ignore[arg-type]
        with torch.no_grad():
            (conv.att if kind is graph.GATV2 else conv.att_dst)[0, 0, 0] += 0.1
        return conv

    monkeypatch.setattr(graph, "pyg_layer", changed)
    with pytest.raises(CaseError, match="the output differs by"):
        largest_difference(graph.against_pyg(kind, TINY[0], train), graph.TOLERANCE)


def test_only_the_cpp_kernel_is_timed(monkeypatch: pytest.MonkeyPatch, kernels: None) -> None:
    monkeypatch.setattr("polyhead.kernels.edges_native.EdgesNative.refuses", lambda self, call: "it is Sunday")
    with pytest.raises(
        CaseError, match=r"must run in edges_native on cpu, got (?!edges_native)(?s:.)*not edges_native: it is Sunday"
    ):
        graph_parts.layer_and_its_functions(graph.GATV2, TINY[0])


def test_tiny_parts_are_equal(kernels: None) -> None:
    made = [graph_parts.layer_and_its_functions(kind, workload) for kind in graph.KINDS for workload in TINY]
    made += [graph_parts.attention_and_its_tenth(edges) for edges in (5_000, 25_000)]
    made += [graph_parts.threads(TINY[0], part) for part in ("attention", "floor")]
    for sides in made:
        assert largest_difference(sides, graph.TOLERANCE) < 1e-6
        assert all(bound().isfinite().all() for bound in sides.bounds)
    assert largest_difference(graph_parts.sorting(31, 127), 0.5) == 0


def test_the_floor_sums_the_rows_of_the_sources(kernels: None) -> None:
    for workload in TINY:
        edge_index, x = workload.make()
        source, destination = edge_index
        wanted = torch.zeros_like(x).index_add(0, destination, x[source])
        torch.testing.assert_close(graphs.gather_sum(Graph(edge_index, len(x)), x), wanted, atol=1e-5, rtol=1e-5)


def test_alone_uses_one_thread() -> None:
    before = torch.get_num_threads()
    assert graph_parts._alone(lambda: torch.tensor(torch.get_num_threads())) == 1
    assert torch.get_num_threads() == before


def test_a_hub_is_connected_to_every_other_node() -> None:
    torch.manual_seed(0)
    source, destination = graphs.drawn_with_hub(17, 101)
    assert source.shape == (101,)
    others = set(range(1, 17))
    assert others <= set(destination[source == 0].tolist())
    assert others <= set(source[destination == 0].tolist())


def test_real_graphs_are_read_from_their_folder(data: Path) -> None:
    assert graphs.CORA.lacks() is None
    assert graphs.AMAZON_COMPUTERS.lacks() is None
    edge_index, x = graphs.CORA.make()
    assert edge_index.shape == (2, 37 + 11)
    torch.testing.assert_close(x.sum(1), torch.tensor([1.0] * 10 + [0.0]))
    edge_index, x = graphs.AMAZON_COMPUTERS.make()
    assert (edge_index.dtype, x.shape) == (torch.int64, (11, graphs.FEATURES))
    assert (edge_index[0] == edge_index[1]).sum() == 11


def test_a_missing_data_set_is_reported(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "cora.npz").unlink()
    assert str(graphs.CORA.lacks()).startswith(f"{data / 'cora.npz'} does not exist: POLYHEAD_DATA must be the folder")
    monkeypatch.delenv(graphs.FOLDER)
    assert str(graphs.CORA.lacks()).startswith("POLYHEAD_DATA is not set: ")
    assert "amazon-computers.npz" in str(graphs.AMAZON_COMPUTERS.lacks())


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    (case, *_) = tables.TABLES["graph"]
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    monkeypatch.setattr(graphs, "native", object())
    assert case.lacks() == "the peer, PyG, is not installed: pip install torch_geometric"
    monkeypatch.setattr(graphs, "native", None)
    assert case.lacks() == "polyhead was installed without a compiler, so there are no C++ kernels to time"
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert graph.no_compiler() == "torch.compile needs a C++ compiler, and none was found"


def test_a_graph_case_from_end_to_end(tmp_path: Path, data: Path, pyg: None, no_children: None) -> None:
    file = tmp_path / "lines.json"
    case = graph.case(graph.GATV2, graphs.CORA, train=True)
    assert main([case.name, "--repeats", "1", "--json", str(file)]) == 0
    (line,) = json.loads(file.read_text())
    assert (line["case"], line["peer"]) == ("gatv2-training-cora-8x8", "GATv2Conv, edges sorted")
    assert 0 < peak_in_child(case, "peer") < 50
