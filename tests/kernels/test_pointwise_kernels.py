"""The pointwise kernels against their torch twins."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from helpers import few_interpreted

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.core.nn.operations import Operations
from jackfield.kernels import reference
from jackfield.kernels.activations import gelu_mul, silu_mul
from jackfield.kernels.attention import reference as attention_reference
from jackfield.kernels.attention.qk_norm_rope_cache import qk_norm_rope_cache
from jackfield.kernels.embedding import embed
from jackfield.kernels.linear.gemv import GemvConfig, gemv
from jackfield.kernels.rms_norm import rms_norm
from jackfield.kernels.sampling.mask_tokens import mask_tokens
from jackfield.kernels.sampling.sample_gumbel import sample_gumbel
from jackfield.kernels.step.written_tokens import write_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One unit in the last place of values up to 4, where sums in another order fall on a border.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


ASKING = GemvConfig(4, 64, 1, early=True, ahead=3)
"""Its first programs ask for later ones' weights, on a GPU."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 96, 1000])
def test_rms_norm_equals_its_twin(dtype, size):
    x, weight = draw(5, size, dtype=dtype), draw(size, dtype=dtype)
    close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


# The interpreter cuts off what bfloat16 has no room for.
@pytest.mark.parametrize("dtype", DTYPES[1:] if DEVICE.type == "cuda" else DTYPES[1:2], ids=str)
def test_rms_norm_with_a_float32_weight_is_rounded_once(dtype):
    x, weight = draw(5, 96, dtype=dtype), draw(96, dtype=torch.float32) * 0.01 + 1
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    exact *= weight.double()
    # Half a unit in the last place, and float32's own error where that falls on a border.
    bound = torch.finfo(dtype).eps / 2 * 1.001
    assert ((got.double() - exact).abs() <= bound * exact.abs()).all()
    torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-6), atol=0, rtol=2 * bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [96, 1000])
def test_rms_norm_with_a_residual_equals_its_twin(dtype, size):
    x, residual = draw(5, size, dtype=dtype), draw(2, 7, size, dtype=dtype)[1, :5]
    weight = draw(size, dtype=torch.float32) + 1
    want = reference.rms_norm(x, weight, 1e-6, residual)
    close(rms_norm(x, weight, 1e-6, residual), want)
    close(rms_norm(x, weight, 1e-6) + residual, want)


def test_rms_norm_of_heads_in_a_fused_projection():
    fused = draw(3, 200, dtype=torch.float32)
    heads, weight = fused[:, 8:72].unflatten(1, (4, 16)).contiguous(), draw(16, dtype=fused.dtype)
    close(rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))
    sliced = fused[:, :64]
    close(
        rms_norm(sliced, weight.repeat(4), 1e-5), reference.rms_norm(sliced, weight.repeat(4), 1e-5)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [48, 1500])
def test_silu_mul_equals_its_reference(dtype, size):
    x = draw(3, 2 * size, dtype=dtype) * 3
    close(silu_mul(x), reference.silu_mul(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [48, 1500])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gelu_mul_equals_its_reference(dtype, size):
    x = draw(3, 2 * size, dtype=dtype) * 3
    x[0, :4] = torch.tensor([-30.0, 30.0, 0.0, -1e4])
    close(gelu_mul(x), reference.gelu_mul(x))


def angles(rotary_dim: int) -> torch.Tensor:
    turns = torch.rand(50, rotary_dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    return torch.cat((turns.cos(), turns.sin()), dim=1).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", ["norms", "float32 norms", "plain"])
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "in place"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim", "rotary_dim"),
    [(6, 2, 80, 80), (3, 1, 64, 32), (16, 8, 32, 0)],
)
def test_normed_and_rotated_heads_equal_their_reference(
    dtype, norms, cached, num_heads, num_kv_heads, dim, rotary_dim
):
    qkv = draw(5, (num_heads + 2 * num_kv_heads) * dim, dtype=dtype)
    positions = torch.tensor([3, 0, 49, 3, 11], device=DEVICE)
    weights = draw(2, dim, dtype=torch.float32 if norms == "float32 norms" else dtype) + 1
    options = {
        "cos_sin": angles(rotary_dim) if rotary_dim else None,
        "query_norm": (weights[0], 1e-6) if norms != "plain" else None,
        "key_norm": (weights[1], 1e-5) if norms != "plain" else None,
    }
    slots = torch.tensor([7, 4, 0, 21, 23], device=DEVICE)
    made = []
    for function in (qk_norm_rope_cache, attention_reference.qk_norm_rope_cache):
        fused = qkv.clone()
        cache = torch.full((2, 6, 4, num_kv_heads, dim), 9.0, device=DEVICE, dtype=dtype)
        target = {"kv_cache": cache, "slot_mapping": slots} if cached else {}
        function(fused, num_heads, num_kv_heads, positions, **options, **target)
        made.append((fused, cache))
    close(made[0][0], made[1][0])
    close(made[0][1], made[1][1])
    assert cached == bool((made[0][1] != 9.0).any())


GEMV = list(
    itertools.product(
        DTYPES,
        (8, 37),
        ("norm", "float32 norm", "no norm"),
        (True, False),
        ("gated", "residual", "nothing"),
    )
)
"""(dtype, rows, norm, bias, after)"""
PAIRS = [
    (DTYPES[-(norm + after) % 3], (8, 37)[rows], *parts)
    for (norm, first), (after, last) in itertools.product(
        enumerate(("norm", "float32 norm", "no norm")), enumerate(("gated", "residual", "nothing"))
    )
    for rows, parts in enumerate(((first, bool(norm % 2), last), (first, not norm % 2, last)))
]
"""Of which any two of dtype, norm and what comes after come together."""


@pytest.mark.parametrize(("dtype", "rows", "norm", "bias", "after"), few_interpreted(GEMV, PAIRS))
def test_gemv_equals_its_twin(dtype, rows, norm, bias, after):
    size = {8: 64, 37: 200}[rows]
    x = draw(1, size, dtype=dtype)
    weight = draw(rows * (2 if after == "gated" else 1), size, dtype=dtype) / size**0.5
    of_norm = torch.float32 if norm == "float32 norm" else dtype
    options = {
        "bias": draw(weight.shape[0], dtype=dtype) if bias else None,
        "norm": (draw(size, dtype=of_norm) + 1, 1e-6) if norm != "no norm" else None,
        "residual": draw(1, rows, dtype=dtype) if after == "residual" else None,
        "gated": after == "gated",
        "factor": 0.3 if after == "residual" and bias else 1.0,
    }
    want = reference.gemv(x, weight, **options)
    for config in (None, GemvConfig(4, 64, 1), GemvConfig(16, 32, 2), ASKING):
        close(gemv(x, weight, **options, config=config), want)


@pytest.mark.parametrize(
    ("dtype", "activation", "bias"),
    [
        (DTYPES[0], "gelu", True), (DTYPES[1], "gelu_new", False), (DTYPES[0], "relu", True),
        (DTYPES[1], "relu2", False), (DTYPES[0], "silu", True), (DTYPES[0], "tanh", False),
        (DTYPES[0], "gated", True),
    ],
)  # fmt: skip
def test_gemv_of_a_layer_norm_and_an_activation_equals_its_twin(dtype, activation, bias):
    size, rows, gated = 200, 38, activation == "gated"
    x = draw(1, size, dtype=dtype) + 3
    weight = draw(rows, size, dtype=dtype) / size**0.5
    norm = draw(size, dtype=dtype) + 1, draw(size, dtype=dtype) if bias else None, 1e-3
    options = {
        "bias": draw(rows, dtype=dtype) if bias else None, "layer_norm": norm,
        "gated": gated, "activation": "" if gated else activation,
    }  # fmt: skip
    want = reference.gemv(x, weight, **options)
    factors, offsets, _ = norm
    ends = weight.float() @ offsets.float() + options["bias"].float() if bias else None
    sums = weight.float() @ factors.float(), ends
    for config in (None, GemvConfig(4, 64, 1), ASKING):
        close(gemv(x, weight, **options, config=config), want)
        close(gemv(x, weight, **options, norm_sums=sums, config=config), want)
    # Of 16 bits it is the sums that are read.
    wrong = (2 * sums[0], sums[1])
    is_close = torch.allclose(gemv(x, weight, **options, norm_sums=wrong), want, atol=0.01)
    assert is_close == (dtype == torch.float32)


@pytest.mark.parametrize("after", ["residual", "activation"])
def test_gemv_refuses_a_gate_with_a_residual_or_another_activation(after):
    x, weight = draw(1, 8, dtype=torch.float32), draw(4, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match=after):
        gemv(x, weight, gated=True, **{after: x[:, :2] if after == "residual" else "relu"})


def choose(logits: torch.Tensor, rows: list[tuple[float, float, int]], lengths: list[int]):
    """Through the kernel; rows: (inverse temperature, noise, seed). → chosen, history"""
    from jackfield.core.worker.sampling.gumbel import seed_lanes
    from jackfield.core.worker.sampling.sampling_columns import NUM_COLUMNS, Column

    count = len(rows)
    settings = torch.zeros(count + 2, NUM_COLUMNS, dtype=torch.int32)
    for row, (temperature, noise, seed) in enumerate(rows):
        drawn = torch.tensor([temperature, noise]).view(torch.int32)
        settings[row + 1, [Column.INVERSE_TEMPERATURE, Column.NOISE]] = drawn
        settings[row + 1, Column.LANES :] = torch.from_numpy(seed_lanes(seed))
    history = torch.full((count + 2, 500), -7, dtype=torch.int32, device=DEVICE)
    chosen = torch.full((count,), -9, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(1, count + 1, device=DEVICE)
    sample_gumbel(
        logits, settings.to(DEVICE), slots, torch.tensor(lengths, device=DEVICE), history, chosen
    )
    return chosen, history


def expected(logits: torch.Tensor, rows: list[tuple[float, float, int]], lengths: list[int]):
    """By the sampler's own noise, in torch."""
    from jackfield.core.worker.sampling.gumbel import TokenNoise, seed_lanes

    lanes = torch.stack([torch.from_numpy(seed_lanes(seed)) for *_, seed in rows]).to(DEVICE)
    noise = TokenNoise(logits.shape[1], DEVICE)
    drawn = noise.exponential(noise.row_keys(lanes, torch.tensor(lengths, device=DEVICE)))
    scale, weight = (
        torch.tensor(part, device=DEVICE)[:, None] for part in list(zip(*rows, strict=True))[:2]
    )
    return (logits.float() * scale - torch.special.xlogy(weight, drawn)).argmax(dim=1)


@pytest.mark.parametrize("vocab", [300, 9000])
def test_chosen_tokens_equal_the_samplers(vocab):
    rows = [
        (1.0, 1.0, 4),
        (0.5, 1.0, 5),
        (2.0, 1.0, 6),
        (1.0, 0.0, 0),
        (1.0, 1.0, 7),
        (1.0, 0.0, 1),
    ]
    lengths = [0, 3, 400, 9, 1, 2]
    logits = draw(6, vocab, dtype=torch.float32) * 3
    logits[4, 7], logits[5] = float("nan"), -float("inf")
    chosen, history = choose(logits, rows, lengths)
    assert chosen[4:].tolist() == [-1, -1]
    want = expected(logits[:4], rows[:4], lengths[:4]).tolist()
    assert chosen[:4].tolist() == want
    written = [int(history[row + 1, length]) for row, length in enumerate(lengths)]
    assert written == [*want, 0, 0]
    assert int((history != -7).sum()) == 6
    tied = torch.zeros(1, vocab, device=DEVICE)
    tied[0, [5, vocab - 1]] = 1.0
    assert choose(tied, rows[3:4], [1])[0].tolist() == [5]


def test_noise_of_the_kernel_is_the_samplers_noise():
    """The winner of flat logits is the noise's own choice, for many seeds and positions."""
    rows = [(1.0, 1.0, seed) for seed in range(63)]
    lengths = [seed * 7 for seed in range(63)]
    logits = torch.zeros(63, 500, device=DEVICE)
    assert choose(logits, rows, lengths)[0].tolist() == expected(logits, rows, lengths).tolist()


@pytest.mark.parametrize("dropped", [None, [0, 12, 0, 3, 31, 0, 0, 40, 7]], ids=["", "dropped"])
@pytest.mark.parametrize("counts", [[1], [1, 1, 7, 300, 1, 0, 0], [130, 1], [1, 1, 1, 1, 0]])
def test_step_inputs_equal_those_of_torch(counts, dropped):
    from jackfield.core.nn.operations import Operations
    from jackfield.core.nn.step_operations.inputs import StepTensors
    from jackfield.kernels.step.step_inputs import step_inputs

    random = torch.Generator().manual_seed(len(counts))
    rows = len(counts)
    history = torch.randint(0, 999, (9, 401), generator=random, dtype=torch.int32).to(DEVICE)
    table = torch.randint(0, 99, (9, 27), generator=random, dtype=torch.int32).to(DEVICE)
    start = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(DEVICE)
    slots = torch.randperm(9, generator=random)[:rows].to(torch.int32).to(DEVICE)
    lengths = torch.randint(41, 90, (9,), generator=random, dtype=torch.int32).to(DEVICE)
    sampled = torch.randint(0, 9, (rows,), generator=random, dtype=torch.int32).to(DEVICE)
    lost = None if dropped is None else torch.tensor(dropped, dtype=torch.int32, device=DEVICE)
    given = (start, slots, sampled, int(start[-1]), lengths, history, table, 16, lost)
    want = Operations().step_inputs(*given)
    tokens, per_row, seq_lens, tables = step_inputs(*given)
    (ids, positions, places), (passed_on, ends, last) = tokens, per_row
    got = StepTensors(ids, positions, places, passed_on, ends, last, seq_lens, tables)
    for name, a, b in zip(StepTensors._fields, got, want, strict=True):
        assert torch.equal(a, b), name
        assert a.dtype == b.dtype and a.data_ptr() % 16 == 0, name
    firsts = lengths[slots.long()].tolist()
    assert positions.tolist() == [
        first + offset for first, n in zip(firsts, counts, strict=True) for offset in range(n)
    ]
    gone = [0 if dropped is None else dropped[slot] for slot in slots.tolist()]
    assert seq_lens.tolist() == [
        first + n - less for first, n, less in zip(firsts, counts, gone, strict=True)
    ]
    assert int(places[0]) % 16 == (firsts[0] - gone[0]) % 16


@pytest.mark.parametrize("rows", [1, 6, 700])
def test_slots_advance_by_the_tokens_of_their_rows(rows):
    from jackfield.core.nn.operations import Operations
    from jackfield.kernels.step.step_inputs import advance

    random = torch.Generator().manual_seed(rows)
    counts = torch.randint(0, 9, (rows,), generator=random)
    slots = torch.randperm(rows + 3, generator=random)[:rows].int()
    # Padding shares the last slot.
    slots[rows // 2 :][slots[rows // 2 :] % 3 == 0] = rows + 2
    lengths = torch.randint(0, 90, (rows + 3,), generator=random, dtype=torch.int32)
    lengths[-1] = 0
    want = lengths.clone()
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        want[slot] += count
    want[-1] = 0
    start = torch.cat([torch.zeros(1), counts.cumsum(0)]).int().to(DEVICE)
    for operation in (advance, Operations().advance):
        got = lengths.to(DEVICE)
        got = got.clone() if got is lengths else got
        operation(got, slots.to(DEVICE), start)
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("count", [0, 1, 1500, 3000])
def test_scattered_writes_equal_those_of_torch(count):
    from jackfield.core.nn.operations import Operations
    from jackfield.kernels.step.step_inputs import scatter

    random = torch.Generator().manual_seed(count)
    places = torch.randperm(5000, generator=random)[:3000]
    values = torch.randint(0, 99, (3000,), generator=random)
    writes = torch.stack([places, values], dim=1).to(torch.int32).to(DEVICE)
    many = torch.tensor([count], dtype=torch.int32, device=DEVICE)
    want, got = (torch.zeros(5001, dtype=torch.int32, device=DEVICE) for _ in range(2))
    Operations().scatter(want, writes, many)
    scatter(got, writes, many)
    assert torch.equal(got[:-1], want[:-1])
    assert (got[writes[:count, 0].long()] == writes[:count, 1]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (5, 1600), (3, 4352)])
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("factor", [1.0, 12.7])
def test_embeddings_equal_those_of_torch(dtype, tokens, size, placed, factor):
    from jackfield.core.nn.operations import PositionRows

    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("the interpreter cuts off what bfloat16 has no room for")
    random = torch.Generator().manual_seed(4)
    # A column of a table, and a part of another table, as models have them.
    ids = torch.randint(0, 40, (2, tokens + 1), generator=random).to(DEVICE)[1, 1:]
    weight, table = draw(40, size, dtype=dtype), draw(33, size, dtype=dtype)[2:]
    positions = torch.randint(0, 31, (tokens,), generator=random).to(DEVICE)
    rows = PositionRows(positions, table) if placed else None
    got = embed(ids, weight, factor=factor, positions=rows)
    want = Operations().embed(ids, weight, factor=factor, positions=rows)
    assert got.dtype == dtype and torch.equal(got, want)
    assert embed(ids[:0], weight, factor=factor).shape == (0, size)


def test_tokens_are_written_to_the_next_place_of_the_ring():
    """257 rows, which one pass does not write; after the last run they are counted from 0."""
    pinned = DEVICE.type == "cuda"
    ring = torch.full((3, 300), -7, dtype=torch.int32, pin_memory=pinned)
    runs = torch.tensor([8], dtype=torch.int32, device=DEVICE)
    for run, rows in ((9, 257), (10, 1), (0, 2)):
        chosen = torch.arange(rows, dtype=torch.int32, device=DEVICE) + 100 * run
        write_tokens(chosen, runs, ring, 10)
        if pinned:
            torch.cuda.synchronize()
        assert runs.tolist() == [run]
        place = ring[run % 3].tolist()
        assert place[: rows + 1] == [run, *chosen.tolist()]
    assert ring[2].tolist() == [-7] * 300, "nothing else is written"
    assert ring[1].tolist()[2:] == [-7] * 298 and ring[0].tolist()[258:] == [-7] * 42


def test_decode_inputs_equal_those_of_torch():
    from jackfield.core.nn.operations import Operations
    from jackfield.core.nn.step_operations.inputs import DecodeTensors
    from jackfield.kernels.step.decode_inputs import decode_inputs

    random = torch.Generator().manual_seed(2)
    history = torch.randint(0, 999, (7, 90), generator=random, dtype=torch.int32).to(DEVICE)
    table = torch.randint(1, 99, (7, 1300), generator=random, dtype=torch.int32).to(DEVICE)
    lengths = torch.tensor([16, 9, 9, 0, 9, 47, 0], dtype=torch.int32, device=DEVICE)
    # Slot 6 is the padding's; the rows of slots 0 and 2 have their tables.
    packed = torch.tensor(
        [[3, -1, 5, -3, 6, 6], [0, 77, 0, 0, 0, 0]], dtype=torch.int32, device=DEVICE
    )
    rows = torch.full((6, 1300), -5, dtype=torch.int32, device=DEVICE)
    want_table, got_table = table.clone(), table.clone()
    want_lengths, got_lengths = lengths.clone(), lengths.clone()
    want_rows, got_rows = rows.clone(), rows.clone()
    want_rows[3, 0] = got_rows[3, 0] = table[2, 0]
    want = Operations().decode_inputs(packed, want_lengths, history, want_table, want_rows, 16)
    got = DecodeTensors(*decode_inputs(packed, got_lengths, history, got_table, got_rows, 16))
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name
    assert torch.equal(got_table, want_table)
    assert got_lengths.tolist() == want_lengths.tolist() == [17, 9, 10, 1, 9, 48, 0]
    assert int(got.slot_mapping[1]) == 77 * 16
    assert int(got_table[0, 1]) == 77 and got.block_table.data_ptr() == got_rows.data_ptr()
    assert torch.equal(got_rows[[0, 2, 4]], table[[3, 5, 6]])
    # Of a row that has its table, the new block alone is written.
    assert int(got_rows[1, 1]) == 77 and (got_rows[1] == -5).sum() == 1299


def test_decode_inputs_of_compacted_caches_equal_those_of_torch():
    """Slot 0 goes on at position 40 with 9 tokens left; slot 1 has lost nothing; slot 2 begins a
    block, which it gets."""
    from jackfield.core.nn.operations import Operations
    from jackfield.core.nn.step_operations.inputs import DecodeTensors
    from jackfield.kernels.step.decode_inputs import decode_inputs

    history = torch.arange(4 * 90, dtype=torch.int32, device=DEVICE).view(4, 90)
    table = torch.arange(1, 4 * 6 + 1, dtype=torch.int32, device=DEVICE).view(4, 6)
    lengths = torch.tensor([40, 21, 60, 0], dtype=torch.int32, device=DEVICE)
    dropped = torch.tensor([31, 0, 28, 0], dtype=torch.int32, device=DEVICE)
    packed = torch.tensor([[0, 2, 1, 3], [0, 99, 0, 0]], dtype=torch.int32, device=DEVICE)
    results = []
    for function in (decode_inputs, Operations().decode_inputs):
        own_lengths, own_table = lengths.clone(), table.clone()
        rows = torch.zeros(4, 6, dtype=torch.int32, device=DEVICE)
        made = function(packed, own_lengths, history, own_table, rows, 16, dropped)
        results.append((*DecodeTensors(*made), own_lengths, own_table))
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
    made = DecodeTensors(*results[0][:7])
    assert made.positions.tolist() == [40, 60, 21, 0] and made.seq_lens.tolist() == [10, 33, 22, 1]
    assert made.lengths.tolist() == [41, 61, 22, 1]
    assert made.slot_mapping.tolist() == [1 * 16 + 9, 99 * 16, 8 * 16 + 5, 19 * 16]
    assert made.input_ids.tolist() == [40, 180 + 60, 90 + 21, 270]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("vocab", [5, 64, 9001])
def test_masked_tokens_equal_their_twin(dtype, vocab, indexed):
    words = -(-vocab // 32)
    bits = torch.randint(-(2**31), 2**31, (3, words), dtype=torch.int64).int().to(DEVICE)
    bits[1] = -1
    rows = torch.tensor([4, 0, 2], device=DEVICE) if indexed else None
    logits = draw(5 if indexed else 3, vocab + 3, dtype=dtype)[:, :vocab]
    want, plain = logits.clone(), logits.clone()
    mask_tokens(logits, bits, rows)
    reference.mask_tokens(want, bits, rows)
    assert torch.equal(logits, want)
    Operations().mask_tokens(plain, bits, rows)
    assert torch.equal(plain, want)
    assert logits.isinf().any() or vocab == 5
