"""The rows of a group of warps in hopper_prefill.py: scores, running softmax and sums of values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_copies import number_of, tile_of
from .reach import last_hidden

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _narrow(x, dtype: gl.constexpr):
    """Convert pairs: the compiler's own conversion takes them apart and joins them again."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def _take_turn(PART: gl.constexpr):
    """Wait until the other group of two has started its products. The barriers' numbers are beyond
    those that the compiler takes."""
    wait: gl.constexpr = (
        "bar.sync 8, 256; mov.u32 $0, $1;" if PART == 0 else "bar.sync 9, 256; mov.u32 $0, $1;"
    )
    gl.inline_asm_elementwise(wait, "=r,r", [0], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pass_turn(PART: gl.constexpr):
    """Let the other group start its products."""
    arrive: gl.constexpr = (
        "bar.arrive 9, 256; mov.u32 $0, $1;" if PART == 0 else "bar.arrive 8, 256; mov.u32 $0, $1;"
    )
    gl.inline_asm_elementwise(arrive, "=r,r", [0], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _scores(query, key_smem, stage, SCORES: gl.constexpr):
    """Start the product of queries and the keys of a stage."""
    BLOCK_N: gl.constexpr = key_smem.shape[1]
    zeros = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    key = key_smem.index(stage).permute((1, 0))
    return warpgroup_mma(query, key, zeros, use_acc=False, is_async=True)


@gluon.jit
def _softmax(
    scores, m, total, position_q, base, scale,
    SOFT_CAP: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Return weights, the rows' maxima and sums, and the factor of the sums before."""
    if SOFT_CAP > 0:
        scores = SOFT_CAP * (1.0 - 2.0 / (1.0 + gl.exp(2.0 * scale * scores / SOFT_CAP)))
        factor = LOG2E
    else:
        factor = scale * LOG2E
    if MASKED:
        position = base + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        visible = position[None, :] <= position_q[:, None]
        if WINDOW > 0:
            hidden = last_hidden(position_q, WINDOW, CHUNK)
            visible = visible & (position[None, :] > hidden[:, None])
        scores = gl.where(visible, scores, -float("inf"))
    m_new = gl.maximum(m, gl.max(scores, 1))
    # Before its first visible key a query sees no key: stay at 0, not NaN.
    pivot = m_new
    if MASKED:
        pivot = gl.where(m_new == -float("inf"), 0.0, m_new)
    pivot = pivot * factor
    weights = gl.exp2(scores * factor - pivot[:, None])
    decay = gl.exp2(m * factor - pivot)
    total = total * decay + gl.sum(weights, 1)
    return weights, m_new, total, decay


@gluon.jit
def _hide_tail(value_smem, stage, tail, BOX: gl.constexpr, STAGES: gl.constexpr):
    """Replace values beyond the row's length, in the page that holds its end, by zeros: a weight of
    zero times what lies there may be NaN."""
    BLOCK_N: gl.constexpr = value_smem.shape[1]
    BLOCK_D: gl.constexpr = value_smem.shape[2]
    PARTS: gl.constexpr = BLOCK_D // 64
    PIECES: gl.constexpr = BLOCK_N // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    pieces = value_smem._reinterpret(
        value_smem.dtype, [STAGES * PARTS * PIECES, 8, 64], value_smem.layout
    )
    rows = gl.arange(0, 8, gl.SliceLayout(1, layout))
    for piece in range(tail // 8, (tail + BOX - 1) // BOX * (BOX // 8)):
        for part in gl.static_range(PARTS):
            place = pieces.index((stage * PARTS + part) * PIECES + piece)
            values = place.load(layout)
            place.store(gl.where((piece * 8 + rows < tail)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def _attend(
    acc, m, total, weights, count, query, key_smem, value_smem, bars, position_q, top, bottom,
    scale, PART: gl.constexpr, TURNS: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
    STAGES: gl.constexpr, SOFT_CAP: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Fold the tiles of keys from `top` - 1 down to `bottom` into the running softmax, and the
    values of the tiles before each into the sums."""
    BLOCK_N: gl.constexpr = key_smem.shape[1]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    for i in range(top - bottom):
        stage = (count - 1) % STAGES
        mbarrier.wait(bars.index(count % STAGES), (count // STAGES) & 1)
        mbarrier.wait(bars.index(STAGES + stage), ((count - 1) // STAGES) & 1)
        if TURNS:
            _take_turn(PART)
        scores = _scores(query, key_smem, count % STAGES, SCORES)
        sums = warpgroup_mma(weights, value_smem.index(stage), acc, is_async=True)
        if TURNS:
            _pass_turn(PART)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(bars.index(2 * STAGES + count % STAGES))
        next_weights, m, total, decay = _softmax(
            scores, m, total, position_q, (top - 1 - i) * BLOCK_N, scale,
            SOFT_CAP, WINDOW, CHUNK, MASKED,
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(bars.index(3 * STAGES + stage))
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
        weights = gl.convert_layout(_narrow(next_weights, query.dtype), OPERAND)
        count += 1
    return acc, m, total, weights, count


@gluon.jit
def attend_rows(
    PART: gl.constexpr, tiles, queries, results, read, NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BOX: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr, SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Compute the rows of a group of warps."""
    query_ptr, stride_query_token, stride_query_head, sinks_ptr, scale = queries
    out_ptr, stride_out_token, stride_out_head, value_scale = results
    query_smem, key_smem, value_smem, bars = read
    BLOCK_N: gl.constexpr = key_smem.shape[1]
    BLOCK_D: gl.constexpr = key_smem.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LANES: gl.constexpr = BLOCK_D // 8
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    query_place = query_smem.index(PART)
    if TURNS and PART == 1:
        _pass_turn(PART)
    columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, WHOLE))
    offs_load = PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, WHOLE))
    offs = PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    count = 0
    for round in range(tiles[5]):
        number = number_of(round)
        if number < tiles[4] * NUM_KV_HEADS:
            (
                kv_head, _row, tile_start, row_start, query_len, seq_len, first, last, _lower,
                begin, end,
            ) = tile_of(number, tiles, NUM_KV_HEADS, BLOCK_Q, BLOCK_N, WINDOW, CHUNK)  # fmt: skip
            if begin < end:
                local = tile_start + offs_load // GROUP
                head = kv_head * GROUP + offs_load % GROUP
                exists = (offs_load < BLOCK_Q * GROUP) & (local < query_len)
                token = (row_start + local).to(gl.int64)
                places = token * stride_query_token + head * stride_query_head
                # Beyond a head's channels keys are those of the next head: times zeros here.
                mask = exists[:, None] & (columns < HEAD_DIM)[None, :]
                query = gl.load(
                    query_ptr + places[:, None] + columns[None, :], mask=mask, other=0.0
                )
                query_place.store(query)
                fence_async_shared()
                position_q = first + offs // GROUP
                m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
                total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
                if SINKS:
                    # A key that every query sees, with this logit and a value of zeros.
                    m = gl.load(sinks_ptr + kv_head * GROUP + offs % GROUP).to(gl.float32)
                    if SOFT_CAP == 0:
                        m = m / scale
                    total += 1.0
                full_end = (first + 1) // BLOCK_N
                full_begin = 0
                if WINDOW > 0:
                    seen = gl.maximum(last_hidden(last, WINDOW, CHUNK) + 1, 0)
                    full_begin = (seen + BLOCK_N - 1) // BLOCK_N
                full_end = gl.minimum(full_end, end - 1)
                if full_begin >= full_end:
                    full_end = begin
                    full_begin = begin

                # The last tile of keys, masked always.
                mbarrier.wait(bars.index(count % STAGES), (count // STAGES) & 1)
                scores = _scores(query_place, key_smem, count % STAGES, SCORES)
                scores = warpgroup_mma_wait(0, deps=[scores])
                mbarrier.arrive(bars.index(2 * STAGES + count % STAGES))
                first_weights, m, total, _decay = _softmax(
                    scores, m, total, position_q, (end - 1) * BLOCK_N, scale,
                    SOFT_CAP, WINDOW, CHUNK, True,
                )  # fmt: skip
                weights = gl.convert_layout(_narrow(first_weights, query_place.dtype), OPERAND)
                acc = gl.zeros([64, BLOCK_D], gl.float32, SUMS)
                tail = seq_len - (end - 1) * BLOCK_N
                if (tail < BLOCK_N) & (tail % BOX != 0):
                    mbarrier.wait(bars.index(STAGES + count % STAGES), (count // STAGES) & 1)
                    _hide_tail(value_smem, count % STAGES, tail, BOX, STAGES)
                count += 1
                acc, m, total, weights, count = _attend(
                    acc, m, total, weights, count, query_place, key_smem, value_smem, bars,
                    position_q, end - 1, full_end, scale,
                    PART, TURNS, SCORES, SUMS, STAGES, SOFT_CAP, WINDOW, CHUNK, True,
                )  # fmt: skip
                acc, m, total, weights, count = _attend(
                    acc, m, total, weights, count, query_place, key_smem, value_smem, bars,
                    position_q, full_end, full_begin, scale,
                    PART, TURNS, SCORES, SUMS, STAGES, SOFT_CAP, WINDOW, CHUNK, False,
                )  # fmt: skip
                if WINDOW > 0:
                    acc, m, total, weights, count = _attend(
                        acc, m, total, weights, count, query_place, key_smem, value_smem, bars,
                        position_q, full_begin, begin, scale,
                        PART, TURNS, SCORES, SUMS, STAGES, SOFT_CAP, WINDOW, CHUNK, True,
                    )  # fmt: skip
                stage = (count - 1) % STAGES
                mbarrier.wait(bars.index(STAGES + stage), ((count - 1) // STAGES) & 1)
                sums = warpgroup_mma(weights, value_smem.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[sums])
                mbarrier.arrive(bars.index(3 * STAGES + stage))
                factor = value_scale / gl.where(total > 0.0, total, 1.0)
                acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, SUMS))[:, None]
                # Through shared memory, for whole lines.
                query_place.store(_narrow(acc, query_place.dtype))
                result = query_place.load(WHOLE)
                places = token * stride_out_token + head * stride_out_head
                gl.store(out_ptr + places[:, None] + columns[None, :], result, mask=mask)
