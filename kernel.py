"""Depth routing as fused Triton kernels: attention over the outputs of all earlier sublayers, forward and backward.

What is computed (all in fp32, whatever the storage dtype is), for a token, a head h and a read site t:

    z[t,i,h]   = <query[t,h], key(v_i,h)> / rho(v_i,h)    key: the last R of the head's K = d/H coordinates
    w[t,:,h]   = softmax over the slots i that site t sees        lse[t,h] = logsumexp over i of z[t,i,h]
    mix(t)[h]  = sum_i w[t,i,h] v_i[h]
    rho        = sqrt(mean v_i^2 + eps)    norm "full": over all d coordinates;  "slice": over the R key coordinates

Two ways in:

    route(sources, query)     stateless: one read, differentiable, composes with anything
    Bank(x, query, ends)      all reads of one forward pass, for training: mix = bank.read(t), bank.write(y)

Two ideas make a Bank fast.  *Chunks*: queries do not depend on the input, so a group of sites (at least 8, up to the next
block end) reads all older slots together, on tensor cores (ahead_kernel), and each site then adds only the slots written
since (read_kernel). Where heads are too wide for that, two sites at a time fetch the slots together.
*Pull*: a slot's gradient needs the output gradients g_t of the sites that read it, and backward has them all when it
reaches the sublayer that wrote the slot. So a site's backward only keeps g_t (where its mix was) and
D[t,h] = <g_t[h], mix(t)[h]>, and a slot then gathers, for the group (pull_ahead_kernel) and for itself (pull_kernel):

    dz[t,i,h]  = w (<g_t[h], v_i[h]> - D[t,h])
    dv_i       = sum_t w g_t + dz query[t] / rho  -  v_i c / (width rho^2),        c = sum_t dz z
    dquery[t]  = sum over tokens and slots of dz key / rho                          (dq_kernel, a GEMM)

No atomics: two runs give the same bits.
"""

import functools
import operator

import torch
import triton
import triton.language as tl

CHUNK = 8  # the least number of sites that read the older slots together
TILE = 8  # sites or slots of a tile for tensor cores, whose products have a side as short as that


# ----------------------------------------------------------------------------------------------------------------------
# Small pieces that the kernels share. A token's d coordinates are a tile [HP, KP]: H heads of K coordinates, both padded
# to powers of two. A head's key is its last R coordinates; queries are padded with zeros to all K, so products over K are
# products over the key. Sizes are constants of the compiler where that pays: masks and padded parts vanish then.


@triton.jit
def head_tile(H, K, R, HP: tl.constexpr, KP: tl.constexpr):
    h, k = tl.arange(0, HP)[:, None], tl.arange(0, KP)[None, :]
    inside = (h < H) & (k < K)
    is_key = inside & (k >= K - R)
    return h * K + k, inside, h * R + k - (K - R), is_key  # offsets in v, mask, offsets in query, mask


@triton.jit
def norm_correction(v, c, inv_rho, is_key, d, R, FULL: tl.constexpr):  # the term v c / (width rho^2) of dv
    if FULL:
        return v * (tl.sum(c, 0) * inv_rho * inv_rho / d)[:, None]
    else:
        return tl.where(is_key, v * (c * inv_rho * inv_rho / R)[:, None], 0.0)


# Sums of several tensors in one tl.reduce: a head that several warps share costs one exchange between them, not one a sum.


@triton.jit
def add2(a, b, c, d):
    return a + c, b + d


@triton.jit
def add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def add4(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def logit(q, v, is_key, d, R, eps, FULL: tl.constexpr):  # q, v [HP, KP] -> z = <q, key> / rho and 1 / rho, [HP]
    z, square = tl.reduce((q * v, v * v if FULL else tl.where(is_key, v * v, 0.0)), 1, add2)
    r = tl.rsqrt((tl.zeros([v.shape[0]], tl.float32) + tl.sum(square, 0)) / d + eps) if FULL else tl.rsqrt(square / R + eps)
    return z * r, r


@triton.jit
def merge(m, l, acc, z, v):  # one more source: m' = max(m, z), l' = l e^(m - m') + e^(z - m'), acc' = acc e^(m - m') + e^(z - m') v
    top = tl.maximum(m, z)
    old, new = tl.exp(m - top), tl.exp(z - top)
    return top, l * old + new, acc * old[:, None] + v * new[:, None]


# ----------------------------------------------------------------------------------------------------------------------
# The stateless read: one program a token, all sources in one pass, online softmax. Backward pushes: one pass that reads
# every source once more and writes its gradient. A program takes several tokens there and sums its own dquery.


# pieces: a tuple of tensors [m, tokens, d], one for a stacked tensor, n with m = 1 for a list; counts: their m.


@triton.jit
def route_kernel(pieces, counts, query, out, mix, lse, inv_rho, tokens, eps, d: tl.constexpr, H: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
                 FULL: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr):
    # merge() for every source, then mix = acc / l and lse = m + log l.
    token = tl.program_id(0).to(tl.int64)
    cols, inside, qcols, is_key = head_tile(H, K, R, HP, KP)
    heads = tl.arange(0, HP)
    q = tl.load(query + qcols, is_key, 0.0)  # [HP, KP]
    m, l, acc = tl.full([HP], float("-inf"), tl.float32), tl.zeros([HP], tl.float32), tl.zeros([HP, KP], tl.float32)
    at = inv_rho + token * H + heads  # of the first source, then of the next
    for piece in tl.static_range(len(pieces)):
        for i in range(counts[piece]):
            v = tl.load(pieces[piece] + (i * tokens + token) * d + cols, inside, 0.0).to(tl.float32)  # [HP, KP]
            z, r = logit(q, v, is_key, d, R, eps, FULL)
            tl.store(at, r, heads < H)
            at += tokens * H
            m, l, acc = merge(m, l, acc, z, v)
    tl.store(out + token * d + cols, acc / l[:, None], inside)
    tl.store(mix + token * d + cols, acc / l[:, None], inside)
    tl.store(lse + token * H + heads, m + tl.log(l), heads < H)


@triton.jit
def route_backward_kernel(pieces, counts, dpieces, query, mix, lse, inv_rho, grad, dquery, tokens,
                          d: tl.constexpr, H: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
                          FULL: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr):
    #  w = e^(z - lse)      dz = w (<g, v_i> - <g, mix>)      dv_i = w g + dz q / rho - v_i dz z / (width rho^2)
    cols, inside, qcols, is_key = head_tile(H, K, R, HP, KP)
    heads = tl.arange(0, HP)
    q = tl.load(query + qcols, is_key, 0.0)
    dq = tl.zeros([HP, KP], tl.float32)
    for n in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.full([], n, tl.int64)
        g = tl.load(grad + token * d + cols, inside, 0.0).to(tl.float32)
        D = tl.sum(g * tl.load(mix + token * d + cols, inside, 0.0), 1)
        s = tl.load(lse + token * H + heads, heads < H, 0.0)
        at = inv_rho + token * H + heads
        for piece in tl.static_range(len(pieces)):
            for i in range(counts[piece]):
                row = (i * tokens + token) * d
                v = tl.load(pieces[piece] + row + cols, inside, 0.0).to(tl.float32)
                r = tl.load(at, heads < H, 0.0)
                at += tokens * H
                z = tl.sum(q * v, 1) * r
                w = tl.where(heads < H, tl.exp(z - s), 0.0)
                dz = w * (tl.sum(g * v, 1) - D)
                dq += (dz * r)[:, None] * v
                dv = w[:, None] * g + (dz * r)[:, None] * q - norm_correction(v, dz * z, r, is_key, d, R, FULL)
                tl.store(dpieces[piece] + row + cols, dv, inside)
    tl.store(dquery + tl.program_id(0) * H * R + qcols, dq, is_key)


# ----------------------------------------------------------------------------------------------------------------------
# The bank, forward. bank [M+1, tokens, d] holds the slots; inv_rho, lse, D are [M+1, tokens, H] in fp32; mix [M+1, tokens, d]
# holds first a site's partial mix over the older slots, then its mix, and in backward its g_t. `finished` lists the slots
# that later sites see: 0 and the block ends.


# In the tiles for tensor cores a head's K coordinates are S slices, one a warp, of W1 + W2 coordinates, powers of two: 160 =
# 1 x (128 + 32), 1024 = 4 x 256. So little is padding, and a warp multiplies only what it owns: a product that sums over K is a
# batch of S products, summed; W2 = 0 leaves the second part out.


@triton.jit
def slices(first, S: tl.constexpr, W: tl.constexpr):  # [S, W] coordinates
    return first + tl.arange(0, S)[:, None] * W + tl.arange(0, W)[None, :]


@triton.jit
def query_rows(query, t, seen, k, h, H, K, R):  # [S, len(t), W], zero outside the key
    inside = ((k >= K - R) & (k < K))[:, None, :] & seen[None, :, None]
    return tl.load(query + (t[None, :, None] * H + h) * R + k[:, None, :] - (K - R), inside, 0.0)


@triton.jit
def head_rows(base, row, seen, k, h, d, K):  # rows of bank or mix [S, len(row), W]
    return tl.load(base + row[None, :, None] * d + h * K + k[:, None, :], (k < K)[:, None, :] & seen[None, :, None], 0.0)


@triton.jit
def store_rows(base, row, seen, k, h, d, K, value):  # value [S, W, len(row)]
    tl.store(base + row[None, None, :] * d + h * K + k[:, :, None], value, (k < K)[:, :, None] & seen[None, None, :])


@triton.jit
def transposed(rows):  # [S, n, W] -> [S, W, n]
    return tl.permute(rows, (0, 2, 1))


@triton.jit
def dot(a, b, acc):  # fp32 stays fp32
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["site", "count", "n"])
def ahead_kernel(bank, inv_rho, q_hi, q_lo, mix, lse, finished, site, count, n, tokens, d, H, K, R, SPLIT: tl.constexpr,
                 C: tl.constexpr, N: tl.constexpr, S: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, TOKENS: tl.constexpr):
    # For each of some tokens and one head, flash attention with C sites as queries over the first n finished slots:
    #  z [slots, sites] = v q^T / rho       m, l, acc by online softmax       partial mix = acc / l, lse = m + log l
    # acc is kept as [K, sites], the side of a tensor-core product that may be as short as 8. In bf16, q and w are the
    # sums of two (q_hi + q_lo), so that only v is rounded.
    h = tl.program_id(1)
    c, k, k2 = tl.program_id(2) * C + tl.arange(0, C), slices(0, S, W1), slices(S * W1, S, max(W2, 1))
    t, ours = site + c, c < count  # [C] sites
    q = transposed(query_rows(q_hi, t, ours, k, h, H, K, R))  # [S, W1, C]
    if SPLIT:
        q_low = transposed(query_rows(q_lo, t, ours, k, h, H, K, R))
    if W2 > 0:
        q2 = transposed(query_rows(q_hi, t, ours, k2, h, H, K, R))  # [S, W2, C]
        if SPLIT:
            q2_low = transposed(query_rows(q_lo, t, ours, k2, h, H, K, R))
    for i in range(tl.program_id(0) * TOKENS, tl.minimum(tl.program_id(0) * TOKENS + TOKENS, tokens)):
        token = tl.full([], i, tl.int64)
        m, l = tl.full([C], float("-inf"), tl.float32), tl.zeros([C], tl.float32)
        acc = tl.zeros([S, W1, C], tl.float32)
        if W2 > 0:
            acc2 = tl.zeros([S, W2, C], tl.float32)
        for p in range(0, n, N):
            at = p + tl.arange(0, N)
            row = tl.load(finished + at, at < n, 0).to(tl.int64) * tokens + token  # [N] slots
            v = head_rows(bank, row, at < n, k, h, d, K)  # [S, N, W1]
            r = tl.load(inv_rho + row * H + h, at < n, 0.0)
            z = dot(v, q, tl.zeros([S, N, C], tl.float32))
            if SPLIT:
                z = dot(v, q_low, z)
            if W2 > 0:
                v2 = head_rows(bank, row, at < n, k2, h, d, K)  # [S, N, W2]
                z = dot(v2, q2, z)
                if SPLIT:
                    z = dot(v2, q2_low, z)
            z = tl.where((at < n)[:, None], tl.sum(z, 0) * r[:, None], float("-inf"))  # [N, C]
            top = tl.maximum(m, tl.max(z, 0))
            old, w = tl.exp(m - top), tl.exp(z - top[None, :])
            l = l * old + tl.sum(w, 0)
            w_hi = w.to(v.dtype)
            w_lo = tl.broadcast_to((w - w_hi.to(tl.float32)).to(v.dtype)[None], S, N, C)
            w_hi = tl.broadcast_to(w_hi[None], S, N, C)
            acc = dot(transposed(v), w_hi, acc * old[None, None, :])  # [S, W1, C]
            if SPLIT:
                acc = dot(transposed(v), w_lo, acc)
            if W2 > 0:
                acc2 = dot(transposed(v2), w_hi, acc2 * old[None, None, :])  # [S, W2, C]
                if SPLIT:
                    acc2 = dot(transposed(v2), w_lo, acc2)
            m = top
        row = t.to(tl.int64) * tokens + token
        store_rows(mix, row, ours, k, h, d, K, acc / l[None, None, :])
        if W2 > 0:
            store_rows(mix, row, ours, k2, h, d, K, acc2 / l[None, None, :])
        tl.store(lse + row * H + h, m + tl.log(l), ours)


@triton.jit(do_not_specialize=["site", "p0", "p1"])
def read_kernel(y, bank, inv_rho, query, mix, lse, inv_rms, finished, site, p0, p1, tokens, eps,
                d: tl.constexpr, H: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
                ADD: tl.constexpr, AHEAD: tl.constexpr, PAIR: tl.constexpr, NORM: tl.constexpr, FULL: tl.constexpr,
                HP: tl.constexpr, KP: tl.constexpr):
    # Write slot `site` and read at site `site`, one token a program: v = y, or slot[site - 1] + y inside a block; merge v, the
    # partial mix over the older slots (AHEAD) and the finished slots p0 .. p1 - 1, as in route_kernel. PAIR: the same slots
    # give the next site's partial mix (m2, l2, acc2), so two sites fetch them once. With the sublayer's pre-norm (NORM),
    # mix / rms takes the mix's place, rms = sqrt(mean mix^2 + eps).
    token = tl.program_id(0).to(tl.int64)
    cols, inside, qcols, is_key = head_tile(H, K, R, HP, KP)
    heads = tl.arange(0, HP)
    here = site.to(tl.int64) * tokens + token
    q = tl.load(query + site * H * R + qcols, is_key, 0.0)  # [HP, KP]
    v = tl.load(y + token * d + cols, inside, 0.0).to(tl.float32)  # [HP, KP]
    if AHEAD:
        older = tl.load(mix + here * d + cols, inside, 0.0).to(tl.float32)  # [HP, KP]
        s = tl.load(lse + here * H + heads, heads < H, 0.0)
    if ADD:
        v += tl.load(bank + (here - tokens) * d + cols, inside, 0.0).to(tl.float32)
    v = v.to(bank.dtype.element_ty)
    tl.store(bank + here * d + cols, v, inside)
    v = v.to(tl.float32)
    z, r = logit(q, v, is_key, d, R, eps, FULL)
    tl.store(inv_rho + here * H + heads, r, heads < H)
    m, l, acc = z, tl.full([HP], 1.0, tl.float32), v
    if AHEAD:
        m, l, acc = merge(m, l, acc, s, older)
    if PAIR:
        q2 = tl.load(query + (site + 1) * H * R + qcols, is_key, 0.0)
        m2, l2, acc2 = tl.full([HP], float("-inf"), tl.float32), tl.zeros([HP], tl.float32), tl.zeros([HP, KP], tl.float32)
    for p in tl.range(p0, p1, num_stages=3):  # the next slots are fetched meanwhile
        row = tl.load(finished + p).to(tl.int64) * tokens + token
        v = tl.load(bank + row * d + cols, inside, 0.0).to(tl.float32)
        r = tl.load(inv_rho + row * H + heads, heads < H, 0.0)
        if PAIR:
            z, z2 = tl.reduce((q * v, q2 * v), 1, add2)
            m2, l2, acc2 = merge(m2, l2, acc2, z2 * r, v)
        else:
            z = tl.sum(q * v, 1)
        m, l, acc = merge(m, l, acc, z * r, v)
    if PAIR:
        tl.store(mix + (here + tokens) * d + cols, acc2 / l2[:, None], inside)
        tl.store(lse + (here + tokens) * H + heads, m2 + tl.log(l2), heads < H)
    acc = acc / l[:, None]
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(acc * acc, 1), 0) / d + eps)
        tl.store(inv_rms + here, scale)
        acc *= scale
    tl.store(mix + here * d + cols, acc, inside)
    tl.store(lse + here * H + heads, m + tl.log(l), heads < H)


# ----------------------------------------------------------------------------------------------------------------------
# The bank, backward.


@triton.jit(do_not_specialize=["slot0", "t0", "t1"])
def pull_ahead_kernel(bank, inv_rho, query, grad, lse, D, finished, partial, partial_c, dz_out, slot0, p0, count, t0, t1,
                      tokens, columns, d: tl.constexpr, H: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
                      C: tl.constexpr, N: tl.constexpr, S: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr):
    # For one token and head, C finished slots (p0, p0 + 1, ...) pull from the sites t0 .. t1 - 1, all later than the group:
    #  z [sites, slots] = q v^T / rho      w = e^(z - lse)      dz = w (g v^T - D)
    #  partial [K, slots] = g^T w + q^T dz / rho                partial_c [slots] = sum over sites of dz z
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c, k, k2 = tl.program_id(2) * C + tl.arange(0, C), slices(0, S, W1), slices(S * W1, S, max(W2, 1))
    ours = c < count
    slot = tl.load(finished + p0 + c, ours, 0).to(tl.int64)  # [C]
    row = slot * tokens + token
    v = transposed(head_rows(bank, row, ours, k, h, d, K))  # [S, W1, C]
    r = tl.load(inv_rho + row * H + h, ours, 0.0)
    dv, dc = tl.zeros([S, W1, C], tl.float32), tl.zeros([C], tl.float32)
    if W2 > 0:
        v2, dv2 = transposed(head_rows(bank, row, ours, k2, h, d, K)), tl.zeros([S, W2, C], tl.float32)  # [S, W2, C]
    out = ((slot - slot0) * H + h) * tokens + token
    for first in range(t0, t1, N):
        t = first + tl.arange(0, N)  # [N] sites
        row_t, seen = t.to(tl.int64) * tokens + token, t < t1
        g = head_rows(grad, row_t, seen, k, h, d, K)  # [S, N, W1]
        q = query_rows(query, t, seen, k, h, H, K, R)  # [S, N, W1]
        s = tl.load(lse + row_t * H + h, seen, float("inf"))
        Dt = tl.load(D + row_t * H + h, seen, 0.0)
        z, gv = dot(q, v, tl.zeros([S, N, C], tl.float32)), dot(g, v, tl.zeros([S, N, C], tl.float32))
        if W2 > 0:
            g2 = head_rows(grad, row_t, seen, k2, h, d, K)  # [S, N, W2]
            q2 = query_rows(query, t, seen, k2, h, H, K, R)
            z, gv = dot(q2, v2, z), dot(g2, v2, gv)
        z, gv = tl.reduce((z, gv), 0, add2)  # [N, C]
        z *= r[None, :]
        w = tl.exp(z - s[:, None])
        dz = w * (gv - Dt[:, None])
        dc += tl.sum(dz * z, 0)
        dz = (dz * r[None, :]).to(g.dtype)
        tl.store(dz_out + out[None, :] * columns + (t - slot0)[:, None], dz, ours[None, :] & seen[:, None])
        w, dz = tl.broadcast_to(w.to(g.dtype)[None], S, N, C), tl.broadcast_to(dz[None], S, N, C)
        dv = dot(transposed(g), w, dv)  # [S, W1, C]
        dv = dot(transposed(q), dz, dv)
        if W2 > 0:
            dv2 = dot(transposed(g2), w, dv2)  # [S, W2, C]
            dv2 = dot(transposed(q2), dz, dv2)
    row = (slot - slot0) * tokens + token
    store_rows(partial, row, ours, k, h, d, K, dv)
    if W2 > 0:
        store_rows(partial, row, ours, k2, h, d, K, dv2)
    tl.store(partial_c + row * H + h, dc, ours)


@triton.jit
def load_site(t, token, mix, query, lse, D, cols, inside, qcols, is_key, tokens, d, H, R, HP: tl.constexpr):  # g, q, lse, D of site t
    row, heads = tl.full([], t, tl.int64) * tokens + token, tl.arange(0, HP)
    g = tl.load(mix + row * d + cols, inside, 0.0).to(tl.float32)  # [HP, KP]
    q = tl.load(query + t * H * R + qcols, is_key, 0.0)  # [HP, KP]
    return g, q, tl.load(lse + row * H + heads, heads < H, 0.0), tl.load(D + row * H + heads, heads < H, 0.0)  # [HP]


@triton.jit
def pull_from(dv, c, z, gv, g, q, s, Dt, r):  # one more site: dv [HP, KP] and c [HP] with it, and its dz / rho [HP]
    w = tl.exp(z * r - s)
    dz = w * (gv - Dt)
    return dv + (w[:, None] * g + (dz * r)[:, None] * q), c + dz * (z * r), dz * r


@triton.jit(do_not_specialize=["site", "slot0", "last"])
def pull_kernel(grad, bank, inv_rho, query, mix, lse, inv_rms, D, partial, partial_c, dy_next, dy, dz_out, site, slot0, last,
                tokens, columns, d: tl.constexpr, H: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
                AHEAD: tl.constexpr, INSIDE: tl.constexpr, LATER: tl.constexpr, TWO: tl.constexpr, NORM: tl.constexpr, FULL: tl.constexpr,
                HP: tl.constexpr, KP: tl.constexpr):
    # Backward of read_kernel, one token a program. The gradient g of the read takes mix's place, and D = <g, mix>. With the
    # pre-norm (NORM) the gradient a of x = mix / rms arrives, and g = (a - x mean(a x)) / rms. Then slot `site` pulls from its
    # own site, from the sites up to last - 1 if there are any (LATER; TWO at a time: more loads in flight), and takes over what
    # was pulled for the group (AHEAD); inside a block, slot site + 1 contains this one, so dy_next is added (INSIDE).
    # dz_out [slots of the group, H, tokens, columns] gets dz / rho, columns counted from slot0.
    token = tl.program_id(0).to(tl.int64)
    cols, inside, qcols, is_key = head_tile(H, K, R, HP, KP)
    heads = tl.arange(0, HP)
    here = site.to(tl.int64) * tokens + token
    v = tl.load(bank + here * d + cols, inside, 0.0).to(tl.float32)  # [HP, KP]
    r = tl.load(inv_rho + here * H + heads, heads < H, 0.0)  # [HP]
    s = tl.load(lse + here * H + heads, heads < H, 0.0)
    q = tl.load(query + site * H * R + qcols, is_key, 0.0)
    o = tl.load(mix + here * d + cols, inside, 0.0).to(tl.float32)
    if INSIDE:
        rest = tl.load(dy_next + token * d + cols, inside, 0.0)
    g = tl.load(grad + token * d + cols, inside, 0.0)  # the last of the loads: all are under way before the first sum
    if NORM:
        scale, a = tl.load(inv_rms + here), g.to(tl.float32)
        z, ax = tl.reduce((q * v, a * o), 1, add2)  # [HP]
        g = ((a - o * (tl.sum(ax, 0) / d)) * scale).to(mix.dtype.element_ty)
        gv, Dt = tl.reduce((g.to(tl.float32) * v, g.to(tl.float32) * o), 1, add2)
        Dt /= scale  # mix = rms x
    else:
        z, gv, Dt = tl.reduce((q * v, g.to(tl.float32) * v, g.to(tl.float32) * o), 1, add3)
    tl.store(mix + here * d + cols, g, inside)
    tl.store(D + here * H + heads, Dt, heads < H)
    g = g.to(tl.float32)
    dv, c, dz = pull_from(tl.zeros([HP, KP], tl.float32), tl.zeros([HP], tl.float32), z, gv, g, q, s, Dt, r)
    out = dz_out + (((site - slot0) * H + heads) * tokens + token) * columns - slot0
    tl.store(out + site, dz, heads < H)
    if LATER:
        for t in range(site + 1, last, 1 + TWO):
            g, q, s, Dt = load_site(t, token, mix, query, lse, D, cols, inside, qcols, is_key, tokens, d, H, R, HP)
            if TWO:
                other = tl.minimum(t + 1, last - 1)  # the last one may be alone: then lse = inf, and the other's weight is zero
                g2, q2, s2, Dt2 = load_site(other, token, mix, query, lse, D, cols, inside, qcols, is_key, tokens, d, H, R, HP)
                z, gv, z2, gv2 = tl.reduce((q * v, g * v, q2 * v, g2 * v), 1, add4)
                dv, c, dz = pull_from(dv, c, z2, gv2, g2, q2, tl.where(t + 1 < last, s2, float("inf")), Dt2, r)
                tl.store(out + t + 1, dz, heads < tl.where(t + 1 < last, H, 0))
            else:
                z, gv = tl.reduce((q * v, g * v), 1, add2)
            dv, c, dz = pull_from(dv, c, z, gv, g, q, s, Dt, r)
            tl.store(out + t, dz, heads < H)
    if AHEAD:
        dv += tl.load(partial + token * d + cols, inside, 0.0).to(tl.float32)
        c += tl.load(partial_c + token * H + heads, heads < H, 0.0)
    dv -= norm_correction(v, c, r, is_key, d, R, FULL)
    if INSIDE:
        dv += rest.to(tl.float32)
    tl.store(dy + token * d + cols, dv, inside)


@triton.jit(do_not_specialize=["slot0", "slots", "last"])
def dq_kernel(dz, bank, is_finished, dquery, slot0, slots, last, tokens, columns, per_split, sites,
              d: tl.constexpr, H: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
              T: tl.constexpr, N: tl.constexpr, RP: tl.constexpr):
    #  dquery[t] += sum over a group's slots and some tokens of (dz / rho)[slot, t, token] key(slot, token)
    # a GEMM [T sites, N tokens] x [N tokens, RP key coordinates]; split over tokens, each split has its own dquery.
    h, split = tl.program_id(0), tl.program_id(1)
    blocks = tl.cdiv(R, RP)
    t = tl.program_id(2) // blocks * T + tl.arange(0, T)  # [T] sites, counted from slot0
    k = tl.program_id(2) % blocks * RP + tl.arange(0, RP)  # [RP] key coordinates
    acc = tl.zeros([T, RP], tl.float32)
    end = tl.minimum((split + 1) * per_split, tokens)
    for i in range(slots):
        stop = tl.where(tl.load(is_finished + slot0 + i) != 0, last - slot0, tl.minimum(i + 1, last - slot0))
        seen = (t >= i) & (t < stop)  # the sites that see slot i
        if tl.max(seen.to(tl.int32), 0) > 0:
            for first in range(split * per_split, end, N):
                n = first + tl.arange(0, N).to(tl.int64)  # [N] tokens
                a = tl.load(dz + ((tl.full([], i, tl.int64) * H + h) * tokens + n[:, None]) * columns + t[None, :],
                            (n < end)[:, None] & seen[None, :], 0.0)  # [N, T]
                b = tl.load(bank + ((tl.full([], i, tl.int64) + slot0) * tokens + n[:, None]) * d + h * K + K - R + k[None, :],
                            (n < end)[:, None] & (k < R)[None, :], 0.0)  # [N, RP]
                acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
    at = dquery + ((split * sites + slot0 + t[:, None]) * H + h) * R + k[None, :]
    mask = (t < last - slot0)[:, None] & (k < R)[None, :]
    tl.store(at, tl.load(at, mask, 0.0) + acc, mask)


# ----------------------------------------------------------------------------------------------------------------------
# Shapes, warps, launches.


def check(x, query, norm):
    H, R = query.shape[-2:]
    d = x.shape[-1] if x.dim() else 0
    if norm not in ("full", "slice"):
        raise ValueError(f"norm is full or slice, not {norm!r}")
    if not H or d % H or not 0 < R <= d // H:
        raise ValueError(f"query [{H}, {R}] does not fit sources of width {d}")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"sources must be float32, bfloat16 or float16, not {x.dtype}")


def warps(elements, each):  # each: values of one warp
    return min(16, max(1, elements // each))


class Shape:
    """The sizes that every kernel takes, and the padded ones. tokens rows of width d, H heads of K, keys of R."""

    def __init__(self, x, query, norm):
        self.d, (self.H, self.R) = x.shape[-1], query.shape[-2:]
        self.tokens, self.K = x.numel() // self.d, self.d // self.H
        self.sizes = dict(d=self.d, H=self.H, K=self.K, R=self.R)
        HP, KP = triton.next_power_of_2(self.H), triton.next_power_of_2(self.K)
        self.rows = dict(FULL=norm == "full", HP=HP, KP=KP, num_warps=warps(HP * KP, 512))  # kernels that see whole tokens
        # The settings below were measured. read_kernel: few warps, as they exchange their sums for every slot. pull_kernel waits
        # for memory: many warps of few registers where heads are narrow; few warps where a head is shared by all of them.
        self.read = self.rows | dict(num_warps=warps(HP * KP, 2048), maxnreg={512: 64, 1024: 128}.get(HP * KP))
        narrow = dict(num_warps=warps(HP * KP, 256), maxnreg=64 if HP * KP <= 4096 else None, TWO=False)
        wide = dict(num_warps=warps(HP * KP, 1024), TWO=HP * KP >= 2048)
        self.pull = self.rows | (narrow if KP < 512 else wide)
        K1 = max(16, KP if KP == self.K else KP // 2)
        S = max(1, K1 // 256)
        W1, W2 = K1 // S, max(16, triton.next_power_of_2(triton.cdiv(self.K - K1, S))) if self.K > K1 else 0
        tiles = dict(C=TILE, N=16, S=S, W1=W1, W2=W2, num_warps=S, num_stages=1)
        self.ahead = tiles | dict(maxnreg=128 if W1 <= 128 else None, SPLIT=x.dtype != torch.float32)
        self.pull_ahead = tiles | dict(maxnreg=168 if W1 + W2 <= 128 else None)
        self.together = 4 if self.tokens >= 1024 else 1  # tokens of one ahead_kernel program, which fetches queries once
        self.chunked = self.K * x.element_size() <= 2048  # wider heads do not fit: two sites at a time read all slots
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
        self.programs = min(self.tokens, max(1, processors * 32 // self.rows["num_warps"]))  # for kernels that sum over tokens
        self.splits = max(1, min(triton.cdiv(self.tokens, 64), 4 * processors // (self.H * triton.cdiv(self.R, 128)))) if x.is_cuda else 2


class Route(torch.autograd.Function):
    @staticmethod
    def pieces(sources, stacked):
        if stacked:
            return [sources[0].contiguous()]
        if len(sources) > 16:  # the kernels have a copy of their loop for each piece
            return [torch.stack(sources)]
        return [v.contiguous()[None] for v in sources]

    @staticmethod
    def forward(ctx, query, norm, eps, stacked, *sources):
        pieces = Route.pieces(sources, stacked)
        v, counts = pieces[0], tuple(len(piece) for piece in pieces)
        s = ctx.shape = Shape(v[0], query, norm)
        q = query.detach().float().contiguous()
        new = lambda *size: torch.empty(*size, dtype=torch.float32, device=v.device)
        out, mix, lse, inv_rho = torch.empty_like(v[0]), new(v.shape[1:]), new(s.tokens, s.H), new(sum(counts), s.tokens, s.H)
        if s.tokens:
            route_kernel[(s.tokens,)](tuple(pieces), counts, q, out, mix, lse, inv_rho, s.tokens, eps, **s.sizes, **s.rows)
        ctx.stacked, ctx.dtype = stacked, query.dtype
        # The mix in fp32: <g, mix> of a rounded one would cost dquery three digits.
        ctx.save_for_backward(q, mix, lse, inv_rho, *sources)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, mix, lse, inv_rho, *sources = ctx.saved_tensors
        s, pieces = ctx.shape, Route.pieces(sources, ctx.stacked)
        dpieces = [torch.empty_like(piece) for piece in pieces]
        grads = dpieces if ctx.stacked else [dv for piece in dpieces for dv in piece.unbind(0)]
        dq = torch.zeros(s.programs, s.H, s.R, dtype=torch.float32, device=grad.device)
        if s.tokens:
            route_backward_kernel[(s.programs,)](tuple(pieces), tuple(len(piece) for piece in pieces), tuple(dpieces), q, mix, lse, inv_rho,
                                                 grad.contiguous(), dq, s.tokens, **s.sizes, **s.rows)
        return dq.sum(0).to(ctx.dtype), None, None, None, *grads


@torch.compiler.disable
def route(sources, query, *, norm="full", eps=1e-6):
    """One read, stateless and differentiable: the fused form of model.route (keys from the values).

    sources: list of n tensors [..., d], or one tensor [n, ..., d];  query: [H, R], the key gain already multiplied in.
    Returns mix [..., d] in the sources' dtype. Raises ValueError if the shapes do not fit."""
    stacked = isinstance(sources, torch.Tensor)
    if query.dim() != 2 or not len(sources) or any((v.shape, v.dtype) != (sources[0].shape, sources[0].dtype) for v in sources):
        raise ValueError("route() takes a query [H, R] and one or more sources of one shape and dtype")
    check(sources[0], query, norm)
    return Route.apply(query, norm, eps, stacked, *([sources] if stacked else sources))


# ----------------------------------------------------------------------------------------------------------------------
# The bank.


@functools.cache
def on_device(lists, device):  # kept, so that a forward pass copies nothing from the host (and CUDA graphs hold)
    return [torch.tensor(values, dtype=torch.int32, device=device) for values in lists]


class Slots:
    """What the reads of one forward pass share: the slots, the mixes and their statistics, and the groups of sites."""

    def __init__(self, x, query, ends, norm, eps, prenorm):
        check(x, query, norm)
        self.sites, self.eps, self.prenorm, self.shape = len(query), eps, prenorm, Shape(x, query, norm)
        M, s, ends = self.sites - 1, self.shape, sorted({operator.index(e) for e in ends})
        if any(not 0 < e <= M for e in ends):
            raise ValueError(f"block ends must lie in 1..{M}")
        seen, self.is_end = [0, *ends], [i in (0, *ends) for i in range(M + 1)]
        self.before = [sum(e < t for e in seen) for t in range(M + 2)]  # finished slots before site t
        starts = [0]
        for t in range(1, M + 1):  # a group starts after a block end and holds at least CHUNK sites
            if self.is_end[t - 1] and t - max(1, starts[-1]) >= CHUNK:
                starts.append(t)
        self.groups = list(zip(starts, starts[1:] + [M + 1]))  # [(first site, past the last site)]
        self.group = [g for g in self.groups for _ in range(*g)]
        self.finished, self.flags = on_device((tuple(seen), tuple(map(int, self.is_end))), x.device)
        self.q = query.detach().float().contiguous()  # [M+1, H, R]
        self.q_hi = self.q.to(x.dtype)
        self.q_lo = (self.q - self.q_hi.float()).to(x.dtype)
        new = lambda *size, dtype=torch.float32: torch.empty(*size, dtype=dtype, device=x.device)
        self.bank = new(M + 1, s.tokens, s.d, dtype=x.dtype)
        self.inv_rho, self.lse = new(M + 1, s.tokens, s.H), new(M + 1, s.tokens, s.H)
        self.mix = new(M + 1, s.tokens, s.d, dtype=x.dtype)
        self.inv_rms = new(M + 1, s.tokens) if prenorm else self.lse  # not read then: the kernel needs some pointer
        self.new, self.reads, self.top, self.dy, self.paired = new, 0, None, None, 0

    def read(self, t, y):
        """Write y into slot t and read at site t."""
        s, (a, b) = self.shape, self.group[t]
        old = self.before[a] if s.chunked and self.before[a] > 2 else 0  # two slots are read as fast by each site
        if t == a and old:
            ahead_kernel[(triton.cdiv(s.tokens, s.together), s.H, triton.cdiv(b - a, TILE))](
                self.bank, self.inv_rho, self.q_hi, self.q_lo, self.mix, self.lse, self.finished, a, b - a, old,
                s.tokens, **s.sizes, **s.ahead, TOKENS=s.together)
        old, pair = old or self.paired, not s.chunked and not self.paired and t < self.sites - 1 and self.before[t] > 2
        self.paired = self.before[t] if pair else 0  # the slots that the next site need not fetch again
        read_kernel[(s.tokens,)](
            y, self.bank, self.inv_rho, self.q, self.mix, self.lse, self.inv_rms, self.finished, t, old, self.before[t],
            s.tokens, self.eps, **s.sizes, ADD=t > 0 and not self.is_end[t - 1], AHEAD=old > 0, PAIR=pair, NORM=self.prenorm, **s.read)
        self.reads = t + 1
        # A tensor with a version counter of its own, not a view: autograd then knows when backward has overwritten this mix.
        return self.mix.new_empty(0).set_(self.mix.untyped_storage(), t * self.mix.stride(0), y.shape, y.contiguous().stride())

    def pull(self, t, grad):
        """Backward of read(t, y): the gradient of y."""
        s, new, (a, b) = self.shape, self.new, self.group[t]
        if self.top is None:  # the last site that the loss depends on
            self.top, self.D = t + 1, new(self.sites, s.tokens, s.H)
            self.dq = torch.zeros(s.splits, self.sites, s.H, s.R, dtype=torch.float32, device=self.bank.device)
        b = min(b, self.top)
        columns = triton.cdiv(self.top - a, 16) * 16  # sites of dz, padded to tiles of 16
        p, count = self.before[a], self.before[b] - self.before[a]
        count -= count % TILE == 1  # a ninth slot would need a second pass over the later sites: it pulls from them itself
        ahead = s.chunked and self.top > b and count > 1
        if t == b - 1:
            self.dz = new(b - a, s.H, s.tokens, columns, dtype=self.bank.dtype)
            if ahead:
                self.partial, self.partial_c = new(b - a, s.tokens, s.d, dtype=self.bank.dtype), new(b - a, s.tokens, s.H)
                pull_ahead_kernel[(s.tokens, s.H, triton.cdiv(count, TILE))](
                    self.bank, self.inv_rho, self.q_hi, self.mix, self.lse, self.D, self.finished, self.partial,
                    self.partial_c, self.dz, a, p, count, b, self.top, s.tokens, columns, **s.sizes, **s.pull_ahead)
            else:
                self.partial = self.partial_c = self.D  # not read
        dy = new(s.tokens, s.d, dtype=self.bank.dtype)
        pulled = ahead and self.is_end[t] and self.before[t] < p + count
        last = b if pulled else self.top if self.is_end[t] else t + 1
        inside = not self.is_end[t] and t + 1 < self.top
        pull_kernel[(s.tokens,)](
            grad, self.bank, self.inv_rho, self.q, self.mix, self.lse, self.inv_rms, self.D, self.partial[t - a], self.partial_c[t - a],
            self.dy if inside else dy, dy, self.dz, t, a, last, s.tokens, columns, **s.sizes,
            AHEAD=pulled, INSIDE=inside, LATER=last > t + 1, NORM=self.prenorm, **s.pull)
        if t == a:
            T = 16 if columns == 16 else 32 if columns == 32 else 64
            RP = max(16, min(128, triton.next_power_of_2(s.R)))
            per_split = triton.cdiv(s.tokens, s.splits)
            dq_kernel[(s.H, s.splits, triton.cdiv(columns, T) * triton.cdiv(s.R, RP))](
                self.dz, self.bank, self.flags, self.dq, a, b - a, self.top, s.tokens, columns, per_split, self.sites,
                **s.sizes, T=T, N=64 if self.bank.dtype != torch.float32 else 32, RP=RP, num_warps=4)
            self.dz = self.partial = self.partial_c = None
        self.dy = dy
        return dy


class Read(torch.autograd.Function):
    """One slot written and one site read. `order`, a tensor without elements, goes through all of them, so that autograd runs
    them backward strictly from the last to the first."""

    @staticmethod
    def forward(ctx, order, y, query, slots, t):
        ctx.slots, ctx.t, ctx.size = slots, t, y.shape
        ctx.query = None if query is None else query.dtype
        ctx.set_materialize_grads(False)
        mix = slots.read(t, y.contiguous())
        ctx.mix = mix.detach()  # the same version counter, without a cycle of references
        return mix, order.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        slots, t = ctx.slots, ctx.t
        task = torch._C._current_graph_task_id()  # one call of backward()
        if slots.top is not None and (t, task) != slots.next:
            raise RuntimeError("a Bank's backward can run only once: it overwrites the mixes with their gradients")
        grad = slots.bank.new_zeros(ctx.size) if grad is None else grad.contiguous()  # None: an output that nothing uses
        dy = slots.pull(t, grad)
        torch.autograd.graph.increment_version(ctx.mix)
        slots.next = t - 1, task
        dquery = slots.dq.sum(0).to(ctx.query) if ctx.query is not None else None
        return grad.new_empty(0), dy.view(ctx.size), dquery, None, None


class Bank:
    """The slots of one forward pass, for training: read(t) and write(y) in turn, t = 0, 1, ..., M.

        bank = Bank(x, query, ends)            # slot 0 is x
        for t in range(M):
            bank.write(sublayer(bank.read(t)))
        out = bank.read(M)

    x: [..., d];  query: [M+1, H, R], the key gain already multiplied in;  ends: the block ends e_1 < ... < e_N (range(1, M+1)
    is full routing). Slot i is the running sum of its block; site t reads slot 0, the finished blocks and slot t. Gradients go to x, to
    every y and, for all sites at once, to query. With prenorm, every read is mix / sqrt(mean mix^2 + eps): the sublayer's RMSNorm
    but for its gain, which the maps that follow can take into their weights.

    Memory: two tensors [M+1, tokens, d] (slots, and mixes that backward replaces by gradients), so a mix belongs to the bank: clone it
    to keep it. Raises RuntimeError if a mix is differentiated after backward has passed its site (backward runs once, first order
    only), ValueError if shapes do not fit or read and write are out of order."""

    @torch.compiler.disable
    def __init__(self, x, query, ends, *, norm="full", eps=1e-6, prenorm=False):
        if query.dim() != 3:
            raise ValueError(f"query must be [M+1, H, R], not {list(query.shape)}")
        self.slots, self.shape = Slots(x, query, ends, norm, eps, prenorm), x.shape
        self.query, self.pending, self.order = query, x, torch.empty(0, device=x.device)

    @torch.compiler.disable
    def read(self, t):
        if self.pending is None or t != self.slots.reads:
            raise ValueError(f"site {t} is out of order: write() then read({self.slots.reads})")
        y, self.pending = self.pending, None
        mix, self.order = Read.apply(self.order, y, self.query if t == 0 else None, self.slots, t)
        return mix

    @torch.compiler.disable
    def write(self, y):
        if self.pending is not None or self.slots.reads >= self.slots.sites:
            raise ValueError("write() follows read(t), and the last site is only read")
        if y.shape != self.shape:
            raise ValueError(f"y must be {list(self.shape)} as x is, not {list(y.shape)}")
        self.pending = y.to(self.slots.bank.dtype)
