"""Parts of a graph: who has which nodes, edges and halo, who sends what to whom, and their files."""

from __future__ import annotations

import pickle
import sys
import time

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from polyhead import Causal, Graph, MultiHeadAttention
from polyhead.distributed import load_part, partition, save_parts


def random_graph(nodes=61, edges=300, **options) -> Graph:
    generator = torch.Generator().manual_seed(2)
    return Graph(torch.randint(nodes, (2, edges), generator=generator), nodes, **options)


def clustered_graph(clusters=8, size=40) -> Graph:
    generator = torch.Generator().manual_seed(2)
    start = torch.arange(clusters).repeat_interleave(size * 6) * size
    inside = start + torch.randint(size, (2, len(start)), generator=generator)
    inside[0, ::50] = torch.randint(clusters * size, (len(inside[0, ::50]),), generator=generator)
    # node numbers carry no information about clusters
    return Graph(torch.randperm(clusters * size, generator=generator)[inside], clusters * size)


GRAPHS = {
    "random": random_graph(),
    "clustered": clustered_graph(),
    "star": Graph(torch.stack((torch.arange(30), torch.zeros(30, dtype=torch.long))), 30),
    "no edges": Graph(torch.empty(2, 0, dtype=torch.long), 9),
    "no nodes": Graph(torch.empty(2, 0, dtype=torch.long), 0),
    "fewer nodes than parts": Graph([[0, 1, 2], [1, 2, 0]], 3),
    "weighted": random_graph(features=torch.randn(300, 2), weights=torch.rand(300)),
}


@pytest.mark.parametrize("method", ["metis", "contiguous", "random owner"])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_hold_every_node_and_edge_once(method, name, parts):
    if method == "metis":
        pytest.importorskip("pymetis", reason="pymetis is not installed: METIS is NOT tested")
    graph = GRAPHS[name]
    owner = torch.randint(parts, (graph.sources,)) if method == "random owner" else None
    cut = partition(graph, parts, owner=owner, method=None if owner is not None else method)
    assert len(cut) == parts == len(list(cut))
    assert torch.equal(torch.cat([part.nodes for part in cut]).sort()[0], torch.arange(graph.sources))
    assert torch.equal(torch.cat([part.edge_ids for part in cut]).sort()[0], torch.arange(graph.num_edges))
    for rank, part in enumerate(cut):
        source, destination = part.edge_index
        pairs = torch.stack((part.sources_in_whole[source], part.nodes[destination]))
        assert torch.equal(pairs, graph.edge_index[:, part.edge_ids])
        assert (cut.owner[part.nodes] == rank).all()
        # every row of the halo is read, and by definition only these are
        remote = pairs[0][cut.owner[pairs[0]] != rank].unique()
        assert torch.equal(part.halo.sort()[0], remote)
        for name in ("features", "weights"):
            whole, own = getattr(graph, name), getattr(part, name)
            assert own is None if whole is None else torch.equal(own, whole[part.edge_ids])


@pytest.mark.parametrize("name", GRAPHS)
def test_what_one_part_sends_another_receives(name):
    cut = list(partition(GRAPHS[name], 5))
    for sender in cut:
        for receiver, rows in enumerate(sender.send.split(list(sender.send_counts))):
            assert torch.equal(sender.nodes[rows], cut[receiver].halo_of(sender.index))
    assert all(part.send_counts[part.index] == part.receive_counts[part.index] == 0 for part in cut)


@pytest.mark.parametrize("method", ["metis", "contiguous"])
def test_parts_have_about_the_same_work(method):
    if method == "metis":
        pytest.importorskip("pymetis", reason="pymetis is not installed: METIS is NOT tested")
    cut = partition(random_graph(2000, 16000), 4, method=method)
    assert max(cut.edge_counts) < 1.1 * 16000 / 4


def test_metis_finds_clusters():
    pytest.importorskip("pymetis", reason="pymetis is not installed: METIS is NOT tested")
    graph = clustered_graph()
    metis, stretches = partition(graph, 8, method="metis"), partition(graph, 8, method="contiguous")
    assert sum(metis.halo_counts) < 0.25 * sum(stretches.halo_counts)
    assert torch.equal(metis.owner, partition(graph, 8).owner), "METIS is the default, and gives the same parts again"


def test_without_pymetis_parts_are_stretches(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    owner = partition(random_graph(), 4).owner
    assert (owner.diff() >= 0).all() and owner.unique().tolist() == [0, 1, 2, 3]
    with pytest.raises(ImportError, match=r"pymetis must be installed .*polyhead\[distributed\]"):
        partition(random_graph(), 4, method="metis")


def test_plans_for_a_thousand_parts():
    graph = random_graph(200_000, 1_000_000)
    begin = time.perf_counter()
    cut = partition(graph, 1024, method="contiguous")
    parts = list(cut)
    # some seconds, also where other processes run: a loop over all pairs of parts takes minutes
    assert time.perf_counter() - begin < 60
    assert sum(len(part.send) for part in parts) == sum(len(part.halo) for part in parts) == sum(cut.halo_counts)


def test_bad_arguments():
    graph = random_graph()
    for error, arguments, options in (
        ("graph must be a Graph, got", ([[0], [1]], 2), {}),
        ("graph must have the same nodes as sources and destinations", (Graph([[0], [1]], (3, 2)), 2), {}),
        ("parts must be", (graph, 0), {}),
        ("method must be 'metis', 'contiguous' or None, got 'spectral'", (graph, 2), {"method": "spectral"}),
        ("owner must be integers", (graph, 2), {"owner": torch.zeros(3)}),
        (r"owner must be in \[0, 2\), got 0 to 2", (graph, 2), {"owner": torch.arange(61) % 3}),
        ("graph must be whole", (partition(graph, 2)[0], 2), {}),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            partition(*arguments, **options)


def test_a_part_refuses_what_needs_the_whole_graph():
    part = partition(random_graph(), 2)[1]
    for change in (
        lambda: part & Causal(),
        lambda: Causal() & part,
        part.with_self_loops,
        part.gcn_normalise,
        part.reverse,
    ):
        with pytest.raises(ValueError, match="needs the whole graph, got GraphPart"):
            change()
    with pytest.raises(ValueError, match=r"must be on ranks; call part.on\(mesh\) first"):
        MultiHeadAttention(8, 2)(torch.randn(len(part.nodes), 8), over=part)
    with pytest.raises(ValueError, match="x must have 61 nodes along dim -2, got shape"):
        part.take(torch.randn(60, 8))
    with pytest.raises(ValueError, match=r"init_process_group first"):
        part.on()


def test_one_part_needs_no_ranks():
    graph = random_graph()
    (part,), layer, x = partition(graph, 1), MultiHeadAttention(8, 2, score="gatv2"), torch.randn(61, 8)
    assert torch.equal(layer(part.take(x), over=part)[0], layer(x, over=graph)[0])
    assert torch.equal(part.gather(x), x)


def test_parts_are_pickled_and_checked():
    part = partition(random_graph(features=torch.randn(300, 2)), 3)[1]
    twin = pickle.loads(pickle.dumps(part))
    assert (
        repr(twin) == repr(part) and torch.equal(twin.halo, part.halo) and torch.equal(twin.edge_index, part.edge_index)
    )
    state = part.__getstate__()
    for name, value, error in (
        ("send", part.send + 100, r"send must be in \[0, "),
        ("send_counts", (1, 2, 3), "send_counts must be 3 counts of rows for other parts"),
        ("nodes", part.nodes + 61, r"nodes must be in \[0, 61\)"),
        ("halo", part.halo * 0, "nodes must be different"),
        ("edge_ids", part.edge_ids.int(), "edge_ids must be int64"),
    ):
        with pytest.raises(ValueError, match=error):
            object.__new__(type(part)).__setstate__({**state, name: value})


def load_and_gather(folder):
    part, rows = load_part(folder)
    assert part.group is not None and torch.equal(rows["y"], rows["x"][:, 0].long())
    return part.index, part.gather(rows["x"]), part.gather(rows["y"]), part.gather_edges(part.features, 0)


def test_each_rank_loads_its_part(two_ranks, tmp_path):
    graph = random_graph(features=torch.randn(300, 2), weights=torch.rand(300))
    x = torch.randn(61, 4) * 10
    save_parts(partition(graph, 2), tmp_path / "new" / "parts", {"x": x, "y": x[:, 0].long()})
    for rank, (index, *rows) in enumerate(two_ranks.run(load_and_gather, tmp_path / "new" / "parts")):
        assert index == rank
        for found, expected in zip(rows, (x, x[:, 0].long(), graph.features), strict=True):
            assert torch.equal(found, expected)


def load_error(folder):
    with pytest.raises(ValueError) as error:
        load_part(folder)
    return str(error.value)


def join_error(parts, wrong):
    """The error of every rank if rank 1 has another part."""
    with pytest.raises(ValueError) as error:
        (wrong if dist.get_rank() == 1 else parts[dist.get_rank()]).on()
    return str(error.value)


def test_damaged_and_mixed_files_are_refused_on_every_rank(two_ranks, tmp_path):
    cut, x = partition(random_graph(), 2), {"x": torch.randn(61, 4)}
    save_parts(cut, tmp_path, x)
    first, second = sorted(tmp_path.iterdir())
    whole = second.read_bytes()
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    for content, expected in (
        (whole[:-40], "damaged"),
        (b"", "damaged"),
        (bytes(flipped), "other contents than were written"),
        (
            first.read_bytes(),
            "on rank 1: parts must be on the rank of their number, got parts[0] on rank 1; use parts[rank]",
        ),
    ):
        second.write_bytes(content)
        errors = two_ranks.run(load_error, tmp_path)
        assert errors[0] == errors[1] and "rank 1" in errors[0]
        assert expected in errors[0]
    save_file({"x": torch.zeros(2)}, second)
    assert all("rank 1" in error for error in two_ranks.run(load_error, tmp_path))
    second.unlink()
    assert all("rank 1" in error for error in two_ranks.run(load_error, tmp_path))
    # the same parts, written by another call
    save_parts(cut, tmp_path / "again", x)
    second.write_bytes((tmp_path / "again" / second.name).read_bytes())
    assert all(
        "the call of save_parts must be the same on every rank" in error
        for error in two_ranks.run(load_error, tmp_path)
    )


def test_files_with_changed_fields_are_refused(two_ranks, tmp_path):
    save_parts(partition(random_graph(), 2), tmp_path)
    for file in sorted(tmp_path.iterdir()):
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        save_file({name: x for name, x in load_file(file).items() if name != "halo"}, file, metadata)
    assert all("one without halo" in error for error in two_ranks.run(load_error, tmp_path))


def test_another_number_of_ranks_is_refused(two_ranks, tmp_path):
    save_parts(partition(random_graph(), 3), tmp_path)
    assert all(
        "mesh must have one rank per part" in error and "3, got 2" in error
        for error in two_ranks.run(load_error, tmp_path)
    )
    assert all("folder must exist" in error for error in two_ranks.run(load_error, tmp_path / "nowhere"))


def test_ranks_must_hold_parts_of_one_partition(two_ranks):
    graph = random_graph()
    contiguous, other = partition(graph, 2, method="contiguous"), partition(graph, 2, owner=torch.arange(61) % 2)
    for wrong, expected in (
        (other[1], "the partition must be the same on every rank"),
        (
            contiguous[0],
            "on rank 1: parts must be on the rank of their number, got parts[0] on rank 1; use parts[rank]",
        ),
        (partition(graph, 3)[1], "the number of parts must be the same on every rank, got 2 on rank 0, 3 on rank 1"),
    ):
        errors = two_ranks.run(join_error, list(contiguous), wrong)
        assert errors[0] == errors[1] and expected in errors[0]
    three = list(partition(graph, 3))
    assert all(
        "mesh must have one rank per part, 3, got 2" in error for error in two_ranks.run(join_error, three, three[1])
    )


def test_what_is_saved_is_checked(tmp_path):
    cut = partition(random_graph(), 2)
    with pytest.raises(ValueError, match=r"rows\['x'\] must have a row per node, 61, got shape \(60, 2\)"):
        save_parts(cut, tmp_path, {"x": torch.zeros(60, 2)})
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="folder must be a folder or a new path, got a file"):
        save_parts(cut, tmp_path / "file")


def test_a_failed_save_leaves_the_older_file(tmp_path, monkeypatch):
    cut = partition(random_graph(), 2)
    save_parts(cut, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def fail(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("polyhead._files.flush_and_copy_permissions", fail)
    with pytest.raises(OSError, match="No space left"):
        save_parts(cut, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
