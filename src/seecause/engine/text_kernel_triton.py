"""The Triton side of `kernel_text.py`: text rows of a vision-language model, which are few and have
thousands of copies, forward and back.

Pointers come with their strides: `_b` per copy, `_h` per head, `_r` per row; a stride of 0 shares
an axis. Of the way back, with g the slope of an output, p probabilities, own what a row reads of
its own text, seen and blind what it read of the picture and of the average:

    out = c own + m s seen + (1 - m) t blind,      s, t their shares by log-sum-exp, m the soft mask
    c = m (1 - s) + (1 - m) (1 - t)
    dscores = p (c g v - c g own + dlse),          dlse = -(dlse_seen + dlse_blind)
    dlse_seen = s (1 - s) m g (seen - own),        dlse_blind = t (1 - t) (1 - m) g (blind - own)
"""

# pyright: reportGeneralTypeIssues=false
# (what a kernel returns to a kernel is not what the checker thinks)
import triton
import triton.language as tl

from seecause.engine.kernel_triton import tile_of


@triton.jit
def rotated(
    x_ptr, x_b, x_h, x_r, out_ptr, out_b, out_h, out_r, table_ptr, table_r, sine, n_rows, n_heads,
    HEADS: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
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
def _look_back(q, k, v, rows, scale, EXACT: tl.constexpr):
    """Rows over themselves and those before them: probabilities, output and log-sum-exp."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * scale
    scores = tl.where(rows[None, :] <= rows[:, None], scores, float("-inf"))
    peak = tl.max(scores, axis=1)
    weights = tl.exp(scores - peak[:, None])
    total = tl.sum(weights, axis=1)
    own = tl.dot(weights.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
    return weights / total[:, None], own / total[:, None], peak + tl.log(total)


@triton.jit
def _parts(
    q_ptr, q_b, q_h, q_r, k_ptr, k_b, k_h, k_r, v_ptr, v_b, v_h, v_r,
    seen_ptr, seen_b, seen_r, seen_h, seen_lse, seen_lse_b, seen_lse_r, seen_lse_h,
    blind_ptr, blind_b, blind_r, blind_h, blind_lse, blind_lse_b, blind_lse_r, blind_lse_h,
    choose_ptr, choose_b, choose_r, choose_h, head, batch, rows, real, scale,
    HARD: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Of one head of one copy: q, k and v; p and m; own, seen and blind with their log-sum-exps. A
    hard mask reads one of seen and blind, and zeros for the other."""
    q = tile_of(q_ptr + batch * q_b + head * q_h, rows, q_r, real, WIDTH, WIDTH)
    k = tile_of(k_ptr + batch * k_b + (head // SHARE) * k_h, rows, k_r, real, WIDTH, WIDTH)
    v = tile_of(v_ptr + batch * v_b + (head // SHARE) * v_h, rows, v_r, real, WIDTH, WIDTH)
    probs, own, own_lse = _look_back(q, k, v, rows, scale, EXACT)
    choose_ptr += batch * choose_b + rows * choose_r + head * choose_h
    choose = tl.load(choose_ptr, mask=real, other=0).to(tl.float32)
    sees, misses = real, real
    if HARD:
        sees, misses = real & (choose != 0), real & (choose == 0)
    seen_ptr += batch * seen_b + head * seen_h
    blind_ptr += batch * blind_b + head * blind_h
    seen = tile_of(seen_ptr, rows, seen_r, sees, WIDTH, WIDTH).to(tl.float32)
    blind = tile_of(blind_ptr, rows, blind_r, misses, WIDTH, WIDTH).to(tl.float32)
    seen_lse += batch * seen_lse_b + rows * seen_lse_r + head * seen_lse_h
    blind_lse += batch * blind_lse_b + rows * blind_lse_r + head * blind_lse_h
    seen_lse = tl.load(seen_lse, mask=sees, other=0.0)
    blind_lse = tl.load(blind_lse, mask=misses, other=0.0)
    return q, k, v, probs, choose, own, own_lse, seen, seen_lse, blind, blind_lse


@triton.jit
def text_rows(
    q_ptr, q_b, q_h, q_r, k_ptr, k_b, k_h, k_r, v_ptr, v_b, v_h, v_r,
    seen_ptr, seen_b, seen_r, seen_h, seen_lse, seen_lse_b, seen_lse_r, seen_lse_h,
    blind_ptr, blind_b, blind_r, blind_h, blind_lse, blind_lse_b, blind_lse_r, blind_lse_h,
    choose_ptr, choose_b, choose_r, choose_h, out_ptr, out_b, out_r, out_h, n_rows, scale,
    HARD: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One head of one copy: its rows look back at themselves, and take in what they saw of the
    picture, or of the average; or of both, as much as a soft mask says."""
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, lanes = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    real = rows < n_rows
    _, _, _, _, choose, own, own_lse, seen, seen_lse, blind, blind_lse = _parts(
        q_ptr, q_b, q_h, q_r, k_ptr, k_b, k_h, k_r, v_ptr, v_b, v_h, v_r,
        seen_ptr, seen_b, seen_r, seen_h, seen_lse, seen_lse_b, seen_lse_r, seen_lse_h,
        blind_ptr, blind_b, blind_r, blind_h, blind_lse, blind_lse_b, blind_lse_r, blind_lse_h,
        choose_ptr, choose_b, choose_r, choose_h, head, batch, rows, real, scale,
        HARD, SHARE, WIDTH, EXACT,
    )  # fmt: skip
    if HARD:
        share = 1 / (1 + tl.exp(own_lse - (seen_lse + blind_lse)))
        merged = own + share[:, None] * (seen + blind - own)
    else:
        share = choose / (1 + tl.exp(own_lse - seen_lse))
        rest = (1 - choose) / (1 + tl.exp(own_lse - blind_lse))
        merged = own + share[:, None] * (seen - own) + rest[:, None] * (blind - own)
    out = out_ptr + batch * out_b + head * out_h + rows[:, None] * out_r + lanes[None, :]
    tl.store(out, merged.to(out_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit
def text_rows_back(
    q_ptr, q_b, q_h, q_r, k_ptr, k_b, k_h, k_r, v_ptr, v_b, v_h, v_r,
    seen_ptr, seen_b, seen_r, seen_h, seen_lse, seen_lse_b, seen_lse_r, seen_lse_h,
    blind_ptr, blind_b, blind_r, blind_h, blind_lse, blind_lse_b, blind_lse_r, blind_lse_h,
    choose_ptr, choose_b, choose_r, choose_h, slope_ptr, slope_b, slope_r, slope_h,
    dq_ptr, dk_ptr, dv_ptr, d_seen_ptr, d_blind_ptr, d_seen_lse, d_blind_lse, d_choose,
    n_rows, n_heads, scale,
    SHARE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """All slopes of one head of one copy under a soft mask: [B, R, H, dh] each, and three
    [B, R, H]."""
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, lanes = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    real = rows < n_rows
    q, k, v, probs, choose, own, own_lse, seen, seen_lse, blind, blind_lse = _parts(
        q_ptr, q_b, q_h, q_r, k_ptr, k_b, k_h, k_r, v_ptr, v_b, v_h, v_r,
        seen_ptr, seen_b, seen_r, seen_h, seen_lse, seen_lse_b, seen_lse_r, seen_lse_h,
        blind_ptr, blind_b, blind_r, blind_h, blind_lse, blind_lse_b, blind_lse_r, blind_lse_h,
        choose_ptr, choose_b, choose_r, choose_h, head, batch, rows, real, scale,
        False, SHARE, WIDTH, EXACT,
    )  # fmt: skip
    share = 1 / (1 + tl.exp(own_lse - seen_lse))
    rest = 1 / (1 + tl.exp(own_lse - blind_lse))
    kept = choose * (1 - share) + (1 - choose) * (1 - rest)
    slope = tile_of(slope_ptr + batch * slope_b + head * slope_h, rows, slope_r, real, WIDTH, WIDTH)
    g = slope.to(tl.float32)
    to_own = tl.sum(g * own, axis=1)
    to_seen = share * (tl.sum(g * seen, axis=1) - to_own)
    to_blind = rest * (tl.sum(g * blind, axis=1) - to_own)
    by_seen = (1 - share) * choose * to_seen
    by_blind = (1 - rest) * (1 - choose) * to_blind
    level = kept * to_own + by_seen + by_blind
    moved = tl.dot(slope, tl.trans(v), input_precision="ieee" if EXACT else "tf32")
    scores = (probs * (kept[:, None] * moved - level[:, None]) * scale).to(q.dtype)
    into_v = (probs * kept[:, None]).to(q.dtype)
    dq = tl.dot(scores, k, input_precision="ieee" if EXACT else "tf32")
    dk = tl.dot(tl.trans(scores), q, input_precision="ieee" if EXACT else "tf32")
    dv = tl.dot(tl.trans(into_v), slope, input_precision="ieee" if EXACT else "tf32")
    place = (batch * n_rows + rows) * n_heads + head
    at = place[:, None] * WIDTH + lanes[None, :]
    kind = dq_ptr.dtype.element_ty
    tl.store(dq_ptr + at, dq.to(kind), mask=real[:, None])
    tl.store(dk_ptr + at, dk.to(kind), mask=real[:, None])
    tl.store(dv_ptr + at, dv.to(kind), mask=real[:, None])
    tl.store(d_seen_ptr + at, ((choose * share)[:, None] * g).to(kind), mask=real[:, None])
    tl.store(d_blind_ptr + at, (((1 - choose) * rest)[:, None] * g).to(kind), mask=real[:, None])
    tl.store(d_seen_lse + place, by_seen, mask=real)
    tl.store(d_blind_lse + place, by_blind, mask=real)
    tl.store(d_choose + place, to_seen - to_blind, mask=real)


@triton.jit
def shared_read_back(
    q_ptr, q_h, q_r, k_ptr, k_h, k_r, v_ptr, v_h, v_r, o_ptr, o_r, o_h, lse_ptr, lse_r, lse_h,
    slope_ptr, slope_r, slope_h, d_lse_ptr, d_lse_r, d_lse_h, dq_ptr, dq_h, dq_r,
    n_rows, n_keys, scale, SHARE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, EXACT: tl.constexpr,
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
        scores = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * scale
        probs = tl.where(present[None, :], tl.exp(scores - lse[:, None]), 0.0)
        moved = tl.dot(slope, tl.trans(v), input_precision="ieee" if EXACT else "tf32")
        d_scores = (probs * (moved - level[:, None])).to(k.dtype)
        dq += tl.dot(d_scores, k, input_precision="ieee" if EXACT else "tf32")
    at = dq_ptr + head * dq_h + rows[:, None] * dq_r + lanes[None, :]
    tl.store(at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit
def rms_norm(x_ptr, x_row, weight_ptr, out_ptr, width, eps, LANES: tl.constexpr):
    """One row over its root mean square, rounded, times the weights."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    real = lanes < width
    x = tl.load(x_ptr + row * x_row + lanes, mask=real, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + lanes, mask=real, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    x = (x / tl.sqrt(tl.sum(x * x) / width + eps)).to(kind)
    tl.store(out_ptr + row * width + lanes, (weight * x.to(tl.float32)).to(kind), mask=real)


@triton.jit
def rms_norm_back(
    x_ptr, x_row, weight_ptr, slope_ptr, slope_row, out_ptr, width, eps, LANES: tl.constexpr
):
    """The slope of one row: root (w g - x root^2 mean(w g x))."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    real = lanes < width
    x = tl.load(x_ptr + row * x_row + lanes, mask=real, other=0.0).to(tl.float32)
    slope = tl.load(slope_ptr + row * slope_row + lanes, mask=real, other=0.0).to(tl.float32)
    slope *= tl.load(weight_ptr + lanes, mask=real, other=0.0).to(tl.float32)
    root = 1 / tl.sqrt(tl.sum(x * x) / width + eps)
    out = root * (slope - x * (root * root * tl.sum(slope * x) / width))
    tl.store(out_ptr + row * width + lanes, out.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def gated(gate_ptr, value_ptr, out_ptr, count, SIZE: tl.constexpr):
    """silu(gate), rounded, times value."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    real = at < count
    gate = tl.load(gate_ptr + at, mask=real, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + at, mask=real, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    gate = (gate / (1 + tl.exp(-gate))).to(kind)
    tl.store(out_ptr + at, (gate.to(tl.float32) * value).to(kind), mask=real)


@triton.jit
def gated_back(gate_ptr, value_ptr, slope_ptr, d_gate_ptr, d_value_ptr, count, SIZE: tl.constexpr):
    """Slopes of gate and value."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    real = at < count
    gate = tl.load(gate_ptr + at, mask=real, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + at, mask=real, other=0.0).to(tl.float32)
    slope = tl.load(slope_ptr + at, mask=real, other=0.0).to(tl.float32)
    kind = d_gate_ptr.dtype.element_ty
    share = 1 / (1 + tl.exp(-gate))
    d_gate = slope * value * share * (1 + gate * (1 - share))
    tl.store(d_gate_ptr + at, d_gate.to(kind), mask=real)
    tl.store(d_value_ptr + at, (slope * gate * share).to(kind), mask=real)
