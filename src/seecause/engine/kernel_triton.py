"""The Triton side of `kernel.py`. Pointers come with their strides: `_b` for an image or a copy,
`_h` for a head, `_row` or `_r` for a row; a stride of 0 shares an axis.

Banked attention (`banked`: banks with masks; `soft`, `back_weights`: banks whose keys have
log-weights w [B, R, K] in float32). Scores and `lse` [B, H, R] are in powers of two. A
program of `banked` has a tile of rows, a head and an image; one of the others has a tile of rows
that holds whole groups.

    s = scale q k + w,   p = exp(s - lse),   ds = p (do v - delta),   delta = do o
    dw = sum over heads of ds,   dq = scale ds k;   of a row's own group also dk = scale ds' q and
    dv = p' do

Text rows of a vision-language model (`rotated`, `text_rows`, `shared_read_back`): few rows and thousands of copies. With g the gradient of an output, p
probabilities, own what a row reads of its own text, seen and blind what it read of the image and
of the average:

    out = c own + m s seen + (1 - m) t blind,      s, t their shares by log-sum-exp, m the mask
    c = m (1 - s) + (1 - m) (1 - t)
    dscores = p (c g v - c g own + dlse),          dlse = -(dlse_seen + dlse_blind)
    dlse_seen = s (1 - s) m g (seen - own),        dlse_blind = t (1 - t) (1 - m) g (blind - own)
"""

# What a kernel returns to a kernel is not what the checker thinks.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def tile_of(ptr, rows, row, real, LANES: constexpr, WIDTH: constexpr):
    """[ROWS, LANES] of a matrix, zeros where nothing is real."""
    lanes = tl.arange(0, LANES)
    inside = real[:, None]
    if LANES > WIDTH:
        inside = inside & (lanes < WIDTH)[None, :]
    return tl.load(ptr + rows[:, None] * row + lanes[None, :], mask=inside, other=0.0)


@triton.jit
def rows_of(ptr, b, h, row, batch, head, rows, real, LANES: constexpr, WIDTH: constexpr):
    """`tile_of` one head of one image."""
    return tile_of(ptr + batch * b + head * h, rows, row, real, LANES, WIDTH)


@triton.jit
def _dot(x, y, EXACT: constexpr):
    """The product of two tiles, in float32 without TF32 if it is to be exact."""
    return tl.dot(x, y, input_precision="ieee" if EXACT else "tf32")


@triton.jit
def _absorb(s, v, peak, total, acc, EXACT: constexpr):
    """Scores and values of some keys into the running softmax."""
    new = tl.maximum(peak, tl.max(s, axis=1))
    ground = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - ground[:, None])
    fade = tl.exp2(peak - ground)
    acc = acc * fade[:, None] + _dot(p.to(v.dtype), v, EXACT)
    return new, total * fade + tl.sum(p, axis=1), acc


@triton.jit
def _leave(o_ptr, rows, row, real, peak, total, acc, LANES: constexpr, WIDTH: constexpr):
    """Store what the running softmax came to, and give its log-sum-exp: zeros and -inf for rows
    that saw no key."""
    lanes = tl.arange(0, LANES)
    safe = tl.where(total > 0, total, 1.0)
    tl.store(
        o_ptr + rows[:, None] * row + lanes[None, :],
        (acc / safe[:, None]).to(o_ptr.dtype.element_ty),
        mask=real[:, None] & (lanes < WIDTH)[None, :],
    )
    return tl.where(total > 0, peak + tl.log2(safe), float("-inf"))


@triton.jit
def _see(
    q, k_ptr, v_ptr, k_row, v_row, columns, present, visible, peak, total, acc, scale,
    WIDTH: constexpr, LANES: constexpr, EXACT: constexpr,
):  # fmt: skip
    """One block of keys into the running softmax; `visible` [ROWS, KEYS] says who sees what."""
    k = tile_of(k_ptr, columns, k_row, present, LANES, WIDTH)
    v = tile_of(v_ptr, columns, v_row, present, LANES, WIDTH)
    s = _dot(q, tl.trans(k), EXACT) * scale
    return _absorb(tl.where(visible, s, float("-inf")), v, peak, total, acc, EXACT)


@triton.jit
def _read_bank(
    q, rows, n_rows, tile, batch, head, kv_head,
    k_ptr, k_b, k_h, k_row, v_ptr, v_b, v_h, v_row, n_keys, keep_ptr, keep_b, keep_h, keep_row, work_ptr, work_row,
    peak, total, acc, scale,
    KEEP: constexpr, WIDTH: constexpr, LANES: constexpr, KEYS: constexpr, EXACT: constexpr,
):  # fmt: skip
    """All key blocks of one bank that this tile needs."""
    k_ptr += batch * k_b + kv_head * k_h
    v_ptr += batch * v_b + kv_head * v_h
    keep_ptr += batch * keep_b + head * keep_h
    blocks = tl.cdiv(n_keys, KEYS)
    if KEEP:
        blocks = tl.load(work_ptr + tile * work_row)
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
        peak, total, acc = _see(
            q, k_ptr, v_ptr, k_row, v_row, columns, present, visible,
            peak, total, acc, scale, WIDTH, LANES, EXACT,
        )  # fmt: skip
    return peak, total, acc


@triton.jit
def _read_own(
    q, rows, n_rows, tile, k_ptr, k_row, v_ptr, v_row, owner_ptr, starts_ptr, peak, total, acc, scale,
    WIDTH: constexpr, LANES: constexpr, ROWS: constexpr, KEYS: constexpr, EXACT: constexpr,
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
        peak, total, acc = _see(
            q, k_ptr, v_ptr, k_row, v_row, columns, columns < last, visible,
            peak, total, acc, scale, WIDTH, LANES, EXACT,
        )  # fmt: skip
    return peak, total, acc


@triton.jit
def banked(
    q_ptr, q_b, q_h, q_row, o_ptr, o_b, o_row, o_h, lse_ptr, lse_b, lse_row, lse_h, n_rows, scale,
    k0, k0_b, k0_h, k0_row, v0, v0_b, v0_h, v0_row, n0, keep0, keep0_b, keep0_h, keep0_row, work0, work0_row,
    k1, k1_b, k1_h, k1_row, v1, v1_b, v1_h, v1_row, n1, keep1, keep1_b, keep1_h, keep1_row, work1, work1_row,
    ko, ko_b, ko_h, ko_row, vo, vo_b, vo_h, vo_row, owner_ptr, starts_ptr,
    BANK0: constexpr, KEEP0: constexpr, BANK1: constexpr, KEEP1: constexpr,
    ALONE: constexpr, OWN: constexpr, SHARE: constexpr, WIDTH: constexpr, LANES: constexpr,
    ROWS: constexpr, KEYS: constexpr, EXACT: constexpr,
):  # fmt: skip
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_head = head // SHARE
    rows = tile * ROWS + tl.arange(0, ROWS)
    real = rows < n_rows
    q = rows_of(q_ptr, q_b, q_h, q_row, batch, head, rows, real, LANES, WIDTH)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LANES], tl.float32)
    ko += batch * ko_b + kv_head * ko_h
    vo += batch * vo_b + kv_head * vo_h
    if ALONE:  # start from each row's own key
        own_k = tile_of(ko, rows, ko_row, real, LANES, WIDTH)
        peak = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), axis=1) * scale
        total = tl.full([ROWS], 1.0, tl.float32)
        acc = tile_of(vo, rows, vo_row, real, LANES, WIDTH).to(tl.float32)
    if BANK0:
        peak, total, acc = _read_bank(
            q, rows, n_rows, tile, batch, head, kv_head,
            k0, k0_b, k0_h, k0_row, v0, v0_b, v0_h, v0_row, n0, keep0, keep0_b, keep0_h, keep0_row, work0, work0_row,
            peak, total, acc, scale, KEEP0, WIDTH, LANES, KEYS, EXACT,
        )  # fmt: skip
    if BANK1:
        peak, total, acc = _read_bank(
            q, rows, n_rows, tile, batch, head, kv_head,
            k1, k1_b, k1_h, k1_row, v1, v1_b, v1_h, v1_row, n1, keep1, keep1_b, keep1_h, keep1_row, work1, work1_row,
            peak, total, acc, scale, KEEP1, WIDTH, LANES, KEYS, EXACT,
        )  # fmt: skip
    if OWN:
        peak, total, acc = _read_own(
            q, rows, n_rows, tile, ko, ko_row, vo, vo_row, owner_ptr, starts_ptr,
            peak, total, acc, scale, WIDTH, LANES, ROWS, KEYS, EXACT,
        )  # fmt: skip
    o_ptr += batch * o_b + head * o_h
    lse = _leave(o_ptr, rows, o_row, real, peak, total, acc, LANES, WIDTH) * 0.6931471805599453
    tl.store(lse_ptr + batch * lse_b + rows * lse_row + head * lse_h, lse, mask=real)


@triton.jit
def _block(
    q, start, k_ptr, k_row, v_ptr, v_row, w_ptr, n_keys, rows, real, scale,
    KEYS: constexpr, WIDTH: constexpr, LANES: constexpr, EXACT: constexpr,
):  # fmt: skip
    """A block of a bank's keys and values, and scores [ROWS, KEYS], -inf where there is no row or
    no key."""
    columns = start + tl.arange(0, KEYS)
    present = columns < n_keys
    k = tile_of(k_ptr, columns, k_row, present, LANES, WIDTH)
    v = tile_of(v_ptr, columns, v_row, present, LANES, WIDTH)
    seen = real[:, None] & present[None, :]
    w = tl.load(w_ptr + rows[:, None] * n_keys + columns[None, :], mask=seen, other=0.0)
    s = _dot(q, tl.trans(k), EXACT) * scale
    return k, v, tl.where(seen, s + w * 1.4426950408889634, float("-inf"))


@triton.jit
def _slopes(s, v, do, lse, delta, EXACT: constexpr):
    """Probabilities and the gradient of the scores, both [ROWS, KEYS] in float32."""
    p = tl.exp2(s - lse[:, None])
    dp = _dot(do, tl.trans(v), EXACT)
    return p, p * (dp - delta[:, None])


@triton.jit
def _read(
    q, peak, total, acc, k_ptr, k_row, v_ptr, v_row, w_ptr, n_keys, rows, real, scale,
    KEYS: constexpr, WIDTH: constexpr, LANES: constexpr, EXACT: constexpr,
):  # fmt: skip
    """One bank's keys into the running softmax."""
    for start in range(0, n_keys, KEYS):
        _, v, s = _block(
            q, start, k_ptr, k_row, v_ptr, v_row, w_ptr, n_keys, rows, real, scale,
            KEYS, WIDTH, LANES, EXACT,
        )  # fmt: skip
        peak, total, acc = _absorb(s, v, peak, total, acc, EXACT)
    return peak, total, acc


@triton.jit
def _descend(
    q, do, lse, delta, dq, k_ptr, k_row, v_ptr, v_row, w_ptr, n_keys, rows, real, scale,
    KEYS: constexpr, WIDTH: constexpr, LANES: constexpr, EXACT: constexpr,
):  # fmt: skip
    """The gradient of queries with what one bank's keys add to it."""
    for start in range(0, n_keys, KEYS):
        k, v, s = _block(
            q, start, k_ptr, k_row, v_ptr, v_row, w_ptr, n_keys, rows, real, scale,
            KEYS, WIDTH, LANES, EXACT,
        )  # fmt: skip
        _, ds = _slopes(s, v, do, lse, delta, EXACT)
        dq += _dot(ds.to(k.dtype), k, EXACT)
    return dq


@triton.jit
def soft(
    q_ptr, q_b, q_h, q_row, o_ptr, o_b, o_row, o_h, lse_ptr, n_rows, n_heads, scale, plain,
    k0, k0_b, k0_h, k0_row, v0, v0_b, v0_h, v0_row, w0, n0,
    k1, k1_b, k1_h, k1_row, v1, v1_b, v1_h, v1_row, w1, n1,
    ko, ko_b, ko_h, ko_row, vo, vo_b, vo_h, vo_row,
    do_ptr, do_b, do_row, do_h, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    EACH: constexpr, USED: constexpr, BACK: constexpr, ROWS: constexpr, KEYS: constexpr,
    WIDTH: constexpr, LANES: constexpr, EXACT: constexpr,
):  # fmt: skip
    """Outputs and their log-sum-exps; or, `BACK`, from the slope `do` of the outputs the gradients
    of queries, own keys and own values, [B, H, R, dh] each, and delta [B, H, R]."""
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    place, lanes = tl.arange(0, ROWS), tl.arange(0, LANES)
    rows = tile * USED + place
    real = (place < USED) & (rows < n_rows)
    flat = (batch * n_heads + head) * n_rows + rows
    q = rows_of(q_ptr, q_b, q_h, q_row, batch, head, rows, real, LANES, WIDTH)
    own_k = rows_of(ko, ko_b, ko_h, ko_row, batch, head, rows, real, LANES, WIDTH)
    own_v = rows_of(vo, vo_b, vo_h, vo_row, batch, head, rows, real, LANES, WIDTH)
    k0 += batch * k0_b + head * k0_h
    v0 += batch * v0_b + head * v0_h
    w0 += batch * n_rows * n0
    k1 += batch * k1_b + head * k1_h
    v1 += batch * v1_b + head * v1_h
    w1 += batch * n_rows * n1
    o_ptr += batch * o_b + head * o_h
    together = (place[:, None] // EACH == place[None, :] // EACH) & real[:, None] & real[None, :]
    own = tl.where(together, _dot(q, tl.trans(own_k), EXACT) * scale, float("-inf"))
    if BACK:
        do = rows_of(do_ptr, do_b, do_h, do_row, batch, head, rows, real, LANES, WIDTH)
        lse = tl.load(lse_ptr + flat, mask=real, other=0.0)
        o = tile_of(o_ptr, rows, o_row, real, LANES, WIDTH)
        delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), axis=1)
        tl.store(delta_ptr + flat, delta, mask=real)
        share, slope = _slopes(own, own_v, do, lse, delta, EXACT)
        dk = _dot(tl.trans(slope.to(q.dtype)), q, EXACT)
        dv = _dot(tl.trans(share.to(q.dtype)), do, EXACT)
        dq = _descend(
            q, do, lse, delta, _dot(slope.to(q.dtype), own_k, EXACT),
            k0, k0_row, v0, v0_row, w0, n0, rows, real, scale, KEYS, WIDTH, LANES, EXACT,
        )  # fmt: skip
        dq = _descend(
            q, do, lse, delta, dq, k1, k1_row, v1, v1_row, w1, n1, rows, real, scale,
            KEYS, WIDTH, LANES, EXACT,
        )  # fmt: skip
        at = flat[:, None] * WIDTH + lanes[None, :]
        inside = real[:, None] & (lanes < WIDTH)[None, :]
        tl.store(dq_ptr + at, (dq * plain).to(dq_ptr.dtype.element_ty), mask=inside)
        tl.store(dk_ptr + at, (dk * plain).to(dk_ptr.dtype.element_ty), mask=inside)
        tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)
    else:
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, LANES], tl.float32)
        peak, total, acc = _absorb(own, own_v, peak, total, acc, EXACT)
        peak, total, acc = _read(
            q, peak, total, acc, k0, k0_row, v0, v0_row, w0, n0, rows, real, scale,
            KEYS, WIDTH, LANES, EXACT,
        )  # fmt: skip
        peak, total, acc = _read(
            q, peak, total, acc, k1, k1_row, v1, v1_row, w1, n1, rows, real, scale,
            KEYS, WIDTH, LANES, EXACT,
        )  # fmt: skip
        lse = _leave(o_ptr, rows, o_row, real, peak, total, acc, LANES, WIDTH)
        tl.store(lse_ptr + flat, lse, mask=real)


@triton.jit
def back_weights(
    q_ptr, q_b, q_h, q_row, do_ptr, do_b, do_row, do_h, lse_ptr, delta_ptr, n_rows, n_heads, scale,
    k_ptr, k_b, k_h, k_row, v_ptr, v_b, v_h, v_row, w_ptr, n_keys, dw_ptr,
    ROWS: constexpr, KEYS: constexpr, WIDTH: constexpr, LANES: constexpr,
    EXACT: constexpr,
):  # fmt: skip
    """Gradient of one bank's log-weights [B, R, K]: heads are added in order, so it is always the
    same."""
    block, tile, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = tile * ROWS + tl.arange(0, ROWS)
    real = rows < n_rows
    columns = block * KEYS + tl.arange(0, KEYS)
    present = columns < n_keys
    seen = real[:, None] & present[None, :]
    at = batch * n_rows * n_keys + rows[:, None] * n_keys + columns[None, :]
    w = tl.load(w_ptr + at, mask=seen, other=0.0) * 1.4426950408889634
    acc = tl.zeros([ROWS, KEYS], tl.float32)
    for head in range(0, n_heads):
        flat = (batch * n_heads + head) * n_rows
        q = rows_of(q_ptr, q_b, q_h, q_row, batch, head, rows, real, LANES, WIDTH)
        do = rows_of(do_ptr, do_b, do_h, do_row, batch, head, rows, real, LANES, WIDTH)
        lse = tl.load(lse_ptr + flat + rows, mask=real, other=0.0)
        delta = tl.load(delta_ptr + flat + rows, mask=real, other=0.0)
        k = tile_of(k_ptr + batch * k_b + head * k_h, columns, k_row, present, LANES, WIDTH)
        v = tile_of(v_ptr + batch * v_b + head * v_h, columns, v_row, present, LANES, WIDTH)
        s = _dot(q, tl.trans(k), EXACT) * scale + w
        _, ds = _slopes(tl.where(seen, s, float("-inf")), v, do, lse, delta, EXACT)
        acc += ds
    tl.store(dw_ptr + at, acc, mask=seen)


@triton.jit
def rotated(
    x_ptr, x_b, x_h, x_r, out_ptr, out_b, out_h, out_r, table_ptr, table_r, sine, n_rows, n_heads,
    HEADS: constexpr, HALF: constexpr, BACK: constexpr,
):  # fmt: skip
    """All heads of one row: left and right halves turn by the row's cosines and sines, `sine`
    entries behind them in the table; or a slope turns back."""
    batch, row = (tl.program_id(0) // n_rows).to(tl.int64), tl.program_id(0) % n_rows
    heads, lanes = tl.arange(0, HEADS), tl.arange(0, HALF)
    real = (heads < n_heads)[:, None] & (lanes < HALF)[None, :]
    table_ptr += row * table_r + lanes
    cos_left = tl.load(table_ptr).to(tl.float32)
    cos_right = tl.load(table_ptr + HALF).to(tl.float32)
    if BACK:
        sin_left = -tl.load(table_ptr + sine + HALF).to(tl.float32)
        sin_right = -tl.load(table_ptr + sine).to(tl.float32)
    else:
        sin_left = tl.load(table_ptr + sine).to(tl.float32)
        sin_right = tl.load(table_ptr + sine + HALF).to(tl.float32)
    place = x_ptr + batch * x_b + row * x_r + heads[:, None] * x_h + lanes[None, :]
    left = tl.load(place, mask=real, other=0.0).to(tl.float32)
    right = tl.load(place + HALF, mask=real, other=0.0).to(tl.float32)
    out = out_ptr + batch * out_b + row * out_r + heads[:, None] * out_h + lanes[None, :]
    kind = out_ptr.dtype.element_ty
    new_left = left * cos_left[None, :] - right * sin_left[None, :]
    new_right = right * cos_right[None, :] + left * sin_right[None, :]
    tl.store(out, new_left.to(kind), mask=real)
    tl.store(out + HALF, new_right.to(kind), mask=real)


@triton.jit
def _look_back(q, k, v, rows, scale, EXACT: constexpr):
    """Rows over themselves and those before them: probabilities, output and log-sum-exp."""
    scores = _dot(q, tl.trans(k), EXACT) * scale
    scores = tl.where(rows[None, :] <= rows[:, None], scores, float("-inf"))
    peak = tl.max(scores, axis=1)
    weights = tl.exp(scores - peak[:, None])
    total = tl.sum(weights, axis=1)
    own = _dot(weights.to(v.dtype), v, EXACT)
    return weights / total[:, None], own / total[:, None], peak + tl.log(total)


@triton.jit
def text_rows(
    q_ptr, q_b, q_h, q_r, k_ptr, k_b, k_h, k_r, v_ptr, v_b, v_h, v_r,
    seen_ptr, seen_b, seen_r, seen_h, seen_lse, seen_lse_b, seen_lse_r, seen_lse_h,
    blind_ptr, blind_b, blind_r, blind_h, blind_lse, blind_lse_b, blind_lse_r, blind_lse_h,
    choose_ptr, choose_b, choose_r, choose_h, g_ptr, g_b, g_r, g_h,
    dq_ptr, dk_ptr, dv_ptr, d_seen_ptr, d_blind_ptr, d_seen_lse, d_blind_lse, d_choose,
    n_rows, n_heads, scale, SHARE: constexpr, ROWS: constexpr, WIDTH: constexpr,
    EXACT: constexpr, BACK: constexpr,
):  # fmt: skip
    """One head of one copy: its rows look back at themselves, and take in what they saw of the
    image and of the average, as much as a mask says. The output goes to g; or, `BACK`, g is its
    slope, and all slopes under a soft mask are stored: [B, R, H, dh] each, and three [B, R, H]."""
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, lanes = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    real = rows < n_rows
    q = rows_of(q_ptr, q_b, q_h, q_r, batch, head, rows, real, WIDTH, WIDTH)
    k = rows_of(k_ptr, k_b, k_h, k_r, batch, head // SHARE, rows, real, WIDTH, WIDTH)
    v = rows_of(v_ptr, v_b, v_h, v_r, batch, head // SHARE, rows, real, WIDTH, WIDTH)
    probs, own, own_lse = _look_back(q, k, v, rows, scale, EXACT)
    choose_ptr += batch * choose_b + rows * choose_r + head * choose_h
    choose = tl.load(choose_ptr, mask=real, other=0.0)
    seen_ptr += batch * seen_b + head * seen_h
    blind_ptr += batch * blind_b + head * blind_h
    seen = tile_of(seen_ptr, rows, seen_r, real, WIDTH, WIDTH).to(tl.float32)
    blind = tile_of(blind_ptr, rows, blind_r, real, WIDTH, WIDTH).to(tl.float32)
    seen_lse += batch * seen_lse_b + rows * seen_lse_r + head * seen_lse_h
    blind_lse += batch * blind_lse_b + rows * blind_lse_r + head * blind_lse_h
    share = 1 / (1 + tl.exp(own_lse - tl.load(seen_lse, mask=real, other=0.0)))
    rest = 1 / (1 + tl.exp(own_lse - tl.load(blind_lse, mask=real, other=0.0)))
    to_image, to_average = choose * share, (1 - choose) * rest
    g_ptr += batch * g_b + head * g_h
    if BACK:
        slope = tile_of(g_ptr, rows, g_r, real, WIDTH, WIDTH)
        g = slope.to(tl.float32)
        kept = choose * (1 - share) + (1 - choose) * (1 - rest)
        to_own = tl.sum(g * own, axis=1)
        to_seen = share * (tl.sum(g * seen, axis=1) - to_own)
        to_blind = rest * (tl.sum(g * blind, axis=1) - to_own)
        by_seen = (1 - share) * choose * to_seen
        by_blind = (1 - rest) * (1 - choose) * to_blind
        level = kept * to_own + by_seen + by_blind
        moved = _dot(slope, tl.trans(v), EXACT)
        scores = (probs * (kept[:, None] * moved - level[:, None]) * scale).to(q.dtype)
        into_v = (probs * kept[:, None]).to(q.dtype)
        place = (batch * n_rows + rows) * n_heads + head
        at, inside = place[:, None] * WIDTH + lanes[None, :], real[:, None]
        kind = dq_ptr.dtype.element_ty
        tl.store(dq_ptr + at, _dot(scores, k, EXACT).to(kind), mask=inside)
        tl.store(dk_ptr + at, _dot(tl.trans(scores), q, EXACT).to(kind), mask=inside)
        tl.store(dv_ptr + at, _dot(tl.trans(into_v), slope, EXACT).to(kind), mask=inside)
        tl.store(d_seen_ptr + at, (to_image[:, None] * g).to(kind), mask=inside)
        tl.store(d_blind_ptr + at, (to_average[:, None] * g).to(kind), mask=inside)
        tl.store(d_seen_lse + place, by_seen, mask=real)
        tl.store(d_blind_lse + place, by_blind, mask=real)
        tl.store(d_choose + place, to_seen - to_blind, mask=real)
    else:
        merged = own + to_image[:, None] * (seen - own) + to_average[:, None] * (blind - own)
        out = g_ptr + rows[:, None] * g_r + lanes[None, :]
        tl.store(out, merged.to(g_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit
def shared_read_back(
    q_ptr, q_h, q_r, k_ptr, k_h, k_r, v_ptr, v_h, v_r, o_ptr, o_r, o_h, lse_ptr, lse_r, lse_h,
    slope_ptr, slope_r, slope_h, d_lse_ptr, d_lse_r, d_lse_h, dq_ptr, dq_h, dq_r,
    n_rows, n_keys, scale, SHARE: constexpr, ROWS: constexpr, KEYS: constexpr,
    WIDTH: constexpr, EXACT: constexpr,
):  # fmt: skip
    """The slope of a tile of rows that read keys which all share."""
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, lanes = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    real = rows < n_rows
    q = tile_of(q_ptr + head * q_h, rows, q_r, real, WIDTH, WIDTH)
    slope = tile_of(slope_ptr + head * slope_h, rows, slope_r, real, WIDTH, WIDTH)
    o = tile_of(o_ptr + head * o_h, rows, o_r, real, WIDTH, WIDTH)
    lse = tl.load(lse_ptr + rows * lse_r + head * lse_h, mask=real, other=0.0)
    level = tl.sum(slope.to(tl.float32) * o.to(tl.float32), axis=1)
    level -= tl.load(d_lse_ptr + rows * d_lse_r + head * d_lse_h, mask=real, other=0.0)
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    k_ptr += (head // SHARE) * k_h
    v_ptr += (head // SHARE) * v_h
    for start in range(0, n_keys, KEYS):
        columns = start + tl.arange(0, KEYS)
        present = columns < n_keys
        k = tile_of(k_ptr, columns, k_r, present, WIDTH, WIDTH)
        v = tile_of(v_ptr, columns, v_r, present, WIDTH, WIDTH)
        scores = _dot(q, tl.trans(k), EXACT) * scale
        probs = tl.where(present[None, :], tl.exp(scores - lse[:, None]), 0.0)
        moved = _dot(slope, tl.trans(v), EXACT)
        d_scores = (probs * (moved - level[:, None])).to(k.dtype)
        dq += _dot(d_scores, k, EXACT)
    at = dq_ptr + head * dq_h + rows[:, None] * dq_r + lanes[None, :]
    tl.store(at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=real[:, None])
