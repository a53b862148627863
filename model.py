"""A GPT whose residual stream is softmax attention over the outputs of all earlier sublayers.

    stream = stream of the chosen kind, started with the token embedding
    for t, sublayer in enumerate(sublayers):      # attention, MLP, attention, MLP, ...: M = 2L of them
        stream.write(*sublayer(stream.read(t)))   # y, and for projected keys what y was projected from
    logits = head(norm(stream.read(M)))

Every method here differs only in what read and write do:

    Residual          the usual Transformer: x, and x = x + y
    HyperConnections  n copies of x, mixed and written by learned weights        (Zhu et al. 2024)
    Depth             read = softmax mix of everything written so far            (AttnRes, LR, MHAR)
    Delta             read = x + gate * that mix; x = x + y stays                (MHAR's mid-training graft)

LR is "Low-Rank Attention Residuals" (arXiv 2607.09694), MHAR "Multi-Head Attention Residuals" (arXiv 2607.27230).
The backbone is Qwen3's: RMSNorm before each sublayer, grouped-query attention with per-head RMSNorm of queries and
keys, half-split RoPE, SwiGLU, no biases, weights drawn from N(0, 0.02^2).
"""
import dataclasses
import difflib
import functools
import inspect
import json
import math
import os
import re
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

# ----------------------------------------------------------------------------------------------------------------------
# The sizes


@dataclass
class GPTConfig:
    # the backbone
    n_layer: int = 6  # layers L; the model has M = 2L sublayers
    d_model: int = 128  # width d
    n_head: int = 4  # query heads of token attention
    n_kv_head: int = 2  # its key and value heads
    head_dim: int | None = None  # width of one of these heads; unset: d_model / n_head
    d_mlp: int = 384  # hidden width of the MLP
    vocab_size: int = 257  # rows of the embedding; unset: the data's (a preset's own counts for --dry_run alone)
    tied: bool = True  # the output head is the embedding
    qk_norm: bool = True  # RMSNorm of every token-attention query and key
    norm_gain: bool = True  # learned gains in the backbone's norms
    norm_eps: float = 1e-6  # epsilon of every norm, the routing's too
    rope_theta: float = 1e4  # base of the rotary frequencies
    rope_scaling: str = ""  # Llama-3.1's, as "factor,low,high,original length"; empty: none
    # the routing (README.md has the table)
    route: Literal["mhar", "baseline", "attnres", "lr", "hc"] = "mhar"  # what takes the residual stream's place
    blocks: int | None = None  # N: sum sublayer outputs in N blocks; unset: the preset's, else full; 0: full
    rank: int | None = None  # r: coordinates that serve as keys, over all heads; unset: d (lr: d/4; projected: 32)
    heads: int | None = None  # H of mhar; unset: n_kv_head
    key_norm: Literal["auto", "full", "slice"] = "auto"  # rho over all d coordinates or over the key's; auto: lr slice, else full
    key_gain: Literal["auto", "on", "off"] = "auto"  # learned gain on the keys; auto: off for lr, else on
    keys: Literal["slice", "projected"] = "slice"  # cut the keys from the values, or project them (lr only)
    delta: bool = False  # keep x = x + y and add gate * mix to each read
    headwise: bool = False  # mhar: one full-width read for each KV group's Q, K, V
    kernel: Literal["auto", "torch", "triton"] = "auto"  # kernel.py's fused reads or the plain ones here; auto: fused on CUDA

    @classmethod
    def from_size(cls, size: str, **overrides) -> "GPTConfig":
        """The preset of that name with overrides on top. The routing that a preset brings goes with mhar alone, and
        routing flags that are given replace it. Raises ValueError for an unknown name or a combination that is refused."""
        if size not in SIZES:
            raise ValueError(f"unknown size {size!r}; there are: {', '.join(SIZES)}")
        preset = dict(SIZES[size])
        if overrides.get("route", "mhar") != "mhar":
            preset = {k: v for k, v in preset.items() if k not in ROUTING_FLAGS}
        return cls(**preset | overrides)

    def __post_init__(self):
        """Refuses what makes no sense, with one line that says what would."""
        def check(ok, message):
            if not ok:
                raise ValueError(message)

        for name, t in get_type_hints(GPTConfig).items():
            if isinstance(get_args(t)[0] if get_args(t) else None, str):
                check(getattr(self, name) in get_args(t), f"{name} must be one of {', '.join(get_args(t))}, not {getattr(self, name)!r}")
        for name in ("n_layer", "d_model", "n_head", "n_kv_head", "d_mlp", "vocab_size"):
            check(getattr(self, name) > 0, f"{name} must be positive, not {getattr(self, name)}")
        check(0 < self.norm_eps < math.inf and 0 < self.rope_theta < math.inf, "norm_eps and rope_theta must be positive")
        check(self.n_head % self.n_kv_head == 0, f"n_kv_head={self.n_kv_head} must divide n_head={self.n_head}")
        if self.head_dim is None:
            check(self.d_model % self.n_head == 0,
                  f"n_head={self.n_head} must divide d_model={self.d_model}, or give a head_dim")
            self.head_dim = self.d_model // self.n_head
        check(self.head_dim > 0 and self.head_dim % 2 == 0, f"head_dim must be even for RoPE, not {self.head_dim}")
        try:
            factor, low, high, original = map(float, (self.rope_scaling or "1,1,2,1").split(","))
        except ValueError:
            factor = 0
        check(factor > 0 and 0 < low < high and original > 0,
              f'rope_scaling must read "factor,low,high,original length", low < high, not {self.rope_scaling!r}')

        takers = {"heads": ("mhar",), "headwise": ("mhar",), "rank": ("lr", "mhar"), "keys": ("lr",),
                  "delta": ("attnres", "lr", "mhar")}  # flag: the routes that take it; the other flags: every route over depth
        for name, default in ROUTING_FLAGS.items():
            given, allowed = getattr(self, name) != default, self.route in takers.get(name, DEPTH_ROUTES)
            hint = "; low-rank multi-head is route=mhar with rank" if (self.route, name) in (("lr", "heads"), ("attnres", "rank")) else ""
            check(allowed or not given, f"route={self.route} takes no {name}{hint}")
        check(self.route in DEPTH_ROUTES or self.kernel != "triton", f"route={self.route} has no kernels: use kernel=auto")
        if self.route not in DEPTH_ROUTES:
            return
        check(0 < self.H, f"heads must be positive, not {self.H}")
        check(self.d_model % self.H == 0, f"heads={self.H} must divide d_model={self.d_model}")
        check(0 < self.r <= self.d_model, f"rank must be from 1 to d_model={self.d_model}, not {self.r}")
        check(self.r % self.H == 0, f"rank={self.r} must be a multiple of heads={self.H}")
        check(0 < self.N <= self.M, f"blocks must be from 1 to 2 n_layer = {self.M} (0: full), not {self.blocks}")
        if self.keys == "projected":
            check(self.key_norm != "full", "keys=projected have no full-width norm: use key_norm=slice")
            check(not self.delta, "delta needs keys=slice")
            check(self.kernel != "triton", "there is no kernel for keys=projected: use kernel=auto or torch")
        if self.headwise:
            check(self.rank is None, "headwise reads have full-width keys: it takes no rank")
            check(not self.delta, "headwise and delta do not go together")

    # The papers' letters, with every default filled in.
    M = property(lambda self: 2 * self.n_layer)  # sublayers; read sites are 0..M
    N = property(lambda self: self.blocks or self.M)  # blocks
    H = property(lambda self: (self.heads if self.heads is not None else self.n_kv_head) if self.route == "mhar" else 1)
    gain = property(lambda self: {"on": True, "off": False, "auto": self.route != "lr"}[self.key_gain])

    @property
    def r(self) -> int:
        if self.rank is not None:
            return self.rank
        return self.d_model if self.route != "lr" else 32 if self.keys == "projected" else max(1, self.d_model // 4)

    @property
    def norm(self) -> str:
        auto = "slice" if self.route == "lr" else "full"
        return auto if self.key_norm == "auto" else self.key_norm

    @property
    def ends(self) -> list[int]:
        """Block ends e_j = ceil(M j / N), j = 1..N."""
        return [-(-self.M * j // self.N) for j in range(1, self.N + 1)]

    def slots(self, t: int) -> list[int]:
        """S(t), the slots that site t reads: the embedding, each finished block, and the partial sum of the open one.
        With M = 12 and N = 4 blocks end at 3, 6, 9, 12, and S(5) = 0, 3, 5: slot 5 is the sum of the outputs 4 and 5."""
        ends = [e for e in self.ends if e <= t]
        return [0] + ends + ([t] if t > 0 and t not in ends else [])

    def source_reads(self) -> int:
        """The sum of |S(t)| over the active sites t = 1..M."""
        return sum(len(self.slots(t)) for t in range(1, self.M + 1))

    def flops(self, seq: int) -> int:
        """FLOPs per token, forward and backward (3x), at sequences of seq tokens. A multiply-add is 2; attention is
        counted without the causal half, as PaLM and nanoGPT do; routing is r + d multiply-adds for each source read."""
        d, q, kv = self.d_model, self.n_head * self.head_dim, self.n_kv_head * self.head_dim
        macs = self.n_layer * (2 * d * q + 2 * d * kv + 3 * d * self.d_mlp + 2 * q * seq) + d * self.vocab_size
        if self.route == "hc":  # read: n+1 mixtures of n streams and their weights; write: one multiply-add a stream
            macs += self.M * d * HC_STREAMS * (2 * HC_STREAMS + 4)
        elif self.route in DEPTH_ROUTES:
            macs += self.source_reads() * (self.r + d)
            if self.headwise:  # attention sites make n_kv_head reads instead of one
                macs += sum(len(self.slots(t)) for t in range(2, self.M, 2)) * (self.n_kv_head - 1) * 2 * d
            if self.keys == "projected":
                macs += self.r * (self.n_layer * (q + self.d_mlp) + d)
        return 6 * macs


HC_STREAMS = 4  # n of hyper-connections
ROUTING_FLAGS = dict(blocks=None, rank=None, heads=None, key_norm="auto", key_gain="auto", keys="slice", delta=False, headwise=False)

_mhar = dict(vocab_size=151_936)
_lr = dict(vocab_size=100_277, tied=False, norm_gain=False, rope_theta=5e5)
SIZES = {
    "nano": dict(n_layer=6, d_model=128, n_head=4, n_kv_head=2, d_mlp=384),
    "100m": dict(n_layer=12, d_model=512, n_head=8, n_kv_head=4, d_mlp=1536, **_mhar),
    "124m": dict(n_layer=12, d_model=768, n_head=12, n_kv_head=4, d_mlp=2304, **_mhar),
    "350m": dict(n_layer=24, d_model=1024, n_head=16, n_kv_head=8, d_mlp=4096, **_mhar),
    "1b": dict(n_layer=36, d_model=1280, n_head=16, n_kv_head=8, d_mlp=5120, **_mhar),
    "lr-0.5b": dict(n_layer=24, d_model=1024, n_head=16, n_kv_head=16, d_mlp=2816, **_lr),
    "lr-1b": dict(n_layer=24, d_model=1536, n_head=24, n_kv_head=24, d_mlp=4224, **_lr),
    "lr-4b": dict(n_layer=44, d_model=2560, n_head=40, n_kv_head=40, d_mlp=7040, **_lr),
    "8b": dict(n_layer=32, d_model=4096, n_head=32, n_kv_head=8, d_mlp=14_336, vocab_size=128_256, tied=False, qk_norm=False,
               norm_eps=1e-5, rope_theta=5e5, rope_scaling="8,1,4,8192", delta=True, blocks=8),
}

# ----------------------------------------------------------------------------------------------------------------------
# Depth routing


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in fp32, or as it is in float64: the precision of norms, rotations and routing."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def route(sources, query, *, norm="full", keys=None, eps=1e-6):
    """One read: each of H heads mixes its own slice of the sources by softmax over depth.

        z[i,h] = <query[h], key(v_i,h)> / rho(v_i,h)       key: the last R coordinates of head h's slice of v_i
        w[:,h] = softmax over i of z[:,h]
        mix[h] = sum_i w[i,h] v_i[h]                       the full slice, whatever R is
        norm = "full":  rho = sqrt(mean of all d coordinates of v_i squared + eps), the same for all heads
        norm = "slice": rho = sqrt(mean of the R key coordinates squared + eps), per head

    (LR Eqs. 4 to 8 at H = 1, "full" being its control, Eq. 13; MHAR Eq. 3 at R = d/H.)

    sources: list of n tensors [..., d], or one tensor [n, ..., d];  query: [H, R], the key gain already multiplied in;
    keys: for projected keys, a list of n tensors [..., H R] to use instead of the values' coordinates (norm="slice").
    Returns mix [..., d] in the sources' dtype and weights [n, ..., H] in fp32 (float64 for float64 sources).
    Raises ValueError if the shapes do not fit.
    """
    H, R = query.shape
    d = sources[0].shape[-1]
    if norm not in ("full", "slice"):
        raise ValueError(f"norm is full or slice, not {norm!r}")
    if d % H or (keys is None and R > d // H):
        raise ValueError(f"query [{H}, {R}] does not fit sources of width {d}")
    if keys is not None and (norm == "full" or len(keys) != len(sources) or keys[0].shape[-1] != H * R):
        raise ValueError(f"projected keys must be {H * R} wide, one for each source, and take norm='slice'")
    query = wide(query)
    values = [wide(v).unflatten(-1, (H, d // H)) for v in sources]  # [..., H, d/H]
    logits = []
    for i, v in enumerate(values):
        key = v[..., -R:] if keys is None else wide(keys[i]).unflatten(-1, (H, R))
        square = v.square().mean((-2, -1)).unsqueeze(-1) if norm == "full" else key.square().mean(-1)  # [..., 1 or H]
        logits.append((key * query).sum(-1) * (square + eps).rsqrt())
    weights = torch.stack(logits).softmax(0)  # [n, ..., H]
    mix = sum(w.unsqueeze(-1) * v for w, v in zip(weights, values))
    return mix.flatten(-2).to(sources[0].dtype), weights


@functools.cache
def kernels(choice, device_type):
    """kernel.py, or None where route() above is to do the reads. choice: GPTConfig.kernel. Raises ValueError if it cannot be had."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter, slow: for tests
    if choice == "torch" or (choice == "auto" and device_type != "cuda"):
        return None
    try:
        if device_type != "cuda" and not interpreted:
            raise ImportError("no CUDA")
        import kernel
        return kernel
    except ImportError as e:
        if choice == "auto":
            return None
        raise ValueError(f"kernel=triton needs CUDA and the package triton ({e}); kernel=torch runs everywhere")


# ----------------------------------------------------------------------------------------------------------------------
# The streams. init() gives a stream's parameters, which live in GPT.router and stay fp32; they draw nothing from the
# backbone's random numbers, so that one seed gives every route the same backbone. write() gets a sublayer's output y
# and hidden, the input of its output projection (for projected keys).


class Residual:
    """x = x + y."""
    normed = False  # whether read() returns x / rms(x): a sublayer's norm has only its gain to apply then, and gives it to its Linears

    @staticmethod
    def init(config):
        return {}

    def __init__(self, x, config, router):
        self.x = x

    def read(self, t):
        return self.x

    def write(self, y, hidden):
        self.x = self.x + y


class HyperConnections:
    """Hyper-connections of Zhu et al. (2024, arXiv 2409.19606), n = 4, static and dynamic weights: n copies X_j of x; for each token

        [A_m | A_r] = alpha + s_alpha tanh(norm(X) W_alpha),   b = beta + s_beta tanh(norm(X) W_beta)     A_m [n], A_r [n, n], b [n]
        read = sum_j A_m[j] X_j,    write: X_k = sum_j A_r[j,k] X_j + b[k] y,    read(M) = mean of the X_j

    Starts as pre-norm: W = 0, A_r = 1, b = 1, and sublayer t reads copy t mod n. The mean (theirs: the sum, which the
    final norm undoes) makes it equal the baseline at the first step. MHAR compares with a static softmax form with noisy
    initialization; this is the published method."""
    normed = False

    @staticmethod
    def init(config):
        M, d, n = config.M, config.d_model, HC_STREAMS
        alpha = torch.cat([torch.eye(n)[torch.arange(M) % n].unsqueeze(-1), torch.eye(n).expand(M, n, n)], -1)
        params = {"alpha": alpha, "w_alpha": torch.zeros(M, d, n + 1), "s_alpha": torch.full((M,), 0.01),
                  "beta": torch.ones(M, n), "w_beta": torch.zeros(M, d, 1), "s_beta": torch.full((M,), 0.01)}
        return params | ({"norm": torch.ones(M, d)} if config.norm_gain else {})

    def __init__(self, x, config, router, compile=lambda f: f):
        self.config, self.router = config, router
        self.weights, self.combine, self.add = compile(self.weights), compile(self.combine), compile(self.add)
        self.X = x.expand(HC_STREAMS, *x.shape)  # [n, B, T, d]

    def read(self, t):
        if t == self.config.M:
            return self.X.mean(0)
        A, self.b = self.weights(self.X, self.config.norm_eps, **{name: p[t] for name, p in self.router.items()})
        x, self.X = self.combine(self.X, A)
        return x

    def write(self, y, hidden):
        self.X = self.add(self.X, self.b, y)

    # Three functions, since in one the compiler would form the tanh again for each of the d coordinates.

    @staticmethod
    def weights(X, eps, alpha, w_alpha, s_alpha, beta, w_beta, s_beta, norm=None):  # -> [A_m | A_r] [n, B, T, n + 1], b [n, B, T, 1]
        n, w = HC_STREAMS, torch.cat([w_alpha, w_beta], -1)  # norm(X) W = (X (gain W)) / rms: no normed copy of X is kept
        w = F.pad(w if norm is None else norm[:, None] * w, (0, -(n + 2) % 8))  # as wide as tensor cores like it
        inv_rms = (wide(X).square().mean(-1, keepdim=True) + eps).rsqrt()
        dynamic = (wide(X @ w.to(X.dtype)) * inv_rms).tanh()
        return alpha[:, None, None] + s_alpha * dynamic[..., :n + 1], beta[:, None, None, None] + s_beta * dynamic[..., n + 1:n + 2]

    @staticmethod
    def combine(X, A):  # -> the read [B, T, d], the copies [n, B, T, d]
        x, *copies = ((A[..., k, None] * X).sum(0).to(X.dtype) for k in range(HC_STREAMS + 1))
        return x, torch.stack(copies)

    @staticmethod
    def add(X, b, y):
        return X + (b * y).to(y.dtype)


class Depth:
    """Attention over depth: AttnRes, LR, MHAR and low-rank MHAR, full and block. Slot 0 is the embedding, slot i the
    running sum of its block up to sublayer output i; site t reads the slots S(t) = config.slots(t), through route() or the
    fused kernels of kernel.py, whose Bank keeps the slots itself."""
    fused = True  # False for a subclass whose reads the kernels do not know
    fuse_norm = True  # the kernels' reads do the sublayer's RMSNorm on the way
    watched = None  # called at every read, see watch_routing

    @staticmethod
    def init(config):
        c, shape = config, (config.M + 1, config.H, config.r // config.H)
        params = {"query": torch.zeros(shape)} | ({"gain": torch.ones(shape)} if c.gain else {})
        if c.headwise:  # sites 0, 2, 4, ... (attention): a full-width query for each KV group; their rows of query are unused
            shape = (c.n_layer, c.n_kv_head, c.d_model)
            params |= {"group_query": torch.zeros(shape)} | ({"group_gain": torch.ones(shape)} if c.gain else {})
        if c.keys == "projected":  # r more rows for each output projection (LR appendix C), and the embedding's own
            draw = torch.Generator().manual_seed(torch.initial_seed())
            widths = {"key_embed": (c.d_model,), "key_attn": (c.n_layer, c.n_head * c.head_dim), "key_mlp": (c.n_layer, c.d_mlp)}
            params |= {name: 0.02 * torch.randn(*w[:-1], c.r, w[-1], generator=draw, device="cpu") for name, w in widths.items()}
        return params

    def __init__(self, x, config, router):
        self.config, self.router, self.written = config, router, 0
        self.sources = [x]  # S(t), in order
        self.keys = [F.linear(x, router["key_embed"].to(x.dtype))] if config.keys == "projected" else None
        fold = lambda name: router[f"{name}query"] * router[f"{name}gain"] if config.gain else router[f"{name}query"]
        self.query = fold("")  # [M + 1, H, R]; <query, gain key> = <query gain, key>
        self.group_query = fold("group_") if config.headwise else None  # [L, KV, d]
        # Three ways to read: kernel.Bank, which keeps the slots itself; kernel.route for each read (headwise); route() above.
        fused = self.fused and self.keys is None and x.dtype != torch.float64 and Depth.watched is None
        self.kernel = kernels(config.kernel, x.device.type) if fused else None
        self.bank, self.normed = None, False
        if self.kernel and not config.headwise:
            self.normed = self.fuse_norm and torch.is_grad_enabled()  # not in generation: gains times weights cost more than a token's norms
            self.bank = self.kernel.Bank(x, self.query, config.ends, norm=config.norm, eps=config.norm_eps, prenorm=self.normed)

    def mix(self, t, sources, query):
        args = dict(norm=self.config.norm, eps=self.config.norm_eps)
        if self.kernel:
            return self.kernel.route(sources, query, **args)
        mix, weights = route(sources, query, keys=self.keys, **args)
        if Depth.watched is not None:
            Depth.watched(t, weights, sources, query, self.keys)
        return mix

    def read(self, t):
        if self.bank:
            return self.bank.read(t)
        if self.config.headwise and t % 2 == 0 and t < self.config.M:
            sources = torch.stack(self.sources) if self.kernel else self.sources  # once for all groups
            return torch.stack([self.mix(t, sources, query[None]) for query in self.group_query[t // 2]])  # [KV, B, T, d]
        return self.mix(t, self.sources, self.query[t])

    def write(self, y, hidden):
        if self.bank:
            return self.bank.write(y)
        t, self.written = self.written, self.written + 1
        begins = t == 0 or t in self.config.ends  # output t + 1 is a block's first
        added = [(self.sources, y)]
        if self.keys is not None:  # a block's key is the sum of its outputs' keys
            added += [(self.keys, F.linear(hidden, self.router["key_mlp" if t % 2 else "key_attn"][t // 2].to(y.dtype)))]
        for slots, new in added:
            slots.append(new if begins else slots.pop() + new)


@contextmanager
def watch_routing(visit=None):
    """with watch_routing() as reads: models run with plain reads, and reads gets (t, weights [n, ..., H]) of each, in order.
    With visit nothing is kept: visit(t, weights, sources, query, keys) is called instead, with what route() took and gave."""
    reads = []
    Depth.watched = visit or (lambda t, weights, *_: reads.append((t, weights)))
    try:
        yield reads
    finally:
        Depth.watched = None


class Delta(Depth):
    """MHAR's graft for mid-training: the residual stream stays, and each site adds gate[t] * mix, the gates closed at the
    start, so that a pretrained model is unchanged. Sources are a learned null vector, each finished block's sum and the
    current partial sum. This follows the paper's text; its code has a null vector per site and no partial sum."""
    fuse_norm = False

    @staticmethod
    def init(config):
        return Depth.init(config) | {"null": torch.zeros(config.d_model), "gate": torch.zeros(config.M + 1)}

    def __init__(self, x, config, router):
        super().__init__(router["null"].to(x.dtype).expand_as(x), config, router)
        self.x = x

    def read(self, t):
        return self.x + self.router["gate"][t] * super().read(t)

    def write(self, y, hidden):
        super().write(y, hidden)
        self.x = self.x + y


# ----------------------------------------------------------------------------------------------------------------------
# The backbone


class RMSNorm(nn.Module):
    def __init__(self, width, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if config.norm_gain else None
        self.eps = config.norm_eps

    def forward(self, x, normed=False):
        if normed:  # all but the gain is done
            return x if self.weight is None else (x * self.weight).to(x.dtype)
        return F.rms_norm(wide(x), x.shape[-1:], self.weight, self.eps).to(x.dtype)


class Linear(nn.Linear):
    """Weights are cast to the activations' dtype, so fp32 parameters can compute in bf16."""

    def forward(self, x, gain=None):
        """gain: that of a norm before, where x comes without it."""
        return F.linear(x, self.weight.to(x.dtype)) if gain is None else ScaledLinear.apply(x, self.weight, gain)


class ScaledLinear(torch.autograd.Function):
    """y = x (W gain)^T. Backward has W itself, dx = (dy W) gain, so that no W with the gain in it is kept."""

    @staticmethod
    def forward(ctx, x, weight, gain):
        ctx.save_for_backward(x, weight, gain)
        return F.linear(x, (weight * gain).to(x.dtype))

    @staticmethod
    def backward(ctx, dy):
        x, weight, gain = ctx.saved_tensors
        dx, dweight = dy @ weight.to(dy.dtype), wide(dy.flatten(0, -2).T @ x.flatten(0, -2))
        return (dx * gain).to(dx.dtype), (dweight * gain).to(weight.dtype), (dweight * weight).sum(0)


def rotary(config, start, length, device):
    """cos and sin [length, head_dim / 2] in float64 of RoPE at positions start, start + 1, ...; Llama-3.1's scaling if asked for."""
    exact = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
    freq = config.rope_theta ** -(torch.arange(0, config.head_dim, 2, device=device, dtype=exact) / config.head_dim)
    if config.rope_scaling:
        factor, low, high, original = map(float, config.rope_scaling.split(","))
        turns = original * freq / (2 * math.pi)  # in the original context: slow frequencies are stretched, fast ones kept
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        freq = freq * (keep + (1 - keep) / factor)
    angle = torch.outer(torch.arange(start, start + length, device=device, dtype=exact), freq)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    a, b = wide(x).chunk(2, dim=-1)  # half-split: coordinate i turns with i + head_dim / 2
    cos, sin = cos.to(a.dtype), sin.to(a.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        c, self.head_dim, self.keys = config, config.head_dim, config.keys
        self.norm = RMSNorm(c.d_model, c)
        self.q = Linear(c.d_model, c.n_head * c.head_dim, bias=False)
        self.k = Linear(c.d_model, c.n_kv_head * c.head_dim, bias=False)
        self.v = Linear(c.d_model, c.n_kv_head * c.head_dim, bias=False)
        self.o = Linear(c.n_head * c.head_dim, c.d_model, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(c.head_dim, c), RMSNorm(c.head_dim, c)) if c.qk_norm else (nn.Identity(), nn.Identity())

    def project(self, x, linear, gain):
        """x [B, T, d], or [KV, B, T, d] with an own input for each KV group g (headwise) -> [B, heads, T, head_dim]."""
        if x.ndim == 4:
            y = torch.einsum("gbtd,god->btgo", x, linear.weight.to(x.dtype).unflatten(0, (len(x), -1))).flatten(2)
        else:
            y = linear(x, gain)
        return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x, normed, rope, mask, cache):
        x, gain = (x, self.norm.weight) if normed else (self.norm(x), None)
        q = rotate(self.q_norm(self.project(x, self.q, gain)), *rope)
        k = rotate(self.k_norm(self.project(x, self.k, gain)), *rope)
        v = self.project(x, self.v, gain)
        if cache is not None:
            k, v = cache.append(self, k, v)
        if mask is None or torch.is_tensor(mask):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1, enable_gqa=True)
        else:
            flex = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
            y = flex(q, k, v, block_mask=mask, enable_gqa=True)
        hidden = y.transpose(1, 2).flatten(2)  # [B, T, n_head * head_dim]
        return self.o(hidden), hidden if self.keys == "projected" else None


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.keys = config.keys
        self.norm = RMSNorm(config.d_model, config)
        self.gate = Linear(config.d_model, config.d_mlp, bias=False)
        self.up = Linear(config.d_model, config.d_mlp, bias=False)
        self.down = Linear(config.d_mlp, config.d_model, bias=False)

    def forward(self, x, normed, rope, mask, cache):
        x, gain = (x, self.norm.weight) if normed else (self.norm(x), None)
        hidden = F.silu(self.gate(x, gain)) * self.up(x, gain)
        return self.down(hidden), hidden if self.keys == "projected" else None


@functools.cache
def compiled_flex_attention():
    return torch.compile(flex_attention)


def document_mask(docs):
    """docs [B, T], the number of each token's document -> what Attention takes as mask: causal, within a document."""
    if docs.is_cuda:
        same = lambda b, h, q, k: (q >= k) & (docs[b, q] == docs[b, k])
        return create_block_mask(same, docs.shape[0], None, docs.shape[1], docs.shape[1], device=docs.device)
    return (docs[:, None, :, None] == docs[:, None, None, :]).tril()


class Cache:
    """Keys and values of the positions that the next token looks back on: window - 1 of them (None: all). The prompt comes
    in one piece, then one token at a time."""

    def __init__(self, window=None):
        self.window, self.length, self.kv = window, 0, {}

    def mask(self, T, device):
        """For the prompt, where it is longer than the window."""
        if self.window and T > self.window:
            return torch.ones(T, T, dtype=torch.bool, device=device).tril().triu(1 - self.window)

    def append(self, layer, k, v):
        if layer in self.kv:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.kv[layer], (k, v)))
        old = max(0, k.shape[2] - self.window + 1) if self.window else 0
        self.kv[layer] = k[:, :, old:], v[:, :, old:]
        return k, v


# ----------------------------------------------------------------------------------------------------------------------
# The loss


def softmax_gradient(logits, targets, vocab_size, z_loss, n):
    """The sum of the cross-entropies of logits [tokens, vocab_size or more], whose further columns do not count, and the gradient of
    LinearCrossEntropy's mean over n tokens."""
    column = torch.arange(logits.shape[-1], device=logits.device)
    wide_logits = wide(logits).masked_fill(column >= vocab_size, -torch.inf)
    lse = wide_logits.logsumexp(-1)
    loss = lse.sum() - wide_logits.gather(1, targets[:, None]).sum()
    grad = (wide_logits - lse[:, None]).exp() * (1 + 2 * z_loss * lse)[:, None] - (column == targets[:, None]).to(lse.dtype)
    return loss, (grad / n).to(logits.dtype)


@functools.cache
def compiled_softmax_gradient():
    return torch.compile(softmax_gradient)


class LinearCrossEntropy(torch.autograd.Function):
    """The head and its loss: the mean cross-entropy in nats of logits = x W^T over x [n, d], W [vocab_size, d], targets [n]. The gradient
    is that of cross-entropy + z_loss * mean(lse^2), lse = logsumexp of a token's logits; the value is the cross-entropy alone.

        dlogits = (softmax(logits) (1 + 2 z_loss lse) - onehot(target)) / n

    is formed in the forward pass for one chunk of tokens after the other, at most CHUNK logits at a time, so that neither logits nor
    dlogits are ever there as a whole."""
    CHUNK = 2 ** 30

    @staticmethod
    def chunks(tokens, vocab_size):  # a power of two: mostly chunks of one size, for which the compiler sees one shape
        return min(tokens, 2 ** max(0, math.ceil(math.log2(tokens * vocab_size / LinearCrossEntropy.CHUNK))))

    @staticmethod
    def forward(ctx, x, weight, targets, z_loss):
        chunks, rows, w = LinearCrossEntropy.chunks(len(x), len(weight)), len(weight), weight.to(x.dtype)
        if x.dtype.itemsize == 2 and rows % 8:  # tensor cores are slow on rows of logits that are not aligned
            w = F.pad(w, (0, 0, 0, -rows % 64))
        loss, dx, dweight, step = 0.0, [], None, compiled_softmax_gradient() if x.is_cuda else softmax_gradient
        for xs, ts in zip(x.tensor_split(chunks), targets.tensor_split(chunks)):
            part, dlogits = step(F.linear(xs, w), ts, rows, z_loss, len(x))
            loss = loss + part
            if any(ctx.needs_input_grad):
                dx.append(dlogits @ w)
                dweight = dlogits.T @ xs if dweight is None else dweight.addmm_(dlogits.T, xs)
            del dlogits  # before the next chunk's are made
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(torch.cat(dx) if dx else None, None if dweight is None else dweight[:rows])
        return loss / len(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        dx, dweight = ctx.saved_tensors
        return dx * grad, dweight.to(ctx.weight_dtype) * grad, None, None


# ----------------------------------------------------------------------------------------------------------------------
# The model

STREAMS = {"baseline": Residual, "hc": HyperConnections, "attnres": Depth, "lr": Depth, "mhar": Depth}
DEPTH_ROUTES = tuple(name for name, stream in STREAMS.items() if issubclass(stream, Depth))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, dtype=torch.float32, z_loss=0.0):
        """dtype: what activations are computed and stored in; parameters are made in fp32 (see cast_parameters). z_loss: the weight of
        the mean square of the logits' logsumexp, in the gradient only."""
        super().__init__()
        self.config, self.dtype, self.z_loss = config, dtype, z_loss
        self.recompute = False  # keep no activations within sublayers, compute them again in backward; the reads' stay
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.sublayers = nn.ModuleList(kind(config) for _ in range(config.n_layer) for kind in (Attention, MLP))
        self.norm = RMSNorm(config.d_model, config)
        self.head = Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        self.stream = Delta if config.delta else STREAMS[config.route]
        self.router = nn.ParameterDict(self.stream.init(config))

    def hidden(self, idx, docs=None, cache=None):
        """idx [B, T] -> what the head reads, [B, T, d]."""
        start = cache.length if cache else 0
        rope = [a.to(torch.promote_types(self.dtype, torch.float32)) for a in rotary(self.config, start, idx.shape[1], idx.device)]
        mask = cache.mask(idx.shape[1], idx.device) if cache else None if docs is None else document_mask(docs)
        stream = self.stream(self.embed(idx).to(self.dtype), self.config, self.router)
        for t, sublayer in enumerate(self.sublayers):
            call = functools.partial(checkpoint, sublayer, use_reentrant=False) if self.recompute and torch.is_grad_enabled() else sublayer
            stream.write(*call(stream.read(t), stream.normed, rope, mask, cache))
        if cache:
            cache.length += idx.shape[1]
        return self.norm(stream.read(self.config.M), stream.normed)

    def forward(self, idx, targets=None, docs=None):
        """Token ids idx [B, T] -> logits [B, T, vocab_size], or with targets [B, T] their mean cross-entropy in nats (in the
        gradient, plus the z-loss).
        docs [B, T], the number of each token's document, keeps attention within documents; positions stay as they are."""
        x = self.hidden(idx, docs)
        if targets is None:
            return self.head(x)
        weight = self.head.weight if torch.is_grad_enabled() else self.head.weight.detach()  # else its gradient would be formed
        return LinearCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), self.z_loss)

    def compile_parts(self):
        """torch.compile for the sublayers, one compilation for each of the two kinds, whatever the depth, and for hyper-connections. Other
        reads and the loss are fused anyway."""
        for sublayer in self.sublayers:
            sublayer.compile()
        if self.stream is HyperConnections:
            self.stream = functools.partial(HyperConnections, compile=functools.cache(torch.compile))

    @torch.no_grad()
    def generate(self, idx, n, temperature=1.0, top_k=None, top_p=None, window=None, generator=None):
        """Yields n times the next token [B] of each row of idx [B, T]; temperature 0 takes the likeliest. window: the
        number of positions that attention looks back (all if None)."""
        cache = Cache(window)
        for _ in range(n):
            logits = wide(self.head(self.hidden(idx, cache=cache)[:, -1]))  # [B, vocab_size]
            if temperature == 0:
                token = logits.argmax(-1)
            else:
                logits = logits / temperature
                if top_k:
                    logits[logits < logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]] = -torch.inf
                probs = logits.softmax(-1)
                if top_p:  # the smallest set of tokens that holds top_p of the probability
                    p, order = probs.sort(descending=True)
                    p[p.cumsum(-1) - p >= top_p] = 0
                    probs = torch.zeros_like(probs).scatter(-1, order, p)
                token = torch.multinomial(probs, 1, generator=generator).squeeze(-1)
            yield token
            idx = token[:, None]

    def cast_parameters(self, dtype):
        """Stores the backbone's matrices in dtype. One-dimensional parameters and the router's stay fp32: steps as small
        as a gain's would be lost in bf16."""
        for name, p in self.named_parameters():
            if p.ndim > 1 and not name.startswith("router."):
                p.data = p.data.to(dtype)
        return self

    def num_params(self):
        """{total, non_embedding, routing}. Site 0 reads one slot, so its query never matters: LR's counts leave that row
        out (its appendix F.5), MHAR's have it, and so do these."""
        routing = sum(p.numel() for p in self.router.values())
        if self.config.route == "lr":
            routing -= sum(p[0].numel() for name, p in self.router.items() if name in ("query", "gain"))
        backbone = sum(p.numel() for name, p in self.named_parameters() if not name.startswith("router."))
        embedding = self.embed.weight.numel() * (1 if self.config.tied else 2)
        return {"total": backbone + routing, "non_embedding": backbone + routing - embedding, "routing": routing}


def memory(config, seq, micro, *, ranks=1, fsdp=False, recompute=False, optimizer="adamw", ema=False, accumulate=False,
           param_dtype=torch.bfloat16, dtype=torch.bfloat16):
    """Bytes on each GPU while micro sequences of seq tokens go forward and backward, compiled and with fused reads, as a dict:

    parameters, gradients, optimizer, average   by parameter, two optimizer states (Muon one); with fsdp in fp32 and 1 / ranks of it
    buckets                                     the gradients again, for the ranks' average (without fsdp)
    gathered                                    fsdp: embedding and head in fp32 with their gradients, two sublayers in dtype
    bank                                        depth routing's slots and mixes, 2 (M + 1) [tokens, d]
    activations                                 what the sublayers keep for backward: inputs and normed inputs (where a read has done the
                                                norm, both are the bank's mix), Q and K before and after rotation (without qk_norm
                                                after), V, attention's output (twice), gate, up and their product; matrices that were
                                                cast and not scaled by a norm's gain; with recompute only the inputs, and all of one
                                                sublayer
    head                                        one chunk's logits and their gradient, the gradient of the head
    peak                                        at the head, or at the optimizer's step, whichever is more

    Reads that are neither fused nor compiled keep more in backward than is counted here: headwise, projected keys.
    """
    c = config
    with torch.device("meta"):
        named = dict(GPT(c).named_parameters())
    rows, size, tokens, d = c.vocab_size, dtype.itemsize, seq * micro, c.d_model
    fp32 = lambda name, p: fsdp or p.ndim < 2 or name.startswith("router.")
    stored = {name: p.numel() * (4 if fp32(name, p) else param_dtype.itemsize) / (ranks if fsdp else 1) for name, p in named.items()}
    inside = sum(stored[name] for name, p in named.items() if name.startswith("sublayers.") and p.ndim == 2)
    total, q, kv = sum(stored.values()), c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    routed = c.route in DEPTH_ROUTES
    copies = HC_STREAMS + 2 if c.route == "hc" else 0 if routed and not c.delta else 1  # hc: its copies, the read and y
    attention, mlp = (4 * q + 3 * kv if c.qk_norm else 3 * q + 2 * kv), 3 * c.d_mlp
    if recompute:
        kept = copies * d * (c.M + 1) + d + max(attention, mlp)
    else:
        kept = (copies + (copies > 0)) * d * (c.M + 1) + c.n_layer * (attention + mlp)
    behind_norms, others = d * (q + 2 * kv + 2 * c.d_mlp), d * (q + c.d_mlp)  # a layer's matrices: Q, K, V, gate, up; O, down
    cast = c.n_layer * (others if copies == 0 and c.norm_gain else others + behind_norms)
    if recompute or fsdp or param_dtype.itemsize <= size:
        cast = 0
    chunk = -(-tokens // LinearCrossEntropy.chunks(tokens, rows))
    sizes = {
        "parameters": total, "gradients": total, "optimizer": 2 * total - (inside if optimizer == "muon" else 0),
        "average": sum(p.numel() for p in named.values()) * 4 / (ranks if fsdp else 1) if ema else 0,
        "buckets": total if ranks > 1 and not fsdp else 0,
        "gathered": (1 if c.tied else 2) * rows * d * 4 * 2 + 2 * max(2 * d * (q + kv), 3 * d * c.d_mlp) * size if fsdp else 0,
        "bank": 2 * (c.M + 1) * tokens * d * size if routed else 0,
        "activations": (kept * tokens + cast) * size,
        "head": (2 * chunk + d) * rows * size,
    }
    always = sum(sizes[name] for name in ("parameters", "optimizer", "average", "buckets", "gathered"))
    running = sizes["bank"] + sizes["activations"] + sizes["head"] + (total if accumulate else 0)
    return {name: round(value) for name, value in (sizes | {"peak": always + max(running, total - sizes["buckets"])}).items()}


def load_run(folder, device="cpu", checkpoint="ckpt.pt", ema=False, dtype=torch.float32):
    """A run's model, ready to use, and its config.json as a dict, with the checkpoint's step; ema: with the moving average of its weights;
    dtype: of activations, and with float64 of the parameters too. Raises ValueError with one line if there is none."""
    run, weights = read_weights(folder, checkpoint, ema)
    kernel = "torch" if run["model"].get("kernel") == "torch" else "auto"  # this may be another machine
    model = GPT(GPTConfig(**run["model"] | {"kernel": kernel}), dtype).to(torch.promote_types(dtype, torch.float32))
    try:
        model.load_state_dict(weights)
    except RuntimeError as e:
        raise ValueError(f"{Path(folder, checkpoint)} does not hold this run's model: {' '.join(str(e).split())[:200]}")
    return model.to(device).eval(), run


def read_weights(folder, checkpoint="ckpt.pt", ema=False):
    """A run's config.json as a dict, with the checkpoint's step, and its weights {name: tensor}, as they were stored. The file is mapped: a tensor takes memory when it is
    used, and what is written into one stays in memory. Raises ValueError with one line if there are none."""
    run, file = read_config(folder), Path(folder, checkpoint)
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        average = (state["ema"] or {}) if ema else {}
        weights = state["model"] | average
        if GPTConfig(**run["model"]).tied:  # the average has it once
            weights["head.weight"] = weights["embed.weight"]
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {checkpoint}")
    except Exception as e:  # torch.load raises nearly everything
        raise ValueError(f"{file} does not hold this run's model: {type(e).__name__}: {' '.join(str(e).split())[:200]}")
    if ema and not average:
        raise ValueError(f"{folder} has no moving average of its weights: leave out --ema")
    return run | {"step": state.get("step")}, weights


def read_config(folder):
    """A run's config.json as a dict. Raises ValueError with one line if it is missing or damaged."""
    file = Path(folder, "config.json")
    try:
        run = json.loads(file.read_text())
        GPTConfig(**run["model"]), Path(run["data"]["folder"]), run["data"]["encoding"]
        if not (isinstance(run["train"]["seq"], int) and run["train"]["seq"] > 0):
            raise ValueError(f"train.seq is {run['train']['seq']!r}")
        return run
    except OSError as e:
        raise ValueError(f"{folder} is no run: cannot read {file} ({e.strerror})")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{file} is damaged: {type(e).__name__}: {e}")


def clip_gradients(parameters, limit):
    """Scales the gradients so that their norm over all parameters is at most limit, up to the rounding of the factor to their dtype, and
    returns the norm before, in fp32. (torch's clip_grad_norm_ multiplies bf16 gradients by an fp32 factor: a slow kernel for each.)"""
    groups = {}  # one kernel for all tensors of a dtype
    for p in parameters:
        if p.grad is not None:
            groups.setdefault(p.grad.dtype, []).append(p.grad)
    norm = torch.stack([norm for group in groups.values() for norm in torch._foreach_norm(group, 2, torch.float32)]).norm()
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of sharded gradients
    factor = (limit / (norm + 1e-6)).clamp(max=1)
    for dtype, group in groups.items():
        torch._foreach_mul_(group, factor.to(dtype))
    return norm


@functools.cache
def capture_stream():  # memory of a pool is used again only by what is captured on the same stream
    return torch.cuda.Stream()


def on_capture_stream(step, *inputs, pool=None):
    """step(*inputs) on the stream that graphs are recorded on, between what comes before and after; given a pool, in its memory."""
    side = capture_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.cuda.use_mem_pool(pool) if pool else nullcontext():
        outputs = step(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    return outputs


def capture(step, *inputs, pool=None, free=None):
    """Records step(*inputs) as a CUDA graph, so that the CPU launches it as one piece, and returns (replay, pool):
    replay(*inputs) copies new inputs of the same shapes into place, runs the graph and returns step's outputs, tensors that the next
    replay overwrites. The same holds for gradients that are None when step begins; gradients that exist are added to.
    step runs once before, to compile, and free() then drops the gradients that it left, which would split the memory that the graph
    takes. A pool is that of an earlier graph: its memory is used in turn, and step, which is compiled then, does not run before."""
    static = [x.clone() for x in inputs]
    if pool is None:
        pool = torch.cuda.MemPool()
        on_capture_stream(step, *static)
        if free:
            free()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id, stream=capture_stream(), capture_error_mode="thread_local"):  # NCCL has a thread of its own
        outputs = step(*static)

    def replay(*inputs):
        for a, b in zip(static, inputs):
            a.copy_(b, non_blocking=True)
        graph.replay()
        return outputs

    return replay, pool


# ----------------------------------------------------------------------------------------------------------------------
# Flags, for the scripts


def fail(message):
    """One line on stderr, exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def pick_device(name=None, best=("cuda", "cpu")):
    """The torch.device of that name, or the first of best that is there. Raises ValueError if it cannot be had."""
    there = next(kind for kind in best if kind == "cpu" or getattr(torch, "cuda" if kind == "cuda" else "mps").is_available())
    try:
        device = torch.device(name or there)
        if device.type not in ("cuda", "mps", "cpu"):
            raise RuntimeError
        torch.empty(0, device=device)
        return device
    except (RuntimeError, AssertionError):
        raise ValueError(f"--device={name} is not to be had here; there is: {there}")


def run_command(commands):
    """SCRIPT COMMAND FOLDERS --name=value ...: for scripts that do several things. commands: {COMMAND: (function, FOLDERS, dataclass, ...)},
    FOLDERS as "RUN OTHER", or "RUN ..." for one or more. Returns function(flags as the dataclass, those of further dataclasses as dicts, the
    folders). Whatever is wrong ends with one line on stderr and exit code 2."""
    module = inspect.getmodule(next(iter(commands.values()))[2])
    script, (command, *rest) = Path(module.__file__).name, sys.argv[1:] or ["--help"]
    if command in ("--help", "-h"):
        return print(module.__doc__.strip(), f"\n\n{script} {{{'|'.join(commands)}}} --help lists the flags")
    if command not in commands:
        fail(f"unknown command {command!r}; there are: {', '.join(commands)}")
    function, wanted, config, *others = commands[command]
    folders = [arg for arg in rest if not arg.startswith("-")]
    flags = parse_flags(config, *others, argv=[arg for arg in rest if arg.startswith("-")])
    n = len(wanted.removesuffix("...").split())
    if len(folders) < n or (len(folders) > n and not wanted.endswith("...")):
        fail(f"{script} {command} takes {wanted or 'no folder'} and flags, not {' '.join(folders) or 'flags alone'}")
    of = lambda kind: {f.name: flags[f.name] for f in dataclasses.fields(kind) if f.name in flags}
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a text's characters
    try:
        code = function(config(**of(config)), *map(of, others), *folders)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # | head: what is still to be printed goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, RuntimeError, OSError) as e:
        fail((str(e).splitlines() or [type(e).__name__])[0])
    except KeyboardInterrupt:
        sys.exit(130)


def parse_flags(*configs, argv=None):
    """The fields of dataclasses as flags: --name=value, or --name for a boolean. Returns a dict of those that were given,
    with the fields' types. --help prints each field with its default and the comment beside it. Whatever is wrong
    ends with one line on stderr and exit code 2."""
    types = {name: t for config in configs for name, t in get_type_hints(config).items()}
    given = {}
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(inspect.getmodule(configs[0]).__doc__.strip(), "\n")
        for config in configs:
            lines = inspect.getsource(config).splitlines()
            for field in dataclasses.fields(config):
                comment = next(line.partition("  # ")[2] for line in lines if re.match(rf"    {field.name}:", line))
                options = get_args(types[field.name])
                choices = f" ({'|'.join(options)})" if isinstance(field.default, str) and options else ""
                print(f"  --{field.name}={field.default}{choices}".ljust(36), comment)
        raise SystemExit(0)
    for arg in argv:
        name, has_value, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or name not in types:
            close = difflib.get_close_matches(name, types, n=1)
            fail(f"unknown flag {arg.partition('=')[0]}" + (f"; did you mean --{close[0]}?" if close else "; --help lists the flags"))
        options = [t for t in get_args(types[name]) or (types[name],) if t is not type(None)]
        kind = options[0]
        if not has_value and kind is not bool:
            fail(f"--{name} needs a value: --{name}=...")
        if isinstance(kind, str):  # Literal
            if text not in options:
                fail(f"--{name}={text}: choose from {', '.join(options)}")
            given[name] = text
        elif kind is bool:
            if has_value and text.lower() not in ("true", "false"):
                fail(f"--{name}={text}: true or false")
            given[name] = text.lower() != "false"
        else:
            try:
                given[name] = kind(text)
                if kind is float and not math.isfinite(given[name]):
                    raise ValueError
            except ValueError:
                fail(f"--{name}={text}: expected {'a whole number' if kind is int else 'a number'}")
    return given
