"""Items over ranks: what is sent, in which order, and what happens to bad input."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from rank_pool import run_on_threads
from torch.distributed.device_mesh import init_device_mesh

from polyhead import Causal, Grid, Mask, MultiHeadAttention, Segments, Window, attend, explain, from_mask_mod
from polyhead._checks import count_of
from polyhead.distributed import exchange_transport, head_pieces, item_attention, shard_items
from polyhead.distributed.item_layout import ItemLayout
from polyhead.neighbourhood import Sizes

LENGTH, HEADS, DIM = 64, 3, 8


def counted_bytes(monkey):
    """The bytes of each message that this rank sends from now on."""
    sent = []
    all_to_all, batch = dist.all_to_all_single, dist.batch_isend_irecv

    def counting_all_to_all(output, x, output_splits, input_splits, **options):
        rank = dist.get_rank(options.get("group"))
        for other, rows in enumerate(input_splits):
            if other != rank and rows:
                sent.append(rows * x[0].numel() * x.element_size())
        return all_to_all(output, x, output_splits, input_splits, **options)

    def counting_batch(operations):
        sent.extend(op.tensor.numel() * op.tensor.element_size() for op in operations if op.op is dist.isend)
        return batch(operations)

    monkey.setattr(dist, "all_to_all_single", counting_all_to_all)
    monkey.setattr(dist, "batch_isend_irecv", counting_batch)
    return sent


OVERS = {
    "causal": Causal(),
    "window": Causal() & Window(5),
    "documents": Segments(torch.arange(LENGTH) // 10),
    "grid": Grid(8, 8, window=3),
    "mask": Mask(torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.05),
}


def keys_needed_from_others(over, order, world):
    """Per rank, by the definition: the foreign keys that some own query may see."""
    keep = over.mask(Sizes((), 1, LENGTH, LENGTH), torch.device("cpu")).expand(1, LENGTH, LENGTH)[0]
    layout = ItemLayout(LENGTH, world, order)
    needed = []
    for rank in range(world):
        seen = keep[layout.items(rank)].any(0)
        seen[layout.items(rank)] = False
        needed.append(int(seen.sum()))
    return needed


def run_counted(name, order, transport):
    with pytest.MonkeyPatch.context() as monkey:
        shard = shard_items(OVERS[name], LENGTH, order=order, transport=transport)
        x = torch.randn(2, HEADS, LENGTH, DIM)
        own = shard.take(x).requires_grad_()
        attend(own, own.clone(), own.clone(), over=shard)
        sent = counted_bytes(monkey)
        out = attend(own, own.clone(), own.clone(), over=shard)
        forward = list(sent)
        sent.clear()
        out.sum().backward()
        text = str(explain(own, own.clone(), own.clone(), over=shard))
    return forward, list(sent), text


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", OVERS)
def test_exchange_sends_only_what_is_seen(name, order, four_ranks):
    results = four_ranks.run(run_counted, name, order, "exchange")
    row = 2 * 2 * HEADS * DIM * 4
    needed = sum(keys_needed_from_others(OVERS[name], order, 4))
    assert sum(sum(forward) for forward, _, _ in results) == needed * row
    # gradients travel back in fp32, as many as keys and values came
    assert sum(sum(backward) for _, backward, _ in results) == needed * row
    for forward, _, text in results:
        assert text.startswith("exchange: ")
        assert f" {sum(forward):,} bytes, in {count_of(len(forward), 'message')}" in text


def hold_a_few_heads():
    """What this rank sends, and the most rows of others that it holds, where heads are exchanged one after the other."""
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(head_pieces, "MAX_PIECE_BYTES", 1)
        held, start = [], exchange_transport.start_send

        def note(rows, *args):
            held.append(rows.shape[1])
            return start(rows, *args)

        monkey.setattr(exchange_transport, "start_send", note)
        forward, backward, text = run_counted("window", "contiguous", "exchange")
    return forward, backward, text, set(held)


def test_heads_are_exchanged_one_after_the_other_where_they_need_much_memory(four_ranks):
    found, whole = four_ranks.run(hold_a_few_heads), four_ranks.run(run_counted, "window", "contiguous", "exchange")
    for (forward, backward, text, widths), (all_forward, all_backward, _) in zip(found, whole, strict=True):
        # k and v of one head, in two rows of the batch
        assert widths == {2 * 2 * DIM}
        assert len(forward) == HEADS * len(all_forward) and sum(forward) == sum(all_forward)
        # the gradients, and the keys and values once more
        assert sum(backward) == sum(all_backward) + sum(forward)
        assert f" {sum(forward):,} bytes, in {count_of(len(forward), 'message')}" in text


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_causal_ring_sends_no_more_than_is_seen(order, four_ranks):
    results = four_ranks.run(run_counted, "causal", order, "ring")
    needed = sum(keys_needed_from_others(Causal(), order, 4))
    assert sum(sum(forward) for forward, _, _ in results) == needed * 2 * 2 * HEADS * DIM * 4
    assert all(len(forward) <= 3 for forward, _, _ in results)


def held_keys_of_ring():
    shard = shard_items(Causal(), LENGTH)
    x = torch.randn(1, HEADS, len(shard.item_indices[0]), DIM)
    made = explain(x, x, x, over=shard)
    plan = next(iter(shard._plans.values()))
    return made.kernel, max(len(hop.key_index) for hop in plan.plan.hops), str(made)


def test_ring_is_chosen_where_much_is_needed_and_holds_one_block_besides_its_own(four_ranks):
    for kernel, held, text in four_ranks.run(held_keys_of_ring):
        assert kernel == "ring" and held <= math.ceil(LENGTH / 4)
        assert "not exchange: a rank would hold 48 keys of others at once" in text


def record_events(order):
    """The order in which an attention starts, computes and awaits."""
    events = []
    with pytest.MonkeyPatch.context() as monkey:
        start, returning, attend_block = (
            exchange_transport.start_send,
            exchange_transport.start_return,
            item_attention.ItemProblem.attend,
        )
        gradients = item_attention.block_gradients

        def note(name, function):
            def wrapped(*args, **options):
                events.append(name)
                result = function(*args, **options)
                if name in ("send", "return"):
                    wait = result.wait
                    monkey.setattr(result, "wait", lambda: (events.append(f"await {name}"), wait())[1], raising=False)
                return result

            return wrapped

        monkey.setattr(exchange_transport, "start_send", note("send", start))
        monkey.setattr(exchange_transport, "start_return", note("return", returning))
        monkey.setattr(item_attention.ItemProblem, "attend", note("attend", attend_block))
        monkey.setattr(item_attention, "block_gradients", note("gradients", gradients))
        shard = shard_items(Causal() & Window(9), LENGTH, order=order)
        q = shard.take(torch.randn(1, HEADS, LENGTH, DIM)).requires_grad_()
        attend(q, q.clone(), q.clone(), over=shard).sum().backward()
    return events


def test_exchange_starts_before_and_is_awaited_after_own_work(two_ranks):
    for events in two_ranks.run(record_events, "zigzag"):
        send, await_send = events.index("send"), events.index("await send")
        assert "attend" in events[send:await_send] and "attend" not in events[:send]
        back, await_back = events.index("return"), events.index("await return")
        assert "gradients" in events[back:await_back] and back > await_send


def compare_cross():
    torch.manual_seed(0)
    layer = MultiHeadAttention(24, 3).double()
    x, y = torch.randn(2, 19, 24, dtype=torch.float64), torch.randn(2, 31, 24, dtype=torch.float64)
    over = Mask(torch.rand(19, 31) < 0.4)
    shard = shard_items(over, (19, 31))
    out, _ = layer(shard.take(x), shard.take_keys(y), over=shard)
    return float((shard.gather(out.detach()) - layer(x, y, over=over)[0]).abs().max())


def test_keys_of_other_items(four_ranks):
    assert max(four_ranks.run(compare_cross)) < 1e-12


def compare_on_eight_ranks(order):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 50, 4, dtype=torch.float64, generator=generator)
    over = Causal() & Window(11)
    shard = shard_items(over, 50, order=order, transport="exchange")
    out = attend(*(shard.take(x) for x in (q, k, v)), over=shard)
    return float((out - shard.take(attend(q, k, v, over=over))).abs().max())


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_eight_ranks_by_threads(order):
    assert max(run_on_threads(compare_on_eight_ranks, 8, order)) < 1e-12


def sum_many_gradients_in_bf16():
    # every query of four ranks adds 1 to the gradient of the value of key 0: 512 in total, which bf16 cannot count in ones
    length = 512
    shard = shard_items(Mask((torch.arange(length) == 0).expand(length, length)), length)
    x = torch.zeros(1, 1, len(shard.item_indices[0]), 8, dtype=torch.bfloat16)
    v = x.clone().requires_grad_()
    attend(x, x, v, over=shard).sum().backward()
    return 0 if dist.get_rank() else float(v.grad[0, 0, 0, 0])


def test_gradients_are_summed_in_fp32(four_ranks):
    assert four_ranks.run(sum_many_gradients_in_bf16)[0] == 512


def expect_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def pass_bad_arguments():
    x = torch.zeros(1, 2, 5, 4)
    expect_error(lambda: shard_items(Causal(), 10, order="spiral"), "order must be one of 'contiguous', 'zigzag'")
    expect_error(lambda: shard_items(Causal(), 10, transport="mail"), "transport must be None or one of")
    expect_error(lambda: shard_items(Causal(), -1), "length must be")
    expect_error(lambda: shard_items(Causal(), (6, 6, 6)), r"length must be an integer or \(queries, keys\)")
    expect_error(lambda: shard_items(shard_items(None, 4), 4), "sharded already")
    expect_error(lambda: shard_items(None, 4) & shard_items(None, 4), "one of both must be for the whole sequence")
    expect_error(lambda: shard_items(None, 4) | shard_items(None, 4), r"\|: one of both must be for the whole sequence")
    expect_error(lambda: shard_items(None, 4).take([1.0] * 4), "x must be a tensor, got list")
    expect_error(lambda: shard_items(None, 4, "cpu"), "mesh must be a DeviceMesh")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    expect_error(lambda: shard_items(None, 4, mesh), "mesh must have one dimension")
    expect_error(lambda: attend(x, x, x, over=shard_items(Causal(), 12)), "query must have the 6 items of rank")
    expect_error(lambda: shard_items(None, 12).take(torch.zeros(5, 3)), "x must have 12 items along dim -2")
    expect_error(lambda: shard_items(None, 12).gather(torch.zeros(5, 3)), "x must have the own rows of its rank")
    labels = torch.arange(12)
    assert torch.equal(shard_items(None, 12).gather(shard_items(None, 12).take(labels)), labels)
    return True


def test_bad_arguments(two_ranks):
    two_ranks.run(pass_bad_arguments)


def pass_different_neighbourhoods():
    window = 3 + dist.get_rank()
    x = torch.zeros(1, 2, 6, 4)
    with pytest.raises(ValueError) as error:
        attend(x, x, x, over=shard_items(Window(window), 12))
    return str(error.value)


def test_neighbourhoods_that_differ_are_found_on_every_rank(two_ranks):
    for message in two_ranks.run(pass_different_neighbourhoods):
        assert "over must be the same on every rank" in message and "rank 0" in message and "rank 1" in message


def compare_odd_inputs():
    """Rows whose biases are all huge, a batch of biases where some ranks have no items, and no items at all."""
    errors, generator = [], torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, DIM, generator=generator)
    for value in (-1e9, torch.finfo(torch.float32).min, 1e9):
        bias = torch.zeros(LENGTH, LENGTH)
        bias[3] = value
        for transport in ("exchange", "ring"):
            shard = shard_items(None, LENGTH, transport=transport)
            out = attend(*map(shard.take, (q, k, v)), over=shard, bias=shard.take(bias))
            want = attend(q, k, v, over=None, bias=torch.where(bias < -1, 0.0, bias.clamp(max=0.0)))
            errors.append(float((out - shard.take(want)).abs().max()))
    short = shard_items(Causal(), 2)
    q, k, v = torch.randn(3, 2, HEADS, 2, DIM, generator=generator)
    bias = torch.randn(2, HEADS, 2, 2, generator=generator)
    out = attend(*map(short.take, (q, k, v)), over=short, bias=short.take(bias))
    errors.append(float((out - short.take(attend(q, k, v, over=Causal(), bias=bias))).abs().sum()))
    for length in (0, (0, 5), (5, 0)):
        shard = shard_items(None, length)
        queries, keys = length if isinstance(length, tuple) else (length, length)
        q, k = shard.take(torch.randn(2, HEADS, queries, DIM)), shard.take_keys(torch.randn(2, HEADS, keys, DIM))
        errors.append(float(attend(q, k, k, over=shard).abs().sum()))
    return max(errors)


def test_odd_inputs_equal_one_process(four_ranks):
    assert max(four_ranks.run(compare_odd_inputs)) < 1e-5


def change_a_mask_in_place():
    keep = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    shard = shard_items(Mask(keep), LENGTH)
    x = torch.randn(1, HEADS, LENGTH, DIM, dtype=torch.float64)
    own = shard.take(x)
    errors = []
    for _ in range(2):
        errors.append(
            float((attend(own, own, own, over=shard) - shard.take(attend(x, x, x, over=Mask(keep)))).abs().max())
        )
        keep.tril_()
    return max(errors)


def test_a_mask_that_changes_in_place_is_planned_anew(two_ranks):
    assert max(two_ranks.run(change_a_mask_in_place)) < 1e-12


def random_keep(seed):
    return torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(seed)) < 0.3


def join_many_masks():
    shard = shard_items(Causal(), LENGTH)
    x = torch.randn(1, HEADS, LENGTH, DIM, dtype=torch.float64)
    own, errors = shard.take(x), []
    for seed in range(12):
        keep = random_keep(seed)
        joined = shard & keep
        assert shard & keep[:] is not None and copy.deepcopy(joined) is joined
        errors.append(
            float(
                (attend(own, own, own, over=joined) - shard.take(attend(x, x, x, over=Causal() & Mask(keep))))
                .abs()
                .max()
            )
        )
    return max(errors), len(shard._joined)


def test_the_plans_of_a_few_neighbourhoods_are_kept(two_ranks):
    for error, kept in two_ranks.run(join_many_masks):
        assert error < 1e-12 and kept <= 8


def sliding_window(size):
    return lambda b, h, q, k: q - k <= size


def combine_shards():
    shard, keep = shard_items(Causal(), LENGTH), random_keep(0)
    x = torch.randn(1, HEADS, LENGTH, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    own, errors = shard.take(x), []
    for combined, over in (
        (shard | Window(0, 3), Causal() | Window(0, 3)),
        (Window(0, 3) & ~Window(0) | shard, Causal() | Window(0, 3)),
        (keep | shard, Causal() | Mask(keep)),
        (keep & shard, Causal() & Mask(keep)),
        (~shard & Window(4), ~Causal() & Window(4)),
        # functions with one name: what they capture tells them apart
        (shard & from_mask_mod(sliding_window(2)), Window(2, 0)),
        (shard & from_mask_mod(sliding_window(5)), Window(5, 0)),
    ):
        out = attend(own, own, own, over=combined)
        errors.append(float((out - shard.take(attend(x, x, x, over=over))).abs().max()))
    return max(errors)


def test_shards_are_combined_with_neighbourhoods_of_the_whole(two_ranks):
    assert max(two_ranks.run(combine_shards)) < 1e-12


def need_gradients_on_one_rank():
    x = torch.zeros(1, 2, 6, 4, requires_grad=bool(dist.get_rank()))
    with pytest.raises(ValueError) as error:
        attend(x, x, x, over=shard_items(Window(2), 12))
    return str(error.value)


def test_a_rank_that_would_skip_the_backward_pass_is_found(two_ranks):
    for message in two_ranks.run(need_gradients_on_one_rank):
        assert "requires_grad must be the same on every rank, got False on rank 0, True on rank 1" in message


def pass_different_dtypes():
    x = torch.zeros(1, 2, 6, 4, dtype=torch.float64 if dist.get_rank() else torch.float32)
    with pytest.raises(ValueError) as error:
        attend(x, x, x, over=shard_items(Window(2), 12))
    return str(error.value)


def test_dtypes_that_differ_are_found_on_every_rank(two_ranks):
    for message in two_ranks.run(pass_different_dtypes):
        assert "torch.float64" in message and "torch.float32" in message
