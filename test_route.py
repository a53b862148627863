"""Tests: python -m pytest -q

First the model, against a small GPT in NumPy float64, written from the papers' formulas (README.md has them) with loops
over tokens, heads and sources; nothing in it is fast and nothing is shared with model.py but the parameters' names. The fused
kernels against reads in float64: in Triton's interpreter, or on a GPU, where more is tried. Then data and training, as commands that a person types.
"""
import atexit
import copy
import functools
import gc
import gzip
import hashlib
import itertools
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernel.py then runs on CPU tensors

import bench
import convert
import eval as evaluation
import model
import prepare
import probe
import sample
import train
from model import GPT, SIZES, GPTConfig, load_run, parse_flags, rotary, route

torch.set_num_threads(1)
HERE = Path(__file__).parent
T = 7  # tokens
SMALL = dict(n_layer=3, d_model=16, n_head=4, n_kv_head=2, head_dim=6, d_mlp=20, vocab_size=23, norm_eps=0.01)  # eps large enough to see
ROUTES = {  # every route; the first column is the test's name
    "baseline": dict(route="baseline"),
    "hc": dict(route="hc"),
    "attnres": dict(route="attnres"),
    "lr": dict(route="lr"),
    "lr-full": dict(route="lr", rank=5, key_norm="full"),
    "lr-projected": dict(route="lr", rank=5, keys="projected"),
    "mhar": dict(route="mhar"),
    "mhar-rank": dict(route="mhar", heads=4, rank=8),
    "mhar-slice": dict(route="mhar", heads=4, key_norm="slice"),
    "headwise": dict(route="mhar", headwise=True),
    "attnres-delta": dict(route="attnres", delta=True),
    "lr-delta": dict(route="lr", delta=True, blocks=4),
    "mhar-delta": dict(route="mhar", delta=True, blocks=2),
    "mhar-blocks": dict(route="mhar", blocks=4),  # 4 and 5 do not divide 2L = 6
    "projected-blocks": dict(route="lr", rank=5, keys="projected", blocks=4),
}
VARIANTS = {  # more settings, compared with the reference only
    "hc-static": dict(route="hc"),
    "hc-no-gain": dict(route="hc", norm_gain=False),
    "attnres-no-gain": dict(route="attnres", key_gain="off", blocks=5),
    "lr-gain": dict(route="lr", rank=7, key_gain="on", blocks=1),
    "projected-gain": dict(route="lr", rank=5, keys="projected", key_gain="on", blocks=5),
    "mhar-rank-slice": dict(route="mhar", heads=4, rank=8, key_norm="slice", blocks=3),
    "mhar-one-coordinate": dict(route="mhar", rank=2, blocks=6),
    "mhar-rank-delta": dict(route="mhar", heads=4, rank=12, delta=True, blocks=5),
    "headwise-blocks": dict(route="mhar", headwise=True, heads=4, key_norm="slice", key_gain="off", blocks=4),
    "untied-mha": dict(route="lr", tied=False, n_kv_head=4, head_dim=None, norm_gain=False, rope_theta=5e2),
    "mqa-no-qk-norm": dict(route="mhar", heads=2, n_kv_head=1, qk_norm=False, rope_scaling="8,1,4,64"),
}
every_route = pytest.mark.parametrize("name", ROUTES)


def build(seed=0, dtype=torch.float64, noise=0.5, **flags):
    """A small model in which no parameter has its initial value."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SMALL | flags), dtype).to(dtype)
    for p in model.parameters():
        p.data += noise * torch.randn_like(p)
    return model


def tokens(seed=1, batch=1, length=T):
    return torch.randint(SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------------------------------------
# The reference


def rms(x, gain=1.0, eps=0.0):
    return gain * x / math.sqrt(sum(a * a for a in x) / len(x) + eps)


def naive_route(sources, query, norm, eps, keys=None):
    """sources: n vectors [d], query [H, R], keys: n vectors [R] or None -> mix [d], weights [n, H]."""
    H, R = query.shape
    d = len(sources[0])
    width, mix, weights = d // H, np.zeros(d), np.zeros((len(sources), H))
    for h in range(H):
        scores = []
        for i, v in enumerate(sources):
            key = keys[i] if keys is not None else v[(h + 1) * width - R:(h + 1) * width]
            rho = math.sqrt(np.mean((v if norm == "full" else key) ** 2) + eps)
            scores.append(sum(query[h, a] * key[a] for a in range(R)) / rho)
        total = sum(math.exp(z) for z in scores)
        for i, v in enumerate(sources):
            weights[i, h] = math.exp(scores[i]) / total
            mix[h * width:(h + 1) * width] += weights[i, h] * v[h * width:(h + 1) * width]
    return mix, weights


def by_block(t, M, N):
    """The outputs 1..t in their blocks; of M outputs in N blocks, output k is in block floor((k - 1) N / M)."""
    return [list(block) for _, block in itertools.groupby(range(1, t + 1), lambda k: (k - 1) * N // M)]


def rope_frequencies(c):
    """Llama 3.1's apply_scaling, case by case."""
    for i in range(c.head_dim // 2):
        freq = c.rope_theta ** (-2 * i / c.head_dim)
        if c.rope_scaling:
            factor, low, high, original = map(float, c.rope_scaling.split(","))
            wavelength = 2 * math.pi / freq
            if wavelength > original / low:
                freq = freq / factor
            elif wavelength > original / high:
                smooth = (original / wavelength - low) / (high - low)
                freq = (1 - smooth) * freq / factor + smooth * freq
        yield freq


def naive_gpt(c, state, idx, docs=None, window=None):
    """Token ids [T] -> logits [T, vocab_size]. Reads c's plain fields only; the defaults are written out again here."""
    p = {name: x.detach().double().numpy() for name, x in state.items()}
    M, d, eps, length = 2 * c.n_layer, c.d_model, c.norm_eps, len(idx)
    N = c.blocks or M
    H = (c.heads or c.n_kv_head) if c.route == "mhar" else 1
    norm = {"auto": "slice" if c.route == "lr" else "full"}.get(c.key_norm, c.key_norm)
    gained = c.key_gain == "on" or c.key_gain == "auto" and c.route != "lr"
    router = lambda name: p["router." + name]
    query = lambda name, t: router(name + "query")[t] * (router(name + "gain")[t] if gained else 1)
    embedding = [p["embed.weight"][i] for i in idx]
    outputs, keys = [], []  # outputs[k - 1][u]: what sublayer k wrote at token u; keys: its projected key
    if c.route == "hc":
        copies = [[x] * 4 for x in embedding]

    def mix(t, u, query, norm=norm):
        first = router("null") if c.delta else embedding[u]
        blocks = by_block(t, M, N)
        sources = [first] + [sum(outputs[k - 1][u] for k in block) for block in blocks]
        projected = None
        if c.keys == "projected":
            projected = [router("key_embed") @ embedding[u]] + [sum(keys[k - 1][u] for k in block) for block in blocks]
        return naive_route(sources, query, norm, eps, projected)[0]

    def read(t, u):
        """What sublayer t reads at token u, once for each KV group."""
        if c.route == "hc":
            if t == M:
                return [sum(copies[u]) / 4]
            normed = [rms(x, router("norm")[t] if c.norm_gain else 1.0, eps) for x in copies[u]]
            alpha = [router("alpha")[t][j] + router("s_alpha")[t] * np.tanh(normed[j] @ router("w_alpha")[t]) for j in range(4)]
            beta[u] = [router("beta")[t][j] + router("s_beta")[t] * math.tanh(normed[j] @ router("w_beta")[t][:, 0]) for j in range(4)]
            mixed = [sum(alpha[j][k] * copies[u][j] for j in range(4)) for k in range(5)]
            copies[u] = mixed[1:]
            return [mixed[0]] * c.n_kv_head
        residual = embedding[u] + sum(y[u] for y in outputs)
        if c.route == "baseline":
            return [residual] * c.n_kv_head
        if c.headwise and t % 2 == 0 and t < M:
            return [mix(t, u, query("group_", t // 2)[g][None], "full") for g in range(c.n_kv_head)]
        x = mix(t, u, query("", t))
        return [residual + router("gate")[t] * x if c.delta else x] * c.n_kv_head

    def turn(x, position):
        half, y = len(x) // 2, np.empty(len(x))
        for i, freq in enumerate(rope_frequencies(c)):
            z = complex(x[i], x[i + half]) * complex(math.cos(position * freq), math.sin(position * freq))
            y[i], y[i + half] = z.real, z.imag
        return y

    def attention(t, x):
        """x[u][g] -> hidden[u], the heads' outputs side by side."""
        w = lambda name: p[f"sublayers.{t}.{name}.weight"]
        qk = lambda name, y: rms(y, w(name + "_norm") if c.norm_gain else 1.0, eps) if c.qk_norm else y
        cut = lambda name, head: w(name)[head * c.head_dim:(head + 1) * c.head_dim]
        hidden = [[] for _ in range(length)]
        for head in range(c.n_head):
            g = head // (c.n_head // c.n_kv_head)
            q = [turn(qk("q", cut("q", head) @ x[u][g]), u) for u in range(length)]
            k = [turn(qk("k", cut("k", g) @ x[u][g]), u) for u in range(length)]
            v = [cut("v", g) @ x[u][g] for u in range(length)]
            for u in range(length):
                seen = [s for s in range(u + 1) if (docs is None or docs[s] == docs[u]) and (window is None or s > u - window)]
                e = [math.exp(q[u] @ k[s] / math.sqrt(c.head_dim)) for s in seen]
                hidden[u].extend(sum(a / sum(e) * v[s] for a, s in zip(e, seen)))
        return [np.array(h) for h in hidden]

    for t in range(M):
        w = lambda name: p[f"sublayers.{t}.{name}.weight"]
        beta = {}
        x = [[rms(y, w("norm") if c.norm_gain else 1.0, eps) for y in read(t, u)] for u in range(length)]
        if t % 2 == 0:
            hidden, out = attention(t, x), w("o")
        else:
            a = [w("gate") @ y[0] for y in x]
            hidden, out = [a / (1 + np.exp(-a)) * (w("up") @ y[0]) for a, y in zip(a, x)], w("down")
        outputs.append([out @ h for h in hidden])
        if c.keys == "projected":
            keys.append([router("key_mlp" if t % 2 else "key_attn")[t // 2] @ h for h in hidden])
        if c.route == "hc":
            copies = [[x + b * outputs[-1][u] for x, b in zip(copies[u], beta[u])] for u in range(length)]
    head = p["embed.weight" if c.tied else "head.weight"]
    return np.stack([head @ rms(read(M, u)[0], p["norm.weight"] if c.norm_gain else 1.0, eps) for u in range(length)])


def close(a, b, tol=1e-9):
    a, b = (torch.as_tensor(x).double() for x in (a, b))
    return a.shape == b.shape and (a - b).abs().max().item() <= tol * b.abs().max().item()


# ----------------------------------------------------------------------------------------------------------------------
# Every route against the reference


@pytest.mark.parametrize("name", ROUTES | VARIANTS)
def test_logits_and_gradients(name):
    model = build(**(ROUTES | VARIANTS)[name])
    if name == "hc-static":
        model.router["w_alpha"].data.zero_(), model.router["w_beta"].data.zero_()
    idx = tokens(batch=2)
    logits = model(idx)
    for row, expected in zip(idx.tolist(), logits):
        assert close(expected, naive_gpt(model.config, model.state_dict(), row))
    # The gradient of some function of the logits along one random direction in parameter space, by central difference.
    g = torch.Generator().manual_seed(2)
    cotangent = torch.randn(logits.shape[1:], generator=g, dtype=torch.float64)
    grads = torch.autograd.grad((logits[0] * cotangent).sum(), list(model.parameters()), allow_unused=True)
    names = [n for n, _ in model.named_parameters()]
    assert all(x is not None for x in grads)
    direction = {n: torch.randn(x.shape, generator=g, dtype=torch.float64) for n, x in zip(names, grads)}
    slope = sum((direction[n] * x).sum().item() for n, x in zip(names, grads))
    moved = lambda h: {n: x + h * direction["embed.weight" if model.config.tied and n == "head.weight" else n] for n, x in model.state_dict().items()}
    f = lambda h: (naive_gpt(model.config, moved(h), idx[0].tolist()) * cotangent.numpy()).sum()
    assert slope == pytest.approx((f(1e-6) - f(-1e-6)) / 2e-6, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("name", ["mhar", "lr-projected"])
def test_loss_is_the_mean_cross_entropy(name):
    model, idx = build(**ROUTES[name]), tokens(batch=2)
    p = np.concatenate([naive_gpt(model.config, model.state_dict(), row) for row in idx.tolist()])
    nats = [math.log(np.exp(z).sum()) - z[y] for z, y in zip(p, tokens(3, 2).flatten().tolist())]
    assert model(idx, tokens(3, 2)).item() == pytest.approx(sum(nats) / len(nats), rel=1e-9)


def test_rope_scaling_of_llama():
    c = GPTConfig.from_size("8b")
    angle = torch.outer(torch.tensor([5.0, 6.0, 7.0]).double(), torch.tensor(list(rope_frequencies(c)), dtype=torch.float64))
    cos, sin = rotary(c, 5, 3, torch.device("cpu"))
    assert close(cos, angle.cos()) and close(sin, angle.sin())
    kept = torch.tensor(list(rope_frequencies(c))) * 5e5 ** (torch.arange(64) / 64)
    assert kept[0] == 1 and kept[-1].item() == pytest.approx(1 / 8) and ((kept > 0.13) & (kept < 0.99)).any()


# ----------------------------------------------------------------------------------------------------------------------
# Identities, bit for bit in fp32


@pytest.mark.parametrize("a, b", [
    (dict(route="mhar", heads=1), dict(route="attnres")),
    (dict(route="mhar", heads=1, blocks=4), dict(route="attnres", blocks=4)),
    (dict(route="lr", rank=16, key_gain="on"), dict(route="attnres")),
    (dict(route="mhar", blocks=6), dict(route="mhar")),
    (dict(route="mhar", blocks=0), dict(route="mhar")),
    (dict(route="lr", blocks=6), dict(route="lr", blocks=0)),
], ids=str)
def test_identity(a, b):
    a, b = build(dtype=torch.float32, **a), build(7, torch.float32, **b)
    b.load_state_dict(a.state_dict())
    idx = tokens(batch=2)
    assert torch.equal(a(idx), b(idx))


@pytest.mark.parametrize("name", ["attnres-delta", "lr-delta", "mhar-delta", "mhar-rank-delta", "hc"])
def test_starts_as_the_baseline(name):
    flags = (ROUTES | VARIANTS)[name]
    base = build(dtype=torch.float32, route="baseline")
    grafted = GPT(GPTConfig(**SMALL | flags))
    if name != "hc":  # closed gates hide every query, gain and null vector
        for key, p in grafted.router.items():
            p.data += 0.0 if key == "gate" else torch.randn_like(p)
    grafted.load_state_dict(base.state_dict(), strict=False)
    idx = tokens(batch=2)
    assert torch.equal(base(idx), grafted(idx))


@pytest.mark.parametrize("name", ["attnres-delta", "lr-delta", "mhar-delta", "hc"])
def test_leaves_the_baseline_after_one_step(name):
    logits = []
    for flags in (dict(route="baseline"), ROUTES[name]):
        torch.manual_seed(0)
        model = GPT(GPTConfig(**SMALL | flags))
        start = model(tokens())
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model(tokens(), tokens(2)).backward()
        optimizer.step()
        logits.append((start, model(tokens())))
    assert torch.equal(logits[0][0], logits[1][0]) and not torch.allclose(logits[0][1], logits[1][1], atol=1e-4)


def test_one_seed_one_backbone():
    states = []
    for flags in ROUTES.values():
        torch.manual_seed(11)
        model = GPT(GPTConfig(**SMALL | flags))
        backbone = {n: x for n, x in model.state_dict().items() if not n.startswith("router.")}
        states.append(backbone | {"next draw": torch.randn(3)})
        for n, x in model.router.items():  # queries start at zero, gains at one
            assert "query" not in n or not x.any()
            assert "gain" not in n or (x == 1).all()
    for state in states:
        assert state.keys() == states[0].keys() and all(torch.equal(x, states[0][n]) for n, x in state.items())
    assert states[0]["sublayers.3.up.weight"].std().item() == pytest.approx(0.02, rel=0.2)
    assert states[0]["embed.weight"].std().item() == pytest.approx(0.02, rel=0.2)


# ----------------------------------------------------------------------------------------------------------------------
# Slots, parameters and FLOPs


@pytest.mark.parametrize("L", [1, 3, 5])
def test_slots(L):
    for N in range(1, 2 * L + 1):
        c = GPTConfig(n_layer=L, blocks=N)
        assert len(by_block(2 * L, 2 * L, N)) == N
        for t in range(2 * L + 1):
            assert c.slots(t) == [0] + [block[-1] for block in by_block(t, 2 * L, N)]


@pytest.mark.parametrize("N, reads", [(0, 1224), (None, 1224), (48, 1224), (4, 168), (8, 264), (16, 456)])
def test_source_reads(N, reads):
    c = GPTConfig(n_layer=24, blocks=N)
    assert sum(len(c.slots(t)) for t in range(1, 49)) == c.source_reads() == reads
    assert c.slots(0) == [0] and max(len(c.slots(t)) for t in range(49)) == (N or 48) + 1


PRESETS = {  # L, d, heads, KV heads, MLP, vocabulary, tied
    "nano": (6, 128, 4, 2, 384, 257, True), "100m": (12, 512, 8, 4, 1536, 151_936, True),
    "124m": (12, 768, 12, 4, 2304, 151_936, True), "350m": (24, 1024, 16, 8, 4096, 151_936, True),
    "1b": (36, 1280, 16, 8, 5120, 151_936, True), "lr-0.5b": (24, 1024, 16, 16, 2816, 100_277, False),
    "lr-1b": (24, 1536, 24, 24, 4224, 100_277, False), "lr-4b": (44, 2560, 40, 40, 7040, 100_277, False),
    "8b": (32, 4096, 32, 8, 14_336, 128_256, False)}


@pytest.mark.parametrize("size", PRESETS)
def test_presets(size):
    c = GPTConfig.from_size(size, route="baseline")
    L, d, heads, kv, m, V, tied = PRESETS[size]
    assert set(PRESETS) == set(SIZES)
    assert (c.n_layer, c.d_model, c.n_head, c.n_kv_head, c.d_mlp, c.vocab_size, c.tied) == PRESETS[size]
    width, lr = c.head_dim, size.startswith("lr")
    assert width == d // heads and c.qk_norm == (size != "8b") and c.norm_gain != lr and c.norm_eps == (1e-5 if size == "8b" else 1e-6)
    assert c.rope_theta == (5e5 if lr or size == "8b" else 1e4) and c.rope_scaling == ("8,1,4,8192" if size == "8b" else "")
    with torch.device("meta"):
        params = GPT(c).num_params()
    matrices = L * (2 * d * heads * width + 2 * d * kv * width + 3 * d * m)
    gains = 0 if lr else d + L * (2 * d + (2 * width if c.qk_norm else 0))
    assert params == {"total": matrices + gains + V * d * (2 - tied), "non_embedding": matrices + gains, "routing": 0}
    assert c.flops(100) == 6 * (matrices + d * V + L * 2 * heads * width * 100)
    routed = GPTConfig.from_size(size)
    assert (routed.route, routed.delta, routed.blocks, routed.H) == ("mhar", size == "8b", 8 if size == "8b" else None, kv)


@pytest.mark.parametrize("size, flags, added", [
    ("350m", dict(route="mhar"), 49 * 2 * 1024), ("350m", dict(route="mhar"), 100_352), ("1b", dict(route="mhar"), 186_880),
    ("1b", dict(route="mhar", heads=4, rank=128), 73 * 2 * 128), ("350m", dict(route="attnres"), 100_352),
    ("lr-0.5b", dict(route="lr", rank=32), 1_536), ("lr-0.5b", dict(route="lr", rank=32, key_gain="on"), 2 * 1_536),
    ("lr-0.5b", dict(route="lr", keys="projected"), 2_983_424),
    ("350m", dict(route="mhar", delta=True, blocks=8), 100_352 + 1024 + 49),
    ("350m", dict(route="mhar", headwise=True), 100_352 + 24 * 8 * 2 * 1024),
    ("nano", dict(route="hc"), 12 * (4 * 5 + 128 * 5 + 1 + 4 + 128 + 1 + 128)),
], ids=str)
def test_parameters(size, flags, added):
    with torch.device("meta"):
        base, routed = (GPT(GPTConfig.from_size(size, vocab_size=8, **f)).num_params() for f in (dict(route="baseline"), flags))
    assert routed == {"total": base["total"] + added, "non_embedding": base["non_embedding"] + added, "routing": added}


@pytest.mark.parametrize("size, flags, percent", [
    ("100m", dict(), "0.879"), ("350m", dict(), "0.664"), ("1b", dict(), "0.781"),
    *[("lr-0.5b", dict(route="lr", rank=r), p) for r, p in zip((16, 32, 64, 128, 256, 512, 768, 1024), (
        "0.4129", "0.4193", "0.4320", "0.4574", "0.5082", "0.6099", "0.7115", "0.8131"))],
    *[("lr-0.5b", dict(route="lr", rank=128, blocks=N), p) for N, p in ((4, "0.06278"), (8, "0.09865"), (16, "0.1704"))],
    *[("lr-0.5b", dict(route="lr", rank=r, keys="projected"), p) for r, p in ((16, "0.8966"), (32, "1.387"), (64, "2.367"))],
    *[("lr-0.5b", dict(route="lr", keys="projected", blocks=N), p) for N, p in ((4, "1.025"), (8, "1.058"), (16, "1.123"))],
], ids=str)
def test_flops(size, flags, percent):
    """The routing's share of the core, as in the papers' tables."""
    c = GPTConfig.from_size(size, **flags)
    core = 6 * c.n_layer * (2 * c.d_model ** 2 + 2 * c.d_model * c.n_kv_head * c.head_dim + 3 * c.d_model * c.d_mlp)
    share = 100 * (c.flops(512) - GPTConfig.from_size(size, route="baseline").flops(512)) / core
    assert f"{share:.{len(percent.split('.')[1])}f}" == percent


def test_flops_of_headwise_and_hyper_connections():
    added = lambda **flags: (GPTConfig.from_size("nano", **flags).flops(64) - GPTConfig.from_size("nano", route="baseline").flops(64)) / 6
    reads = [1 + len(by_block(t, 12, 4)) for t in range(13)]  # 12 sublayers, d = 128, 2 KV groups
    assert added(route="mhar", headwise=True, blocks=4) == sum(n * 2 * 128 * (2 if t in (2, 4, 6, 8, 10) else 1) for t, n in enumerate(reads) if t)
    assert added(route="hc") == 12 * 128 * 4 * (5 + 1 + 5 + 1)  # weights A and b from 4 copies, mix into 5, write


# ----------------------------------------------------------------------------------------------------------------------
# One read: route()


def one_read(H=1, R=4, d=12, n=4, lead=(2, 3), seed=0, dtype=torch.float64, projected=False):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
    sources = [draw(*lead, d) for _ in range(n)]
    return sources, draw(H, R).to(torch.promote_types(dtype, torch.float32)), [draw(*lead, H * R) for _ in range(n)] if projected else None


READS = [dict(norm="full", R=12), dict(norm="full", R=5), dict(norm="slice", R=5), dict(norm="full", H=3, R=4),
         dict(norm="full", H=3, R=2), dict(norm="slice", H=3, R=2), dict(norm="slice", R=5, projected=True)]
every_read = pytest.mark.parametrize("read", READS, ids=str)


@every_read
def test_route_forms(read):
    norm, shape = read["norm"], {k: v for k, v in read.items() if k != "norm"}
    for dtype, tol in ((torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        sources, query, keys = one_read(dtype=dtype, **shape)
        mix, weights = route(sources, query, norm=norm, keys=keys, eps=0.1)
        H = len(query)
        assert mix.shape == (2, 3, 12) and mix.dtype == dtype
        assert weights.shape == (4, 2, 3, H) and weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert close(weights.sum(0), torch.ones(2, 3, H), 1e-6)
        for a, b in zip((mix, weights), route(torch.stack(sources), query, norm=norm, keys=keys, eps=0.1)):
            assert torch.equal(a, b)
        for u in itertools.product(range(2), range(3)):
            at = lambda bank: None if bank is None else [v[u].double().numpy() for v in bank]
            m, w = naive_route(at(sources), query.double().numpy(), norm, 0.1, at(keys))
            assert close(mix[u], m, tol) and close(weights[:, u[0], u[1]], w, min(tol, 2e-6))  # weights never see bf16


@every_read
def test_route_gradcheck(read):
    sources, query, keys = one_read(lead=(2,), n=3, **{k: v for k, v in read.items() if k != "norm"})
    leaves = [x.requires_grad_() for x in [query, *sources, *(keys or [])]]
    f = lambda q, *x: route(list(x[:3]), q, norm=read["norm"], keys=list(x[3:]) or None)
    assert torch.autograd.gradcheck(f, leaves)


@pytest.mark.parametrize("query, options", [
    ((5, 2), {}), ((3, 5), {}), ((1, 13), {}), ((1, 4), dict(norm="rms")), ((1, 4), dict(norm="slice", keys=5)), ((1, 4), dict(norm="full", keys=4)),
], ids=str)
def test_route_refuses(query, options):
    if "keys" in options:
        options = options | {"keys": [torch.zeros(2, options["keys"])] * 3}
    with pytest.raises(ValueError):
        route([torch.zeros(2, 12)] * 3, torch.zeros(query), **options)


def lr_read(norm):
    """One read with H = 1, key width 4 of d = 12, and a gradient g into its mix."""
    sources, query, _ = one_read(R=4, lead=())
    mix, weights = route([v.requires_grad_() for v in sources], query, norm=norm, eps=0.1)
    g = torch.linspace(-1, 2, 12, dtype=torch.float64)
    grads = torch.autograd.grad(mix @ g, sources)
    return [v.detach() for v in sources], query[0], mix.detach(), weights.detach()[:, 0], g, grads


@pytest.mark.parametrize("norm", ["slice", "full"])
def test_lr_gradient(norm):
    """LR Eqs. 15, 16, 21 to 23: what reaches a source through its value, its key and the key's norm."""
    sources, q, mix, weights, g, grads = lr_read(norm)
    for v, w, grad in zip(sources, weights, grads):
        key = v[-4:]
        width, normed = (4, key) if norm == "slice" else (12, v)
        rho = (normed.square().mean() + 0.1).sqrt()
        z = q @ key / rho
        dz = w * (g @ v - g @ mix)
        expected = w * g
        expected[-4:] += dz * q / rho
        expected[-width:] -= normed * dz * z / (width * rho ** 2)
        assert close(grad, expected, 1e-12)
        if norm == "slice":  # unselected coordinates see the value path alone
            assert torch.equal(grad[:-4], (w * g)[:-4])
        else:  # what remains there is radial
            assert close((grad - w * g)[:-4], -v[:-4] * dz * z / (12 * rho ** 2), 1e-10)


@pytest.mark.parametrize("norm", ["slice", "full"])
def test_lr_weights_see_key_coordinates_only(norm):
    sources, q, mix, weights, *_ = lr_read(norm)
    for i in range(4):
        moved = [v.clone() for v in sources]
        moved[i][:-4] += torch.linspace(1, 2, 8, dtype=torch.float64)
        mix2, weights2 = route(moved, q[None], norm=norm, eps=0.1)
        assert torch.equal(weights2[:, 0], weights) == (norm == "slice") and not torch.equal(mix, mix2)
        moved[i][-1] += 1
        assert not torch.equal(route(moved, q[None], norm=norm, eps=0.1)[1][:, 0], weights)


@pytest.mark.parametrize("norm", ["slice", "full"])
def test_lr_jacobian_rank(norm):
    """The mix's Jacobian in one source is w times the identity plus a matrix of rank one."""
    sources, q, _, weights, *_ = lr_read(norm)
    for i in range(4):
        f = lambda v: route(sources[:i] + [v] + sources[i + 1:], q[None], norm=norm, eps=0.1)[0]
        J = torch.autograd.functional.jacobian(f, sources[i])
        assert torch.linalg.matrix_rank(J) >= 11
        assert torch.linalg.matrix_rank(J - weights[i] * torch.eye(12, dtype=torch.float64), rtol=1e-10) == 1


# ----------------------------------------------------------------------------------------------------------------------
# Causality, documents, generation


@every_route
def test_causality(name):
    model, idx = build(dtype=torch.float32, **ROUTES[name]), tokens()
    logits = model(idx)
    for k in range(T):
        changed = idx.clone()
        changed[0, k] = (changed[0, k] + 1) % SMALL["vocab_size"]
        other = model(changed)
        assert torch.equal(other[:, :k], logits[:, :k]) and (other[:, k:] != logits[:, k:]).any(-1).all()


@every_route
def test_packed_documents(name):
    model, idx = build(**ROUTES[name]), tokens(batch=2)
    docs = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [4, 5, 5, 5, 5, 6, 6]])
    packed = model(idx, docs=docs)
    for row in range(2):
        for doc in docs[row].unique():
            inside = docs[row] == doc
            assert close(packed[row, inside], model(idx[row:row + 1, inside])[0])
        assert close(packed[row], naive_gpt(model.config, model.state_dict(), idx[row].tolist(), docs=docs[row].tolist()))


@every_route
def test_greedy_with_cache(name):
    model, idx = build(**ROUTES[name]), tokens(batch=3, length=4)
    made = torch.stack(list(model.generate(idx, 12, temperature=0)), 1)
    for _ in range(12):
        idx = torch.cat((idx, model(idx)[:, -1:].argmax(-1)), 1)
    assert torch.equal(made, idx[:, 4:]) and len(made.unique()) > 3


@pytest.mark.parametrize("length", [2, 3, 7])  # of the prompt: shorter than the window, as long, longer
@pytest.mark.parametrize("name", ["baseline", "mhar", "headwise"])
def test_sliding_window(name, length):
    model, idx = build(**ROUTES[name]), tokens(length=length)
    made = torch.stack(list(model.generate(idx, 6, temperature=0, window=3)), 1)[0].tolist()
    row = idx[0].tolist()
    for _ in range(6):
        row.append(int(naive_gpt(model.config, model.state_dict(), row, window=3)[-1].argmax()))
    assert made == row[length:]


@pytest.mark.parametrize("temperature, top_k, top_p", [(1, None, None), (0.5, None, None), (2, 3, None), (1, None, 0.6), (2, 5, 0.5), (3, 99, 0.01), (1, 1, None)])
def test_sampling(temperature, top_k, top_p):
    """4000 draws come from the allowed set only, as often as they should."""
    model, idx = build(noise=0.2), tokens()
    draw = lambda: next(model.generate(idx.expand(4000, T), 1, temperature, top_k, top_p, generator=torch.Generator().manual_seed(0)))
    drawn = draw()
    p = np.exp(naive_gpt(model.config, model.state_dict(), idx[0].tolist())[-1] / temperature)
    order = np.argsort(-p)
    p[order[top_k or len(p):]] = 0
    p /= p.sum()
    if top_p:  # the likeliest tokens until they hold top_p
        keep = next(n for n in range(1, len(p) + 1) if p[order[:n]].sum() >= top_p)
        p[order[keep:]] = 0
        p /= p.sum()
    counts = np.bincount(drawn, minlength=len(p))
    assert not counts[p == 0].any()
    assert (abs(counts - 4000 * p) <= 5 * np.sqrt(4000 * p) + 3).all()
    assert torch.equal(drawn, draw())


@every_route
def test_bf16(name):
    """Activations and matrices in bf16; vectors and everything of the router stay fp32, and receive gradients."""
    exact, model = build(noise=0.1, **ROUTES[name]), GPT(GPTConfig(**SMALL | ROUTES[name]), torch.bfloat16)
    model.load_state_dict(exact.state_dict())
    assert model.cast_parameters(torch.bfloat16) is model
    for n, p in model.named_parameters():
        assert p.dtype == (torch.float32 if p.ndim == 1 or n.startswith("router.") else torch.bfloat16), n
    logits = model(tokens())
    assert logits.dtype == torch.bfloat16 and close(logits, exact(tokens()), 0.05)
    loss = model(tokens(), tokens(2))
    loss.backward()
    assert loss.dtype == torch.float32 and all(p.grad.isfinite().all() for p in model.parameters())
    next(model.generate(tokens(), 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_route
def test_cuda_equals_cpu(name):
    """Logits, with FlexAttention's document mask too, gradients and cached greedy decoding, in fp32."""
    flags = {k: v for k, v in ROUTES[name].items() if k != "blocks"}
    torch.manual_seed(0)
    m = GPT(GPTConfig.from_size("nano", **flags))
    for p in m.router.parameters():
        p.data += 0.1 * torch.randn_like(p)
    idx, docs = torch.randint(257, (2, 256)), (torch.rand(2, 256) < 0.02).cumsum(1)
    plain, masked = m(idx), m(idx, docs=docs)
    m(idx, idx, docs=docs).backward()
    grads = {n: p.grad for n, p in m.named_parameters()}
    m.zero_grad(set_to_none=True)
    m.cuda()
    idx, docs = idx.cuda(), docs.cuda()
    assert close(m(idx).cpu(), plain, 1e-5) and close(m(idx, docs=docs).cpu(), masked, 1e-5)
    m(idx, idx, docs=docs).backward()
    assert all(close(p.grad.cpu(), grads[n], 2e-5) for n, p in m.named_parameters() if grads[n].abs().max() > 0)
    ids = full = idx[:, :20]
    ids = torch.cat([ids, *(token[:, None] for token in m.generate(ids, 40, temperature=0))], 1)
    for _ in range(40):
        full = torch.cat([full, m(full)[:, -1:].argmax(-1)], 1)
    assert torch.equal(ids, full)


# ----------------------------------------------------------------------------------------------------------------------
# The fused kernels, against a read in float64 written from the definition. On the CPU they run in Triton's interpreter, in
# fp32 only (it gets products in bf16 wrong); on a GPU the same cases run compiled, and more.

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


@pytest.fixture
def kernel(monkeypatch):
    """kernel.py, with groups of sites so short that a chain of 8 has several."""
    pytest.importorskip("triton")
    import kernel
    import triton.runtime.interpreter
    monkeypatch.setattr(kernel, "CHUNK", 2)
    monkeypatch.setattr(triton.runtime.interpreter.ReduceOps, "generic_reduce", reduce_by_halves)
    return kernel


def reduce_by_halves(self, input):
    """Triton's interpreter calls a reduction's function for one pair of numbers at a time; this, for whole halves of the tensors."""
    data = [x.handle.data for x in input]
    while data[0].shape[self.axis] > 1:
        halves = [self.to_tensor(part, x.dtype) for side in (0, 1) for x, a in zip(input, data) for part in [np.split(a, 2, self.axis)[side]]]
        data = [x.handle.data for x in self.combine_fn.fn(*halves)]
    return [self.to_tensor(a.squeeze(self.axis), x.dtype) for x, a in zip(input, data)]


def draw(*shape, seed=0, scale=1.0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE)


def naive_read(sources, query, norm="full", eps=1e-6):
    """naive_route for tensors [..., d], which have gradients."""
    heads = []
    for h, q in enumerate(query):
        values = [v.chunk(len(query), -1)[h] for v in sources]
        keys = [v[..., v.shape[-1] - len(q):] for v in values]
        rho = [((v if norm == "full" else key).square().mean(-1) + eps).sqrt() for v, key in zip(sources, keys)]
        z = torch.stack([(q * key).sum(-1) / r for key, r in zip(keys, rho)])
        w = (z - z.detach().amax(0)).exp()
        heads.append(sum((a / w.sum(0)).unsqueeze(-1) * v for a, v in zip(w, values)))
    return torch.cat(heads, -1)


def naive_reads(x, query, ends, *, norm, eps, prenorm=False):
    """A chain's read(t) and write(y): site t reads x and the sum of each block of the outputs so far."""
    blocks = [[x], []]

    def read(t):
        mix = naive_read([sum(block) for block in blocks if block], query[t], norm, eps)
        return mix / (mix.square().mean(-1, keepdim=True) + eps).sqrt() if prenorm else mix

    def write(y):
        blocks[-1].append(y)
        if sum(map(len, blocks)) - 1 in ends:
            blocks.append([])
    return read, write


def bank_reads(kernel):
    def reads(*args, **options):
        bank = kernel.Bank(*args, **options)
        return bank.read, bank.write
    return reads


def stateless_reads(route):
    """The same from one route(sources, query) for each site."""
    def reads(x, query, ends, *, prenorm=False, **options):
        slots, written = [x], []

        def read(t):
            mix = route(slots, query[t], **options)
            return F.rms_norm(mix, mix.shape[-1:], eps=options["eps"]) if prenorm else mix

        def write(y):
            slots.append(slots.pop() + y if written and len(written) not in ends else y)
            written.append(y)
        return read, write
    return reads


def run_chain(reads, dtype=torch.float32, *, stored=torch.float32, M=6, lead=(2,), d=96, H=3, R=7, ends=None, norm="full", prenorm=False,
              used=None, cut=(), frozen=(), wrap=lambda f: f, eps=0.1):
    """{name: value} of all reads of a chain with linear sublayers y = mix a + b, and of the gradients of the used ones.

    ends: None for full routing. used: the sites that the loss sees (None: all), cut: the sublayers that ignore their input,
    frozen: leaves without gradient, wrap: around a sublayer. Inputs are values that `stored` can hold."""
    leaf = {"x": draw(*lead, 2 * d, seed=1), "query": draw(R, M + 1, H, seed=2, scale=1.5 / R ** 0.5)}
    leaf |= {f"a{t}": draw(d, seed=100 + t, scale=0.7) for t in range(M)} | {f"b{t}": draw(*lead, d, seed=200 + t, scale=0.7) for t in range(M)}
    wide = torch.promote_types(dtype, torch.float32)
    leaf = {n: x.to(wide) if n == "query" else x.to(stored).to(dtype) for n, x in leaf.items()}
    for n, x in leaf.items():
        x.requires_grad_(n not in frozen)
    read, write = reads(leaf["x"][..., ::2], leaf["query"].permute(1, 2, 0), range(1, M + 1) if ends is None else ends,
                        norm=norm, eps=eps, prenorm=prenorm)
    mixes = []
    for t in range(M + 1):
        mixes.append(read(t))
        if t < M:
            sublayer = wrap(lambda mix, a, b: torch.stack((mix * a + b, b), -1)[..., 0])  # strided
            write(leaf[f"b{t}"] if t in cut else sublayer(mixes[-1], leaf[f"a{t}"], leaf[f"b{t}"]))
    out = {f"read {t}": mix.detach().clone() for t, mix in enumerate(mixes)}  # backward takes the memory of a Bank's mixes
    cotangents = [draw(*lead, d, seed=400 + t).to(stored).to(dtype) for t in range(M)] + [torch.ones((), dtype=dtype, device=DEVICE).expand(*lead, d)]
    torch.autograd.backward(*zip(*[(mixes[t], cotangents[t]) for t in (range(M + 1) if used is None else used) if mixes[t].requires_grad]))
    return out | {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaf.items()}


def error(a, b):
    """The largest difference over the largest entry of b."""
    assert a.shape == b.shape
    if not b.numel():
        return 0.0
    largest = b.abs().max().item()
    return (a.double() - b.double()).abs().max().item() / (largest if largest > 1e-9 else 1.0)


def assert_exact(fused, truth, tol=2.5e-6):
    assert fused.keys() == truth.keys()
    errors = {name: error(fused[name], truth[name]) for name in truth}
    assert all(e <= tol for e in errors.values()), {name: e for name, e in errors.items() if not e <= tol}


def compare_chain(kernel, **case):
    assert_exact(run_chain(bank_reads(kernel), **case), run_chain(naive_reads, torch.float64, **case))


FUSED_READS = [  # n, leading dimensions, d, H, R, norm
    (1, (3,), 80, 1, 80, "full"), (3, (1,), 96, 3, 32, "full"), (5, (5,), 96, 8, 12, "slice"), (3, (2,), 513, 1, 513, "full"),
    (4, (2,), 513, 3, 7, "slice"), (40, (2,), 80, 1, 20, "slice"), (3, (2, 3), 96, 3, 7, "full"), (2, (1, 1), 96, 8, 3, "full"),
    (3, (0,), 96, 3, 7, "full"), *([(100, (200,), 1280, 8, 160, "full"), (9, (300,), 4096, 8, 512, "full")] if GPU else [])]


@pytest.mark.parametrize("form", ["list", "tensor", "repeated"])
@pytest.mark.parametrize("n, lead, d, H, R, norm", FUSED_READS)
def test_fused_read(kernel, n, lead, d, H, R, norm, form):
    results = []
    for dtype, read in ((torch.float32, kernel.route), (torch.float64, naive_read)):
        base = draw(n, *lead, 2 * d).to(dtype).requires_grad_()
        query = draw(R, H, seed=1, scale=2 / R ** 0.5).to(dtype).requires_grad_()
        v = base[..., ::2]
        out = read({"list": list(v), "tensor": v, "repeated": [v[0], *v, v[0], 0 * v[0]]}[form], query.T, norm=norm, eps=0.1)
        out.backward(draw(*lead, d, 2, seed=5).to(dtype)[..., 0])
        results.append({"mix": out.detach(), "sources": base.grad, "query": query.grad})
    assert results[0]["mix"].dtype == torch.float32
    assert_exact(*results)


def test_fused_defaults(kernel):
    """norm="full", eps=1e-6; here the sources are small enough to tell."""
    small, query = draw(3, 2, 96, scale=1e-3), draw(3, 3, 7, seed=1)
    bank = kernel.Bank(small[0], query, [1, 2])
    bank.read(0), bank.write(small[1]), bank.read(1), bank.write(small[2])
    truth = naive_read(small.double(), query[2].double(), "full", 1e-6)
    assert error(kernel.route(small, query[2]), truth) <= 2.5e-6 and error(bank.read(2), truth) <= 2.5e-6


def test_fused_large_logits(kernel):
    """Logits far beyond what exp can hold."""
    query = draw(4, 3, 32, seed=1, scale=100).double()
    x, ys = draw(2, 96), list(draw(3, 2, 96, seed=2))
    bank = kernel.Bank(x, query.float(), [1, 2, 3])
    for t in range(4):
        truth = naive_read([v.double() for v in [x, *ys][:t + 1]], query[t])
        assert error(bank.read(t), truth) < 1e-3 and error(kernel.route([x, *ys][:t + 1], query[t].float()), truth) < 1e-3
        if t < 3:
            bank.write(ys[t])


CHAINS = {  # the last column: the least number of sites that read older slots together
    "full": (dict(M=7, d=80, H=1, R=80, prenorm=True), 2),
    "full-lr": (dict(M=7, d=80, H=1, R=20, norm="slice", lead=(1, 3)), 3),
    "full-narrow": (dict(M=6, d=96, H=8, R=7, prenorm=True), 2),
    "full-multihead": (dict(M=6, d=96, H=3, R=32, norm="slice", lead=(1,)), 1),
    "full-513": (dict(M=4, d=513, H=3, R=171, lead=(1,)), 1),
    "full-513-lr": (dict(M=4, d=513, H=3, R=7, norm="slice", prenorm=True), 1),
    "full-513-wide": (dict(M=3, d=513, H=1, R=513, lead=(1,)), 1),
    "blocks": (dict(M=7, d=96, H=8, R=3, ends=[2, 4, 5, 7]), 2),  # N = 4 of M = 7
    "blocks-lr": (dict(M=7, d=96, H=1, R=7, norm="slice", ends=[3, 5, 7], prenorm=True), 1),
    "blocks-open": (dict(M=6, d=96, H=3, R=7, norm="slice", ends=[1, 2, 4]), 1),  # the last block never ends
    "one-block": (dict(M=4, d=96, H=3, R=7, ends=[4]), 2),
    "many-tokens": (dict(M=1, d=32, H=2, R=5, lead=(67,), prenorm=True), 1),
    "40-slots": (dict(M=39, d=40, H=2, R=16, lead=(1,), ends=[*range(1, 20), *range(30, 40)]), 8),  # a group of 14 sites
    "pairs": (dict(M=7, d=1200, H=2, R=600, lead=(1,), prenorm=True), 2),  # heads too wide for tiles: sites in pairs
    "pairs-blocks": (dict(M=7, d=520, H=1, R=130, norm="slice", lead=(1,), ends=[3, 5, 7]), 2),
    "two-slices": (dict(M=4, d=512, H=1, R=128, lead=(2,)), 1),
    "no-tokens": (dict(M=3, lead=(0, 2)), 1),
    "no-sublayer": (dict(M=0), 2),
}


@pytest.mark.parametrize("name", CHAINS)
def test_fused_chain(kernel, monkeypatch, name):
    case, chunk = CHAINS[name]
    monkeypatch.setattr(kernel, "CHUNK", chunk)
    compare_chain(kernel, **case)


@pytest.mark.parametrize("part", [
    dict(used=[6]), dict(used=[0]), dict(used=[3]), dict(used=[2, 5], cut=[1, 3, 4]), dict(used=[6], cut=[0, 1, 2, 3, 4, 5]),
    dict(used=[5], ends=[3, 6]), dict(used=[1, 4], ends=[3, 6], cut=[1, 2], prenorm=True), dict(frozen=["x"]), dict(frozen=["query"]),
    dict(frozen=["x", "query"], prenorm=True), dict(frozen=["x", "query", *"a0 b0 a1 b1 a2".split()]),
    dict(frozen=[*"a0 a1 a2 a3 a4 a5 b0 b1 b2 b3 b4 b5".split(), "x"]),
], ids=str)
def test_fused_parts_of_a_graph(kernel, part):
    """Sites that the loss does not depend on, in the middle and at the end; leaves that need no gradient."""
    compare_chain(kernel, lead=(1,), **part)


@pytest.mark.parametrize("frozen", ["x", "query"])
def test_fused_read_with_one_gradient(kernel, frozen):
    grads = []
    for dtype, read in ((torch.float32, kernel.route), (torch.float64, naive_read)):
        leaf = {"x": draw(3, 2, 96).to(dtype), "query": draw(3, 7, seed=1).to(dtype)}
        for name, x in leaf.items():
            x.requires_grad_(name != frozen)
        read(leaf["x"], leaf["query"]).sum().backward()
        assert leaf[frozen].grad is None
        grads.append({name: x.grad for name, x in leaf.items() if name != frozen})
    assert_exact(*grads)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ["sublayers", "reads"])
def test_fused_checkpointing(kernel, what, reentrant):
    """Around the sublayers between a Bank's reads, and around stateless reads."""
    checkpoint = lambda f: lambda *args: torch.utils.checkpoint.checkpoint(f, *args, use_reentrant=reentrant)
    case = dict(lead=(1,), M=4, ends=[2, 4])
    truth = run_chain(naive_reads, torch.float64, **case)
    if what == "reads":
        read = lambda slots, query, **options: checkpoint(lambda query, *slots: kernel.route(slots, query, **options))(query, *slots)
        assert_exact(run_chain(stateless_reads(read), **case), truth)
    else:
        assert_exact(run_chain(bank_reads(kernel), wrap=checkpoint, **case), truth)


def test_fused_forwards_before_one_backward(kernel):
    """Two chains that take turns, and a third without gradients that must read the same bits as the first."""
    def three(reads):
        def start(x, *args, **options):
            (read1, write1), (read2, write2), (read3, write3) = (reads(y, *args, **options) for y in (x, x.flip(-1), x.detach()))

            def read(t):
                with torch.no_grad():
                    quiet = read3(t)
                mix = read1(t)
                assert torch.equal(quiet, mix) and mix.requires_grad and not quiet.requires_grad
                return mix + 2 * read2(t)

            def write(y):
                write1(y.double()), write2(y.flip(-1))
                with torch.no_grad():
                    write3(y)
            return read, write
        return start

    assert_exact(run_chain(three(bank_reads(kernel)), M=4, ends=[1, 2, 4]), run_chain(three(naive_reads), torch.float64, M=4, ends=[1, 2, 4]))


def simple_chain(reads, dtype=torch.float32, M=3, **leaf):
    """(all reads, leaves) of a chain y = mix a."""
    leaf = {"x": draw(2, 96), "query": draw(M + 1, 3, 7, seed=1, scale=0.5), "a": draw(M, 96, seed=2)} | leaf
    leaf = {name: x.to(dtype).requires_grad_() for name, x in leaf.items()}
    read, write = reads(leaf["x"], leaf["query"], range(1, M + 1), norm="full", eps=0.1)
    mixes = [read(0)]
    for t in range(M):
        write(mixes[-1] * leaf["a"][t])
        mixes.append(read(t + 1))
    return mixes, leaf


def test_fused_microbatches_accumulate(kernel):
    x, g, shared = draw(4, 96), draw(4, 96, seed=5), {}
    mixes, truth = simple_chain(naive_reads, torch.float64, x=x)
    mixes[-1].backward(g.double())
    for half, g in zip(x.chunk(2), g.chunk(2)):
        mixes, leaf = simple_chain(bank_reads(kernel), x=half, **shared)
        mixes[-1].backward(g)
        shared = {name: leaf[name] for name in ("query", "a")}
    assert_exact({name: x.grad for name, x in shared.items()}, {name: truth[name].grad for name in shared})


def test_fused_backward_runs_once(kernel):
    mixes, _ = simple_chain(bank_reads(kernel))
    mixes[3].sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        mixes[3].sum().backward()
    mixes, _ = simple_chain(bank_reads(kernel))
    torch.autograd.grad(mixes[3].sum(), mixes[2], retain_graph=True)  # a part only; then another loss from there on
    with pytest.raises(RuntimeError, match="once"):
        mixes[2].sum().backward()


def test_fused_mix_is_lost_in_backward(kernel):
    """Whoever keeps a mix without a copy and differentiates through it after the bank's backward is told."""
    mixes, (x, *_) = simple_chain(bank_reads(kernel))
    weight = torch.ones_like(mixes[2]).requires_grad_()
    probe = (mixes[2].detach() * weight).sum()
    mixes[3].sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        probe.backward()


def test_fused_read_runs_backward_twice(kernel):
    x, query = draw(3, 2, 96).requires_grad_(), draw(3, 7, seed=1).requires_grad_()
    out = kernel.route(x, query).square().sum()
    first, second = (torch.autograd.grad(out, (x, query), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) and a.any() for a, b in zip(first, second))


def test_fused_has_no_second_derivative(kernel):
    mixes, leaf = simple_chain(bank_reads(kernel))
    for out in (mixes[3], kernel.route([leaf["x"], 2 * leaf["x"]], leaf["query"][0])):
        grad, = torch.autograd.grad(out.square().sum(), leaf["x"], create_graph=True)
        with pytest.raises(RuntimeError, match="twice"):
            grad.sum().backward()


def test_fused_compiled(kernel):
    """Compiled code around the kernels, which are no part of its graphs."""
    compiled = lambda f: torch.compile(f, backend="inductor" if GPU else "aot_eager")
    truth = run_chain(naive_reads, torch.float64, M=3, prenorm=True)
    assert_exact(run_chain(bank_reads(kernel), wrap=compiled, M=3, prenorm=True), truth)
    x, query = draw(3, 2, 96), draw(3, 7, seed=1)
    read = compiled(lambda x, query: 2 * kernel.route(x + 1, query))(x, query)
    assert error(read, 2 * naive_read(x.double() + 1, query.double())) <= 2.5e-6


@pytest.mark.parametrize("arguments", [
    "[x, x], q[0, :, :0]", "[x, x], draw(5, 7)", "[x, x], draw(3, 33)", "[x], q[0, 0]", "[x], q", "[], q[0]", "[x, x[:1]], q[0]",
    "[x, x[0]], q[0]", "[x], q[0], norm='rms'", "[x.double()], q[0]", "[x.int()], q[0]",
])
def test_fused_read_refuses(kernel, arguments):
    x, q = draw(2, 96), draw(4, 3, 7)
    with pytest.raises(ValueError):
        eval(f"kernel.route({arguments})")


@pytest.mark.parametrize("calls", [
    "Bank(x.double(), q, [3])", "Bank(x, q, [3], norm='rms')", "Bank(x, q, [0, 3])", "Bank(x, q, [4])", "Bank(x, q[0], [3])",
    "Bank(x, q[..., :0], [3])", "Bank(x[..., 1:], q, [3])", "Bank(x, q[:, None], [3])", "write(x)", "read(1)", "read(-1)",
    "read(0) read(0)", "read(0) read(1)", "read(0) write(x) write(x)", "read(0) write(x) read(2)", "read(0) write(x[:1])", "read(0) write(x.T)", "read(0) write(x[0])",
    "read(0) write(x) read(1) write(x) read(2) write(x) read(3) write(x)", "read(0) write(x) read(1) write(x) read(2) write(x) read(3) read(4)",
])
def test_fused_bank_refuses(kernel, calls):
    """The last call; those before it are as they should be."""
    x, q = draw(2, 96), draw(4, 3, 7)
    bank = kernel.Bank(x, q, [1, 3])
    *before, last = [f"kernel.{calls}"] if calls.startswith("Bank") else ["bank." + call for call in re.split(r"(?<=\)) ", calls)]
    for call in before:
        eval(call)
    with pytest.raises(ValueError):
        eval(last)


def run_model(name, dtype, kernel, device=DEVICE):
    """A small GPT, its loss and all gradients."""
    net = build(dtype=torch.float32, noise=0.2, kernel=kernel, d_model=48, **ROUTES[name]).to(device, dtype)
    net.dtype = dtype
    loss = net(tokens(length=3).to(device), tokens(2, length=3).to(device))
    loss.backward()
    return net, {"loss": loss.detach().cpu()} | {n: p.grad.cpu() for n, p in net.named_parameters()}


@pytest.mark.parametrize("name", [name for name, flags in ROUTES.items() if flags["route"] in model.DEPTH_ROUTES and "keys" not in flags])
def test_fused_model(kernel, name):
    """Every route that has kernels is as close to float64 as plain PyTorch: 1.5 times its error, up to the luck of a tensor."""
    net, truth = run_model(name, torch.float64, "torch", "cpu")
    logits = torch.tensor(naive_gpt(net.config, net.state_dict(), tokens(length=3)[0].tolist()))
    assert truth["loss"].item() == pytest.approx(F.cross_entropy(logits, tokens(2, length=3)[0]).item(), rel=1e-9)
    fused, plain = (run_model(name, torch.float32, kernel)[1] for kernel in ("triton", "torch"))
    assert not all(torch.equal(fused[n], plain[n]) for n in truth)  # the kernels ran
    ours, theirs = ([error(x[n], truth[n]) for n in truth] for x in (fused, plain))
    assert np.mean(ours) <= max(1.5 * np.mean(theirs), 2.5e-6) and max(ours) <= max(3 * max(theirs), 2.5e-6)


def test_fused_generation(kernel):
    """Cached decoding through the kernels, which leave the norm to the sublayers then, is as without."""
    net, out = build(dtype=torch.float32, route="mhar", blocks=4).to(DEVICE), []
    for net.config.kernel in ("triton", "torch"):
        out.append(torch.stack(list(net.generate(tokens(length=4).to(DEVICE), 5, temperature=0))))
    assert torch.equal(*out)


def test_a_run_is_loaded_with_kernels_that_are_there(tmp_path):
    for stored, loaded in (("torch", "torch"), ("triton", "auto"), ("auto", "auto")):
        config = GPTConfig(**SMALL, kernel=stored)
        (tmp_path / "config.json").write_text(json.dumps({"model": vars(config), "train": {"seq": 8}, "data": {"folder": "x", "encoding": "bytes"}}))
        torch.save({"model": GPT(config).state_dict()}, tmp_path / "ckpt.pt")
        assert load_run(tmp_path)[0].config.kernel == loaded


# The interpreter accepts what the compiler refuses, so the compiler is asked too: every launch of a bank and of a read is compiled
# for an H100 or H200, which needs no GPU, and not run. One process for all cases, beside the other tests.
COMPILE = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

names, done = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", int: "i32", float: "fp32"}, set()

def run(self, *args, grid, warmup, **options):
    values = dict(zip(self.arg_names, args)) | {k: options.pop(k) for k in list(options) if k in self.arg_names}
    constants = {p.name: values[p.name] for p in self.params if p.is_constexpr}
    kind = lambda v: tuple(map(kind, v)) if isinstance(v, tuple) else names[v.dtype if torch.is_tensor(v) else type(v)]
    signature = {n: "constexpr" if n in constants else kind(values[n]) for n in self.arg_names}
    options = {k: v for k, v in options.items() if v is not None}
    if (key := repr((self.__name__, signature, constants, options))) not in done:
        done.add(key)
        source = ASTSource(fn=self, signature=signature, constexprs={(self.arg_names.index(n),): v for n, v in constants.items()})
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

triton.runtime.jit.JITFunction.run = run
import kernel
kernel.CHUNK = 3
for case in sys.argv[1:]:
    done.clear()
    M, d, H, R, ends, norm, prenorm, dtype = eval(case)
    x, query = torch.zeros(2, d, dtype=dtype, requires_grad=True), torch.zeros(M + 1, H, R, requires_grad=True)
    bank = kernel.Bank(x, query, ends, norm=norm, prenorm=prenorm)
    for t in range(M):
        bank.write(bank.read(t) * 2)
    (bank.read(M).sum() + kernel.route([x, x], query[0], norm=norm).sum()).backward()
    print(*sorted({key.split("'")[1] for key in done}), flush=True)
"""
COMPILED = {
    "8, 1280, 8, 160, range(1, 9), 'full', True, torch.bfloat16": "ahead dq pull_ahead pull read",
    "7, 1536, 1, 384, (2, 4, 5, 7), 'slice', False, torch.bfloat16": "dq pull read",  # pairs
    "8, 512, 1, 512, range(1, 9), 'full', False, torch.float32": "ahead dq pull_ahead pull read"}


@pytest.fixture(scope="session", autouse=True)
def compiler(request):
    if any("compiles_for" in item.name for item in request.session.items):
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, "-c", COMPILE, *COMPILED], env=environment, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return functools.cache(lambda: (*process.communicate(), process.returncode))


@pytest.mark.parametrize("case", COMPILED)
def test_fused_compiles_for_a_gpu(compiler, case):
    pytest.importorskip("triton")
    out, err, code = compiler()
    lines = dict(zip(COMPILED, out.splitlines()))
    assert case in lines, err[-2000:]
    assert lines[case].split() == sorted(f"{kind}_kernel" for kind in (COMPILED[case] + " route route_backward").split()) and not code


# On a GPU only: sizes, bf16, bits, memory, CUDA graphs.


def blocks(M, N):
    return [-(-M * j // N) for j in range(1, N + 1)]


@gpu
@pytest.mark.parametrize("case", [
    dict(M=24, lead=(33,), d=513, H=1, R=513), dict(M=40, lead=(17,), norm="slice"), dict(M=72, lead=(5,), norm="slice"),
    dict(M=40, lead=(17,), d=1280, H=8, R=160, prenorm=True), dict(M=48, lead=(33,), d=1536, H=1, R=384, norm="slice", ends=blocks(48, 8)),
    dict(M=24, lead=(65,), d=512, H=4, R=128), dict(M=12, lead=(1027,), d=512, H=4, R=128),
    dict(M=48, lead=(33,), d=512, H=4, R=128, ends=blocks(48, 4)), dict(M=26, lead=(9,), d=4096, H=8, R=512, ends=blocks(26, 8))], ids=str)
def test_fused_long_chain(case):
    """Like plain fp32, whose rounding adds up too; up to 3.6e-6 was seen over 48 sites."""
    import kernel
    fused, plain, truth = (run_chain(reads, dtype, **case) for reads, dtype in (
        (bank_reads(kernel), torch.float32), (naive_reads, torch.float32), (naive_reads, torch.float64)))
    assert_exact(fused, truth, max(2.5e-6, 3 * max(error(plain[name], truth[name]) for name in truth)))


def near(a, b):
    return (a - b).abs() <= 0.05 + 0.05 * b.abs()


@gpu
@pytest.mark.parametrize("case", [
    dict(M=24, d=512, H=4, R=128, prenorm=True), dict(M=24, d=512, H=4, R=32, norm="slice", prenorm=True), dict(M=40, d=1280, H=8, R=160, prenorm=True),
    dict(M=40, d=1280, H=8, R=160), dict(M=24, d=1024, H=1, R=1024), dict(M=24, d=1536, H=1, R=384, norm="slice", ends=blocks(24, 8))], ids=str)
def test_fused_bf16_chain(case):
    """No further from the truth than plain PyTorch in bf16, and the same bits twice."""
    import kernel
    case |= dict(lead=(2, 64), stored=torch.bfloat16)
    fused, again, plain, truth = (run_chain(reads, dtype, **case) for reads, dtype in (
        (bank_reads(kernel), torch.bfloat16), (bank_reads(kernel), torch.bfloat16),
        (stateless_reads(lambda *args, **options: route(*args, **options)[0]), torch.bfloat16), (naive_reads, torch.float64)))
    assert all(torch.equal(fused[name], again[name]) for name in truth)
    far = lambda x, name: max(((x[name] - truth[name]).norm() / truth[name].norm()).item(), 1e-9)
    ratio = math.exp(np.mean([math.log(far(fused, name) / far(plain, name)) for name in truth]))
    assert ratio <= (1 if case.get("prenorm") else 1.02), ratio  # without the norm, a rounded partial mix shows
    # Over such chains plain bf16 has up to 1 element in 100,000 out of bounds too.
    assert torch.cat([near(fused[name], truth[name]).flatten() for name in truth if "read" in name]).double().mean() > 1 - 2e-5


@gpu
@pytest.mark.parametrize("n, d, H, R, norm", [(100, 1280, 8, 160, "full"), (9, 4096, 8, 512, "full"), (9, 1536, 1, 384, "slice")])
def test_fused_bf16_read(n, d, H, R, norm):
    import kernel
    results = []
    for dtype, read in ((torch.bfloat16, kernel.route), (torch.float64, naive_read)):
        v = draw(n, 50, d).bfloat16().to(dtype).requires_grad_()
        query = draw(H, R, seed=1, scale=2 / R ** 0.5).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        out = read(v, query, norm=norm, eps=0.1)
        results.append((out, *torch.autograd.grad(out, (v, query), draw(50, d, seed=5).bfloat16().to(dtype))))
    assert results[0][0].dtype == torch.bfloat16
    (mix, dv, dq), truth = results
    assert near(mix, truth[0]).all() and near(dv, truth[1]).all() and (dq - truth[2]).norm() <= 0.01 * truth[2].norm()


@gpu
@pytest.mark.skipif(GPU and torch.cuda.mem_get_info()[1] < 60e9, reason="needs 60 GB")
def test_fused_beyond_32_bits():
    """More than 2^31 numbers: the last tokens come out as they do alone."""
    import kernel
    x, a, query = torch.randn(280_000, 2048, device=DEVICE, dtype=torch.bfloat16), draw(2048).bfloat16(), draw(5, 8, 256, scale=0.1)
    results = []
    for x in (x, x[-5:].clone()):
        x = x.requires_grad_()
        bank = kernel.Bank(x, query, range(1, 5))
        for t in range(4):
            bank.write(bank.read(t) * a)
        out = bank.read(4)
        dx, = torch.autograd.grad(out[-5:].float().sum(), x)
        read = kernel.route(torch.stack([x * (1 + i / 8) for i in range(5)]), query[0])
        ds, = torch.autograd.grad(read[-5:].float().sum(), x)
        results.append([y[-5:].clone() for y in (out, dx, read, ds)])
    assert all(error(a, b) <= 0.01 for a, b in zip(*results))


@gpu
def test_fused_memory():
    """Two tensors [M + 1, tokens, d] and little else; all of it is free again without the garbage collector."""
    import kernel
    x, query = draw(4096, 512).bfloat16().requires_grad_(), draw(97, 4, 128).requires_grad_()

    def step():
        bank = kernel.Bank(x, query, range(1, 97))
        for t in range(96):
            bank.write(bank.read(t) * 0.5)
        torch.autograd.grad(bank.read(96).sum(), (x, query))

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    assert torch.cuda.max_memory_allocated() - before <= 1.2 * 2 * 97 * x.nbytes
    assert torch.cuda.memory_allocated() - before <= x.nbytes


@gpu
def test_capture():
    """A micro batch as a graph: the first replaces the gradients, a second adds to them, with other inputs each time."""
    net = GPT(GPTConfig(**SMALL)).cuda()

    def backward(idx, first):
        if first:
            net.zero_grad()
        net(idx, idx).backward()

    batches = [tokens(seed, 2).cuda() for seed in (3, 4, 5)]
    first, pool = model.capture(lambda idx: backward(idx, True), batches[0])
    more, _ = model.capture(lambda idx: backward(idx, False), batches[0], pool=pool)
    for a, b in (batches[:2], batches[1:]):
        first(a), more(b)
        replayed = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        other = GPT(net.config).cuda()
        other.load_state_dict(net.state_dict())
        for batch in (a, b):
            other(batch, batch).backward()
        grads = [p.grad for p in other.parameters() if p.grad is not None]
        assert len(grads) == len(replayed) and all(torch.allclose(x, y, rtol=1e-5, atol=1e-7) for x, y in zip(replayed, grads))


@gpu
def test_fused_cuda_graph():
    """A replay with other inputs gives the bits that eager gives."""
    import kernel
    x, query = draw(64, 512).bfloat16().requires_grad_(), draw(17, 4, 128, scale=0.1).requires_grad_()

    def step():
        bank, sources = kernel.Bank(x, query, blocks(16, 11)), [x]
        for t in range(16):
            sources.append(bank.read(t) * 0.5)
            bank.write(sources[-1])
        out = bank.read(16).float().square().sum() + kernel.route(sources, query[3]).float().sum()
        return out, *torch.autograd.grad(out, (x, query))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step()
    for seed in (3, 4):
        with torch.no_grad():
            x.copy_(draw(64, 512, seed=seed)), query.copy_(draw(17, 4, 128, seed=seed, scale=0.3))
        graph.replay()
        replayed = [y.clone() for y in static]
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(replayed, step()))


def test_clip_gradients():
    params = [torch.nn.Parameter(torch.zeros(5, 3)), torch.nn.Parameter(torch.zeros(7, dtype=torch.bfloat16)), torch.nn.Parameter(torch.zeros(2))]
    for scale in (0.01, 3.0):
        grads = [torch.randn(p.shape).mul(scale).to(p.dtype) for p in params[:2]]
        for p, g in zip(params, grads):
            p.grad = g.clone()
        norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
        assert math.isclose(model.clip_gradients(params, 1.0).item(), norm, rel_tol=1e-6)
        for p, g, tol in zip(params, grads, (1e-6, 2 ** -7)):
            assert torch.allclose(p.grad.double(), g.double() * min(1, 1 / norm), rtol=tol, atol=0)


@pytest.mark.parametrize("flags", [dict(route="mhar", blocks=4), dict(route="mhar", delta=True, blocks=2), dict(route="lr")], ids=str)
def test_bench_chains(kernel, flags):
    """What bench.py times gives one result and one gradient, whichever way it is computed."""
    c = GPTConfig(**SMALL | flags)
    results = []
    for implementation, dtype in ((bench.ours, torch.float32), (bench.stateless, torch.float32), (bench.plain, torch.float64)):
        inputs = [draw(*shape, seed=i).to(dtype).requires_grad_() for i, shape in
                  enumerate([(3, c.d_model), (c.M + 1, c.H, c.r // c.H), (c.d_model,), (c.M + 1,)])]
        out = implementation(c)(c, *inputs, [draw(3, c.d_model, seed=10 + t).to(dtype) for t in range(c.M)])
        kept = out.detach().clone()
        results.append((kept, *torch.autograd.grad(out, inputs if c.delta else inputs[:2], draw(3, c.d_model, seed=9).to(dtype))))
    assert all(error(a, b) < 5e-6 for ours in results[:2] for a, b in zip(ours, results[2]))


def test_bench_pairs_its_repeats(monkeypatch, capsys):
    speeds = {"baseline": iter([100.0, 110.0, 120.0]), "mhar": iter([90.0, 88.0, 114.0])}
    row = lambda config, *_: {"tokens/s": next(speeds[config.route]), "step ms": 1.0, "GiB": 2.0 if config.route == "mhar" else 1.0, "first s": 5.0}
    monkeypatch.setattr(bench, "train_once", row)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    assert not bench.bench_train(bench.TrainBench())
    last = capsys.readouterr().out.splitlines()[-1].split()  # ratios 0.9, 0.8, 0.95: mean 0.8833, standard deviation 0.0764
    assert last[:2] == ["100m", "mhar"] and "0.883" in last and "0.190" in last and "2.000" in last  # 4.303 * 0.0764 / sqrt(3)


@pytest.mark.parametrize("command", ["kernel", "train", "error", "kernel --sizes=9b", "nothing", ""])
def test_bench_without_a_gpu(command):
    (code, _, err), = finished("bench.py", *command.split(), cwd=HERE, CUDA_VISIBLE_DEVICES="")
    assert (code, err.count("\n")) == ((2, 1) if command else (0, 0)), err


def test_kernels_are_refused_where_they_cannot_run(tmp_path):
    assert model.kernels("torch", "cuda") is None and model.kernels("auto", "cpu") is None
    code = "import model, train\nmodel.kernels.cache_clear(), train.main()"
    (code, _, err), = finished(code, "--kernel=triton", "--device=cpu", cwd=tmp_path, TRITON_INTERPRET="")
    assert code == 2 and err.startswith("error: kernel=triton needs CUDA") and err.count("\n") == 1, err


# ----------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize("flags, word", [
    (dict(n_kv_head=3), "n_kv_head"), (dict(n_head=5, n_kv_head=5, head_dim=None), "n_head"), (dict(head_dim=5), "head_dim"), (dict(n_layer=0), "n_layer"),
    (dict(rope_scaling="8,1,4"), "rope_scaling"), (dict(rope_scaling="a,b,c,d"), "rope_scaling"),
    *[(dict(route=route, rank=r), "rank") for route in ("lr", "mhar") for r in (17, 18, -2, 0)],
    *[(dict(route="mhar", heads=h), "heads") for h in (3, 5, 32, -1, 0)],
    (dict(route="mhar", heads=3, rank=6), "heads"), (dict(route="mhar", n_head=6, n_kv_head=3), "heads"),
    *[(dict(route=route, blocks=N), "blocks") for route in ("attnres", "lr", "mhar") for N in (7, -1)],
    (dict(route="mhar", heads=4, rank=6), "rank"), (dict(route="mhar", rank=3), "rank"),
    (dict(route="attnres", heads=1), "heads"), (dict(route="attnres", rank=4), "rank"), (dict(route="attnres", headwise=True), "headwise"),
    (dict(route="attnres", keys="projected"), "keys"), (dict(route="lr", heads=2), "heads"), (dict(route="lr", headwise=True), "headwise"),
    (dict(route="mhar", headwise=True, rank=8), "rank"), (dict(headwise=True, delta=True), "delta"), (dict(route="mhar", keys="projected"), "keys"),
    (dict(route="lr", keys="projected", rank=4, key_norm="full"), "key_norm"), (dict(route="lr", keys="projected", rank=4, delta=True), "delta"),
    *[(dict(route=route, **{flag: value}), flag) for route in ("baseline", "hc") for flag, value in dict(
        blocks=2, rank=4, heads=2, key_norm="full", key_gain="off", keys="projected", delta=True, headwise=True).items()],
    *[({flag: "nope"}, flag) for flag in ("route", "key_norm", "key_gain")], (dict(route="lr", keys="nope"), "keys"),
], ids=str)
def test_config_refuses(flags, word):
    with pytest.raises(ValueError, match=word) as e:
        GPTConfig(**SMALL | flags)
    assert "\n" not in str(e.value)


def test_from_size():
    with pytest.raises(ValueError, match="350m"):
        GPTConfig.from_size("350M")
    with pytest.raises(ValueError, match="blocks"):
        GPTConfig.from_size("nano", blocks=13)
    c = GPTConfig.from_size("8b", n_layer=4, blocks=0)
    assert (c.n_layer, c.N, c.delta) == (4, 8, True)
    assert GPTConfig.from_size("8b", route="baseline").delta is False


@pytest.mark.parametrize("argv, given", [
    ([], {}), (["--route=lr", "--rank=8"], dict(route="lr", rank=8)), (["--delta"], dict(delta=True)), (["--delta=true"], dict(delta=True)),
    (["--tied=false"], dict(tied=False)), (["--rope_theta=5e5"], dict(rope_theta=5e5)), (["--blocks=0"], dict(blocks=0)),
    (["--rope_scaling=8,1,4,8192"], dict(rope_scaling="8,1,4,8192")),
])
def test_flags(argv, given):
    parsed = parse_flags(GPTConfig, argv=argv)
    assert parsed == given and all(type(parsed[name]) is type(value) for name, value in given.items())


@pytest.mark.parametrize("arg, words", [
    ("--n_layers=3", ["--n_layers", "did you mean --n_layer?"]), ("--xyzzy", ["--xyzzy"]), ("route=mhar", ["route"]), ("--rank", ["--rank=", "value"]),
    ("--rank=four", ["rank", "four", "number"]), ("--rank=4.5", ["rank", "4.5", "whole"]), ("--norm_eps=small", ["norm_eps", "small"]),
    ("--route=mahr", ["mahr", "mhar", "baseline", "hc"]), ("--key_norm=", ["key_norm", "slice"]), ("--delta=maybe", ["delta", "maybe", "true"]),
])
def test_flags_refuse(arg, words, capsys):
    with pytest.raises(SystemExit) as e:
        parse_flags(GPTConfig, argv=["--route=lr", arg])
    out, err = capsys.readouterr()
    assert e.value.code == 2 and not out and err.count("\n") == 1 and err.endswith("\n") and all(word in err for word in words)


def test_help(capsys):
    with pytest.raises(SystemExit) as e:
        parse_flags(GPTConfig, argv=["--help"])
    out, err = capsys.readouterr()
    assert e.value.code == 0 and not err
    for flag, default in (("route", "mhar"), ("n_layer", "6"), ("rank", "None"), ("norm_eps", "1e-06")):
        line = next(line for line in out.splitlines() if line.startswith(f"  --{flag}="))
        assert default in line and len(line) > 40  # with its comment


# ----------------------------------------------------------------------------------------------------------------------
# Data


def make_texts(folder, n=200):
    """n distinct documents, some empty, not UTF-8 or duplicate; returns the files' bytes in sorted order."""
    rng = np.random.default_rng(0)
    docs = [f"{i} <|endoftext|> é漢🎉\r\n {' '.join(map(str, rng.integers(0, 99, rng.integers(1, 200))))}".encode() for i in range(n)]
    docs[10:10] = [b"", b"\xff\xfe", docs[3], b"abc\xe9", docs[50], b""]
    folder.mkdir()
    for i, doc in enumerate(docs):
        (folder / f"{i:04}.txt").write_bytes(doc)
    return docs


def expected_tokens(docs, fraction):
    """{split: tokens} by the definition: eot, then the bytes, in order, each document once, split by its hash."""
    out, seen = {"train": [], "val": []}, set()
    for doc in docs:
        try:
            doc.decode("utf-8", errors="strict")
        except UnicodeDecodeError:
            continue
        if doc and doc not in seen:
            seen.add(doc)
            first = hashlib.blake2b(doc, digest_size=16).hexdigest()[:16]
            out["val" if int(first, 16) < fraction * 16**16 else "train"] += [256, *doc]
    return out


def text_config(folder, out, **more):
    return prepare.Config(**dict(dataset="text", glob=f"{folder}/*", out=str(out), val_fraction=0.2, workers=1) | more)


@pytest.fixture
def made(tmp_path):
    docs = make_texts(tmp_path / "texts")
    prepare.prepare(text_config(tmp_path / "texts", tmp_path / "data"))
    return tmp_path / "data", docs


def run_main(monkeypatch, capsys, *flags):
    """(exit code, stderr) of the script with these flags."""
    monkeypatch.setattr(sys, "argv", ["prepare.py", *flags])
    capsys.readouterr()
    try:
        code = prepare.main() or 0
    except SystemExit as e:
        code = e.code
    return code, capsys.readouterr().err


def test_prepare_documents_split_and_order_whatever_the_workers(tmp_path, monkeypatch):
    docs = make_texts(tmp_path / "texts")
    monkeypatch.setattr(prepare, "CHUNK", 700)  # many chunks
    want = expected_tokens(docs, 0.2)
    for workers in (1, 2, 5):
        out = tmp_path / f"data{workers}"
        prepare.prepare(text_config(tmp_path / "texts", out, workers=workers))
        meta = json.loads((out / "meta.json").read_text())
        for split in ("train", "val"):
            assert np.fromfile(out / f"{split}_000.bin", "<u2").tolist() == want[split]
            assert meta["tokens"][split] == len(want[split])
        count = meta["documents"]
        assert (count["empty"], count["invalid"], count["duplicate"], count["train"] + count["val"]) == (2, 2, 2, 200)
        assert (meta["encoding"], meta["vocab_size"], meta["eot"], meta["dtype"]) == ("bytes", 257, 256, "uint16")
        assert sorted(p.name for p in out.iterdir()) == ["meta.json", "train_000.bin", "val_000.bin"]
        assert os.getcwd() not in meta["command"] and "workers" not in meta["command"]
    assert not list(tmp_path.glob("*.partial"))


def test_prepare_split_does_not_depend_on_order_or_company(tmp_path):
    docs = make_texts(tmp_path / "texts")
    (tmp_path / "fewer").mkdir()
    for i, doc in enumerate(docs[::-2]):
        (tmp_path / "fewer" / f"{i:04}").write_bytes(doc)
    sets = {}
    for name in ("texts", "fewer"):
        prepare.prepare(text_config(tmp_path / name, tmp_path / ("d" + name)))
        for split in ("train", "val"):
            ids = np.fromfile(tmp_path / ("d" + name) / f"{split}_000.bin", "<u2")
            sets[name, split] = {tuple(doc) for doc in np.split(ids, np.flatnonzero(ids == 256)) if len(doc)}
    for split in ("train", "val"):
        assert sets["fewer", split] < sets["texts", split]


def test_prepare_shards_roll_over_and_stop(tmp_path, monkeypatch):
    docs = make_texts(tmp_path / "texts")
    monkeypatch.setattr(prepare, "SHARD", 1000)
    out = tmp_path / "data"
    prepare.prepare(text_config(tmp_path / "texts", out))
    want = expected_tokens(docs, 0.2)
    meta = json.loads((out / "meta.json").read_text())
    for split in ("train", "val"):
        shards = meta["shards"][split]
        assert all(s["tokens"] == 1000 for s in shards[:-1]) and 0 < shards[-1]["tokens"] <= 1000 and len(shards) > 2
        assert sum((np.fromfile(out / s["name"], "<u2").tolist() for s in shards), []) == want[split]
        for s in shards:
            assert hashlib.sha256((out / s["name"]).read_bytes()).hexdigest() == s["sha256"]
    prepare.prepare(text_config(tmp_path / "texts", tmp_path / "some", tokens=5000))
    some = json.loads((tmp_path / "some" / "meta.json").read_text())
    assert 5000 <= some["tokens"]["train"] < 6000  # the document that reaches it is whole
    assert np.fromfile(tmp_path / "some" / "train_000.bin", "<u2").tolist() == want["train"][:1000]
    # every token but each shard's first is a target once, but for the rest that is shorter than a window
    cut = [want["train"][i:i + 1000] for i in range(0, len(want["train"]), 1000)]
    for seq in (64, 50, 999):  # 50: the last window of a shard lacks its last target
        data = prepare.Shards(out, "train", seq)
        windows = [data.window(i) for i in range(data.n_windows)]
        assert {len(w) for w in windows} == {seq + 1}
        assert np.concatenate([w[1:] for w in windows]).tolist() == sum((shard[1:1 + (len(shard) - 1) // seq * seq] for shard in cut), [])
    data = prepare.Shards(out, "train", 64)
    assert data.window(0).dtype == np.int64 and data.window(0).shape == (65,)
    assert data.window(1)[0] == data.window(0)[-1]


def test_prepare_batches_are_a_permutation_each_epoch(made):
    folder, _ = made
    data = prepare.Shards(folder, "train", 32)
    n = data.n_windows
    batch = 7
    assert n % batch and n > 100
    steps = 2 * n // batch + 1
    rows = np.concatenate([data.batch(step, batch, seed=5) for step in range(steps)])[:2 * n]
    windows = [data.window(i).tobytes() for i in range(n)]
    first, second = [r.tobytes() for r in rows[:n]], [r.tobytes() for r in rows[n:]]
    assert sorted(first) == sorted(second) == sorted(windows) and first != second and first != windows
    for epoch, got in enumerate((first, second)):  # by the definition
        order = np.random.default_rng((5, epoch)).permutation(np.arange(n, dtype=np.int32))
        assert got == [windows[i] for i in order]
    fresh = prepare.Shards(folder, "train", 32)  # a function of (seed, step) alone, ranks take slices
    step = n // batch  # straddles the epochs
    whole = fresh.batch(step, 8, seed=5)
    parts = [prepare.Shards(folder, "train", 32).batch(step, 8, seed=5, part=slice(r * 2, r * 2 + 2)) for r in range(4)]
    assert (np.concatenate(parts) == whole).all() and whole.shape == (8, 33) and whole.dtype == np.int64
    assert (fresh.batch(0, 8, seed=5) != fresh.batch(0, 8, seed=6)).any()
    assert (fresh.batch(3, batch, seed=5) == rows[3 * batch:4 * batch]).all()


def test_prepare_shards_refuse_what_is_not_whole(made, tmp_path):
    folder, _ = made
    shard, meta = folder / "train_000.bin", folder / "meta.json"
    good, good_meta = shard.read_bytes(), meta.read_text()

    def refused(*words, seq=32, split="train", where=folder):
        with pytest.raises(ValueError) as e:
            data = prepare.Shards(where, split, seq)
            for i in range(data.n_windows):
                data.window(i)
        assert "\n" not in str(e.value) and all(word in str(e.value) for word in words), str(e.value)

    refused("no data", "prepare.py", where=tmp_path / "nowhere")
    shard.write_bytes(good[:-2])
    refused("train_000.bin", "bytes")
    shard.write_bytes(good + b"\0\0")
    refused("train_000.bin", "bytes")
    altered = bytearray(good)
    altered[100] ^= 1
    shard.write_bytes(altered)
    refused("train_000.bin", "sha256")
    altered[100:102] = b"\x39\x30"  # 12345 is no id of 257, and whoever wrote it had a matching checksum
    shard.write_bytes(altered)
    meta.write_text(good_meta.replace(hashlib.sha256(good).hexdigest(), hashlib.sha256(altered).hexdigest()))
    refused("train_000.bin", "12345", "257")
    shard.unlink()
    refused("train_000.bin", "missing")
    shard.write_bytes(good)
    meta.write_text(good_meta[:-30])
    refused("meta.json")
    meta.write_text("{}")
    refused("meta.json")
    meta.unlink()
    refused("meta.json")
    meta.write_text(good_meta)
    refused("val", "window", split="val", seq=10**6)
    prepare.Shards(folder, "train", 32)


def test_prepare_large_data_is_hashed_on_request(made, monkeypatch):
    folder, _ = made
    meta = json.loads((folder / "meta.json").read_text())
    meta["tokens"]["val"] = 10**9  # as if there were more than 1 GB
    meta["shards"]["train"][0]["sha256"] = "0" * 64
    (folder / "meta.json").write_text(json.dumps(meta))
    prepare.Shards(folder, "train", 32)
    with pytest.raises(ValueError, match="sha256"):
        prepare.Shards(folder, "train", 32, verify=True)


def test_prepare_bytes_encoding():
    enc = prepare.encoding("bytes")
    text = "def f():\n\treturn 'é漢🎉'  # <|endoftext|>\r\n\0" + " " * 1000
    assert enc.encode(text) == list(text.encode()) and enc.decode(enc.encode(text)) == text
    assert (enc.vocab_size, enc.eot) == (257, 256)
    assert enc.decode([0xe9, 65]) == "\ufffdA" and enc.decode([65, 9999]) == "A\ufffd" and enc.decode([256]) == "<|endoftext|>"


def test_prepare_tokenize_counts_what_it_skips(monkeypatch):
    prepare.start_worker("bytes")
    long = "x" * 30 + " " * 50 + "é" * 30
    monkeypatch.setattr(prepare, "PIECE", 7)
    result = prepare.tokenize(["a", "", "half \ud800 pair", b"\xc3", b"", long])
    assert [r if isinstance(r, str) else r[1].tolist() for r in result] == [[256, 97], "empty", "invalid", "invalid", "empty", [256, *long.encode()]]


def test_prepare_stdlib_is_the_library_without_its_tests(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = time.time()
    prepare.prepare(prepare.Config())
    assert time.time() - started < 30
    root, files = sysconfig.get_paths()["stdlib"], []
    for folder, _, names in os.walk(root):
        parts = os.path.relpath(folder, root).split(os.sep)
        if not any(p in ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__") for p in parts):
            files += [os.path.join(folder, n) for n in names if n.endswith(".py") and not n.startswith("test_")]
    files.sort(key=lambda f: os.path.relpath(f, root).replace(os.sep, "/"))
    want = expected_tokens([Path(f).read_bytes() for f in files], prepare.Config.val_fraction)
    for split in ("train", "val"):
        assert np.array_equal(np.fromfile(tmp_path / "data" / "stdlib" / f"{split}_000.bin", "<u2"), want[split])
    assert 5e6 < len(want["train"]) < 5e7
    assert len(want["val"]) > 32_768


def test_prepare_hf_from_local_files(tmp_path, monkeypatch, capsys):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    texts = [f"document {i}: " + "é" * i for i in range(100)]
    want = expected_tokens([t.encode() for t in texts], 0.2)
    Path("pq/sub").mkdir(parents=True)
    pq.write_table(pa.table({"text": texts[:60], "n": range(60)}), "pq/a.parquet")
    pq.write_table(pa.table({"text": texts[60:], "n": range(40)}), "pq/sub/b.parquet")
    Path("pq/README.txt").write_text("not a document")
    lines = [json.dumps({"content": t}) + "\n" for t in [*texts[:50], None, *texts]]
    Path("a.jsonl").write_text("".join(lines))
    with gzip.open("b.jsonl.gz", "wt") as f:
        f.write("".join(lines))
    Path("lines.txt").write_text("\n".join(texts) + "\n\n")
    for source, *flags in (["pq"], ["a.jsonl", "--text_field=content"], ["b.jsonl.gz", "--text_field=content"], ["lines.txt"]):
        assert run_main(monkeypatch, capsys, "--dataset=hf", f"--hf={source}", f"--out=d-{source}", "--val_fraction=0.2", *flags) == (0, "")
        for split in ("train", "val"):
            assert np.fromfile(f"d-{source}/{split}_000.bin", "<u2").tolist() == want[split], source
    assert json.loads(Path("d-a.jsonl/meta.json").read_text())["documents"]["empty"] == 1
    before = sorted(tmp_path.rglob("*"))
    Path("broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    Path("bad.txt").write_bytes(b"ab\n\xff\xfe\n")
    for flags, word in ((["--hf=pq", "--text_field=n"], "text (str), n (int)"), (["--hf=pq", "--text_field=nope"], "nope"),
                        (["--hf=broken.jsonl"], "broken.jsonl"), (["--hf=bad.txt"], "bad.txt"), (["--hf=d-pq/train_000.bin"], "parquet")):
        code, err = run_main(monkeypatch, capsys, "--dataset=hf", "--out=new/no", *flags)
        assert code == 2 and err.count("\n") == 1 and word in err, err
    Path("broken.jsonl").unlink()
    Path("bad.txt").unlink()
    assert sorted(tmp_path.rglob("*")) == before


def test_prepare_says_what_needs_the_network(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing answers there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    started = time.time()
    for flags, word in ((["--dataset=hf"], "fineweb-edu"), (["--dataset=hf", "--hf=some/none"], "some/none"), (["--encoding=gpt2"], "gpt2")):
        code, err = run_main(monkeypatch, capsys, *flags)
        assert code == 2 and err.count("\n") == 1 and word in err and "network" in err, err
    assert time.time() - started < 10 and not [p for p in tmp_path.iterdir() if p.name != "cache"]


@pytest.mark.parametrize("flags, word", [
    (["--dataste=text"], "dataset"), (["--dataset=web"], "stdlib, text, hf"), (["--encoding=nope"], "gpt2"), (["--encoding=no/tokenizer.json"], "tokenizer"),
    (["--dataset=text"], "--glob"), (["--glob=*.txt"], "--dataset=text"), (["--hf=x/y"], "--dataset=hf"), (["--dataset=text", "--glob=*.none"], "*.none"),
    (["--dataset=text", "--glob=one.txt,*.none"], "*.none"), (["--dataset=text", "--glob=one.txt"], "validation"), (["--tokens=0"], "--tokens"),
    (["--tokens=many"], "whole number"), (["--val_fraction=0"], "between 0 and 1"), (["--val_fraction=1"], "between 0 and 1"), (["--val_fraction=nan"], "a number"),
    (["--workers=0"], "--workers"), (["--out=."], "exists"), (["--out=one.txt"], "exists"), (["--out=one.txt/x"], "one.txt/x"),
    (["--tokens=100", "--out=a/b/c"], "validation"),
])
def test_prepare_refuses_in_one_line(tmp_path, monkeypatch, capsys, flags, word):
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("one document")
    code, err = run_main(monkeypatch, capsys, "--workers=1", *flags)
    assert code == 2 and err.count("\n") == 1 and word in err, err
    assert [p.name for p in tmp_path.iterdir()] == ["one.txt"]


def test_prepare_existing_data_stays(made, tmp_path):
    folder, _ = made
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(ValueError, match="exists"):
        prepare.prepare(text_config(tmp_path / "texts", folder))
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}


def test_prepare_full_disk_leaves_nothing(tmp_path, monkeypatch, capsys):
    resource = pytest.importorskip("resource")  # a limit on the size of files fails where a full disk would
    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        code, err = run_main(monkeypatch, capsys, "--workers=1", "--out=x/y")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2 and err.count("\n") == 1 and "cannot write x/y" in err and not list(tmp_path.iterdir()), err


SLOW = """
import sys, time, prepare
read = prepare.read
prepare.CHUNK = 1
prepare.read = lambda file: (time.sleep(0.01), read(file))[1]
sys.argv = ["prepare.py", "--dataset=text", "--glob=texts/*", "--val_fraction=0.2", "--workers=2", "--out=data"]
prepare.main()
"""


def processes(session):
    """Ids of the living processes of a session."""
    lines = subprocess.run(["ps", "-eo", "pid=,sess=,stat="], capture_output=True, text=True).stdout.split("\n")
    return [line.split()[0] for line in lines if line and line.split()[1] == str(session) and "Z" not in line.split()[2]]


@pytest.mark.skipif(sys.platform != "linux", reason="counts processes")
def test_prepare_killed_leaves_nothing_that_is_accepted(tmp_path):
    docs = make_texts(tmp_path / "texts")
    shard = tmp_path / "data.partial" / "train_000.bin"

    def until(condition):
        for _ in range(600):
            if condition():
                return
            time.sleep(0.05)
        raise AssertionError("waited 30 s")

    first = start(SLOW, cwd=tmp_path)
    until(shard.exists)
    time.sleep(0.2)
    with pytest.raises(ValueError, match="another process"):  # nobody writes into it beside
        prepare.prepare(text_config(tmp_path / "texts", tmp_path / "data"))
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert shard.exists() and not (tmp_path / "data").exists()
    until(lambda: not processes(first.pid))  # the workers leave too
    for folder in ("data", "data.partial"):
        with pytest.raises(ValueError):
            prepare.Shards(tmp_path / folder, "train", 8)
    (tmp_path / "data.partial" / "val_007.bin").write_bytes(b"left over")

    second = start(SLOW, cwd=tmp_path)  # a worker that dies, then an interrupt: nothing is left
    until(lambda: shard.exists() and len(processes(second.pid)) >= 3)
    worker = next(p for p in processes(second.pid) if p != str(second.pid))
    os.kill(int(worker), signal.SIGKILL)
    error = second.communicate()[1]
    assert second.returncode == 2 and error.count("\n") == 1 and "worker" in error, error
    third = start(SLOW, cwd=tmp_path)
    until(shard.exists)
    os.killpg(third.pid, signal.SIGINT)
    assert third.communicate()[1] == "" and third.returncode == 130
    assert [p.name for p in tmp_path.iterdir()] == ["texts"]

    (tmp_path / "data.partial").mkdir()
    (tmp_path / "data.partial" / "val_007.bin").write_bytes(b"left over")
    with pytest.raises(ValueError, match="move it elsewhere"):  # somebody's own
        prepare.prepare(text_config(tmp_path / "texts", tmp_path / "data"))
    assert (tmp_path / "data.partial" / "val_007.bin").read_bytes() == b"left over"
    (tmp_path / "data.partial" / ".unfinished").touch()
    prepare.prepare(text_config(tmp_path / "texts", tmp_path / "data"))
    assert np.fromfile(tmp_path / "data" / "train_000.bin", "<u2").tolist() == expected_tokens(docs, 0.2)["train"]
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["meta.json", "train_000.bin", "val_000.bin"]


def test_prepare_tokenizer_json(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    make_texts(tmp_path / "texts")
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.pre_tokenizer, t.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    t.train_from_iterator(["some text to merge, some more text"] * 3, tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.enable_truncation(5)
    t.save("mine.json")
    prepare.prepare(text_config("texts", "data", encoding="mine.json"))
    Path("mine.json").unlink()
    meta = json.loads(Path("data/meta.json").read_text())
    assert meta["encoding"] == "tokenizer.json" and meta["eot"] == 0
    enc = prepare.encoding(meta["encoding"], "data")
    text = "some text é漢🎉 <|endoftext|>\n"
    ids = enc.encode(text)
    assert enc.eot not in ids and len(ids) > 5 and enc.decode(ids) == text and enc.vocab_size == meta["vocab_size"]
    assert enc.decode(ids + [10**6]) == text
    first = np.fromfile("data/train_000.bin", "<u2")
    assert first[0] == 0 and "<|endoftext|>" in enc.decode(first[1:20].tolist())


# ----------------------------------------------------------------------------------------------------------------------
# Training: commands as a person types them, on a small data set and a tiny model.

TINY = "--n_layer=2 --d_model=32 --n_head=4 --n_kv_head=2 --d_mlp=48 --seq=32 --batch=4 --steps=40 --warmup=5 --eval_every=20 --eval_tokens=256 --save_every=6 --device=cpu".split()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder to run commands in, with data/small, made from a few of Python's own sources."""
    folder = tmp_path_factory.mktemp("repo")
    sources = Path(os.__file__).parent / "json" / "*.py"
    call("prepare.py", "--dataset=text", f"--glob={sources}", "--val_fraction=0.3", "--out=data/small", cwd=folder)
    return folder


@pytest.fixture
def inside(folder, monkeypatch):
    """In that folder; whatever a training run does to signals is undone."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(folder)
    yield folder
    for s, handler in handlers.items():
        signal.signal(s, handler)


def start(code, *flags, cwd, **env):
    """`python -c code flags` with a session of its own. On Linux a fork of this process, which has torch already, and no exec."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), **env}

    def run():
        status = 1
        try:
            null = os.open(os.devnull, os.O_RDWR)  # files of the parent (Popen waits for one), whose numbers must not be given again
            [os.dup2(null, int(fd)) for fd in os.listdir("/proc/self/fd") if int(fd) > 2], gc.enable(), os.environ.update(env)
            sys.argv, sys.stdout, sys.stderr, sys.unraisablehook = ["-c", *flags], open(1, "w"), open(2, "w", buffering=1), sys.__unraisablehook__
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
            atexit._clear(), logging.root.handlers.clear(), warnings.resetwarnings()
            [warnings.simplefilter("ignore", kind) for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)]
            warnings.showwarning = lambda message, category, file, line, *_: print(f"{file}:{line}: {category.__name__}: {message}", file=sys.stderr)
            status = exec(code, {"__name__": "__main__"}) or atexit._run_exitfuncs() or 0
        except SystemExit as e:
            status = e.code if isinstance(e.code, int) else bool(e.code) and (print(e.code, file=sys.stderr), 1)[1]
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush(), os._exit(status)
    STARTED.append(subprocess.Popen([sys.executable, "-c", code, *flags], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                    start_new_session=True, restore_signals=False, preexec_fn=run if sys.platform == "linux" and not GPU else None))
    return STARTED[-1]


STARTED = []


@pytest.fixture(autouse=True)
def nothing_goes_on_after_a_test():
    yield
    while STARTED:
        process = STARTED.pop()
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def finished(script, *flags, cwd, ranks=0, **env):
    """A script, or code, in a process of its own, or in as many as torchrun would start -> [(exit code, stdout, stderr)]."""
    code = script if "\n" in script else f"import runpy; runpy.run_path({str(HERE / script)!r}, run_name='__main__')"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        at = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), WORLD_SIZE=str(ranks))
    started = [start(code, *flags, cwd=cwd, **env, **dict(at, RANK=str(rank), LOCAL_RANK=str(rank)) if ranks else {}) for rank in range(ranks or 1)]
    with ThreadPoolExecutor(len(started)) as readers:  # all pipes at once: a full one would stop a rank, and the others with it
        outputs = list(readers.map(lambda process: process.communicate(timeout=300), started))
    return [(process.returncode, *texts) for process, texts in zip(started, outputs)]


def call(*args, **options):
    """Its standard output; for ranks, the first one's."""
    done = finished(*args, **options)
    assert not any(code for code, *_ in done), "\n".join(f"exit code {code}\n{err[-3000:]}" for code, _, err in done)
    return done[0][1]


def inline(script, *flags):
    """The same inside this process: quicker. The sample at the end of a training run is short."""
    whole = GPT.generate
    with pytest.MonkeyPatch.context() as m:
        m.setattr(sys, "argv", [script.__name__ + ".py", *flags])
        m.setattr(GPT, "generate", lambda self, idx, n, *args, **options: whole(self, idx, min(n, 20), *args, **options))
        script.main()


def losses(run):
    return {entry["step"]: entry["loss"] for entry in map(json.loads, (run / "log.jsonl").read_text().splitlines())}


def wait_for(process, run, step, file="log.jsonl"):
    """Until a run's log has so many lines and the file is there."""
    end = time.time() + 120
    while not (run / "log.jsonl").exists() or len((run / "log.jsonl").read_text().splitlines()) < step or not (run / file).exists():
        assert process.poll() is None, process.stderr.read()
        assert time.time() < end
        time.sleep(0.01)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_resumes_to_the_same_losses(folder, ranks):
    whole, killed = folder / f"out/whole{ranks}", folder / f"out/killed{ranks}"
    flags, ranks = [*TINY, "--data=small", "--steps=100", "--eval_every=50"], ranks if ranks > 1 else 0
    for run, n in {"out/whole1": 0, whole: ranks}.items():
        if not (folder / run).exists():
            call("train.py", *flags, f"--out={run}", cwd=folder, ranks=n)
    if ranks:  # as a person types it
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", HERE / "train.py", *flags, f"--out={killed}"]
        process = subprocess.Popen(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    else:
        process = start("import train; train.main()", *flags, f"--out={killed}", cwd=folder)
    wait_for(process, killed, random.randint(7, 50), "ckpt.pt")
    for line in subprocess.run(["ps", "-Awwo", "pid,args"], capture_output=True, text=True).stdout.splitlines():
        if f"--out={killed}" in line:  # torchrun and its ranks, which are not in one process group
            os.kill(int(line.split()[0]), signal.SIGKILL)
    process.kill(), process.wait()
    assert len(losses(killed)) < 100
    call("train.py", f"--resume={killed}", cwd=folder, ranks=ranks)
    assert losses(killed) == losses(whole) and len(losses(whole)) == 100
    if ranks:  # the same batches on one rank as on two; later, training has amplified the rounding of sums in another order
        one, two = losses(folder / "out/whole1"), losses(whole)
        assert all(abs(one[s] - two[s]) < 1e-5 for s in range(1, 51))


def test_sigterm_saves_and_says_how_to_go_on(folder):
    process = start("import train; train.main()", *TINY, "--data=small", "--out=out/term", "--steps=100000", "--save_every=50000", "--eval_every=50000", cwd=folder)
    wait_for(process, folder / "out/term", 1)
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "python train.py --resume=out/term" in stdout
    state = torch.load(folder / "out/term/ckpt.pt", weights_only=True)
    assert state["step"] == max(losses(folder / "out/term"))


@pytest.mark.parametrize("flags", ["--route=baseline", "--route=hc", "--route=attnres", "--route=lr --rank=8", "--route=lr --rank=8 --key_norm=full",
                                   "--route=lr --keys=projected --rank=8", "--route=mhar", "--route=mhar --rank=8", "--route=mhar --headwise",
                                   "--route=mhar --blocks=3", "--route=mhar --delta --blocks=2", "--doc_mask", "--schedule=linear",
                                   "--dtype=bfloat16 --param_dtype=bfloat16"])
def test_every_route_learns(inside, flags):
    inline(train, *TINY, "--data=small", "--lr=1e-2", "--out=out/learn" + flags.replace(" ", ""), *flags.split())
    log = [json.loads(line) for line in (inside / ("out/learn" + flags.replace(" ", "")) / "log.jsonl").read_text().splitlines()]
    assert log[-1]["val_loss"] < log[19]["val_loss"] < log[0]["loss"] - 0.5
    assert [entry["tokens"] for entry in log] == [128 * (i + 1) for i in range(40)]


def test_accumulation_equals_one_batch(folder):
    """Of 12 sequences: as one, in three micro batches, in three on each of two ranks, which average their gradients after the last."""
    logs = []
    for micro, ranks in ((12, 0), (4, 0), (2, 2)):
        run = f"out/micro{micro}"
        call("train.py", *TINY, "--data=small", "--batch=12", "--steps=12", f"--micro={micro}", f"--out={run}", cwd=folder, ranks=ranks)
        logs.append([(entry["loss"], entry["grad_norm"]) for entry in entries(folder / run)])
    assert len(logs[0]) == 12
    for log in logs[1:]:
        assert all(abs(a[0] - b[0]) < 1e-5 and a[1] == pytest.approx(b[1], rel=1e-4) for a, b in zip(logs[0], log, strict=True))


def test_learning_rates_follow_the_formulas():
    c = train.TrainConfig(steps=100, lr=1.0, min_lr=0.1, warmup=10, schedule="cosine")
    assert [train.learning_rate(s, c) for s in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert math.isclose(train.learning_rate(55, c), 0.55) and math.isclose(train.learning_rate(100, c), 0.1)
    c = train.TrainConfig(steps=100, lr=1.0, min_lr=0.1, warmup=10, schedule="linear", warmdown=0.2)
    assert train.learning_rate(79, c) == 1.0 and math.isclose(train.learning_rate(90, c), 0.55) and math.isclose(train.learning_rate(100, c), 0.1)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(inside, capsys):
    with pytest.raises(SystemExit) as stop:
        inline(train, *TINY, "--data=small", "--lr=1e25", "--warmup=0", "--save_every=1", "--clip=1e30", "--out=out/nan")
    step = int(re.search(r"step (\d+)", str(stop.value))[1])
    state = torch.load(inside / "out/nan/ckpt.pt", weights_only=True)
    assert "the run stops" in str(stop.value) and state["step"] == step - 1 == len(losses(inside / "out/nan"))


def test_a_full_disk_leaves_the_last_checkpoint_whole(inside, monkeypatch):
    whole_save = torch.save

    def full(state, file):
        if state["step"] > 12:
            Path(file).write_bytes(b"half of a chec")
            raise OSError(28, "No space left on device")
        whole_save(state, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SystemExit, match="cannot write .*ckpt.pt.*No space left"):
        inline(train, *TINY, "--data=small", "--out=out/full")
    assert torch.load(inside / "out/full/ckpt.pt", weights_only=True)["step"] == 12
    assert torch.load(inside / "out/full/ckpt_prev.pt", weights_only=True)["step"] in (6, 12)
    assert not list((inside / "out/full").glob("*.partial"))


def test_resume_takes_the_last_whole_checkpoint_and_only_the_same_data(inside):
    inline(train, *TINY, "--data=small", "--out=out/damaged")
    (inside / "out/damaged/ckpt.pt").write_bytes((inside / "out/damaged/ckpt.pt").read_bytes()[:1000])
    with open(inside / "out/damaged/log.jsonl", "a") as log:
        log.write('{"step": 41, "lo')
    before = (inside / "out/damaged/log.jsonl").read_text().splitlines()[:40]
    inline(train, "--resume=out/damaged")
    assert len(losses(inside / "out/damaged")) == 40 and [json.loads(a)["loss"] for a in before] == list(losses(inside / "out/damaged").values())
    config = json.loads((inside / "out/damaged/config.json").read_text())
    config["data"]["sha256"][0] = "another"
    (inside / "out/damaged/config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as stop:
        inline(train, "--resume=out/damaged", "--steps=41")
    assert stop.value.code == 2


def test_a_default_folder_takes_the_next_free_name(inside):
    for name in ("mhar-nano", "mhar-nano-2"):
        inline(train, *TINY, "--data=small", "--steps=1")
        assert (inside / "out" / name / "ckpt.pt").exists()


def test_sample_is_greedy_decoding_of_the_full_forward(inside, capsys):
    inline(train, *TINY, "--data=small", "--out=out/sampled")
    capsys.readouterr()
    inline(sample, "--out=out/sampled", "--prompt=def ", "--temperature=0", "--tokens=20", "--window=1000")
    text = capsys.readouterr().out
    model, run = load_run("out/sampled")
    encoding = prepare.encoding("bytes")
    ids = [256] + list(b"def ")
    while len(ids) < 25 and (token := model(torch.tensor([ids]))[0, -1].argmax().item()) != 256:
        ids.append(token)
    assert text == encoding.decode(ids[1:]) + "\n"
    inline(sample, "--out=out/sampled", "--samples=3", "--tokens=20", "--top_k=5", "--top_p=0.9")
    assert capsys.readouterr().out.count("--- ") >= 3


@pytest.mark.parametrize("script, flags, says", [
    (train, "--rout=mhar", "did you mean --route"),
    (train, "--route=mhra", "choose from"),
    (train, "--size=1g", "unknown size"),
    (train, "--steps=many", "whole number"),
    (train, "--steps=0", "positive"),
    (train, "--warmdown=2", "share"),
    (train, "--batch=4 --micro=3", "multiple"),
    (train, "--device=abacus", "not to be had"),
    (train, "--route=lr --rank=33", "rank"),
    (train, "--route=lr --rank=-1", "rank"),
    (train, "--heads=3", "divide"),
    (train, "--n_kv_head=3", "divide"),
    (train, "--blocks=5", "blocks"),
    (train, "--rank=7", "multiple"),
    (train, "--route=baseline --blocks=2", "takes no blocks"),
    (train, "--out=out", "exists"),
    (train, "--data=nowhere", "nowhere"),
    (train, "--vocab_size=100", "less than the data's 257"),
    (train, "--seq=1000000", "window"),
    (train, "--resume=out/nothing", "out/nothing is no run"),
    (train, "--init_from=out/nothing", "out/nothing is no run"),
    (train, "--init_from=out/truncated", "does not hold this run's model"),
    (train, "--init_from=out/refused --d_model=64", "do not fit"),
    (train, "--init_from=out/refused --n_layer=3", "do not fit"),
    (train, "--init_from=out/refused --qk_norm=false", "do not fit"),
    (train, "--init_from=out/refused --data=larger", "vocab_size=257 is less than the data's 300"),
    (train, "--init_from=out/other", "out/other knows the tokens of gpt2"),
    (train, "--init_from=out/refused --size=1g", "unknown size"),
    (train, "--init_from=out/refused --blocks=9", "blocks"),
    (train, "--resume=out/refused --init_from=out/refused", "only these may change"),
    (train, "--resume=out/refused --ema=0.5", "only these may change"),
    (train, "--resume=out/refused --optimizer=muon", "only these may change"),
    (train, "--resume=out/refused --eval_only --seq=64", "only these may change"),
    (train, "--resume=out/nothing --eval_only", "out/nothing is no run"),
    (train, "--eval_only", "--resume=RUN"),
    (train, "--optimizer=adam", "choose from adamw, muon"),
    (train, "--decay=none", "choose from all, matrices"),
    (train, "--schedule=constant", "choose from cosine, linear"),
    (train, "--route=mhar --kernel=triton --dtype=bfloat16", "kernel=triton"),
    (train, "--ema=1", "share"),
    (train, "--ema=-0.1", "share"),
    (train, "--z_loss=-1", "not negative"),
    (train, "--min_lr=-1", "not negative"),
    (train, "--min_lr=1", "at most"),
    (train, "--device=meta", "not to be had"),
    (train, "--dry_run --batch=7 --micro=2", "multiple"),
    (train, "--muon_lr=0", "positive"),
    (train, "--seed=-1", "--seed"),
    (train, "--lr=nan", "number"),
    (train, "--micro=0", "1 x 0"),
    (train, "--rope_scaling=8,4,4,8192", "rope_scaling"),
    (train, "--out=data/small/meta.json/x", "meta.json"),
    (train, "--resume=out/refused --route=lr", "only these may change"),
    (train, "--resume=out/refused --lr=0.5", "only these may change"),
    (train, "--resume=out/refused", "is at step 40 of 40: give more --steps"),
    (sample, "--out=out", "config.json"),
    (sample, "--out=out/refused --temperature=-1", "not negative"),
])
def test_bad_input_is_one_line_and_exit_code_2(inside, capsys, script, flags, says):
    if not (inside / "out/refused").exists():
        inline(train, *TINY, "--data=small", "--out=out/refused")
        shutil.copytree("out/refused", "out/truncated"), shutil.copytree("out/refused", "out/other"), shutil.copytree("data/small", "data/larger")
        Path("out/other/config.json").write_text(Path("out/refused/config.json").read_text().replace('"encoding": "bytes"', '"encoding": "gpt2"'))
        Path("out/truncated/ckpt.pt").write_bytes(Path("out/refused/ckpt.pt").read_bytes()[:1000])
        Path("data/larger/meta.json").write_text(Path("data/small/meta.json").read_text().replace('"vocab_size": 257', '"vocab_size": 300'))
    before = sorted(inside.rglob("*"))
    capsys.readouterr()
    tiny = TINY + ["--data=small"] if script is train and "--resume" not in flags else []
    with pytest.raises(SystemExit) as stop:
        inline(script, *tiny, *flags.split())
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and says in err, err
    assert sorted(inside.rglob("*")) == before  # nothing written


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_commit(tmp_path, monkeypatch):
    """What config.json keeps: the whole hash, -dirty if the code is not what was committed, None where there is no repository."""
    monkeypatch.setattr(train, "__file__", str(tmp_path / "train.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    git = lambda *args: subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
    assert train.git_commit() is None
    git("init"), (tmp_path / "train.py").write_text("1"), git("add", "train.py"), git("commit", "-m", "one"), git("tag", "-a", "v1", "-m", "v1")
    assert train.git_commit() == git("rev-parse", "HEAD")
    (tmp_path / "train.py").write_text("2")
    assert train.git_commit() == git("rev-parse", "HEAD") + "-dirty"


def test_the_readme_adds_a_route(inside, monkeypatch, capsys):
    """The README's examples of a route of one's own, as they stand there."""
    scope = dict(vars(model))
    for code in re.findall(r"```python\n(class .*?)```", (HERE / "README.md").read_text(), re.S):
        exec(code, scope)
    monkeypatch.setitem(model.STREAMS, "scaled", scope["Scaled"])
    monkeypatch.setitem(model.STREAMS, "recent", scope["Recent"])
    monkeypatch.setattr(model, "DEPTH_ROUTES", (*model.DEPTH_ROUTES, "recent"))
    monkeypatch.setattr(probe, "DEPTH_ROUTES", model.DEPTH_ROUTES)
    monkeypatch.setitem(GPTConfig.__annotations__, "route", Literal["scaled", "recent"])
    inline(train, *TINY, "--data=small", "--route=scaled", "--lr=1e-2", "--out=out/scaled")
    state = torch.load(inside / "out/scaled/ckpt.pt", weights_only=True)["model"]
    assert state["router.scale"].shape == (5,) and (state["router.scale"] != 1).all()
    inline(train, *TINY, "--data=small", "--route=recent", "--blocks=4", "--key_gain=off", "--out=out/recent")
    net, _ = load_run("out/recent")
    with model.watch_routing() as reads:
        net(tokens(3, 2))
    assert [len(weights) for _, weights in reads] == [1, 2, 3, 4, 4]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        inline(probe, "routing", "out/recent")
    assert "site 4 reads 4 sources, and config.slots(4) names 5" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# The papers' recipes: the loss, optimizers, schedules, average, presets and documents, each against its formula

KEPT = 2 ** 30  # LinearCrossEntropy.CHUNK as it is


def objective(logits, targets, z_loss):
    """logits [n, V], targets [n] -> mean cross-entropy, and that plus the z-loss. No logsumexp, no max: softmax by hand."""
    total = logits.exp().sum(-1)
    value = -(logits.exp()[torch.arange(len(targets)), targets] / total).log().mean()
    return value, value + z_loss * total.log().square().mean()


def head_inputs(n, dtype=torch.float64, weight_dtype=None):
    g = torch.Generator().manual_seed(n)
    x, w = torch.randn(n, 6, generator=g, dtype=torch.float64), torch.randn(23, 6, generator=g, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), w.to(weight_dtype or dtype).requires_grad_(), torch.randint(23, (n,), generator=g)


@pytest.mark.parametrize("dtypes, tol", [((torch.float64, None), 1e-12), ((torch.float32, None), 1e-6), ((torch.bfloat16, None), 0.02),
                                         ((torch.bfloat16, torch.float32), 0.02)], ids=str)
@pytest.mark.parametrize("n, chunk", [(13, KEPT), (13, 23 * 5), (13, 1), (16, 23 * 4), (1, KEPT), (1, 1)])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_linear_cross_entropy(monkeypatch, n, chunk, z_loss, dtypes, tol):
    sizes, plain = [], model.softmax_gradient
    monkeypatch.setattr(model, "softmax_gradient", lambda logits, *rest: sizes.append(len(logits)) or plain(logits, *rest))
    monkeypatch.setattr(model.LinearCrossEntropy, "CHUNK", chunk)
    x, w, targets = head_inputs(n, *dtypes)
    value = model.LinearCrossEntropy.apply(x, w, targets, z_loss)
    (-1.7 * value).backward()
    assert sum(sizes) == n and (max(sizes) * 23 <= chunk or max(sizes) == 1) and (chunk < KEPT or sizes == [n])
    X, W = (a.detach().double().requires_grad_() for a in (x, w))
    cross_entropy, minimized = objective(X @ W.T, targets, z_loss)
    (-1.7 * minimized).backward()
    assert value.dtype == torch.promote_types(x.dtype, torch.float32) and not value.shape and close(value.detach(), cross_entropy.detach(), tol)
    assert x.grad.dtype == x.dtype and close(x.grad, X.grad, tol) and w.grad.dtype == w.dtype and close(w.grad, W.grad, tol)


@pytest.mark.parametrize("frozen", ["x", "weight", "both", "no_grad"])
def test_linear_cross_entropy_with_one_gradient(monkeypatch, frozen):
    monkeypatch.setattr(model.LinearCrossEntropy, "CHUNK", 100)
    x, w, targets = head_inputs(13)
    expected = torch.autograd.grad(objective(x @ w.T, targets, 0.3)[1], (x, w))
    x.requires_grad_(frozen not in ("x", "both")), w.requires_grad_(frozen not in ("weight", "both"))
    with torch.set_grad_enabled(frozen != "no_grad"):
        value = model.LinearCrossEntropy.apply(x, w, targets, 0.3)
    assert close(value.detach(), objective(x @ w.T, targets, 0.3)[0].detach())
    if frozen in ("both", "no_grad"):
        assert not value.requires_grad
    else:
        value.backward()
        assert all(p.grad is None if not p.requires_grad else close(p.grad, e) for p, e in zip((x, w), expected))


class Largest(TorchDispatchMode):
    """Notes the shapes of all tensors that operations return."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **kwargs or {})
        fresh = not any(r.alias_info for r in op._schema.returns)  # no views, nothing in place
        self.shapes |= {tuple(x.shape) for x in (result if isinstance(result, (tuple, list)) else [result]) if fresh and torch.is_tensor(x)}
        return result

    def __int__(self):
        return max(math.prod(shape) for shape in self.shapes)


@pytest.mark.parametrize("chunk, most", [(KEPT, 96 * 500), (2000, 500 * 16), (40_000, 24_000)])
def test_logits_are_never_stored_as_a_whole(monkeypatch, chunk, most):
    monkeypatch.setattr(model.LinearCrossEntropy, "CHUNK", chunk)
    m = GPT(GPTConfig(**SMALL | dict(vocab_size=500, n_layer=1)))
    with Largest() as largest:
        m(*(torch.randint(500, (2, 48)) for _ in range(2))).backward()
    assert int(largest) == most  # all logits; no chunk is larger than the weight; two chunks


def test_evaluations_form_no_gradient():
    m = build()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), Largest() as largest:
            m(tokens(), tokens(2))
        assert (tuple(m.embed.weight.shape) in largest.shapes) == grad


@pytest.mark.parametrize("name", ["mhar", "untied-mha", "lr-projected"])
def test_gradients_of_the_loss(monkeypatch, name):
    monkeypatch.setattr(model.LinearCrossEntropy, "CHUNK", 100)
    flags = (ROUTES | VARIANTS)[name]
    m, idx, targets = build(**flags), tokens(batch=2), tokens(3, 2)
    m.z_loss = 0.3
    cross_entropy, minimized = objective(m(idx).flatten(0, 1), targets.flatten(), 0.3)
    expected = torch.autograd.grad(minimized, list(m.parameters()))
    loss = m(idx, targets)
    loss.backward()
    assert close(loss.detach(), cross_entropy.detach()) and all(close(p.grad, e) for p, e in zip(m.parameters(), expected))
    if m.config.tied:  # the gradient of its two uses, apart
        other = build(**flags | dict(tied=False))
        other.load_state_dict(m.state_dict())
        other.z_loss = 0.3
        other(idx, targets).backward()
        assert other.embed.weight.grad.any() and close(m.embed.weight.grad, other.embed.weight.grad + other.head.weight.grad)


# Optimizers


MUON = re.compile(r"sublayers\.\d+\.(q|k|v|o|gate|up|down)\.weight")
every_kind = pytest.mark.parametrize("name", ["baseline", "hc", "headwise", "lr-projected", "mhar-delta", "untied-mha"])


@every_kind
def test_muon_takes_the_matrices_of_the_sublayers(name):
    m, c = build(**(ROUTES | VARIANTS)[name]), train.TrainConfig(optimizer="muon", lr=3e-4, muon_lr=2e-3, weight_decay=0.2)
    names = {id(p): n for n, p in m.named_parameters()}
    muon, adam = train.optimizers(m, c)
    held = [[names.pop(id(p)) for group in o.param_groups for p in group["params"]] for o in (muon, adam)]
    assert not names and len(held[0]) == 7 * 3 and all(map(MUON.fullmatch, held[0])) and not any(map(MUON.fullmatch, held[1]))
    assert type(muon) is torch.optim.Muon and type(adam) is torch.optim.AdamW
    assert all((g["lr"], g["weight_decay"], g["momentum"], g["nesterov"]) == (2e-3, 0.2, 0.95, True) for g in muon.param_groups)
    assert all((g["lr"], g["weight_decay"], g["betas"], g["eps"]) == (3e-4, 0.0, (0.9, 0.95), 1e-8) for g in adam.param_groups)


def naive_muon(p, grads, lr, decay, momentum=0.95):
    """torch.optim.Muon's documentation, in float64, with the Newton-Schulz iteration of Jordan's post."""
    B = np.zeros_like(p)
    for g in grads:
        B = momentum * B + g
        X = g + momentum * B
        X = X / np.sqrt((X ** 2).sum())
        for _ in range(5):
            G = X @ X.T
            X = 3.4445 * X - 4.7750 * G @ X + 2.0315 * G @ G @ X
        p = p - lr * decay * p
        p = p - lr * math.sqrt(max(1, p.shape[0] / p.shape[1])) * X
    return p


@pytest.mark.parametrize("name", ["q", "o", "k", "gate"])  # 24 x 16, 16 x 24, 12 x 16, 48 x 16
def test_muon_steps(name):
    torch.manual_seed(0)
    m = GPT(GPTConfig(**SMALL | dict(d_mlp=48)))
    muon, _ = train.optimizers(m, train.TrainConfig(optimizer="muon", muon_lr=0.05, weight_decay=0.1))
    p = dict(m.named_parameters())[f"sublayers.{name == 'gate':d}.{name}.weight"]
    p.data += torch.randn_like(p)
    start, grads = p.detach().double().numpy().copy(), np.random.default_rng(0).normal(size=(3, *p.shape)) * np.array([[[3]], [[1]], [[0.3]]])
    for g in grads:
        p.grad = torch.tensor(g, dtype=torch.float32)
        muon.step()
    moved, expected = p.detach().double().numpy() - start, naive_muon(start, grads, 0.05, 0.1) - start
    assert np.linalg.norm(moved - expected) < 0.015 * np.linalg.norm(expected)  # torch's runs in bf16


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("flags, decays", [
    (dict(), lambda name, tied: True),
    (dict(decay="matrices"), lambda name, tied: MUON.fullmatch(name) or name == "head.weight"),
    (dict(optimizer="muon"), lambda name, tied: MUON.fullmatch(name)),
], ids=["all", "matrices", "muon"])
@every_kind
def test_decay(flags, decays, tied, name):
    """A step with gradients of zero is the decay alone."""
    m = build(**(ROUTES | VARIANTS)[name] | dict(tied=tied))
    start = {n: p.detach().clone() for n, p in m.named_parameters()}
    for p in m.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in train.optimizers(m, train.TrainConfig(lr=0.01, muon_lr=0.02, weight_decay=0.3, **flags)):
        optimizer.step()
    rate = 0.02 if "optimizer" in flags else 0.01
    for n, p in m.named_parameters():
        assert start[n].all() and close(p.detach(), start[n] * (1 - rate * 0.3 * bool(decays(n, tied))), 1e-7), n


@pytest.mark.parametrize("flags, expected", [
    ("--schedule=linear --warmdown=0.25 --optimizer=muon --muon_lr=2e-2 --min_lr=1e-3", lambda s: np.interp(s, [15, 20], [8e-3, 1e-3])),
    ("--schedule=linear --warmdown=1 --decay=matrices", lambda s: np.interp(s, [0, 20], [8e-3, 8e-4])),
    ("--schedule=cosine --optimizer=muon --muon_lr=4e-3", lambda s: 4.4e-3 + 3.6e-3 * np.cos(np.pi * (s - 4) / 16)),
])
def test_learning_rates_of_a_run(inside, flags, expected):
    used = {torch.optim.AdamW: [], torch.optim.Muon: []}
    hook = register_optimizer_step_pre_hook(lambda o, *_: used[type(o)].append({g["lr"] for g in o.param_groups}))
    out = f"out/rates-{len(flags)}"
    inline(train, *TINY, "--data=small", "--steps=20", "--warmup=4", "--lr=8e-3", f"--out={out}", *flags.split())
    hook.remove()
    rates = [np.interp(s + 1, [0, 4], [0, 8e-3]) if s < 4 else expected(s) for s in range(20)]
    flat = lambda sets: [lr for (lr,) in sets]
    assert flat(used[torch.optim.AdamW]) == pytest.approx(rates) == [json.loads(line)["lr"] for line in Path(out, "log.jsonl").read_text().splitlines()]
    scale = {"--muon_lr=2e-2": 2.5, "--muon_lr=4e-3": 0.5}
    assert flat(used[torch.optim.Muon]) == pytest.approx([lr * scale[f] for f in flags.split() if f in scale for lr in rates])


# Runs


def trained(name, *flags):
    """A run of the tiny model, made once."""
    out = Path("out", name)
    if not out.exists():
        inline(train, *TINY, "--data=small", f"--out={out}", *flags)
    return out


def entries(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def loss_by_hand(m, rows, eot=None):
    """Mean cross-entropy of m on rows [n, seq + 1], in float64; with eot each document of a row by itself."""
    m.dtype, nats = torch.float64, []
    m.double()
    for row in rows.tolist():
        starts = [0] + [i for i in range(1, len(row) - 1) if row[i] == eot] + [len(row) - 1]
        for a, b in zip(starts, starts[1:]):
            logits = m(torch.tensor([row[a:b]]))[0].detach().numpy()
            nats += [math.log(np.exp(z).sum()) - z[y] for z, y in zip(logits, row[a + 1:b + 1])]
    return sum(nats) / len(nats)


def validation_rows(data="small", n=8, seq=32):
    """The n windows of an evaluation, evenly over the validation tokens."""
    ids = np.fromfile(f"data/{data}/val_000.bin", "<u2").astype(int)
    windows = (len(ids) - 1) // seq
    return np.stack([ids[seq * (i * windows // n):][:seq + 1] for i in range(n)])


@pytest.mark.parametrize("name, flags", [("muon", "--optimizer=muon"), ("bf16", "--decay=matrices --param_dtype=bfloat16")])
def test_moving_average(inside, monkeypatch, name, flags):
    saved, save = {}, torch.save
    monkeypatch.setattr(torch, "save", lambda state, file: (saved.update({(bool(state["ema"]), state["step"]): copy.deepcopy(state)})
                                                            if "optimizer" in state else None, save(state, file)))
    flags = ["--lr=1e-2", "--save_every=1", "--steps=12", "--eval_every=4", *flags.split()]
    run, without = trained("ema-" + name, "--ema=0.75", *flags), trained("no-ema-" + name, *flags)
    log, config = entries(run), json.loads((run / "config.json").read_text())
    assert all(b.get(key) == a.get(key) for a, b in zip(log, entries(without)) for key in ("loss", "val_loss"))  # evaluations leave no trace
    assert [s for s, entry in enumerate(log, 1) if "val_loss_ema" in entry] == [4, 8, 12] and "val_loss_ema" not in entries(without)[-1]

    dtype = getattr(torch, config["train"]["param_dtype"])
    torch.manual_seed(42)
    average = {n: p.detach().double() for n, p in GPT(GPTConfig(**config["model"])).cast_parameters(dtype).named_parameters()}
    for step in range(1, 13):
        weights = saved[True, step]["model"]
        average = {n: 0.75 * p + 0.25 * weights[n].double() for n, p in average.items()}
        kept = saved[True, step]["ema"]
        assert kept.keys() == average.keys() and all(p.dtype == torch.float32 and close(p, average[n], 1e-6) for n, p in kept.items())
    for ema, key in ((False, "val_loss"), (True, "val_loss_ema")):
        m = load_run(run, ema=ema)[0].cast_parameters(dtype)
        assert log[-1][key] == pytest.approx(loss_by_hand(m, validation_rows()), rel=1e-5)
    assert abs(log[-1]["val_loss"] - log[-1]["val_loss_ema"]) > 1e-3

    again = Path(f"out/ema-again-{name}")  # the run as it was after 6 steps
    again.mkdir()
    (again / "config.json").write_text((run / "config.json").read_text())
    (again / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log[:6]))
    save(saved[True, 6], again / "ckpt.pt")
    inline(train, f"--resume={again}")
    a, b = (torch.load(r / "ckpt.pt", weights_only=True) for r in (run, again))
    flat = lambda tree: [leaf for branch in (tree.values() if isinstance(tree, dict) else tree) for leaf in flat(branch)] if isinstance(tree, (dict, list, tuple)) else [tree]
    assert len(flat(a)) == len(flat(b)) and all(torch.equal(x, y) if torch.is_tensor(x) else x == y for x, y in zip(flat(a), flat(b)))
    assert losses(again) == losses(run)


def test_the_average_is_not_biased():
    """The shares of old and new add up to one, also as fp32 rounds them: 0.999 and 0.001, each rounded, would be 1.3e-5 too much."""
    draw, dtypes = torch.Generator().manual_seed(0), (torch.float32, torch.bfloat16)
    averages = [torch.ones(2000) for _ in dtypes]
    exact = [a.double() for a in averages]
    for _ in range(5000):
        params = [(1 + 0.5 * torch.randn(2000, generator=draw)).to(dtype) for dtype in dtypes]
        train.update_average(averages, params, 0.999)
        exact = [0.999 * a + 0.001 * p.double() for a, p in zip(exact, params)]
    assert all(abs((a - b).mean() / b.mean()) < 4e-6 for a, b in zip(averages, exact))


@pytest.mark.parametrize("flags", ["", "--route=mhar --delta --blocks=2", "--route=lr --rank=8 --delta", "--optimizer=muon --z_loss=0.1 --ema=0.9"])
def test_a_run_from_the_weights_of_another(inside, flags):
    source, options = trained("plain", "--route=baseline"), ["--init_from=out/plain", "--seed=7", "--steps=4", "--warmup=2", "--lr=1e-2"]
    same, run = trained("from", *options), trained("from" + flags.replace(" ", ""), *options, *flags.split())
    log = entries(run)
    rows = prepare.Shards("data/small", "train", 32).batch(0, 4, 7)
    assert log[0]["loss"] == pytest.approx(loss_by_hand(load_run(source)[0], rows), rel=1e-5)
    assert log[0]["loss"] == entries(same)[0]["loss"] < math.log(257) - 1  # closed gates: bit for bit
    assert [(entry["step"], entry["tokens"]) for entry in log] == [(s, 128 * s) for s in (1, 2, 3, 4)]
    assert [entry["lr"] for entry in log[:2]] == [0.005, 0.01]
    state = torch.load(run / "ckpt.pt", weights_only=True)
    assert state["step"] == 4 and all(s["step"] == 4 for o in state["optimizer"][-1:] for s in o["state"].values())


def test_a_run_from_another_resumes_without_it(inside):
    shutil.copytree(trained("plain", "--route=baseline"), "out/gone")
    run = trained("from-gone", "--init_from=out/gone", "--steps=4")
    shutil.rmtree("out/gone")
    inline(train, f"--resume={run}", "--steps=6")
    assert len(losses(run)) == 6


@pytest.mark.parametrize("name", ["plain", "ema-muon"])
def test_eval_only(inside, capsys, name):
    run = trained("plain", "--route=baseline") if name == "plain" else trained("ema-eval", "--ema=0.75", "--steps=12", "--doc_mask", "--log_routing")
    with open(run / "log.jsonl", "a") as log:
        log.write('{"step": 41, "lo')
    files = lambda: {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(inside.rglob("*")) if p.is_file()}
    before, (*_, last) = files(), map(json.loads, (run / "log.jsonl").read_text().splitlines()[:-1])
    capsys.readouterr()
    inline(train, f"--resume={run}", "--eval_only")
    shown = capsys.readouterr().out
    assert files() == before and str(run) in shown and f"step {last['step']}" in shown
    assert all(f"{key} {last[key]}" in shown for key in ("val_loss", "val_loss_ema", "routing_entropy") if key in last)
    assert ("val_loss_ema" in shown, "routing_entropy" in shown) == (name != "plain", name != "plain")
    inline(train, f"--resume={run}", "--eval_only", "--eval_tokens=640", "--micro=2")
    m = load_run(run)[0]
    value = float(re.search(r"val_loss ([\d.]+)", capsys.readouterr().out)[1])
    assert files() == before and value == pytest.approx(loss_by_hand(m, validation_rows(n=20), 256 if name != "plain" else None), rel=1e-5)
    (run / "log.jsonl").write_text((run / "log.jsonl").read_text().rpartition("\n")[0] + "\n")


@pytest.mark.parametrize("flags", ["--route=attnres", "--route=lr --rank=8", "--route=lr --keys=projected --rank=8", "--route=mhar", "--route=mhar --headwise",
                                   "--route=mhar --blocks=3", "--route=mhar --delta --blocks=2", "--route=lr --rank=8 --delta", "--route=baseline", "--route=hc"])
def test_routing_entropies(inside, monkeypatch, flags):
    run = trained("entropy" + flags.replace(" ", ""), "--log_routing", "--steps=6", "--seq=8", "--lr=0.2", "--warmup=0", "--eval_every=3", *flags.split())
    log = entries(run)
    assert [s for s in range(1, 7) if "routing_entropy" in log[s - 1]] == ([3, 6] if "baseline" not in flags and "hc" not in flags else [])
    if "routing_entropy" in log[-1]:
        c, weights, plain = load_run(run)[0].config, [], naive_route
        monkeypatch.setattr(sys.modules[__name__], "naive_route", lambda *args: (weights.append(plain(*args)[1]), plain(*args))[1])
        naive_gpt(c, torch.load(run / "ckpt.pt", weights_only=True)["model"], validation_rows(n=1, seq=8)[0, :-1].tolist())
        reads = iter(weights)  # in order: sites, tokens, and KV groups where a site reads for each
        sites = [list(itertools.islice(reads, 8 * (2 if c.headwise and t in (0, 2) else 1))) for t in range(5)]
        expected = [np.mean([-(w * np.log(w)).sum(0).mean() for w in site]) for site in sites[1:]]
        assert log[-1]["routing_entropy"] == pytest.approx(expected, abs=1e-4) and next(reads, None) is None
        assert max(abs(e - math.log(len(site[0]))) for e, site in zip(expected, sites[1:])) > 0.02  # not uniform any more


MHAR = dict(seq=1024, batch=32, steps=20_000, lr=1e-3, min_lr=1e-4, schedule="cosine", warmup=1000, optimizer="adamw", weight_decay=0.1,
            decay="all", z_loss=0.0, ema=0.0, clip=1.0, doc_mask=False, seed=42, eval_every=500, param_dtype="bfloat16")
LR = dict(seq=2048, batch=128, steps=76_294, lr=3e-4, min_lr=3e-5, schedule="linear", warmup=2000, warmdown=0.2, optimizer="muon", muon_lr=1e-3,
          weight_decay=0.1, z_loss=1e-5, ema=0.0, clip=1.0, doc_mask=True)
PAPER = {  # the papers' values; nano is ours
    "nano": dict(seq=128, batch=8, steps=700, lr=4e-3, min_lr=4e-4, optimizer="adamw", weight_decay=0.1, clip=1.0, param_dtype="float32"),
    "100m": MHAR | dict(seq=2048, batch=64), "124m": MHAR | dict(seq=2048, batch=64, lr=5e-4, min_lr=5e-5), "350m": MHAR, "1b": MHAR,
    "lr-0.5b": LR | dict(steps=38_147), "lr-1b": LR, "lr-4b": LR,
    "8b": dict(seq=4096, batch=256, steps=9_500, lr=4e-4, min_lr=4e-6, schedule="cosine", optimizer="adamw", weight_decay=0.05, decay="matrices",
               z_loss=1e-4, ema=0.999, clip=1.0)}


@pytest.mark.parametrize("size", PAPER)
def test_recipes(inside, size):
    assert set(PAPER) == set(train.RECIPES) == set(SIZES)
    c, expected = train.configure({"size": size})[1], PAPER[size]
    assert {name: getattr(c, name) for name in expected} == expected | dict(min_lr=pytest.approx(expected["min_lr"])) and c.warmup > 0
    if size[:3] == "lr-":
        assert c.seq * c.batch == 262_144 and math.isclose(c.seq * c.batch * c.steps, (10 if size == "lr-0.5b" else 20) * 1e9, rel_tol=1e-4)
    out = f"out/recipe-{size}"
    inline(train, *TINY, f"--size={size}", "--data=small", "--steps=1", "--clip=2", "--seed=42", f"--out={out}", *["--blocks=2"] * (size == "8b"))
    recipe = json.loads(Path(out, "config.json").read_text())["recipe"]
    assert re.search({"nano": "ours", "8b": "MHAR.*2607.27230"}.get(size, "LR.*2607.09694" if size[:3] == "lr-" else "MHAR.*2607.27230"), recipe["of"])
    assert recipe["changed"] == dict(seq=32, batch=4, steps=1, warmup=5, clip=2.0, eval_tokens=256)
    inline(train, f"--resume={out}", "--steps=2", "--save_every=1")
    assert json.loads(Path(out, "config.json").read_text())["recipe"]["changed"] == recipe["changed"] | dict(steps=2)


def test_training_on_packed_documents(inside):
    """The loss of a step, and of an evaluation, is that of each document by itself."""
    if not Path("data/short").exists():
        Path("texts").mkdir()
        for i in range(80):
            Path(f"texts/{i}.txt").write_text(f"{i} " * random.Random(i).randint(1, 12))
        inline(prepare, "--dataset=text", "--glob=texts/*.txt", "--val_fraction=0.4", "--out=data/short")
    rows, found = prepare.Shards("data/short", "train", 32).batch(0, 4, 42), {}
    source = trained("plain", "--route=baseline")
    for mask in (True, False):
        run = trained(f"packed-{mask}", "--data=short", "--steps=1", f"--doc_mask={mask}", "--warmup=0", "--lr=1e-2", f"--init_from={source}")
        by_hand = lambda m, rows: loss_by_hand(m, rows, 256 if mask else None)
        found[mask] = entries(run)[0]
        assert found[mask]["loss"] == pytest.approx(by_hand(load_run(source)[0], rows), rel=1e-5)
        n = len(np.fromfile("data/short/val_000.bin", "<u2")) - 1
        assert found[mask]["val_loss"] == pytest.approx(by_hand(load_run(run)[0], validation_rows("short", min(8, n // 32))), rel=1e-5)
    assert (rows[:, 1:-1] == 256).sum() > 5 and all(abs(found[True][key] - found[False][key]) > 1e-3 for key in ("loss", "val_loss"))


@pytest.mark.parametrize("name", ["baseline", "hc", "mhar", "headwise", "projected-blocks", "mhar-delta"])
def test_recompute_changes_nothing(name):
    m, idx, calls, grads = build(dtype=torch.float32, **ROUTES[name]), tokens(batch=2), [], []
    m.sublayers[3].register_forward_pre_hook(lambda *_: calls.append(0))
    for m.recompute in (False, True):
        grads.append(torch.autograd.grad(m(idx, tokens(3, 2), docs=torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)), list(m.parameters())))
    assert len(calls) == 3 and all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.fixture(scope="session")
def sharded(folder):
    """[A run on one rank, the same on two with FSDP2, that went on on one after 4 of 6 steps]: their logs and last weights."""
    flags = [*TINY, "--data=small", "--optimizer=muon", "--ema=0.75", "--z_loss=0.01", "--delta", "--blocks=2", "--lr=1e-2", "--doc_mask",
             "--micro=2", "--eval_every=2", "--save_every=2", "--steps=6"]
    call("train.py", *flags, "--out=out/one", cwd=folder)
    call("train.py", *flags, "--fsdp", "--out=out/sharded", cwd=folder, ranks=2)
    shutil.copytree(folder / "out/sharded", folder / "out/resharded", ignore=shutil.ignore_patterns("ckpt", "ckpt.pt"))
    call("train.py", "--resume=out/resharded", cwd=folder, ranks=1)
    runs = [folder / "out" / name for name in ("one", "sharded", "resharded")]
    return [(entries(run), torch.load(run / "ckpt.pt", weights_only=True)) for run in runs]


@pytest.mark.parametrize("key", ["loss", "grad_norm", "val_loss", "val_loss_ema", "model", "ema"])
def test_sharded_training_equals_one_rank(sharded, key):
    one, *others = ([log[s].get(key) for s in range(6)] if key not in state else state[key] for log, state in sharded)
    for other in others:
        if isinstance(one, dict):
            assert one.keys() == other.keys() and all((other[n] - one[n]).norm() < 3e-3 * one[n].norm() for n in one)  # Muon's products are in bf16
        else:
            assert [x is None for x in one] == [x is None for x in other]
            assert other == [x if x is None else pytest.approx(x, rel=2e-4) for x in one]
            assert one[0] is None or other[0] == pytest.approx(one[0], rel=2e-6)  # before any update: gradients are summed in fp32


def test_a_gradient_that_is_not_finite_stops_the_run(folder):
    script = """if True:
        import sys, torch, train
        start, count = train.GPT.__init__, []
        def plant(self, *args):
            start(self, *args)
            self.embed.weight.register_hook(lambda g: g * float("nan") if count.append(0) or len(count) == 9 else g)
        train.GPT.__init__ = plant
        train.main()"""
    (code, _, err), = finished(script, *TINY, "--data=small", "--out=out/planted", "--save_every=4", "--ema=0.9", cwd=folder)
    run = folder / "out/planted"
    assert code == 1 and err.count("\n") == 1 and re.match("step 9: .*gradient norm nan; the run stops", err), err
    states = {name: torch.load(run / name, weights_only=True) for name in ("ckpt.pt", "ckpt_prev.pt")}
    assert [s["step"] for s in states.values()] == [8, 4] and len(losses(run)) == 8 and not list(run.glob("*.partial"))
    assert all(p.isfinite().all() for s in states.values() for part in ("model", "ema") for p in s[part].values())
    call("train.py", f"--resume={run}", "--steps=12", cwd=folder)
    assert list(losses(run)) == list(range(1, 13)) and all(map(math.isfinite, losses(run).values()))


def test_linear_with_a_norms_gain():
    g = torch.Generator().manual_seed(1)
    x, w, gain = (torch.randn(size, generator=g, dtype=torch.float64, requires_grad=True) for size in ((2, 3, 5), (4, 5), (5,)))
    y = model.ScaledLinear.apply(x, w, gain)
    for b, t, o in ((0, 0, 0), (1, 2, 3), (0, 1, 2)):
        naive = sum(x[b, t, i].item() * w[o, i].item() * gain[i].item() for i in range(5))
        assert y[b, t, o].item() == pytest.approx(naive, rel=1e-12)
    torch.autograd.gradcheck(model.ScaledLinear.apply, (x, w, gain))
    for stored in (torch.float32, torch.bfloat16):  # bf16 products; what follows them is fp32
        low = [a.detach().to(dtype).requires_grad_() for a, dtype in ((x, torch.bfloat16), (w, stored), (gain, torch.float32))]
        dy = torch.randn(2, 3, 4, generator=g).bfloat16()
        grads = torch.autograd.grad(model.ScaledLinear.apply(*low), low, dy)
        assert all(grad.dtype == leaf.dtype for grad, leaf in zip(grads, low))
        X, W, G = (a.detach().double() for a in low)
        product = (dy.double().flatten(0, 1).T @ X.flatten(0, 1)).bfloat16().double()
        dx = ((dy.double() @ W.bfloat16().double()).bfloat16().double() * G).bfloat16()
        right = [dx, (product * G).to(stored), (product * W).sum(0)]
        assert all((a.double() - b.double()).norm() < 1e-6 * b.double().norm() for a, b in zip(grads, right))


# What a run needs, by arithmetic


@pytest.mark.parametrize("flags", ["--route=mhar --param_dtype=bfloat16 --ema=0.9", "--route=attnres --blocks=2 --optimizer=muon", "--route=hc --norm_gain=false --tied=false"])
def test_memory_of_weights_and_optimizer(inside, flags):
    run = trained("memory" + flags.replace(" ", ""), "--steps=1", *flags.split())
    state, run = torch.load(run / "ckpt.pt", weights_only=True), load_run(run)[1]
    c, flat = GPTConfig(**run["model"]), lambda part: {a.data_ptr(): a.nbytes for a in part if a.ndim}
    plan = model.memory(c, 32, 1, param_dtype=getattr(torch, run["train"]["param_dtype"]), optimizer=run["train"]["optimizer"], ema=bool(state["ema"]))
    moments = [a for o in state["optimizer"] for s in o["state"].values() for name, a in s.items() if name != "step"]
    # Not read out: gradients have the parameters' dtypes.
    assert plan["parameters"] == plan["gradients"] == sum(flat(state["model"].values()).values())
    assert plan["optimizer"] == sum(flat(moments).values()) and plan["average"] == sum(flat((state["ema"] or {}).values()).values())
    quarter = model.memory(c, 32, 1, ranks=4, fsdp=True, optimizer=run["train"]["optimizer"], ema=True)
    assert quarter["parameters"] == round(sum(p.numel() for p in GPT(c).parameters())) and quarter["average"] == quarter["parameters"]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("route", ["baseline", "mhar"])
def test_memory_of_activations(route, stored, qk_norm):
    """Against what the compiler's partition really keeps of each kind of sublayer; no compiler for the CPU is needed for that."""
    c, T = GPTConfig(n_layer=1, d_model=128, n_head=4, n_kv_head=2, head_dim=48, d_mlp=320, route=route, vocab_size=16, qk_norm=qk_norm), 1024
    rope, kept, normed = [a.float() for a in model.rotary(c, 0, T, torch.device("cpu"))], {}, route != "baseline"
    for kind in (model.Attention, model.MLP):
        sublayer = kind(c)
        GPT.cast_parameters(sublayer, stored)
        sublayer.compile(backend="aot_eager_decomp_partition")
        x = torch.randn(1, T, c.d_model, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda a: kept.__setitem__(a.untyped_storage().data_ptr(), a) or a, lambda a: a):
            y, _ = sublayer(x, normed, rope, None, None)
        own = {p.untyped_storage().data_ptr() for p in (x, *rope, *sublayer.parameters())}
        kept = {at: a for at, a in kept.items() if at not in own}
        y.sum().backward()
    measured, plan = sum(a.nbytes for a in kept.values()), model.memory(c, T, 1, param_dtype=stored)
    d = 2 * T * c.d_model
    others = 4 * d if route == "baseline" else 0  # the three inputs, which no sublayer keeps for itself, and the last one normed
    assert measured == pytest.approx(plan["activations"] - others, rel=0.03), (measured, plan)
    assert plan["bank"] == (0 if route == "baseline" else 2 * 3 * d)


def test_hyper_connections_start():
    """As pre-norm: sublayer t reads copy t mod n, every copy gets y; no dynamic weights yet, but their scale is 0.01."""
    p = build(route="hc", noise=0, dtype=torch.float32).router
    for t in range(6):
        for j in range(4):
            assert p["alpha"][t, j].tolist() == [float(j == t % 4)] + [float(j == k) for k in range(4)]
    assert all((p[f"w_{name}"] == 0).all() and (p[f"s_{name}"] == 0.01).all() for name in ("alpha", "beta"))
    assert (p["beta"] == 1).all() and (p["norm"] == 1).all()


def test_compiled_hyper_connections(monkeypatch):
    """What they give, and what they keep for backward."""
    shared, compile_, made = dict(n_layer=3, d_model=512, n_head=8, d_mlp=64, vocab_size=16), torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda f: made.append(f.__name__) or compile_(f, backend="aot_eager_decomp_partition"))
    m, plain, kept, T = GPT(GPTConfig(**shared, route="hc"), torch.bfloat16), GPT(GPTConfig(**shared, route="hc")), {}, 256
    m.compile_parts()
    parameters = {name: torch.nn.Parameter(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) / 8) for name, p in m.router.items()}
    results = []
    for gpt, dtype in ((m, torch.bfloat16), (plain, torch.float32)):
        x = torch.randn(1, T, 512, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
        stream = [gpt.stream(x, gpt.config, parameters) for _ in range(2)][1]  # compiled once, whatever the number of streams
        with torch.autograd.graph.saved_tensors_hooks(lambda a: kept.__setitem__((dtype, a.untyped_storage().data_ptr()), a) or a, lambda a: a):
            for t in range(gpt.config.M):
                stream.write(stream.read(t).detach().roll(1, -1).requires_grad_(), None)
            out = stream.read(gpt.config.M)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [x, *parameters.values()])])
    assert sorted(made) == ["_call_impl"] * 6 + ["add", "combine", "weights"]  # the first: sublayers
    for a, b in zip(*results):
        assert (a - b).norm() < 0.02 * b.norm()
    own = {p.untyped_storage().data_ptr() for p in parameters.values()}
    measured = sum(a.untyped_storage().nbytes() for (dtype, at), a in kept.items() if dtype == torch.bfloat16 and at not in own)
    plan = [model.memory(GPTConfig(**shared, route=route), T, 1)["activations"] for route in ("hc", "baseline")]
    assert measured == pytest.approx(plan[0] - plan[1], rel=0.1), (measured, plan)


def test_memory_of_the_bank(kernel):
    c = GPTConfig(**SMALL | dict(route="mhar"))
    bank = kernel.Bank(draw(3, 5, c.d_model), draw(c.M + 1, c.H, c.r // c.H), c.ends)
    assert bank.slots.bank.nbytes + bank.slots.mix.nbytes == model.memory(c, 5, 3, dtype=torch.float32)["bank"]


def test_dry_run(inside, monkeypatch, capsys):
    before = sorted(inside.rglob("*"))
    shown = lambda ranks, *flags: (monkeypatch.setenv("WORLD_SIZE", str(ranks)), inline(train, "--dry_run", *flags), capsys.readouterr().out)[2]
    eight, one = shown(8, "--size=8b", "--fsdp", "--recompute", "--micro=2"), shown(1, "--size=8b", "--recompute", "--micro=2")
    peaks = [float(re.search(r"peak +([\d.]+)", text)[1]) for text in (eight, one)]
    assert peaks[0] < 60 < 80 < peaks[1] and "8,030,797,889 parameters" in eight and "9,961,472,000 tokens" in eight and sorted(inside.rglob("*")) == before
    hours = [float(re.search(r"([\d.]+) hours", text)[1]) for text in (eight, one)]
    assert hours[1] == pytest.approx(8 * hours[0], rel=0.01)
    # 6 FLOPs a parameter and token, and attention's: 12 L d T (its causal half not taken off); routing adds less than 1 %
    flops = 9_961_472_000 * (6 * (8.03e9 - 128_256 * 4096) + 12 * 32 * 4096 * 4096)
    assert hours[0] * 3600 == pytest.approx(flops / (0.4 * 989e12 * 8), rel=0.01)


def test_a_disk_that_is_full_for_one_rank(folder):
    """The second sharded save fails on rank 1 alone: the first stays, and the run goes on from it."""
    code = """if True:
        import os, resource, signal, train
        save, count = train.dcp.save, []
        def limited(*args, **options):
            if count.append(0) or len(count) == 2 and os.environ["RANK"] == "1":
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
            return save(*args, **options)
        train.dcp.save = limited
        train.main()"""
    done = finished(code, *TINY, "--data=small", "--fsdp", "--save_every=2", "--steps=6", "--out=out/filled", cwd=folder, ranks=2)
    run = folder / "out/filled"
    assert all(code and "cannot write out/filled/ckpt.partial, what was there before is untouched" in err for code, _, err in done), done
    assert (run / "ckpt/.metadata").exists() and not (run / "ckpt.partial/.metadata").exists() and not (run / "ckpt_prev").exists()
    call("train.py", "--resume=out/filled", cwd=folder, ranks=2)
    assert list(losses(run)) == list(range(1, 7)) and (run / "ckpt.pt").exists() and not list(run.glob("*.partial"))


# ----------------------------------------------------------------------------------------------------------------------
# probe.py: its arithmetic against the papers' figures, its statistics against naive reads, cases with known answers

PROBED = dict(vocab_size=257)  # of data/small
ROUTED = [name for name in ROUTES if name not in ("baseline", "hc")]


def same(a, b, tol=1e-9):
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and np.abs(a - b).max() <= tol * np.abs(b).max()


def test_probe_flops_of_lr():
    """LR table 5, every cell: S_src (r + d) multiply-adds, and r (L (d + m) + d) for projected keys, of L (4 d^2 + 3 d m)."""
    printed = {("slice", r, "full"): p for r, p in zip((16, 32, 64, 128, 256, 512, 768, 1024), (
        "0.4129", "0.4193", "0.4320", "0.4574", "0.5082", "0.6099", "0.7115", "0.8131"))}
    printed |= {("slice", 128, N): p for N, p in (("N=4", "0.06278"), ("N=8", "0.09865"), ("N=16", "0.1704"))}
    printed |= {("projected", r, "full"): p for r, p in ((16, "0.8966"), (32, "1.387"), (64, "2.367"))}
    printed |= {("projected", 32, N): p for N, p in (("N=4", "1.025"), ("N=8", "1.058"), ("N=16", "1.123"))}
    swept = probe.sweep(GPTConfig.from_size("lr-0.5b", route="lr"))
    cells = {(row["keys"], row["rank"], N): row[N] for row in swept["added_flops_percent"] for N in ("full", "N=4", "N=8", "N=16")}
    assert len(cells) == 32 + 12 and all(f"{cells[key]:#.4g}" == p for key, p in printed.items())
    L, d, m, reads = 24, 1024, 2816, {name: sum(1 + len(by_block(t, 48, N)) for t in range(1, 49)) for name, N in (("full", 48), ("N=4", 4), ("N=8", 8), ("N=16", 16))}
    assert reads == {row["blocks"]: row["source_reads"] for row in swept["reads"]} == {"full": 1224, "N=4": 168, "N=8": 264, "N=16": 456}
    for (keys, r, N), percent in cells.items():
        added = reads[N] * (r + d) + (r * (L * (d + m) + d) if keys == "projected" else 0)
        assert percent == pytest.approx(100 * added / (L * (4 * d * d + 3 * d * m)), rel=1e-12)


@pytest.mark.parametrize("size, flags, expected", [
    ("lr-0.5b", dict(route="lr", rank=32), dict(kernel_reduction_percent="48.44", parameters_added="1536", source_reads="1224", retained_slots="49")),
    ("lr-0.5b", dict(route="lr", keys="projected"), dict(key_parameters="2981888", parameters_added="2983424", key_bytes_percent="3.125", kernel_reduction_percent="48.44")),
    ("lr-0.5b", dict(route="lr", rank=128, blocks=8), dict(added_flops_percent="0.09865", source_reads="264", retained_slots="9")),
    ("100m", dict(), dict(added_flops_percent="0.879")), ("350m", dict(), dict(added_flops_percent="0.664", parameters_added="100352")),
    ("1b", dict(), dict(added_flops_percent="0.781", parameters_added="186880")),
    ("350m", dict(route="baseline"), dict(added_flops_percent="0", parameters_added="0")),
], ids=str)
def test_probe_cost(size, flags, expected):
    result = probe.cost(GPTConfig.from_size(size, **flags))
    assert {name: f"{result[name]:.{len(p.partition('.')[2])}f}" for name, p in expected.items()} == expected


def test_probe_traffic():
    for L, N in itertools.product((1, 4), (1, 2, 3, 8)):
        if N <= 2 * L:  # each pair by itself, both ways
            c = GPTConfig(n_layer=L, blocks=N)
            assert probe.pair_reads(c, 1) == (c.source_reads(), c.source_reads())
    M, C = 48, 8
    before, after = [k * C + 1 for k in range(M // C)], [M - (k + 1) * C for k in range(M // C)]  # full routing: of each chunk
    full = GPTConfig.from_size("350m")
    assert probe.pair_reads(full, C) == (sum(before) + M * (C + 1) // 2, M + sum(after) + M * (C + 1) // 2)
    # 6 sublayers, blocks end at 2, 4, 6, chunks of 2. Forward 1 + 2, 2 + 2, 3 + 2; backward slot 0: 6, then 2 + 4, 2 + 2, 2 + 0
    assert probe.pair_reads(GPTConfig(n_layer=3, blocks=3), 2) == (12, 18)
    push, pull, chunked = probe.cost(full, tokens=1000, itemsize=2, bandwidth=1e12)["traffic"]
    assert (push["pair_units"], pull["pair_units"]) == (1224 * (1 + 2 + 4), 2 * 1224) and chunked["pair_units"] == sum(probe.pair_reads(full, 8)) < 1224
    assert pull["bytes"] == (2 * 1224 + 7 * 48) * 1000 * 1024 * 2 and pull["ms"] == pytest.approx(pull["bytes"] / 1e9)
    assert probe.cost(full, itemsize=4)["traffic"][0]["pair_units"] == 1224 * (1 + 2 + 2)
    pytest.importorskip("triton")
    import kernel
    assert probe.Cost.chunk == kernel.CHUNK


def probed(name="mhar", n=4, seq=8, **options):
    """A model in float64 on data/small, its run, and flags."""
    m = build(**PROBED | (ROUTES[name] if isinstance(name, str) else name))
    return m, {"data": {"folder": "data/small", "encoding": "bytes"}, "train": {"seq": seq}}, options | dict(tokens=n * seq)


def reads_by_hand(m, rows):
    """{t: [[(sources, query, norm, keys, weights) for each read] for each token]} of naive_gpt on rows [n, seq]."""
    c, calls, plain = m.config, [], naive_route

    def spy(sources, query, norm, eps, keys=None):
        mix, weights = plain(sources, query, norm, eps, keys)
        calls.append((sources, query, norm, keys, weights))
        return mix, weights

    reads = {t: [] for t in range(c.M + 1)}
    for row in rows:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[__name__], "naive_route", spy)
            naive_gpt(c, m.state_dict(), row.tolist())
        found = iter(calls)
        for t in reads:
            reads[t] += [[next(found) for _ in range(c.n_kv_head if c.headwise and t % 2 == 0 and t < c.M else 1)] for _ in row]
        calls.clear()
    return reads


def deviations_by_hand(W):
    """W: {t: weights [tokens, n, H]} -> {t: [H]}, r between the first 16 tokens and the others."""
    gap = lambda w: w.mean(0) - w.mean(0).mean(-1, keepdims=True)
    a, b = (np.concatenate([gap(h).ravel() for h in half]) for half in zip(*(np.split(w, [16]) for w in W.values())))
    return {t: np.abs(gap(w)).sum(0) / 2 for t, w in W.items()}, np.corrcoef(a, b)[0, 1]


@pytest.mark.parametrize("name", ["mhar", "attnres", "lr-projected", "headwise", "mhar-delta", "mhar-blocks"])
def test_probe_routing(inside, name):
    """All statistics against naive reads; in batches of one as in one big batch; the text's picture."""
    m, run, options = probed(name, n=5)  # windows: two and three
    c = m.config
    results = [probe.routing(m, run, probe.Routing(batch=batch, **options), "cpu") for batch in (1, 4)]
    reads, random = reads_by_hand(m, validation_rows(n=5, seq=8)[:, :-1]), probe.RandomQueries(0)
    W, null = {}, {}
    for t in range(1, c.M + 1):
        W[t] = np.stack([np.concatenate([w for *_, w in token], -1) for token in reads[t]])
        queries = [random((t, j), torch.tensor(q))[0].numpy() for j, (_, q, *_) in enumerate(reads[t][0])]
        null[t] = np.stack([np.concatenate([naive_route(s, q, norm, c.norm_eps, k)[1] for (s, _, norm, k, _), q in zip(token, queries)], -1) for token in reads[t]])
    (ours, r), (theirs, r_random) = (deviations_by_hand(x) for x in (W, null)) if c.H > 1 else ((None, None),) * 2
    for result in results:
        assert result["tokens"] == 40 and [row["site"] for row in result["sites"]] == list(W)
        for t, row in zip(W, result["sites"]):
            exp_h = np.exp(-(W[t] * np.log(W[t])).sum(1))  # [tokens, H]
            assert same(row["weights"], W[t].mean(0)) and same(row["effective_by_head"], exp_h.mean(0)) and row["effective"] == pytest.approx(exp_h.mean())
            assert row["spread"] == pytest.approx(math.sqrt(exp_h.var(0).mean())) and 0.01 < row["spread"] < row["effective"] < len(row["slots"])
            if c.H > 1:
                assert same(row["deviation"], ours[t], 1e-7) and same(row["deviation_random"], theirs[t], 1e-7)
            if c.delta:
                assert row["gate"] == m.router["gate"][t].item()
        assert ("replication_r" in result) == (c.H > 1) and (c.H == 1 or (result["replication_r"], result["replication_r_random"]) == pytest.approx((r, r_random)))
    for site in (None, 2):
        shown = probe.text_routing(m, run, probe.Routing(text="json", site=site), "cpu")
        hand = reads_by_hand(m, np.array([[256, *b"json"]]))[site or c.M]
        assert shown["tokens"] == list("·json") and same(np.array(shown["weights"]).transpose(2, 1, 0), np.stack([np.concatenate([w for *_, w in token], -1) for token in hand]))


def test_probe_statistics_in_batches():
    """fp32 weights, added batch by batch: the sums are those of one batch in float64."""
    w, statistics = torch.randn(5, 40_000, 2, generator=torch.Generator().manual_seed(0)).mul(2).softmax(0), probe.Statistics()
    for half, part in enumerate(w.split([10_000, 30_000], 1)):
        for batch in part.split(700, 1):
            statistics.add(half, (1, 0), batch.unflatten(1, (-1, 20)))
    weights, halves, mean, std = statistics.sites()[1]
    exp_h = np.exp(-(w.double() * w.double().log()).sum(0).numpy())
    assert same(weights, w.double().mean(1), 1e-12) and same(halves[1], w[:, 10_000:].double().mean(1), 1e-12)
    assert same(mean, exp_h.mean(0), 1e-7) and same(std, exp_h.std(0), 1e-6)


@pytest.mark.parametrize("name", ROUTED)
def test_probe_known_routing(inside, name):
    """Zero queries read every slot alike; huge ones a single slot at each token."""
    m, run, options = probed(name)
    for size, expected in ((0.0, lambda row: len(row["slots"])), (1e7, lambda row: 1)):
        for key in ("query", "group_query"):
            if key in m.router:
                m.router[key].data = torch.randn(m.router[key].shape, generator=torch.Generator().manual_seed(1)).double() * size
        for row in probe.routing(m, run, probe.Routing(**options), "cpu")["sites"]:
            assert row["effective_by_head"] == pytest.approx([expected(row)] * len(row["effective_by_head"]), abs=1e-3) and row["spread"] < 1e-2
            assert same(np.sum(row["weights"], 0), np.ones(len(row["weights"][0])))


def kl_by_hand(sources, query, norm, keys, eps, S, interleaved):
    """KL(a_s || alpha) of one token, mean over heads and slices."""
    (H, R), d, found = query.shape, len(sources[0]), []
    for h in range(H):
        parts = np.zeros((S, len(sources)))
        for i, v in enumerate(sources):
            key = keys[i] if keys is not None else v[(h + 1) * (d // H) - R:(h + 1) * (d // H)]
            rho = math.sqrt(np.mean((v if norm == "full" else key) ** 2) + eps)
            for a in range(R):
                parts[a % S if interleaved else a * S // R, i] += query[h, a] * key[a] / rho
        softmax = lambda z: [math.exp(x) / sum(map(math.exp, z)) for x in z]
        alpha = softmax(parts.sum(0))
        found += [sum(p * math.log(p / q) for p, q in zip(softmax(S * z), alpha)) for z in parts]
    return np.mean(found)


@pytest.mark.parametrize("name, S", [("attnres", 4), ("lr", 2), ("lr-full", 5), ("lr-projected", 5), ("mhar-rank", 2), ("headwise", 4), ("lr-delta", 4)])
def test_probe_disagreement(inside, name, S):
    """Every column of the table against naive reads: trained, random, contiguous, interleaved, equally many sources, cosines."""
    m, run, options = probed(name, n=2)
    c, flags = m.config, probe.Queries(slices=S, sources=4, draws=2, seed=3, **options)
    result, reads = probe.width(m, run, flags, "cpu"), reads_by_hand(m, validation_rows(n=2, seq=8)[:, :-1])
    random = probe.RandomQueries(3, 2)
    assert [row["site"] for row in result["sites"]] == list(range(1, c.M + 1)) and result["tokens"] == 16
    for t, row in enumerate(result["sites"], 1):
        nulls = [random((t, j), torch.tensor(q)).numpy() for j, (_, q, *_) in enumerate(reads[t][0])]
        assert all(same(np.linalg.norm(q, axis=-1), np.linalg.norm(read[1], axis=-1)[None].repeat(2, 0)) for q, read in zip(nulls, reads[t][0]))
        some = [round(x) for x in np.linspace(0, row["slots"] - 1, 4)]
        matched = lambda sources: [sources[i] for i in some]
        for kind, pick in (("contiguous", list), ("interleaved", list), ("matched", matched)):
            if kind == "matched" and row["slots"] < 4:
                assert kind not in row
                continue
            kl = lambda read, q: kl_by_hand(pick(read[0]), q, read[2], read[3] and pick(read[3]), c.norm_eps, S, kind == "interleaved")
            ours = np.mean([kl(read, read[1]) for token in reads[t] for read in token])
            theirs = np.mean([kl(read, q) for token in reads[t] for read, pair in zip(token, nulls) for q in pair])
            assert (row[kind], row[f"{kind}_random"], row[f"{kind}_excess"]) == pytest.approx((ours, theirs, ours - theirs), rel=1e-8) and ours > 1e-3
        cosine = lambda a, b: a @ b / math.sqrt(a @ a * (b @ b))
        cosines = [cosine(a, b) for token in reads[t] for s, *_ in token for a, b in itertools.combinations(s, 2)]
        assert row["cosine"] == pytest.approx(np.mean(cosines), abs=1e-9)
    assert result["mean"]["contiguous_excess"] == pytest.approx(np.mean([row["contiguous_excess"] for row in result["sites"]]))


def test_probe_planted_disagreement():
    """Two slices that want different sources, KL by hand: alpha is 1/2 each, a_s is p = 9/10 for its own. Slices that agree give 0."""
    a = math.log(9) / 2  # softmax(2 z) = (0.9, 0.1)
    sources = [torch.tensor([1.0, 0, 0, 0], dtype=torch.float64), torch.tensor([0, 0, 1.0, 0], dtype=torch.float64)]
    planted = a / 2 * torch.tensor([[1.0, 0, 1.0, 0]], dtype=torch.float64)  # rho = 1/2
    kl = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    z = probe.slice_logits(sources, planted, 2, eps=0.0)
    assert probe.disagreement(z).item() == pytest.approx(kl)
    assert probe.disagreement(probe.slice_logits(sources, planted, 2, interleaved=True, eps=0.0)).item() == pytest.approx(0)  # coordinates 0 and 2 are one slice
    assert probe.cosine([torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3)]).item() == pytest.approx(2 / 3)  # 1/3 for each of two tokens
    assert probe.disagreement(torch.tensor([1.0, -2.0, 0.5]).view(3, 1, 1).expand(3, 1, 4)).item() == pytest.approx(0, abs=1e-7)


def test_probe_query_matrix():
    draw = np.random.default_rng(0)
    rank3 = torch.tensor(draw.normal(size=(9, 3)) @ draw.normal(size=(3, 20)))
    found = probe.query_matrix(torch.cat([torch.zeros(1, 20), rank3.float()]), None)
    assert (found["rank"], found["queries"], found["zero_queries"], found["width"]) == (3, 9, 1, 20)
    gain = torch.tensor(draw.uniform(0.5, 2, size=(9, 20))).float()
    found = probe.query_matrix(rank3.float(), gain)
    values = np.linalg.svd(rank3.float().double().numpy() * gain.double().numpy(), compute_uv=False)
    assert same(found["singular_values"], values) and found["rank"] > 3
    energy = np.cumsum(values ** 2) / np.sum(values ** 2)
    assert energy[found["rank_99"] - 1] >= 0.99 > energy[found["rank_99"] - 2]
    query = torch.zeros(3, 16)
    query[0, 5], query[1], query[2, :2] = 3.0, -0.2, torch.tensor([3.0, 4.0])
    found = probe.query_matrix(query, None)
    p = (9 / 25, 16 / 25)
    assert found["effective_dimension_by_site"] == pytest.approx([1, 16, math.exp(-sum(x * math.log(x) for x in p))])
    assert found["effective_dimension"] == pytest.approx(np.mean(found["effective_dimension_by_site"])) and found["zeros_fp32"] == found["zeros_fp64"] == 15 + 14
    tiny, gain = torch.ones(1, 4), torch.ones(1, 4)
    tiny[0, 0] = gain[0, 0] = 1e-30  # their product is 0 in fp32 only
    found = probe.query_matrix(tiny, gain)
    assert (found["zeros_fp32"], found["zeros_fp64"]) == (1, 0)
    assert probe.query_matrix(torch.zeros(2, 4), None) == {"queries": 0, "zero_queries": 2}


def probe_json(inside, *flags):
    inline(probe, *flags, "--json=probe.json")
    return json.loads(Path("probe.json").read_text())


def test_probe_queries_of_a_file(inside, capsys):
    save_file = pytest.importorskip("safetensors.torch").save_file
    draw = torch.Generator().manual_seed(0)
    rows = {f"layers.{i}.query": torch.randn(6, generator=draw) for i in range(12)}
    save_file(rows | {f"layers.{i}.gain": torch.full((6,), 1.0 + i) for i in range(12)} | {"all": torch.stack(list(rows.values())).view(12, 2, 3)}, "q.safetensors")
    folded = np.stack([(1.0 + i) * rows[f"layers.{i}.query"].numpy() for i in range(12)])  # layer 10 after layer 9
    one = probe_json(inside, "queries", "q.safetensors", "--query=layers.*.query", "--gain=layers.*.gain")["matrices"]["query"]
    assert same(one["singular_values"], np.linalg.svd(folded, compute_uv=False), 1e-6) and one["queries"] == 12
    p = folded ** 2 / (folded ** 2).sum(1, keepdims=True)
    assert same(one["effective_dimension_by_site"], np.exp(-(p * np.log(p)).sum(1)), 1e-5)
    assert probe_json(inside, "queries", "q.safetensors", "--query=all")["matrices"] == probe_json(inside, "queries", "q.safetensors", "--query=layers.*.query")["matrices"]


def test_probe_queries_of_a_run(inside):
    run = trained("probed", "--steps=12", "--route=attnres", "--lr=0.05", "--warmup=0", "--norm_eps=1e-2")
    state = torch.load(run / "ckpt.pt", weights_only=True)["model"]
    folded = (state["router.query"] * state["router.gain"]).double().flatten(1).numpy()[1:]
    found = probe_json(inside, "queries", str(run), "--tokens=64")["matrices"]["query"]
    assert same(found["singular_values"], np.linalg.svd(folded, compute_uv=False), 1e-6) and (found["queries"], found["zero_queries"], found["rank"]) == (4, 1, 4)


def test_probe_memory(inside):
    """What is alive between two batches does not grow with the tokens."""
    m, run, options = probed("mhar", n=24)
    gc.collect(), gc.freeze()  # what there is already is not looked at again
    hidden, alive = m.hidden, []

    def spy(*args):
        alive.append(sum(x.nbytes for x in gc.get_objects() if type(x) is torch.Tensor))
        return hidden(*args)

    m.hidden = spy
    for call in (lambda: probe.routing(m, run, probe.Routing(batch=4, **options), "cpu"), lambda: probe.width(m, run, probe.Queries(batch=4, **options), "cpu")):
        alive.clear()
        call()
        assert len(alive) == 6 and alive[2] <= alive[1] and alive[5] <= alive[4]  # the second half of the text has sums of its own
    gc.unfreeze()


def fake_run(name, losses, seed=42, speed=1000, norms=(1.0, 3.0), tokens=1024, peak=None, recipe={}, **flags):
    """A finished run's config.json and log.jsonl, an evaluation at every step."""
    folder = Path("out", name)
    folder.mkdir(parents=True)
    c, recipe = GPTConfig(**dict(n_layer=2, d_model=32, n_head=4, n_kv_head=2, d_mlp=48, route="baseline") | flags), train.TrainConfig(seed=seed, steps=len(losses), **recipe)
    (folder / "config.json").write_text(json.dumps({"model": vars(c), "train": vars(recipe), "data": {"folder": "data/small", "encoding": "bytes", "sha256": ["x"]},
                                                    "flops_per_token": c.flops(128)}))
    (folder / "log.jsonl").write_text("".join(json.dumps({"step": s, "tokens": tokens * s // len(losses), "loss": 9.0, "grad_norm": norms[s % 2], "tokens_per_s": speed,
                                                          "peak_gib": peak and peak * s, "val_loss": loss}) + "\n" for s, loss in enumerate(losses, 1)))
    return str(folder)


README_TABLES = re.findall(r"```\n\$ python (probe\.py compare .*)\n((?:.*\n)+?)```", (HERE / "README.md").read_text())


@pytest.mark.parametrize("command", [command for command, _ in README_TABLES])
def test_the_readmes_tables_are_what_compare_prints(command, monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    script, *rest = [name for word in command.split() for name in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    inline(probe, *rest)
    assert dict(README_TABLES)[command] == capsys.readouterr().out


def test_the_readme_has_tables():
    assert [command.split()[2] for command, _ in README_TABLES] == [
        "results/nano", "results/ladder/*x12-*", "results/ladder/*x24-*", "results/ladder/*-512x12-1e-3-*", "results/heads", "results/graft"]


def test_the_readmes_commands_made_the_kept_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("out").symlink_to(HERE / "results")
    script = re.search(r"```bash\n(python prepare.py .*?)```", (HERE / "README.md").read_text(), re.S)[1]
    lines = subprocess.run(["bash", "-c", 'python() { echo "$@"; }\n' + script], capture_output=True, text=True, check=True).stdout.splitlines()
    made = []
    for flags in (parse_flags(train.TrainConfig, GPTConfig, argv=line.split()[1:]) for line in lines if line.startswith("train.py")):
        made.append(flags.pop("out"))
        config, recipe = train.configure(flags)
        kept = model.read_config(made[-1])
        assert vars(config) | {"vocab_size": 257} == kept["model"] and vars(recipe) | {"data": "data/env"} == kept["train"], made[-1]
    groups = ("ladder", "ranks", "heads", "graft")
    assert sorted(made) == sorted(f"out/{folder.relative_to(HERE / 'results')}" for group in groups for folder in (HERE / "results" / group).iterdir())


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_probe_compare(fakes):
    pytest.importorskip("matplotlib"), pytest.importorskip("safetensors")
    curve = lambda last: [5.0, 4.0] + [last + 0.01 * (i - 5) for i in range(11)]  # eleven evaluations of mean `last`, two before
    runs = [fake_run("base-42", curve(3.0)), fake_run("base-43", curve(3.2), seed=43), fake_run("other", curve(1.0), seed=42, d_model=48),
            *[fake_run(f"mhar-{s}", curve(x), seed=s, speed=800, norms=(0.5, 2.0), route="mhar", blocks=2) for s, x in ((42, 2.9), (43, 3.0), (44, 2.0))]]
    found = probe_json(fakes, "compare", *runs, "--tail=11", f"--plot={fakes / 'curves.svg'}")
    rows = {row["runs"]: row for row in found["groups"]}
    assert set(rows) == {"baseline --d_model=32", "baseline --d_model=48", "mhar --blocks=2 --d_model=32"}
    row = rows["mhar --blocks=2 --d_model=32"]  # differences -0.1, -0.2 (the seed 44 has no baseline): mean -0.15, std 0.0707, SE 0.05
    assert (row["seeds"], row["loss"], row["delta"], row["delta_std"], row["delta_over_se"]) == pytest.approx((3, 7.9 / 3, -0.15, 0.1 / math.sqrt(2), 3.0))
    assert row["std"] == pytest.approx(np.std([2.9, 3.0, 2.0], ddof=1)) and row["speed_ratio"] == 0.8
    norms = [2.0, 0.5] * 6 + [2.0]
    assert (row["grad_norm"], row["grad_norm_variance"], row["clipped"]) == pytest.approx((np.mean(norms), np.var(norms), 7 / 13))
    reads = 2 + 2 + 3 + 3  # of the four sites, two blocks
    assert row["added_flops_percent"] == pytest.approx(100 * reads * 2 * 32 / (2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)))
    assert probe.flags_of(GPTConfig(n_layer=2, blocks=4)) == "mhar"  # as many blocks as outputs: full
    assert [run["baseline"] for run in found["runs"]] == ["out/base-42", "out/base-43", "out/other", "out/base-42", "out/base-43", None]


def test_probe_compare_names_what_tells_runs_apart(fakes, capsys):
    wide = dict(d_model=64, n_head=8, d_mlp=96)
    runs = [fake_run("narrow", [3.0, 2.0], peak=0.5), fake_run("wide", [3.0, 1.5], **wide), fake_run("slow", [3.0, 1.4], recipe={"lr": 1e-3}, **wide)]
    assert [run["label"] for run in probe_json(fakes, "compare", *runs)["runs"]] == [
        "baseline --d_model=32 --lr=0.004", "baseline --d_model=64 --lr=0.004", "baseline --d_model=64 --lr=0.001"]  # heads and MLP follow from the width
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[:2]] == ["GiB", "1"]  # the most over the run
    more = fake_run("heads", [3.0, 1.6], **wide | {"n_head": 4})
    assert probe_json(fakes, "compare", *runs, more)["runs"][3]["label"] == "baseline --d_model=64 --n_head=4 --lr=0.004"  # not any more
    capsys.readouterr()
    inline(probe, "compare", more)
    assert "GiB" not in capsys.readouterr().out  # a CPU's runs have none


def test_probe_compare_draws_the_numbers(fakes, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    figures, close = [], plt.close
    monkeypatch.setattr(plt, "close", figures.append)

    def axes(figure, *runs):
        probe_json(fakes, "compare", *runs, "--tail=1", f"--figure={figure}", "--plot=x.svg")
        return figures[-1].axes[0]

    lines = lambda ax: {line.get_label(): line.get_xydata().tolist() for line in ax.lines}
    bars = lambda ax: {bar.get_label(): (bar.lines[0].get_xydata().tolist(), [s.tolist() for s in bar.lines[2][0].get_segments()]) for bar in ax.containers}
    wide = dict(d_model=64, n_head=8, d_mlp=96)
    base = [fake_run("base", [3.0, 2.0]), fake_run("base-43", [3.0, 2.2], seed=43), fake_run("base-wide", [3.0, 1.8], **wide)]
    lr = {(r, N): [fake_run(f"lr-{r}-{N}-{s}", [3.0, 1.5 + r / 100 + N / 10 + s / 1000], seed=s, norms=(r, N), route="lr", rank=r, blocks=N) for s in (42, 43)]
          for r, N in ((8, 2), (16, 2), (8, 0))}
    slow = fake_run("lr-slow", [3.0, 9.0], route="lr", rank=8, blocks=2, recipe={"lr": 1e-3})
    mhar = [fake_run("mhar", [2.9, 1.7], route="mhar"), fake_run("mhar-1", [2.9, 1.6], route="mhar", heads=1), fake_run("mhar-wide", [2.9, 1.3], route="mhar", **wide)]
    every = [*base, *itertools.chain(*lr.values()), *mhar]
    found = lines(axes("curves", *base[:2], mhar[0]))
    assert found["mhar"] == [[1, 2.9], [2, 1.7]] and found["baseline"] == [[1, 3.0], [2, 2.0]] and sorted(found)[0] == "_child1"  # the second seed, without a name
    (points, errors) = bars(axes("width", *every, slow))["lr --blocks=2 --rank=8"]
    assert points == [[32, pytest.approx(-0.2775)]] and errors == [[[32, pytest.approx(-0.2775 - 0.199 / 2**0.5)], [32, pytest.approx(-0.2775 + 0.199 / 2**0.5)]]]
    assert bars(axes("width", *every))["mhar"][0] == [[32, pytest.approx(-0.3)], [64, pytest.approx(-0.5)]]
    deep = [fake_run("deep", [3.0, 1.5], n_layer=4), fake_run("mhar-deep", [3.0, 1.4], route="mhar", n_layer=4)]  # better, but another line
    assert [bars(axes("width", *every, *deep))[f"mhar --n_layer={n}"][0] for n in (2, 4)] == [
        [[32, pytest.approx(-0.3)], [64, pytest.approx(-0.5)]], [[32, pytest.approx(-0.1)]]]
    (points, errors) = bars(axes("flops", *lr[8, 2]))["lr --blocks=2 --rank=8"]
    assert points[0][1] == pytest.approx(1.8225) and points[0][0] > 0 and errors[0][1][1] - errors[0][0][1] == pytest.approx(2 * 0.001 / 2**0.5)
    assert lines(axes("norms", *every)) == {"N = 2": [[8, 5], [16, 9]], "N = full": [[8, 4]]}  # means of the norms r and N
    ax = axes("grid", *every, slow)
    assert [[round(v, 4) if v else None for v in row] for row in ax.images[0].get_array().tolist()] == [[1.8225, 1.6225], [1.9025, None]]
    assert [label.get_text() for label in (*ax.get_xticklabels(), *ax.get_yticklabels())] == ["2", "full", "8", "16"]
    ax = axes("heads", *mhar[:2])
    assert ax.images[0].get_array().tolist() == [[1.6], [1.7]] and [label.get_text() for label in (*ax.get_xticklabels(), *ax.get_yticklabels())] == ["2", "1", "2"]
    for fig in figures:
        close(fig)


def test_probe_compare_groups_continued_runs(fakes):
    """Each seed goes on from its own model: seeds of one row. Other models, and none, are other rows."""
    runs = [fake_run(f"{route}-{s}", [3.0, x], seed=s, route=route, recipe={"init_from": f"out/first-{s}"})
            for s, route, x in ((42, "baseline", 2.0), (43, "baseline", 2.2), (42, "mhar", 1.9), (43, "mhar", 2.0))]
    rows = probe_json(fakes, "compare", *runs)["groups"]
    assert [(row["runs"], row["seeds"], row["delta"]) for row in rows] == [("baseline", 2, 0), ("mhar", 2, pytest.approx(-0.15))]
    others = [fake_run("other", [3.0, 1.0], seed=44, route="mhar", recipe={"init_from": "out/other-44"}), fake_run("fresh", [3.0, 1.0], seed=45, route="mhar")]
    rows = probe_json(fakes, "compare", *runs[2:], *others)["groups"]
    assert [(row["runs"], row["seeds"]) for row in rows] == [("mhar --init_from=out/first-SEED", 2), ("mhar --init_from=out/other-SEED", 1), ("mhar", 1)]


@pytest.mark.parametrize("field", [*vars(train.TrainConfig()), "sha256", "norm_eps", "rope_theta"])
def test_probe_compare_keeps_apart_what_differs(fakes, field):
    """Whatever changes a run's losses makes a row of its own and, but for learning rates, needs a baseline of its own."""
    how_run = {"size", "out", "resume", "eval_only", "dry_run", "micro", "seed", "save_every", "log_routing", "wandb", "verify", "device", "fsdp", "recompute", "compile"}
    runs = [fake_run("base", [3.0, 2.0]), fake_run("mhar", [3.0, 1.5], route="mhar"), fake_run("odd", [3.0, 1.0], route="mhar")]
    file = Path(runs[2], "config.json")
    config = json.loads(file.read_text())
    part = config["data" if field == "sha256" else "train" if field in config["train"] else "model"]
    part[field] = {"sha256": ["y"], "seed": 42, "steps": 3, "init_from": "out/model"}.get(field, 7 if isinstance(part.get(field), int | float) and field != "doc_mask" else "odd")
    file.write_text(json.dumps(config))
    found = probe_json(fakes, "compare", *runs)["runs"]
    apart = field not in how_run
    assert (found[1]["label"] != found[2]["label"]) == (apart or field == "size")
    assert found[2]["baseline"] == (None if apart and field not in ("lr", "min_lr", "muon_lr") else runs[0])


def test_probe_compare_counts_seeds(fakes, capsys):
    """Several runs of a seed, or one given twice, count as one; an unfinished baseline is none, one of another machine gives no speed."""
    deltas = {42: 0.1, 43: 0.2}
    runs = [fake_run(f"{route}-{s}", [3.0 - (route == "mhar") * delta], seed=s, route=route) for s, delta in deltas.items() for route in ("baseline", "mhar")]
    twice = fake_run("mhar-again", [2.7], seed=43, route="mhar")  # a difference of 0.3: 0.25 for this seed
    row = {row["runs"]: row for row in probe_json(fakes, "compare", *runs, f"{runs[0]}/", runs[1], runs[1], twice)["groups"]}["mhar"]
    assert (row["seeds"], row["delta"], row["delta_over_se"]) == (2, pytest.approx(-0.175), pytest.approx(0.175 / (0.15 / 2)))
    config = Path(runs[0], "config.json")
    config.write_text(config.read_text().replace('"flops', '"ranks": 8, "flops'))
    assert [run["speed_ratio"] for run in probe_json(fakes, "compare", *runs)["runs"]] == [1, None, 1, 1]
    config.write_text(config.read_text().replace('"steps": 1', '"steps": 2'))
    config = Path(runs[1], "config.json")
    config.write_text(config.read_text().replace('"steps": 1', '"steps": 2'))
    assert [run["baseline"] for run in probe_json(fakes, "compare", *runs)["runs"]] == [None, None, runs[2], runs[2]]
    assert f"not at their last step: {runs[0]} (1 of 2), {runs[1]} (1 of 2)" in capsys.readouterr().out


@pytest.mark.parametrize("part, value", [
    ("train", {"lr": [1]}), ("train", {"seed": {}}), ("train", {"steps": None}), ("train", {"size": []}), ("data", {"sha256": [3]}), ("model", {"rope_scaling": 1}),
    ("log", {"step": "1"}), ("log", {"peak_gib": "3"}), ("log", {"tokens_per_s": None}), ("log", {"grad_norm": 10 ** 400}), ("log", {"val_loss": float("nan")}),
    ("log", {"tokens": float("inf")}), ("deep", None)], ids=str)
def test_probe_compare_leaves_out_the_damaged(fakes, capsys, part, value):
    good, bad = fake_run("good", [3.0, 2.0]), fake_run("bad", [3.0, 2.0], peak=1)
    file = Path(bad, "log.jsonl" if part == "log" else "config.json")
    if part == "log":
        file.write_text("".join(json.dumps(json.loads(line) | value) + "\n" for line in file.read_text().splitlines()))
    elif part == "deep":
        file.write_text("[" * 100_000)
    else:
        config = json.loads(file.read_text())
        config[part] |= value
        file.write_text(json.dumps(config))
    found = probe_json(fakes, "compare", good, bad)
    err = capsys.readouterr().err
    assert [run["run"] for run in found["runs"]] == [good] and err.startswith("left out: out/bad") and err.count("\n") == 1


def test_probe_compare_leaves_out_what_is_no_run(fakes, capsys):
    good, cut, empty = fake_run("good", [3.0, 2.0]), fake_run("cut", [3.0, 2.0]), fake_run("empty", [])
    Path(cut, "log.jsonl").write_text(Path(cut, "log.jsonl").read_text() + '{"step": 3, "lo')
    Path("out/none").mkdir()
    shutil.copytree(good, "out/logless"), Path("out/logless/log.jsonl").unlink()
    shutil.copytree(good, "out/odd"), Path("out/odd/log.jsonl").write_text('{"val_loss": 3.0}\n')
    found = probe_json(fakes, "compare", good, cut, empty, "out/none", "out/logless", "out/odd", "out/nothing")
    assert [(run["run"], run["loss"], run["evaluations"]) for run in found["runs"]] == [(good, 2.0, 1), (cut, 2.0, 1)]
    assert capsys.readouterr().err.count("left out: ") == 5
    found = probe_json(fakes, "compare", "out")  # all that are in it
    assert [run["run"] for run in found["runs"]] == [cut, good] and capsys.readouterr().err.count("left out: ") == 3


@pytest.mark.parametrize("evaluations, averaged", [(1, 1), (7, 1), (10, 2), (20, 3), (70, 10), (71, 11), (500, 11)])
def test_probe_compare_averages_the_last_seventh(fakes, evaluations, averaged):
    run = fake_run("run", [1.0 / i for i in range(1, evaluations + 1)])
    assert probe_json(fakes, "compare", run)["runs"][0]["loss"] == pytest.approx(np.mean([1.0 / i for i in range(evaluations - averaged + 1, evaluations + 1)]))


def test_probe_power_law(fakes, capsys):
    C = np.array([1e15, 4e15, 3e16, 2e17])
    A, alpha, E = 900.0, 0.18, 1.7
    assert probe.power_law(C, A * C ** -alpha + E) == pytest.approx((A, alpha, E, 0), rel=1e-3, abs=1e-6)
    wrong = A * C ** -alpha + E + np.array([0.01, -0.02, 0.015, -0.005])
    assert 1e-3 < probe.power_law(C, wrong)[3] < 0.02
    for *bad, says in (([1e15, 1e15, 2e15], [3, 3, 2], "three different"), ([1e15, 2e15, 3e15], [2, 3, 4], "does not fall"), ([1e15, 2e15, 3e15], [4, 4, 4 - 1e-9], "does not fall"),
                       ([0, 1e15, 2e15], [3, 2, 1], "positive"), ([1e15, 2e15, 3e15], [3, 2, 0], "positive")):
        with pytest.raises(ValueError, match=says):
            probe.power_law(*bad)
    flops, law = GPTConfig(n_layer=2, d_model=32, n_head=4, n_kv_head=2, d_mlp=48, route="baseline").flops(128), lambda c: 50 * c ** -0.1 + 1.5
    runs = [fake_run(f"base-{n}", [law(flops * n)], tokens=n) for n in (10**6, 10**7, 10**8)]
    routed = GPTConfig(n_layer=2, d_model=32, n_head=4, n_kv_head=2, d_mlp=48, route="mhar").flops(128) * 10**7
    runs += [fake_run("mhar", [law(1.5 * routed)], tokens=10**7, route="mhar"), fake_run("floor", [1.4], tokens=10**7, route="mhar", blocks=2)]
    found = probe_json(fakes, "compare", *runs, "--gain")["power_law"]
    assert found["alpha"] == pytest.approx(0.1, rel=1e-2) and found["gain"]["out/mhar"] == pytest.approx(1.5, rel=1e-2) and found["gain"]["out/floor"] is None
    with pytest.raises(SystemExit):
        inline(probe, "compare", *runs[1:], "--gain")
    assert "three different amounts of compute, there are 2" in capsys.readouterr().err
    file = Path(runs[0], "config.json")
    file.write_text(file.read_text().replace('["x"]', '["y"]'))
    with pytest.raises(SystemExit):
        inline(probe, "compare", *runs, "--gain")
    assert "same data" in capsys.readouterr().err


def test_probe_items(fakes, capsys):
    ours, theirs = {i: int(i % 3 > 0) for i in range(90)}, {i: int(i % 3 > 0 and i > 8 or i == 0) for i in range(90)}
    pair = probe.paired_items(ours, theirs)  # gained 1, 2, 4, 5, 7, 8; lost 0
    assert (pair["n"], pair["gained"], pair["lost"], pair["difference"]) == (90, 6, 1, 5 / 90) and pair["mcnemar_p"] == 2 * (1 + 7) / 2 ** 7
    draw, gap = np.random.default_rng(1), np.array([1] * 60 + [-1] * 30 + [0] * 810)
    naive = np.percentile([gap[draw.integers(900, size=900)].mean() for _ in range(10_000)], (2.5, 97.5))
    many = probe.paired_items({i: int(gap[i] > 0) for i in range(900)}, {i: int(gap[i] < 0) for i in range(900)})
    assert (many["low"], many["high"]) == pytest.approx(naive, abs=0.0015) and (many["gained"], many["lost"]) == (60, 30)
    equal = probe.paired_items(ours, ours)
    assert (equal["mcnemar_p"], equal["low"], equal["high"]) == (1.0, 0.0, 0.0)
    for name, items in (("base", theirs), ("mhar", ours)):
        run = Path(fake_run(name, [3.0], route="mhar" if name == "mhar" else "baseline"))
        (run / "eval").mkdir()
        (run / "eval/tasks.json").write_text(json.dumps({"results": {}, "items": {"arc": [{"id": i, "correct": x} for i, x in items.items()]}}))
    (row,) = probe_json(fakes, "compare", "out/base", "out/mhar", "--items")["items"]
    assert row == {"run": "out/mhar", "against": "out/base", "task": "arc"} | pair
    for run in ("base", "mhar"):  # other tasks, whose items are not right or wrong, or half written
        Path(f"out/{run}/eval/loss.json").write_text(json.dumps({"items": {"validation": [{"id": 0, "correct": 1.5}], "none": []}}))
        Path(f"out/{run}/eval/torn.json").write_text('{"items": {')
    capsys.readouterr()
    assert [row["task"] for row in probe_json(fakes, "compare", "out/base", "out/mhar", "--items")["items"]] == ["arc"]
    assert capsys.readouterr().err.count("torn.json holds no results") == 2
    Path("out/mhar/eval/tasks-2.json").write_text(json.dumps({"items": {"arc": [{"id": i + 1, "correct": x} for i, x in ours.items()]}}))
    with pytest.raises(SystemExit):  # the higher number counts
        inline(probe, "compare", "out/base", "out/mhar", "--items")
    assert "left out: out/mhar and out/base were not asked the same items of arc: 90 and 90" in capsys.readouterr().err


@pytest.mark.parametrize("flags, words", [
    ("cost", "memory traffic"), ("cost --size=lr-0.5b --route=lr --sweep", "rank r|added FLOPs|projected"), ("routing out/probed-mhar --tokens=256", "exp|random queries|head 2"),
    ("routing out/probed-mhar --text=a$b$", "head 2|slot"), ("queries out/probed --tokens=64", "contiguous|singular value|cosine"),
    *[(f"compare out/probed-lr out/probed-mhar out/plain --figure={figure}", words) for figure, words in (
        ("curves", "optimizer step|validation loss"), ("grid", "blocks N|rank r"), ("flops", "added FLOPs"), ("norms", "gradient norm"), ("heads", "routing heads|KV heads"))],
])
def test_probe_draws(inside, flags, words):
    pytest.importorskip("matplotlib")
    trained("probed", "--steps=12", "--route=attnres", "--lr=0.05", "--warmup=0", "--norm_eps=1e-2"), trained("probed-mhar", "--route=mhar", "--steps=12"), trained("plain", "--route=baseline")
    trained("probed-lr", "--route=lr", "--steps=12")
    inline(probe, *flags.split(), "--plot=probe.svg", "--json=probe.json")
    assert all(word in Path("probe.svg").read_text() for word in words.split("|")) and json.loads(Path("probe.json").read_text())["command"].startswith("python probe.py " + flags.split()[0])
    if flags == "cost":
        inline(probe, "cost", "--plot=probe.png")
        assert Path("probe.png").read_bytes()[:4] == b"\x89PNG"


def test_a_reader_that_has_gone(tmp_path):
    script = f"{sys.executable} {HERE / 'probe.py'} cost | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.parametrize("flags, says", [
    ("nothing", "unknown command"), ("cost --size=1g", "unknown size"), ("cost out/probed", "takes no folder"), ("cost --route=lr --rank=0", "rank"), ("cost --tokens=0", "positive"),
    ("cost --sweep", "--route=lr"), ("cost --route=lr --sweep --rank=3", "by itself"), ("cost --route=baseline --plot=x.svg", "none"), ("cost --bandwith=3", "--bandwidth"),
    ("cost --json=out/probed/config.json", "own files"), ("routing out/probed-mhar --site=2", "--text"), ("cost --json=nowhere/x.json", "no folder"), ("cost --json=out", "is a folder"), ("cost --plot=x.gif", ".png"), ("routing", "takes RUN and flags"), ("routing a b", "takes RUN and flags"), ("routing out/nothing", "is no run"),
    ("routing out/plain", "no depth routing"), ("routing out/probed-mhar --tokens=-1", "positive"), ("routing out/probed-mhar --text=a --site=5", "from 1 to 4"),
    ("routing out/probed-mhar --checkpoint=last.pt", "last.pt"), ("queries out/probed --slices=5", "divide"), ("queries out/probed --slices=0", "positive"), ("queries out/probed --query=x", ".safetensors"),
    ("queries nothing.safetensors --query=x", "nothing.safetensors"), ("queries half.safetensors --query=x", "half.safetensors"), ("queries half.safetensors", "names"),
    ("compare", "takes RUN ... and flags"), ("compare out/nothing", "no run to compare"), ("compare out/probed --tail=0", "positive"), ("compare out/probed --items", "eval.py"),
    ("compare out/plain --figure=grid --plot=x.svg --json=x.json", "--route=lr"), ("compare out/plain --figure=heads --plot=x.svg", "--route=mhar"), ("compare out/plain --gain", "three"),
    ("compare out/plain --figure=flops", "--plot=FILE"), ("compare out/plain --figure=width --plot=x.svg", "needs runs with a baseline"), ("compare out/plain --json=x.svg --plot=x.svg", "one file"),
])
def test_probe_refuses(inside, capsys, flags, says):
    pytest.importorskip("matplotlib"), pytest.importorskip("safetensors")
    trained("probed", "--steps=12", "--route=attnres", "--lr=0.05", "--warmup=0", "--norm_eps=1e-2"), trained("probed-mhar", "--route=mhar", "--steps=12"), trained("plain", "--route=baseline")
    Path("half.safetensors").write_bytes(b"\x08" * 20)
    before = sorted(inside.rglob("*"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        inline(probe, *flags.split())
    err = capsys.readouterr().err
    assert stop.value.code == 2 and says in err and len([line for line in err.splitlines() if not line.startswith("left out: ")]) == 1, err
    assert sorted(inside.rglob("*")) == before


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation: the loss against a loop over the split, answers against one full forward pass for each, in float64

LETTERS = ["a", "b", "c", "d", " ", "ab", "ba", "cc", " a", "d ", "abc", "x", "y", "z", "xy", "zz", "\n", "\n\n", "c\n", "dd", "0", "1"]
SPELLING = prepare.Encoding(lambda text: [LETTERS.index(piece) for piece in re.findall("|".join(sorted(LETTERS, key=len, reverse=True)), text)],
                            lambda ids: "".join(LETTERS[i] for i in ids if i < 22), 23, 22)  # longest pieces first; they join across boundaries


def asked(*args):
    return SimpleNamespace(args=args, task_name="asked")


@torch.no_grad()
def naive_answer(m, prompt, answer, max_length):
    """Log-probability of the answer's ids after the prompt's, of which as many are read as fit; and whether each was the likeliest."""
    ids = prompt[-max(1, max_length + 1 - len(answer)):] + answer
    total, greedy = 0.0, True
    for z, token in zip(m(torch.tensor([ids[:-1]]))[0].double().numpy()[len(ids) - 1 - len(answer):] if answer else [], answer):
        total += z[token] - z.max() - math.log(np.exp(z - z.max()).sum())
        greedy &= z.argmax() == token
    return total, greedy


def texts(n, seed=0, longest=30):
    draw = random.Random(seed)
    return ["".join(draw.choice(LETTERS) for _ in range(draw.randrange(longest))) for _ in range(n)]


def newest(run, name):
    return json.loads(max(Path(run, "eval").glob(f"{name}*.json"), key=lambda file: file.stat().st_mtime_ns).read_text())


@pytest.mark.parametrize("flags, options", [("--route=baseline", ""), ("--route=mhar --ema=0.75 --doc_mask", "--ema"), ("--route=lr --rank=8", "--tokens=1003")])
def test_eval_loss_is_that_of_a_loop_over_the_split(inside, monkeypatch, capsys, flags, options):
    if not Path("data/shards").exists():  # several shards, the last window of each shorter than the others
        monkeypatch.setattr(prepare, "SHARD", 3001)
        make_texts(inside / "many")
        prepare.prepare(text_config("many", "data/shards"))
    run = trained("eval" + flags.replace(" ", ""), "--data=shards", "--steps=12", "--lr=1e-2", *flags.split())
    inline(evaluation, "loss", str(run), "--batch_tokens=200", *options.split())
    m, found, left = load_run(run, ema="ema" in options)[0], newest(run, "loss"), 1003 if "tokens" in options else 10**9
    nats, counts, size = [], [], 0
    for file in sorted(Path("data/shards").glob("val_*.bin")):
        ids = np.fromfile(file, "<u2").astype(int)[:left + 1]
        left -= len(ids) - 1
        for eot, part in itertools.groupby(ids[1:].tolist(), lambda i: i == 256):
            size += 0 if eot else len(bytes(part).decode(errors="replace").encode())  # U+FFFD for what a shard's end cuts
        for start in range(0, len(ids) - 1, 32):
            window = ids[start:start + 33]
            counts.append(len(window) - 1)
            nats.append(loss_by_hand(m, window[None], 256 if "doc_mask" in flags else None))
    total = sum(a * n for a, n in zip(nats, counts))
    expected = {"loss": total / sum(counts), "perplexity": math.exp(total / sum(counts)), "bits_per_byte": total / math.log(2) / size}
    assert found["results"]["validation"] == pytest.approx(expected | {"tokens": sum(counts), "bytes": size, "windows": len(counts)}, rel=1e-6)
    assert [item["correct"] for item in found["items"]["validation"]] == pytest.approx(nats, rel=1e-5) and found["step"] == 12
    assert len(set(counts)) > 1 and f"loss {found['results']['validation']['loss']:.6f}" in capsys.readouterr().out


def test_eval_loss_has_the_same_bits_on_any_number_of_ranks(folder, inside):
    run = trained("plain", "--route=baseline")
    inline(evaluation, "loss", str(run), "--batch_tokens=100")
    one, before = newest(run, "loss"), {file: file.read_bytes() for file in Path(run, "eval").iterdir()}
    call("eval.py", "loss", str(run), "--batch_tokens=100", cwd=folder, ranks=2)
    two = newest(run, "loss")
    assert one["results"] == two["results"] and one["items"] == two["items"] and len(one["items"]["validation"]) > 50
    assert all(file.read_bytes() == text for file, text in before.items()) and len(list(Path(run, "eval").iterdir())) == len(before) + 1


def test_eval_in_bf16(inside):
    run = trained("plain", "--route=baseline")
    for dtype in ("bfloat16", "float32"):
        inline(evaluation, "loss", str(run), "--tokens=2000", f"--dtype={dtype}")
        loss = newest(run, "loss")["results"]["validation"]["loss"]
        m = load_run(run)[0]
        ids = torch.from_numpy(np.fromfile("data/small/val_000.bin", "<u2")[:2001].astype(int))
        m.dtype, nats = getattr(torch, dtype), []
        m.cast_parameters(m.dtype)
        for a in range(0, 2000, 32):
            logits = m(ids[None, a:min(a + 32, 2000)])[0].detach().double()
            nats += F.cross_entropy(logits, ids[a + 1:a + 1 + len(logits)], reduction="none").tolist()
        assert loss == pytest.approx(sum(nats) / 2000, rel=1e-6 if dtype == "float32" else 1e-4)  # logits and no log-probabilities are bf16


@pytest.mark.parametrize("name, max_length", [("baseline", 12), ("lr-projected", 12), ("headwise", 100), ("mhar-delta", 12)])
def test_eval_answers(monkeypatch, name, max_length):
    m = build(**ROUTES[name])
    monkeypatch.setattr(evaluation, "CHUNK", 23 * 7)
    asks, sizes, heads = [*zip(texts(60), texts(60, 1, 10))], [], []
    for module, log in ((m, sizes), (m.head, heads)):
        method = "hidden" if module is m else "forward"
        inner = getattr(module, method)
        monkeypatch.setattr(module, method, lambda x, *more, inner=inner, log=log: (log.append(x.shape), inner(x, *more))[1])
    scorer = evaluation.Scorer(m, SPELLING, max_length, 80)
    answers = scorer.loglikelihood([asked(*args) for args in asks])
    assert max(shape.numel() for shape in sizes) <= 80 and len(sizes) < 30 and max(shape[0] for shape in heads) == 7
    lengths = set()
    for (prompt, answer), (total, greedy) in zip(asks, answers):
        a, b = scorer.split(prompt, answer)
        lengths.add(len(a) + len(b) > max_length)
        expected = naive_answer(m, a, b, max_length)
        assert total == pytest.approx(expected[0], abs=1e-9) and greedy == expected[1]
    assert lengths == {False, True} if max_length == 12 else {False}


def test_eval_parts_a_prompt_from_its_answer():
    split = evaluation.Scorer(build(), SPELLING, 10, 10).split
    ids = lambda *pieces: [LETTERS.index(piece) for piece in pieces]
    assert split("xy", " ab") == (ids("xy"), ids(" a", "b"))
    assert split("xy ", "ab") == (ids("xy"), ids(" a", "b"))  # white space goes to the answer
    assert split("", "abc") == ([22], ids("abc"))  # nothing but an end of text before it
    assert split(" \n", "abc") == ([22], ids(" ", "\n", "abc"))
    assert split("xa", "bd") == (ids("x"), ids("ab", "d"))  # a token over the boundary
    for prompt, answer in zip(texts(200), texts(200, 1)):
        a, b = split(prompt, answer)
        assert SPELLING.decode(a + b) == prompt + answer and prompt.startswith(SPELLING.decode(a)) and (a[0] == 22) == (a == [22])


def test_eval_long_texts_in_windows():
    pytest.importorskip("lm_eval")
    m, asks = build(route="mhar"), ["", "a", *texts(12, 2, 60)]
    found = evaluation.Scorer(m, SPELLING, 8, 50).loglikelihood_rolling([asked(text) for text in asks])
    for text, total in zip(asks, found):
        ids, expected = SPELLING.encode(text), 0.0
        for i in range(len(ids)):
            end = min(8 * (i // 8 + 1), len(ids))  # of the window that token i is a target in
            expected += naive_answer(m, ([22] + ids)[max(0, end - 8):i + 1], ids[i:i + 1], 8)[0]
        assert total == pytest.approx(expected, abs=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("name", ["hc", "mhar", "lr-projected", "mhar-delta"])
def test_eval_generation(name):
    """Against full forward passes. Stop strings are cut out of what the model says by itself, most of them across tokens."""
    pytest.importorskip("lm_eval")
    m, draw, asks, expected, reasons = build(**ROUTES[name]), random.Random(0), [], [], set()
    for i, prompt in enumerate(texts(40, 3, 20)):
        most, ids = 3 + i % 11, SPELLING.encode(prompt) or [22]
        ids, out = ids[-max(16 - most, 8):], []
        while len(out) < most and len(ids) < 16 and out[-1:] != [22]:
            out.append(m(torch.tensor([ids]))[0, -1].argmax().item())
            ids = ids + out[-1:]
        text = SPELLING.decode(out)
        stops = [text[k:k + draw.randrange(1, 4)] for k in draw.sample(range(len(text)), min(len(text), i % 3))]
        ends = list(itertools.accumulate(len(SPELLING.decode([token])) for token in out))
        end = min((end for end in ends if any(stop in text[:end] for stop in stops)), default=None)  # of the token that completes one
        cut = min(text[:end].index(stop) for stop in stops if stop in text[:end]) if end else len(text)
        reasons.add("across tokens" if end and any(cut < e < end for e in ends) else "stop" if end else "end of text" if out[-1] == 22 else "length")
        asks.append(asked(prompt, {"until": stops, "max_gen_toks": most, "do_sample": False}))
        expected.append(text[:cut])
    assert evaluation.Scorer(m, SPELLING, 16, 60).generate_until(asks) == expected
    assert {"across tokens", "stop", "length"} <= reasons
    with pytest.raises(ValueError, match="greedy"):
        evaluation.Scorer(m, SPELLING, 16, 60).generate_until([asked("a", {"do_sample": True, "temperature": 1.0})])


# The harness

TASK = """task: %s
dataset_path: %s
dataset_kwargs: {data_files: {test: %s}, cache_dir: %s}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{answers}}"
doc_to_target: right
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


@pytest.fixture
def harness(inside, monkeypatch):
    """A tokenizer, data and a run with it, and a task of 200 items of uneven length."""
    pytest.importorskip("lm_eval")
    tokenizers = pytest.importorskip("tokenizers")
    for name in ("HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "HF_ALLOW_CODE_EVAL"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    monkeypatch.setattr("urllib.request.urlopen", lambda *args, **options: (_ for _ in ()).throw(OSError("no network")))
    sources = sorted((Path(os.__file__).parent / "json").glob("*.py"))
    if not Path("tasks").exists():
        t = tokenizers.Tokenizer(tokenizers.models.BPE())
        t.pre_tokenizer, t.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
        t.train_from_iterator([file.read_text() for file in sources], tokenizers.trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
        t.save("mine.json")
        prepare.prepare(prepare.Config(dataset="text", glob=str(sources[0].parent / "*.py"), val_fraction=0.3, encoding="mine.json", out="data/bpe"))
        Path("tasks").mkdir()
        draw, words = random.Random(0), " ".join(file.read_text() for file in sources).split()
        some = lambda a, b: " ".join(draw.choice(words) for _ in range(draw.randrange(a, b)))
        items = [{"prompt": some(0, 40) + " " * (i % 2), "answers": [some(1, 9) for _ in range(4)], "right": i % 4} for i in range(200)]
        Path("tasks/items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
        Path("tasks/mine.yaml").write_text(TASK % ("mine", "json", Path("tasks/items.jsonl").resolve(), Path("cache").resolve()))
        Path("tasks/absent.yaml").write_text(TASK % ("absent", "nobody/nothing", "x.json", Path("cache").resolve()))
        Path("tasks/code.yaml").write_text(TASK % ("code", "json", Path("tasks/items.jsonl").resolve(), Path("cache").resolve()) + "unsafe_code: true\n")
    return trained("bpe", "--route=baseline", "--data=bpe", "--lr=1e-2"), [json.loads(line) for line in Path("tasks/items.jsonl").read_text().splitlines()]


def test_eval_loss_counts_the_bytes_of_the_text(harness):
    inline(evaluation, "loss", str(harness[0]))
    documents = [file.read_bytes() for file in (Path(os.__file__).parent / "json").glob("*.py")]
    digest = lambda text: int.from_bytes(hashlib.blake2b(text, digest_size=16).digest()[:8], "big") / 2**64
    assert newest(harness[0], "loss")["results"]["validation"]["bytes"] == sum(len(text) for text in documents if digest(text) < 0.3)


def test_eval_tasks_and_the_accuracy_by_hand(harness, capsys):
    run, items = harness
    inline(evaluation, "tasks", str(run), "--tasks=mine", "--include_path=tasks", "--batch_tokens=500", "--max_length=64")
    m, encode, right, norm = load_run(run)[0].double(), prepare.encoding("tokenizer.json", "data/bpe").encode, [], []
    m.dtype = torch.float64
    for item in items:
        prompt = item["prompt"].rstrip()
        pad = item["prompt"][len(prompt):] + " "  # the harness puts a space before an answer
        before, scores = encode(prompt), []
        for answer in item["answers"]:
            ids = encode(prompt + pad + answer)
            assert ids[:len(before)] == before
            scores.append(naive_answer(m, before or [0], ids[len(before):], 64)[0])
        right.append(float(np.argmax(scores) == item["right"]))
        norm.append(float(np.argmax([s / len(answer) for s, answer in zip(scores, item["answers"])]) == item["right"]))
    found = newest(run, "mine")
    assert found["results"]["mine"]["acc"] == pytest.approx(np.mean(right)) and found["results"]["mine"]["acc_norm"] == pytest.approx(np.mean(norm))
    assert found["items"]["mine"] == [{"id": i, "correct": correct} for i, correct in enumerate(right)] and 0 < sum(right) < 200
    assert f"{np.mean(right):.4f}" in capsys.readouterr().out and found["versions"]["lm_eval"] and found["num_fewshot"]["mine"] == 0


def test_eval_agrees_with_the_harness_on_an_exported_model(harness):
    transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM
    run, items = harness
    m = load_run(run)[0]
    inline(convert, "export", str(run), "--out=exported")
    exported = transformers.AutoModelForCausalLM.from_pretrained("exported", dtype=torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file="exported/tokenizer.json", eos_token="<|endoftext|>")
    theirs = HFLM(pretrained=exported.eval(), tokenizer=tokenizer, max_length=64, batch_size=16, device="cpu")
    encoding = prepare.encoding("tokenizer.json", "data/bpe")
    ours = evaluation.Scorer(m, encoding, 64, 1000)
    asks = [asked(item["prompt"], " " + answer) for item in items for answer in item["answers"]]
    asks = [ask for ask in asks if len(ours.split(*ask.args)[1]) <= 64 and ask.args[0] != " "]  # which it refuses
    assert len(asks) > 700
    for ask, a, b in zip(asks, ours.loglikelihood(asks), theirs.loglikelihood(asks, disable_tqdm=True), strict=True):
        assert abs(a[0] - b[0]) <= 1e-4 * len(ours.split(*ask.args)[1]) and a[1] == b[1]
    long = [asked(item["prompt"]) for item in items[:40]]
    for ask, a, b in zip(long, ours.loglikelihood_rolling(long), theirs.loglikelihood_rolling(long, disable_tqdm=True), strict=True):
        assert abs(a - b) <= 1e-4 * len(encoding.encode(*ask.args))


def test_eval_groups_are_tasks_of_the_harness():
    tasks = pytest.importorskip("lm_eval.tasks")
    folders = "arc hellaswag piqa winogrande openbookqa super_glue/boolq sciq wikitext lambada mmlu/default gpqa/zeroshot gsm8k benchmarks minerva_math humaneval mbpp"
    manager = tasks.TaskManager(include_defaults=False, include_path=[Path(tasks.__file__).parent / name for name in folders.split()])
    for group in evaluation.GROUPS.values():
        for name, metric in group.items():
            config = manager.task_index[name].cfg
            metrics = str(config.get("metric_list") or config["aggregate_metric_list"]) + str(config.get("filter_list"))
            assert all(f"'{word}'" in metrics or f".{word}'" in metrics for word in metric.replace("pass@1", "pass_at_k").split(",")), name
    assert all(manager.task_index[name].cfg.get("unsafe_code", False) == (name in evaluation.RUN_CODE) for group in evaluation.GROUPS.values() for name in group)
    assert [len(evaluation.GROUPS[name]) for name in ("lr", "mhar")] == [8, 3] and manager.task_index["gsm8k"].cfg["num_fewshot"] == 5
    assert manager.task_index["minerva_math_algebra"].cfg["num_fewshot"] == 4 and manager.task_index["gpqa_main_zeroshot"].cfg["num_fewshot"] == 0


def test_eval_runs_code_only_if_it_may(harness, capsys):
    inline(evaluation, "tasks", "out/bpe", "--tasks=code", "--include_path=tasks", "--limit=2", "--confirm_run_unsafe_code")
    assert os.environ["HF_ALLOW_CODE_EVAL"] == "1" and len(newest(Path("out/bpe"), "code")["items"]["code"]) == 2
    c = evaluation.Tasks(tasks="mhar-mid")
    assert set(evaluation.chosen(c, 0)) == set(evaluation.GROUPS["mhar-mid"]) - {"humaneval", "mbpp"} and "humaneval and mbpp" in capsys.readouterr().err
    c.confirm_run_unsafe_code = True
    assert evaluation.chosen(c, 0) == evaluation.GROUPS["mhar-mid"]


@pytest.mark.parametrize("flags, says", [
    ("tasks out/bpe --tasks=absent --include_path=tasks", "nobody/nothing"),
    ("tasks out/bpe --tasks=code --include_path=tasks", "--confirm_run_unsafe_code"),
    ("tasks out/bpe --tasks=mine --include_path=nowhere", "nowhere is no folder"),
    ("tasks out/bpe --tasks=mine --include_path=tasks --limit=0", "--limit must be 1"),
    ("tasks out/bpe --tasks=mine --include_path=tasks --max_length=1", "--max_length must be 2"),
    ("tasks out/bpe --tasks=mine --include_path=tasks --device=abacus", "not to be had"),
    ("tasks out/bpe", "which tasks"),
    ("loss out/bpe --tasks=lr", "unknown flag --tasks"),
    ("loss out/bpe --tokens=0", "--tokens must be 1"),
    ("loss out/bpe --batch_tokens=-1", "--batch_tokens must be 1"),
    ("loss out/bpe --ema", "no moving average"),
    ("loss out/bpe --checkpoint=none.pt", "has no none.pt"),
    ("loss out/bpe out/plain", "takes RUN and flags"),
    ("loss", "takes RUN and flags"),
    ("loss out/nothing", "out/nothing is no run"),
    ("loss out/moved", "is not the data that"),
    ("perplexity out/bpe", "unknown command"),
])
def test_eval_refuses_in_one_line(harness, capsys, flags, says):
    if not Path("out/moved").exists():
        shutil.copytree("out/bpe", "out/moved")
        config = json.loads(Path("out/moved/config.json").read_text())
        Path("out/moved/config.json").write_text(json.dumps(config | {"data": config["data"] | {"sha256": ["0"]}}))
    before = sorted(Path().glob("out/*/eval/*"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        inline(evaluation, *flags.split())
    *bars, err = capsys.readouterr().err.rstrip().split("\n")  # datasets shows its progress when it reads a file for the first time
    assert stop.value.code == 2 and err.startswith("error: ") and says in err and not any("rror" in line for line in bars), (bars, err)
    assert sorted(Path().glob("out/*/eval/*")) == before


# ----------------------------------------------------------------------------------------------------------------------
# Conversions: low rank against the reference above, grafts against transformers' own models

LOWRANK = {  # the original, and the rank of its queries in each head where that is made smaller
    "attnres": (dict(route="attnres"), None),
    "attnres-blocks": (dict(route="attnres", blocks=4, key_gain="off", tied=False), None),
    "attnres-wide": (dict(route="attnres", d_model=40, n_layer=2), 3),
    "attnres-no-gain": (dict(route="attnres", norm_gain=False), 2),
    "attnres-delta": (dict(route="attnres", delta=True, blocks=2), None),
    "lr-whole": (dict(route="lr", rank=16, qk_norm=False), 4),
    "lr-full": (dict(route="lr", rank=9, key_norm="full", key_gain="on"), 5),
    "one-layer": (dict(route="attnres", n_layer=1, d_model=7), None),
    "mhar": (dict(route="mhar"), None),
    "mhar-one-head": (dict(route="mhar", heads=1), None),
    "mhar-rank": (dict(route="mhar", heads=4, rank=12, blocks=3), 2),
    "mhar-delta": (dict(route="mhar", heads=2, delta=True), 3),
    "mhar-odd": (dict(route="mhar", heads=3, d_model=21, n_layer=2, tied=False), None),
}


@pytest.mark.parametrize("name", LOWRANK)
def test_low_rank_has_the_outputs_of_the_original(name):
    flags, span = LOWRANK[name]
    m = build(**flags)
    c, router = m.config, m.router
    if span:
        query = torch.randn(c.M + 1, span, dtype=torch.float64) @ torch.randn(c.H, span, c.r // c.H, dtype=torch.float64)
        router["query"].data = query.transpose(0, 1) / (router["gain"].data if c.gain else 1)
    idx = tokens()[0]
    before = naive_gpt(c, m.state_dict(), idx)
    query = (router["query"] * (router["gain"] if c.gain else 1))[1:].detach().numpy()
    ranks = [np.linalg.matrix_rank(query[:, h]) for h in range(c.H)]
    assert max(ranks) == (span or min(c.M, c.r // c.H))
    least, width = c.H * max(ranks), c.d_model // c.H
    for rank in (0, least, c.d_model):
        new, weights, needed = convert.low_rank(c, {n: p.clone() for n, p in m.state_dict().items()}, rank)
        assert needed == least and new.r == (rank or c.H * min(width, 16 * math.ceil(max(ranks) / 16)))
        assert (new.route, new.H, new.norm, new.gain) == ("lr" if c.H == 1 else "mhar", c.H, "full", False)
        assert (new.N, new.delta, new.norm_gain, new.tied) == (c.N, c.delta, c.norm_gain, c.tied and not c.norm_gain)
        after = naive_gpt(new, weights, idx)
        assert np.abs(after - before).max() < 1e-11 and (after.argmax(-1) == before.argmax(-1)).all()
        GPT(new).load_state_dict(weights)
    if max(ranks) > 1:
        with pytest.raises(ValueError, match=f"{max(ranks)} coordinates.*takes {least}"):
            convert.low_rank(c, m.state_dict(), least - c.H)


@pytest.mark.parametrize("name", ["baseline", "hc", "lr", "lr-projected", "mhar-slice", "headwise"])
def test_what_has_no_low_rank_form_is_refused(name):
    m = build(**ROUTES[name])
    with pytest.raises(ValueError, match="nothing to convert|no low-rank form|key_norm=slice normalizes"):
        convert.low_rank(m.config, m.state_dict())


def store(run, m, **more):
    """A run's folder with that model in it."""
    run.mkdir(parents=True)
    config = {"model": vars(m.config), "train": {"size": "nano", "seq": 32}, "data": {"folder": "data/small", "encoding": "bytes", "eot": 256}}
    (run / "config.json").write_text(json.dumps(config))
    torch.save({"model": m.state_dict(), "ema": None, "step": 9} | more, run / "ckpt.pt")


def logits_of(run, dtype=torch.float64):
    """Its config and logits at 64 windows of data/small."""
    m, config = load_run(run, dtype=dtype)
    with torch.no_grad():
        return m.config, m(torch.from_numpy(validation_rows("small", 64, seq=32))[:, :-1])


def test_a_converted_run_can_be_sampled_and_trained(inside, capsys):
    inline(train, *TINY, "--data=small", "--route=attnres", "--lr=1e-2", "--ema=0.5", "--out=out/exact")
    source = Path("out/exact/ckpt.pt").read_bytes()
    old, before = logits_of("out/exact")
    for dtype, tolerance in {"float64": 1e-11, "float32": 1e-5, "bfloat16": 0.3}.items():
        run = f"out/exact-{dtype}"
        inline(convert, "lowrank", "out/exact", f"--out={run}", f"--dtype={dtype}", "--rank=4")
        assert "span 4 of 32 coordinates, keys take 4; the head is no longer tied" in capsys.readouterr().out
        new, after = logits_of(run)
        assert (new.route, new.rank, old.tied, new.tied) == ("lr", 4, True, False) and (after - before).abs().max() < tolerance
        state = torch.load(f"{run}/ckpt.pt", weights_only=True)["model"]
        assert {str(p.dtype).removeprefix("torch.") for p in state.values() if p.ndim == 2} == {dtype} and state["router.query"].itemsize >= 4
        assert sorted(p.name for p in Path(run).iterdir()) == ["ckpt.pt", "config.json"] and Path("out/exact/ckpt.pt").read_bytes() == source
    inline(convert, "lowrank", "out/exact", "--out=out/exact-ema", "--dtype=float64", "--ema")
    averaged, _ = load_run("out/exact", ema=True, dtype=torch.float64)
    x = torch.from_numpy(validation_rows("small", 64, seq=32))[:, :-1]
    assert (averaged(x) - logits_of("out/exact-ema")[1]).abs().max() < 1e-11 < (averaged(x) - before).abs().max()
    inline(sample, "--out=out/exact-float32", "--tokens=5")
    inline(train, "--init_from=out/exact-float32", *TINY[5:], "--data=small", "--lr=1e-3", "--out=out/onward")
    ends = [entries(Path(run))[i] for run, i in (("out/exact", -1), ("out/onward", 0), ("out/onward", -1))]
    assert ends[1]["loss"] < ends[0]["loss"] + 0.5 and ends[2]["val_loss"] < ends[0]["val_loss"] and load_run("out/onward")[0].config.rank == 4


def test_check_measures_differences(inside, capsys):
    a, b = (build(seed, torch.float32, 0.1, vocab_size=257) for seed in (0, 1))
    store(Path("out/check-a"), a), store(Path("out/check-b"), b)
    inline(convert, "check", "out/check-a", "out/check-b", "--dtype=float64", "--tokens=320")
    out = capsys.readouterr().out
    rows = torch.from_numpy(validation_rows("small", 10, seq=32))
    x, y = rows[:, :-1], rows[:, 1:]
    with torch.no_grad():
        a, b = a.double(), b.double()
        a.dtype = b.dtype = torch.float64
        first, second = a(x), b(x)
    losses = [-l.log_softmax(-1).gather(-1, y[..., None]).mean().item() for l in (first, second)]
    difference, same = (first - second).abs(), (first.argmax(-1) == second.argmax(-1)).sum()
    assert f"320 tokens of data/small in float64\nlogits: largest difference {difference.max():.3g}, mean {difference.mean():.3g}" in out, out
    assert f"{same} of 320" in out and f"cross-entropy: {losses[0]:.8f}, {losses[1]:.8f}, difference {losses[1] - losses[0]:.3g}" in out, out
    inline(convert, "check", "out/check-a", "out/check-a")
    assert "largest difference 0, mean 0," in capsys.readouterr().out


HF = dict(vocab_size=261, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e3, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
GRAFTS = {  # class in transformers, its config beyond HF, largest shard, dtype
    "llama-scaled": ("Llama", dict(rms_norm_eps=1e-3, rope_parameters=LLAMA3, tie_word_embeddings=False), "20KB", "float32"),
    "llama-tied": ("Llama", dict(head_dim=10, tie_word_embeddings=True), "5GB", "float32"),
    "qwen-tied": ("Qwen3", dict(head_dim=8, tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6)), "20KB", "float32"),
    "qwen-untied": ("Qwen3", dict(head_dim=32, tie_word_embeddings=False, rms_norm_eps=1e-2), "5GB", "bfloat16"),
}


def hugging_face(folder, name):
    """A folder of transformers with random weights in it -> its class."""
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    kind, flags, shard, dtype = GRAFTS[name]
    torch.manual_seed(0)
    kind, config = getattr(transformers, kind + "ForCausalLM"), getattr(transformers, kind + "Config")(**HF | flags)
    net = kind(config).eval()
    for p in net.parameters():
        p.data += 0.2 * torch.randn_like(p)
    net = net.to(getattr(torch, dtype))
    net.save_pretrained(folder, max_shard_size=shard)
    vocabulary = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, 261)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w1"}, "added_tokens": [], "normalizer": None,
                 "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "truncation": None, "padding": None}
    (Path(folder) / "tokenizer.json").write_text(json.dumps(tokenizer))
    return kind


@pytest.mark.parametrize("name", GRAFTS)
def test_grafts_compute_what_transformers_compute(inside, capsys, name):
    kind = hugging_face(f"hf/{name}", name)
    config = json.loads(Path(f"hf/{name}/config.json").read_text())
    x = torch.randint(261, (2, 100), generator=torch.Generator().manual_seed(0))
    found = {}
    with torch.no_grad():
        expected = kind.from_pretrained(f"hf/{name}", dtype=torch.float32).eval()(x).logits
    for route_flags in ("--route=baseline", "--route=hc", "--route=mhar --delta --blocks=4", "--route=lr --delta --rank=5"):
        run = f"out/{name}-{len(found)}"
        inline(convert, "graft", f"hf/{name}", f"--out={run}", *route_flags.split())
        m, saved = load_run(run)
        with torch.no_grad():
            found[run] = m(x)
        assert torch.equal(found[run], found[f"out/{name}-0"]) and (found[run] - expected).abs().max() < 2e-5
        for key in ("gate", "query", "null"):
            assert key not in m.router or not m.router[key].any()
        assert prepare.encoding(saved["data"]["encoding"], saved["data"]["folder"]).encode("w5 w7") == [5, 7]
        if "hc" in route_flags:
            continue
        inline(convert, "export", run, f"--out=hf/{name}-{len(found)}")
        back, originals = kind.from_pretrained(f"hf/{name}-{len(found)}", dtype="auto"), kind.from_pretrained(f"hf/{name}", dtype="auto").state_dict()
        assert back.state_dict().keys() == originals.keys() and (Path(f"hf/{name}-{len(found)}") / "tokenizer.json").exists()
        assert all(p.dtype == originals[n].dtype and torch.equal(p, originals[n]) for n, p in back.state_dict().items())
        with torch.no_grad():
            exported = kind.from_pretrained(f"hf/{name}-{len(found)}", dtype=torch.float32).eval()(x).logits
        assert torch.equal(exported, expected) and back.config.max_position_embeddings == config["max_position_embeddings"]
    if name == "llama-scaled":  # as transformers 4 wrote it
        rope = config.pop("rope_parameters")
        old = config | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
        Path(f"hf/{name}/config.json").write_text(json.dumps(old))
        inline(convert, "graft", f"hf/{name}", "--out=out/older", "--route=baseline")
        assert torch.equal(load_run("out/older")[0](x), found[f"out/{name}-0"])


def test_a_graft_opens_its_gates(inside, capsys):
    hugging_face("hf/gates", "qwen-tied")
    flags = [*TINY[5:], "--data=small", "--lr=1e-3", "--warmup=1", "--steps=8", "--ema=0"]
    for name, route_flags in {"closed": ["--route=baseline"], "open": ["--delta", "--blocks=3"]}.items():
        inline(convert, "graft", "hf/gates", f"--out=out/gates-{name}", *route_flags)
        config = Path(f"out/gates-{name}/config.json")  # its tokenizer knows none of the small data
        config.write_text(config.read_text().replace('"encoding": "tokenizer.json"', '"encoding": "bytes"'))
        inline(train, f"--init_from=out/gates-{name}", *flags, f"--out=out/trained-{name}")
    logs = {name: list(losses(Path(f"out/trained-{name}")).values()) for name in ("closed", "open")}
    assert logs["open"][0] == logs["closed"][0] and max(b - a for a, b in zip(logs["closed"], logs["open"])) < 0.1
    gates = load_run("out/trained-open")[0].router["gate"]
    assert (gates != 0).all()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        inline(convert, "export", "out/trained-open", "--out=hf/open")
    assert re.fullmatch(r"error: 7 of the 7 gates of out/trained-open are open: .*\n", capsys.readouterr().err) and not Path("hf/open").exists()


@pytest.mark.parametrize("damage, says", [
    (lambda c, f: c.update(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    (lambda c, f: c.pop("hidden_size"), "has no 'hidden_size'"),
    (lambda c, f: c.update(hidden_size="wide"), "config.json"),
    (lambda c, f: c.update(rope_parameters={"full_attention": {"rope_type": "default"}}), "by layer type"),
    (lambda c, f: c.update(intermediate_size=48), "gate_proj.weight is [40, 24], by config.json it should be [48, 24]"),
    (lambda c, f: c.update(num_hidden_layers=4), "lacks model.layers.3.input_layernorm.weight"),
    (lambda c, f: c.update(num_hidden_layers=2), "has model.layers.2.input_layernorm.weight, which"),
    (lambda c, f: c.update(attention_bias=True), "attention_bias = True"),
    (lambda c, f: c.update(hidden_act="gelu"), "hidden_act = gelu"),
    (lambda c, f: c.update(quantization_config={"bits": 4}), "quantization_config"),
    (lambda c, f: c.update(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}), "rope_type = yarn"),
    (lambda c, f: c.update(tie_word_embeddings=False), "lacks lm_head.weight"),
    (lambda c, f: (f / "tokenizer.json").write_text("{"), "cannot read the tokenizer"),
    (lambda c, f: torch.save({}, f / "model.safetensors"), "no whole safetensors file"),
    (lambda c, f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pytorch_model.bin is a pickle"),
    (lambda c, f: (f / "model.safetensors").unlink(), "no model.safetensors"),
    (lambda c, f: os.truncate(f / "model.safetensors", 9000), "no whole safetensors file"),
    (lambda c, f: (f / "model.safetensors.index.json").write_text('{"weight_map": [1]}'), "index.json is damaged"),
    (lambda c, f: (f / "model.safetensors.index.json").write_text('{"weight_map": {}}'), "lacks"),
])
def test_a_wrong_folder_is_one_line(inside, capsys, damage, says):
    pytest.importorskip("safetensors")
    if not Path("hf/whole").exists():
        hugging_face("hf/whole", "llama-tied")
    folder = Path("hf/damaged")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree("hf/whole", folder)
    config = json.loads((folder / "config.json").read_text())
    damage(config, folder)
    (folder / "config.json").write_text(json.dumps(config))
    before = sorted(inside.rglob("*"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        inline(convert, "graft", str(folder), "--out=out/damaged", "--delta")
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and says in err, err
    assert sorted(inside.rglob("*")) == before


@pytest.mark.parametrize("flags, says", [
    ("strange", "unknown command"), ("lowrank", "takes RUN and flags"), ("lowrank out/base out/base --out=out/x", "takes RUN"),
    ("lowrank out/nothing --out=out/x", "is no run"), ("lowrank out/base --out=out/x", "nothing to convert"), ("lowrank out/routed", "--out=FOLDER is missing"),
    ("lowrank out/routed --out=out/base", "exists"), ("lowrank out/routed --out=out/x --rank=1", "takes 12"), ("lowrank out/routed --out=out/x --rank=13", "multiple"),
    ("lowrank out/routed --out=out/x --rank=18", "from 1 to"), ("lowrank out/routed --out=out/x --ema", "no moving average"),
    ("lowrank out/routed --out=out/x --checkpoint=best.pt", "has no best.pt"), ("lowrank out/stranger --out=out/x", "missing, unknown or of another shape: router.gain, router.query"),
    ("graft out --out=out/x --delta", "config.json"), ("graft out --out=out/x", "give --delta"), ("export out/routed --out=out/x", "route=mhar"),
    ("check out/base", "RUN OTHER_RUN"), ("check out/base out/small-vocabulary", "vocabularies"), ("check out/base out/base --tokens=0", "positive"),
    ("check out/base out/base --data=nowhere", "no data at nowhere"), ("check out/base out/base --dtype=int8", "choose from"),
])
def test_wrong_conversions_are_one_line(inside, capsys, flags, says):
    if not Path("out/routed").exists():
        for name, more in {"base": dict(route="baseline"), "routed": dict(route="mhar"), "small-vocabulary": dict(route="baseline", vocab_size=11)}.items():
            store(Path("out", name), build(dtype=torch.float32, **dict(vocab_size=257) | more))
        shutil.copytree("out/base", "out/stranger")
        shutil.copy("out/routed/config.json", "out/stranger")
    before = sorted(inside.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        inline(convert, *flags.split())
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and says in err, err
    assert sorted(inside.rglob("*")) == before


MEMORY = """if True:
    import ctypes, os, re, sys, torch, convert
    from pathlib import Path
    import safetensors.torch
    ctypes.CDLL(None).mallopt(-3, 65_536)  # M_MMAP_THRESHOLD: tensors get pages of their own, not what a parent has freed
    peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # ru_maxrss would be the parent's too
    with torch.device("meta"):
        convert.GPT(convert.GPTConfig())  # loads more of torch
    before = peak()
    for command in ("lowrank attnres --out=low", "export baseline --out=hf", "graft hf --out=graft --delta"):
        sys.argv = ["convert.py", *command.split()]
        convert.main()
        print((peak() - before) / os.path.getsize("baseline/ckpt.pt"))"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says how much")
def test_conversions_need_little_memory(tmp_path):
    """The peak of the resident set over the checkpoint's size, imports left out."""
    pytest.importorskip("safetensors")
    for route in ("attnres", "baseline"):
        store(tmp_path / route, GPT(GPTConfig(d_model=256, d_mlp=1024, vocab_size=40_000, route=route, tied=False)))
    growth = [float(line) for line in call(MEMORY, cwd=tmp_path).splitlines()[1::2]]
    assert len(growth) == 3 and 0.9 < growth[0] and growth[2] < 1.3, growth
