"""The Triton side of banked attention: one program per tile of rows, head and image.

Pointers come with their strides: `_b` per image, `_h` per head, `_row` per row; a stride of 0
shares an axis. Scores are in powers of two.
"""

import triton
import triton.language as tl


@triton.jit
def _absorb(
    q,
    k_ptr,
    v_ptr,
    k_row,
    v_row,
    columns,
    present,
    visible,
    peak,
    total,
    acc,
    scale,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One block of keys into the running softmax; `visible` [ROWS, KEYS] says who sees what."""
    lanes = tl.arange(0, LANES)
    inside = present[:, None] & (lanes < WIDTH)[None, :]
    k = tl.load(k_ptr + columns[:, None] * k_row + lanes[None, :], mask=inside, other=0.0)
    v = tl.load(v_ptr + columns[:, None] * v_row + lanes[None, :], mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new = tl.maximum(peak, tl.max(scores, axis=1))
    ground = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - ground[:, None])
    fade = tl.exp2(peak - ground)
    acc = acc * fade[:, None] + tl.dot(
        weights.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32"
    )
    return new, total * fade + tl.sum(weights, axis=1), acc


@triton.jit
def _read_bank(
    q, rows, n_rows, tile, batch, head, kv_head,
    k_ptr, k_b, k_h, k_row, v_ptr, v_b, v_h, v_row, n_keys, keep_ptr, keep_b, keep_h, keep_row, work_ptr, work_row, choose_ptr, choose_b,
    peak, total, acc, scale,
    KEEP: tl.constexpr, CHOOSE: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """All key blocks of one bank that this tile needs."""
    k_ptr += batch * k_b + kv_head * k_h
    v_ptr += batch * v_b + kv_head * v_h
    keep_ptr += batch * keep_b + head * keep_h
    blocks = tl.cdiv(n_keys, KEYS)
    if KEEP:
        blocks = tl.load(work_ptr + tile * work_row)
    if CHOOSE:
        blocks = tl.where(tl.load(choose_ptr + batch * choose_b + head) != 0, blocks, 0)
    for step in range(0, blocks):
        start = step * KEYS
        if KEEP:
            start = tl.load(work_ptr + tile * work_row + 1 + step) * KEYS
        columns = start + tl.arange(0, KEYS)
        present = columns < n_keys
        visible = (rows[:, None] < n_rows) & present[None, :]
        if KEEP:  # a word of bits for each row and key block; none is set beyond the last key
            word = tl.load(keep_ptr + rows * keep_row + start // KEYS, mask=rows < n_rows, other=0)
            visible = ((word[:, None] >> tl.arange(0, KEYS)[None, :]) & 1) != 0
        peak, total, acc = _absorb(
            q, k_ptr, v_ptr, k_row, v_row, columns, present, visible,
            peak, total, acc, scale, WIDTH, LANES, EXACT,
        )  # fmt: skip
    return peak, total, acc


@triton.jit
def _read_own(
    q, rows, n_rows, tile, k_ptr, k_row, v_ptr, v_row, owner_ptr, starts_ptr, peak, total, acc, scale,
    WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The keys of the groups this tile's rows belong to."""
    group = tl.load(owner_ptr + rows, mask=rows < n_rows, other=0)
    low = tl.load(starts_ptr + group)
    # rows past the end see nothing
    high = tl.where(rows < n_rows, tl.load(starts_ptr + group + 1), low)
    first = tl.load(starts_ptr + tl.load(owner_ptr + tile * ROWS))
    end = tl.minimum(tile * ROWS + ROWS, n_rows) - 1
    last = tl.load(starts_ptr + tl.load(owner_ptr + end) + 1)
    for start in range(first, last, KEYS):
        columns = start + tl.arange(0, KEYS)
        visible = (columns[None, :] >= low[:, None]) & (columns[None, :] < high[:, None])
        peak, total, acc = _absorb(  # pyright: ignore[reportGeneralTypeIssues]
            q, k_ptr, v_ptr, k_row, v_row, columns, columns < last, visible,
            peak, total, acc, scale, WIDTH, LANES, EXACT,
        )  # fmt: skip
    return peak, total, acc


@triton.jit
def banked(
    q_ptr, q_b, q_h, q_row, o_ptr, o_b, o_row, o_h, lse_ptr, lse_b, lse_row, lse_h, n_rows, scale,
    k0, k0_b, k0_h, k0_row, v0, v0_b, v0_h, v0_row, n0, keep0, keep0_b, keep0_h, keep0_row, work0, work0_row, choose0, choose0_b,
    k1, k1_b, k1_h, k1_row, v1, v1_b, v1_h, v1_row, n1, keep1, keep1_b, keep1_h, keep1_row, work1, work1_row, choose1, choose1_b,
    ko, ko_b, ko_h, ko_row, vo, vo_b, vo_h, vo_row, owner_ptr, starts_ptr,
    BANK0: tl.constexpr, KEEP0: tl.constexpr, CHOOSE0: tl.constexpr, BANK1: tl.constexpr, KEEP1: tl.constexpr, CHOOSE1: tl.constexpr,
    ALONE: tl.constexpr, OWN: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_head = head // SHARE
    rows = tile * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, LANES)
    real = (rows[:, None] < n_rows) & (lanes < WIDTH)[None, :]
    q_ptr += batch * q_b + head * q_h
    q = tl.load(q_ptr + rows[:, None] * q_row + lanes[None, :], mask=real, other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LANES], tl.float32)
    ko += batch * ko_b + kv_head * ko_h
    vo += batch * vo_b + kv_head * vo_h
    if ALONE:  # start from each row's own key
        own_k = tl.load(ko + rows[:, None] * ko_row + lanes[None, :], mask=real, other=0.0)
        peak = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), axis=1) * scale
        total = tl.full([ROWS], 1.0, tl.float32)
        own_v = tl.load(vo + rows[:, None] * vo_row + lanes[None, :], mask=real, other=0.0)
        acc = own_v.to(tl.float32)
    if BANK0:
        peak, total, acc = _read_bank(
            q, rows, n_rows, tile, batch, head, kv_head,
            k0, k0_b, k0_h, k0_row, v0, v0_b, v0_h, v0_row, n0, keep0, keep0_b, keep0_h, keep0_row, work0, work0_row, choose0, choose0_b,
            peak, total, acc, scale, KEEP0, CHOOSE0, WIDTH, LANES, KEYS, EXACT,
        )  # fmt: skip
    if BANK1:
        peak, total, acc = _read_bank(
            q, rows, n_rows, tile, batch, head, kv_head,
            k1, k1_b, k1_h, k1_row, v1, v1_b, v1_h, v1_row, n1, keep1, keep1_b, keep1_h, keep1_row, work1, work1_row, choose1, choose1_b,
            peak, total, acc, scale, KEEP1, CHOOSE1, WIDTH, LANES, KEYS, EXACT,
        )  # fmt: skip
    if OWN:
        peak, total, acc = _read_own(
            q, rows, n_rows, tile, ko, ko_row, vo, vo_row, owner_ptr, starts_ptr,
            peak, total, acc, scale, WIDTH, LANES, ROWS, KEYS, EXACT,
        )  # fmt: skip
    safe = tl.where(total > 0, total, 1.0)
    tl.store(
        o_ptr + batch * o_b + rows[:, None] * o_row + head * o_h + lanes[None, :],
        (acc / safe[:, None]).to(o_ptr.dtype.element_ty),
        mask=real,
    )
    lse = tl.where(total > 0, (peak + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + batch * lse_b + rows * lse_row + head * lse_h, lse, mask=rows < n_rows)
