"""Look inside: what depth routing costs, what a trained run's routing does, and how runs compare.

    python probe.py cost --size=lr-0.5b --route=lr --rank=32 --blocks=8       # arithmetic, nothing is run
    python probe.py cost --size=lr-0.5b --route=lr --sweep                    # every rank and number of blocks of LR's tables
    python probe.py routing out/mhar-nano --plot=routing.png                  # who reads what, over validation text
    python probe.py routing out/mhar-nano --text="def main():" --plot=text.png   # one text, token by token
    python probe.py queries out/attnres-nano --plot=queries.png               # is one head enough?
    python probe.py queries model.safetensors --query='layers.*.query'        # the queries of any checkpoint
    python probe.py compare out --plot=curves.svg                             # losses, speed, seeds, of whole runs

Each prints a table; --json=FILE writes its numbers, --plot=FILE (.png, .svg or .pdf; pip install matplotlib) draws them.

cost: S_src, the sum of |S(t)|; the routing's FLOPs as a share of the core L (2 d q + 2 d kv + 3 d m), the backbone without embeddings,
head and attention scores (LR tables 4 and 5); by how much r-dimensional keys reduce a read's r + d multiply-adds; the memory traffic of
all reads of a step, in units of one [tokens, d] tensor as it is stored, and the time that it takes at --bandwidth:
    push      as published: each site reads its slots once forward, twice backward, where it also reads and writes fp32 gradients
    pull      every (site, slot) pair is read once forward (the slot) and once backward (the site's gradient)
    chunked   --chunk sites fetch their older slots together, --chunk slots the gradients of later sites
and besides, once for each site: slots, mixes and gradients written and read, and with chunks the partial results. Bank, activations and
the training's peak beside the baseline's are the arithmetic of train.py --dry_run, with bf16 parameters.

routing: the weights' mean over tokens (LR figure 8); exp(H), H a token's entropy over slots, its mean and standard deviation over
tokens: the effective number of sources (LR Eq. 14); each head's deviation from the mean over heads, half the sum of absolute
differences of the mean weights, beside that of random queries of the same norms, and how well both repeat on the other half of the text:
r, over all sites, slots and heads (MHAR figure 4). Nothing is stored for each token.

queries: each head's query cut into S slices, each voting alone: z_s is slice s's part of the logits z = sum of z_s over s,

    disagreement = mean over tokens and slices of KL(a_s || alpha),    a_s = softmax(S z_s),    alpha = softmax(z)

so slices that agree give 0; beside it random queries of the same norm, the excess over them, slices of every S-th coordinate,
--sources slots at every site, and the sources' mean cosine (MHAR table 6). Of the queries alone (gain folded in): the rank and singular
values of all sites' queries as one matrix (LR 4.8), exp of the entropy of the squared coordinates' shares, and zeros (LR appendix E).

compare: a run's loss is the mean of its last --tail evaluations (three of 20). A finished baseline with the same seed, backbone, data and recipe
(the best, if there are several learning rates) is subtracted; mean and standard deviation over seeds (runs of one seed count once), SE = std /
sqrt(seeds). A folder of runs stands for them all. Runs that go on from models whose names end in the run's seed (--init_from) are
seeds of one row. A flag is in a run's name if it tells runs apart; heads and MLP not where they follow from d_model.
Columns: speed, tokens/s over that baseline's (medians of the steps); |grad|, var |grad| and clipped, the mean and variance of the
gradient's norm over the logged steps and the share of them above --clip; GiB, the most memory that a GPU held.
Figures by width (a line for each depth if a width has several), rank or heads draw the best of the rows that differ in something else.
--gain fits L = A C^-alpha + E through the baselines, C = FLOPs in training: how much more compute a baseline needs for a run's loss
(MHAR 3.2). --items compares eval.py's results item by item: exact McNemar test and a bootstrap interval of the difference.
"""
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import re
import shlex
import statistics
import sys
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

import prepare
from model import DEPTH_ROUTES, GPT, ROUTING_FLAGS, GPTConfig, fail, load_run, memory, pick_device, read_config, route, run_command, watch_routing, wide


@dataclass
class Cost:
    size: str = "350m"  # a preset of model.py, whose fields are flags too
    tokens: int = 16_384  # tokens of a micro batch
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # what slots and gradients are stored in
    bandwidth: float = 4.2e12  # bytes that the memory moves in a second
    chunk: int = 8  # sites that fetch older slots together; kernel.py's CHUNK
    sweep: bool = False  # instead: all ranks and numbers of blocks of LR's tables
    json: str | None = None  # write the numbers to this file
    plot: str | None = None  # draw them: .png, .svg or .pdf


@dataclass
class Routing:
    tokens: int = 65_536  # validation tokens, spread over the whole split
    batch: int = 8  # sequences in a forward pass
    text: str | None = None  # instead: the weights of this text, token by token
    site: int | None = None  # the site for that; unset: the last, which the head reads
    checkpoint: str = "ckpt.pt"  # or best.pt, ckpt_prev.pt
    seed: int = 0  # of the random queries
    device: str | None = None  # unset: cuda if there is one, else cpu
    json: str | None = None  # write the numbers to this file
    plot: str | None = None  # draw them: .png, .svg or .pdf


@dataclass
class Queries:
    tokens: int = 16_384  # validation tokens, spread over the whole split
    batch: int = 8  # sequences in a forward pass
    slices: int = 4  # S: slices of each query
    sources: int = 8  # slots that every site gets in the matched control, spread over S(t); sites with fewer are left out
    draws: int = 4  # random queries for each site
    query: str | None = None  # of a .safetensors file: the names of the queries, with *, several separated by commas
    gain: str | None = None  # the names of the key gains to multiply in, as many
    checkpoint: str = "ckpt.pt"  # or best.pt, ckpt_prev.pt
    seed: int = 0  # of the random queries
    device: str | None = None  # unset: cuda if there is one, else cpu
    json: str | None = None  # write the numbers to this file
    plot: str | None = None  # draw them: .png, .svg or .pdf


@dataclass
class Compare:
    tail: int | None = None  # evaluations at the end whose mean is a run's loss; unset: a seventh of them, at most 11
    gain: bool = False  # compute-equivalent gain: needs baselines of three different amounts of compute
    items: bool = False  # also what eval.py wrote to RUN/eval/*.json, item by item
    figure: Literal["curves", "width", "grid", "flops", "norms", "heads"] = "curves"  # width: deltas; grid: lr's ranks and blocks; norms: of gradients; heads: H and KV
    json: str | None = None  # write the numbers to this file
    plot: str | None = None  # draw the figure: .png, .svg or .pdf


# ----------------------------------------------------------------------------------------------------------------------
# cost


def baseline(c):
    return dataclasses.replace(c, route="baseline", kernel="auto", **ROUTING_FLAGS)


def percent(c, macs=None):
    """A token's multiply-adds, by default those of the routing, in percent of the core's."""
    d, q, kv = c.d_model, c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    macs = (c.flops(1) - baseline(c).flops(1)) / 6 if macs is None else macs
    return 100 * macs / (c.n_layer * (2 * d * q + 2 * d * kv + 3 * d * c.d_mlp))


def retained(c):
    """Slots that must be kept at one time."""
    return max(len(c.slots(t)) for t in range(c.M + 1))


def pair_reads(c, chunk):
    """Tensors that the sites 1..M read forward, and the slots backward, if `chunk` sites fetch what was finished before them
    together, and `chunk` slots the gradients of the sites after them. Chunks of 1: S_src each way."""
    finished, forward, backward = {0, *c.ends}, 0, c.M  # slot 0 by itself pulls from every site
    for a in range(1, c.M + 1, chunk):
        b = min(a + chunk, c.M + 1)
        old = {i for i in finished if i < a}
        forward += len(old) + sum(len(set(c.slots(t)) - old) for t in range(a, b))
        backward += sum(i in c.slots(t) for t in range(a, b) for i in range(a, b)) + (c.M + 1 - b) * any(i in finished for i in range(a, b))
    return forward, backward


def cost(c, tokens=16_384, itemsize=2, bandwidth=4.2e12, chunk=8):
    """What the routing of a GPTConfig costs over its baseline, as a dict."""
    with torch.device("meta"):
        parameters = GPT(c).num_params()["total"] - GPT(baseline(c)).num_params()["total"]
    result = {"route": flags_of(c), "added_flops_percent": percent(c), "parameters_added": parameters}
    if c.route not in DEPTH_ROUTES:
        return result
    d, r, M, reads, projected = c.d_model, c.r, c.M, c.source_reads(), c.keys == "projected"
    result |= {"source_reads": reads, "kernel_reduction_percent": 100 * (1 - (r + d) / (2 * d)), "retained_slots": retained(c),
               "retained_bytes": retained(c) * tokens * (d + projected * r) * itemsize}
    if projected:
        weights = r * (c.n_layer * (c.n_head * c.head_dim + c.d_mlp) + d)  # each used once for a token
        result |= {"key_parameters": weights, "key_flops_percent": percent(c, weights), "key_bytes_percent": 100 * r / d}
    if not c.headwise and not projected:  # they have no kernels
        ours, other = (memory(config, tokens, 1, dtype=torch.bfloat16 if itemsize == 2 else torch.float32) for config in (c, baseline(c)))
        result |= {"bank_bytes": ours["bank"], "activation_bytes": ours["activations"], "training_peak_percent": 100 * ours["peak"] / other["peak"]}
        wide_units = 4 // itemsize  # an fp32 tensor
        pairs = {"push": reads * (3 + 2 * wide_units), "pull": 2 * reads, "chunked": sum(pair_reads(c, chunk))}
        once = {"push": (4 + 2 * wide_units) * M, "pull": 7 * M, "chunked": 11 * M}
        result["traffic"] = [{"kernels": name, "pair_units": pairs[name], "site_units": once[name],
                              "bytes": (total := (pairs[name] + once[name]) * tokens * d * itemsize), "ms": total / bandwidth * 1e3} for name in pairs]
    return result


def sweep(c):
    """Rows of LR's tables 4 (source reads) and 5 (added FLOPs in percent of the core) for a size."""
    schedules = {("full" if N == 0 else f"N={N}"): N for N in (0, 4, 8, 16) if N <= c.M}
    config = lambda r, N, keys="slice": dataclasses.replace(c, rank=r, blocks=N, keys=keys, key_norm="auto", kernel="auto")
    reads = [{"blocks": name, "source_reads": config(1, N).source_reads(), "retained_slots": retained(config(1, N))} for name, N in schedules.items()]
    ranks = sorted({max(1, c.d_model * k // 64) for k in (1, 2, 4, 8, 16, 32, 48, 64)})
    flops = [{"keys": keys, "rank": r} | {name: percent(config(r, N, keys)) for name, N in schedules.items()}
             for keys, some in (("slice", ranks), ("projected", ranks[:3])) for r in some]
    return {"reads": reads, "added_flops_percent": flops}


def run_cost(c, model_flags):
    if min(c.tokens, c.bandwidth, c.chunk) <= 0:
        fail("--tokens, --bandwidth and --chunk must be positive")
    config = GPTConfig.from_size(c.size, **model_flags)
    if c.sweep:
        if config.route != "lr" or set(model_flags) & {"rank", "blocks", "keys", "delta"}:
            fail("--sweep goes over ranks, blocks and keys by itself: use it with --route=lr and without these")
        result = sweep(config)
        table(result["reads"])
        print("\nadded FLOPs, percent of the core:")
        table(result["added_flops_percent"], "#.4g")
        return result, draw_sweep
    result = {"size": c.size} | cost(config, c.tokens, 2 if c.dtype == "bfloat16" else 4, c.bandwidth, c.chunk)
    for name, value in result.items():
        if name != "traffic":
            print(f"{name:26} {cell(value)}")
    if "traffic" in result:
        print(f"\nreads of {c.tokens:,} tokens in {c.dtype}, a unit being {c.tokens * config.d_model * (2 if c.dtype == 'bfloat16' else 4):,} bytes:")
        table(result["traffic"])
    elif c.plot:
        fail("--plot draws the reads' traffic, which there is none of here")
    return result, draw_cost


# ----------------------------------------------------------------------------------------------------------------------
# routing


def text_batches(run, c):
    """Batches [B, seq] of token ids, with document numbers if the run was trained so: --tokens of the validation split, evenly
    spread; in two halves: yields (half, idx, docs)."""
    data = prepare.Shards(run["data"]["folder"], "val", run["train"]["seq"])
    n = min(data.n_windows, max(2, c.tokens // data.seq))
    if n < 2:
        fail(f"the validation split of {run['data']['folder']} has one window of {data.seq} tokens; two are needed")
    picks = [i * data.n_windows // n for i in range(n)]
    for half, part in enumerate((picks[:n // 2], picks[n // 2:])):
        for i in range(0, len(part), c.batch):
            idx = torch.from_numpy(np.stack([data.window(p)[:-1] for p in part[i:i + c.batch]]))
            yield half, idx, (idx == data.meta["eot"]).cumsum(1) if run["train"].get("doc_mask") else None


@torch.no_grad()
def visit_reads(model, idx, docs, visit):
    """Runs the model on idx [B, T] and calls visit(site, weights, sources, query, keys) at every read of the sites 1..M, site being (t, j):
    j counts the reads of a site, several only with headwise."""
    count = Counter()

    def each(t, weights, *read):
        if t > 0:
            if len(weights) != (n := len(model.config.slots(t))):
                raise ValueError(f"site {t} reads {len(weights)} sources, and config.slots({t}) names {n}: they must be the same")
            visit((t, count[t]), weights, *read)
            count[t] += 1

    with watch_routing(each):
        model.hidden(idx, docs)


class RandomQueries:
    """For each site, queries in random directions, each head's as long as the trained one; the same every time."""

    def __init__(self, seed, draws=1):
        self.generator, self.draws, self.queries = torch.Generator().manual_seed(seed), draws, {}

    def __call__(self, site, query):
        if site not in self.queries:
            random = torch.randn(self.draws, *query.shape, generator=self.generator).to(query)
            self.queries[site] = random * (query.norm(dim=-1) / random.norm(dim=-1)).unsqueeze(-1)
        return self.queries[site]


class Statistics:
    """Sums over tokens of the weights of each site and of exp(H) and its square, in float64, for each half of the text:
    as large for one token as for a million."""

    def __init__(self):
        self.sums = {}

    def add(self, half, site, weights):
        w = weights.flatten(1, -2)  # [n, tokens, H]
        effective = -torch.xlogy(w, w).sum(0)  # [tokens, H]
        effective = effective.double().exp()
        new = torch.cat([w.sum(1, dtype=torch.float64), effective.sum(0, keepdim=True), effective.square().sum(0, keepdim=True),
                         torch.full_like(effective[:1], len(effective))])
        self.sums[half, site] = self.sums.get((half, site), 0) + new

    def sites(self):
        """{t: (mean weights [n, H], those of the two halves [2, n, H], mean of exp(H) [H], its standard deviation [H])}"""
        merged = defaultdict(list)
        for (half, (t, j)), x in sorted(self.sums.items()):
            merged[t, half].append(x)
        result = {}
        for t in sorted({t for t, _ in merged}):
            halves = [torch.cat(merged[t, half], -1).cpu() for half in (0, 1)]
            *weights, mean, square, _ = sum(halves) / sum(x[-1] for x in halves)
            result[t] = torch.stack(weights), torch.stack([x[:-3] / x[-1] for x in halves]), mean, (square - mean.square()).clamp(min=0).sqrt()
        return result


def deviations(sites):
    """Statistics.sites() -> ({t: half the sum over slots of |deviation from the mean over heads|, [H]}, its r between the halves)."""
    gap = lambda w: w - w.mean(-1, keepdim=True)
    a, b = torch.cat([gap(halves).flatten(1) for _, halves, *_ in sites.values()], 1)
    r = torch.corrcoef(torch.stack([a, b]))[0, 1].item() if min(a.std(), b.std()) > 1e-12 else None
    return {t: (gap(w).abs().sum(0) / 2).tolist() for t, (w, *_) in sites.items()}, r


def routing(model, run, c, device):
    """The statistics of a run's weights: a dict with a row for each site."""
    config, trained, null, random = model.config, Statistics(), Statistics(), RandomQueries(c.seed)
    args, tokens = dict(norm=config.norm, eps=config.norm_eps), 0

    def visit(half, site, weights, sources, query, keys):
        trained.add(half, site, weights)
        if config.H > 1 or config.headwise:
            null.add(half, site, route(sources, random(site, query)[0], keys=keys, **args)[1])

    for half, idx, docs in text_batches(run, c):
        visit_reads(model, idx.to(device), None if docs is None else docs.to(device), functools.partial(visit, half))
        tokens += idx.numel()
    sites, result = trained.sites(), {"tokens": tokens}
    rows = {t: {"site": t, "before": what_reads(t, config), "slots": config.slots(t), "weights": weights.tolist(), "effective_by_head": mean.tolist(),
                "effective": mean.mean().item(), "spread": std.square().mean().sqrt().item()} for t, (weights, _, mean, std) in sites.items()}
    if null.sums:
        ours, result["replication_r"] = deviations(sites)
        theirs, result["replication_r_random"] = deviations(null.sites())
    for t, row in rows.items():
        row |= {"deviation": ours[t], "deviation_random": theirs[t]} if null.sums else {}
        row |= {"gate": model.router["gate"][t].item()} if config.delta else {}
    return result | {"sites": list(rows.values())}


def what_reads(t, config):
    return "head" if t == config.M else "MLP" if t % 2 else "attention"


def text_routing(model, run, c, device):
    """The weights of one site at every token of a text."""
    encoding = prepare.encoding(run["data"]["encoding"], folder=run["data"]["folder"])
    site = model.config.M if c.site is None else c.site
    if not 1 <= site <= model.config.M:
        fail(f"--site must be from 1 to {model.config.M}, not {site}")
    ids, found = [encoding.eot] + encoding.encode(c.text), []
    visit_reads(model, torch.tensor([ids], device=device), None, lambda s, weights, *_: found.append(weights[:, 0]) if s[0] == site else None)
    return {"site": site, "before": what_reads(site, model.config), "slots": model.config.slots(site),
            "tokens": ["·" if i == encoding.eot else encoding.decode([i]) for i in ids],
            "weights": torch.cat(found, -1).permute(2, 0, 1).tolist()}  # [H][slot][token]


def run_routing(c, name):
    model, run, device = load(c, name)
    if c.text is not None:
        result = text_routing(model, run, c, device)
        mean = np.mean(result["weights"], 0)  # [slot, token]
        print(f"site {result['site']}, before the {result['before']}; the three slots that each token reads most, mean over heads:")
        for token, column in zip(result["tokens"], mean.T):
            print(f"{token!r:>14} ", *(f"{result['slots'][i]:>4} {column[i]:5.1%}" for i in (-column).argsort()[:3]))
        return result, draw_text
    if c.site is not None:
        fail("--site goes with --text")
    result = routing(model, run, c, device)
    rows = []
    for row in result["sites"]:
        mean = np.mean(row["weights"], 1)
        most = "  ".join(f"{row['slots'][i]}: {mean[i]:.0%}" for i in (-mean).argsort()[:3])
        rows.append({name: row[name] for name in ("site", "before", "effective", "spread", "gate") if name in row}
                    | {"slots": len(row["slots"]), "most read": most}
                    | {name: np.mean(row[name]) for name in ("deviation", "deviation_random") if name in row})
    table(rows)
    print(f"{result['tokens']:,} tokens")
    if "replication_r" in result:
        r, random = cell(result["replication_r"]), cell(result["replication_r_random"])
        print(f"deviations on one half of the text and on the other: r = {r}, of random queries {random}")
    return result, draw_routing


# ----------------------------------------------------------------------------------------------------------------------
# queries


def slice_logits(sources, query, slices, interleaved=False, norm="full", keys=None, eps=1e-6):
    """The logits of route(), in parts: z [n, ..., H, slices], part s from slice s of the head's key coordinates, contiguous or every
    slices-th. Their sum over s is the logit. Arguments as route()'s."""
    H, R = query.shape
    parts = []
    for i, v in enumerate(sources):
        v = wide(v).unflatten(-1, (H, -1))
        key = v[..., -R:] if keys is None else wide(keys[i]).unflatten(-1, (H, R))
        square = v.square().mean((-2, -1)).unsqueeze(-1) if norm == "full" else key.square().mean(-1)
        part = (key * query).unflatten(-1, (-1, slices) if interleaved else (slices, -1)).sum(-2 if interleaved else -1)
        parts.append(part * (square + eps).rsqrt().unsqueeze(-1))
    return torch.stack(parts)


def disagreement(z):
    """Slice logits z [n, ..., H, S] -> KL(a_s || alpha) in nats, summed over tokens, mean over heads and slices: a_s = softmax(S z_s) is what
    slice s alone would choose, alpha = softmax(sum of z_s)."""
    a, alpha = (z.shape[-1] * z).log_softmax(0), z.sum(-1, keepdim=True).log_softmax(0)
    return (a.exp() * (a - alpha)).sum(0).mean((-2, -1)).sum(dtype=torch.float64)


def cosine(sources):
    """Mean over all pairs of n sources [..., d] of their cosine, summed over tokens: |sum of unit vectors|^2 = n + 2 sum of the cosines."""
    n, units = len(sources), [F.normalize(wide(v), dim=-1) for v in sources]
    cosines = sum(units).square().sum(-1) - sum(u.square().sum(-1) for u in units)  # a zero vector has no length 1
    return (cosines / (n * (n - 1))).sum(dtype=torch.float64)


def query_matrix(query, gain):
    """Of the folded queries [sites, coordinates]: rank, singular values, effective dimension, zeros. Rows of zeros are left out: the query
    of site 0 is never used."""
    folded = {dtype: query.to(dtype) if gain is None else query.to(dtype) * gain.to(dtype) for dtype in (torch.float32, torch.float64)}
    matrix = folded[torch.float64]
    used = matrix.abs().sum(1) > 0
    if not used.any():
        return {"queries": 0, "zero_queries": len(matrix)}
    values = torch.linalg.svdvals(matrix[used])
    energy = values.square().cumsum(0) / values.square().sum()
    share = matrix[used].square() / matrix[used].square().sum(1, keepdim=True)
    dims = (-torch.xlogy(share, share).sum(1)).exp()
    return {"queries": used.sum().item(), "zero_queries": (~used).sum().item(), "width": matrix.shape[1],
            "rank": (values > values[0] * max(matrix.shape) * torch.finfo(torch.float32).eps).sum().item(),
            "rank_99": (energy < 0.99).sum().item() + 1,  # singular values that hold 99 % of the squared norm
            "effective_dimension": dims.mean().item(), "effective_dimension_by_site": dims.tolist(),
            "zeros_fp32": (folded[torch.float32][used] == 0).sum().item(), "zeros_fp64": (matrix[used] == 0).sum().item(),
            "singular_values": values.tolist()}


def width(model, run, c, device):
    """Disagreement between slices of the trained queries, site by site."""
    config, random, sums, tokens = model.config, RandomQueries(c.seed, c.draws), defaultdict(float), 0
    args = dict(norm=config.norm, eps=config.norm_eps)
    matched = min(c.sources, max(len(config.slots(t)) for t in range(config.M + 1)))

    def visit(site, weights, sources, query, keys):
        nulls, some = random(site, query), torch.linspace(0, len(sources) - 1, matched).round().long().tolist()
        def measure(name, sources, keys, interleaved=False):
            of = lambda q: disagreement(slice_logits(sources, q, c.slices, interleaved, keys=keys, **args))
            sums[site[0], name] += of(query)
            sums[site[0], name + "_random"] += sum(map(of, nulls)) / c.draws
        measure("contiguous", sources, keys)
        measure("interleaved", sources, keys, interleaved=True)
        if len(sources) >= matched:
            measure("matched", [sources[i] for i in some], keys and [keys[i] for i in some])
        sums[site[0], "cosine"] += cosine(sources)
        sums[site[0], "n"] += weights[0, ..., 0].numel()

    for _, idx, docs in text_batches(run, c):
        visit_reads(model, idx.to(device), None if docs is None else docs.to(device), visit)
        tokens += idx.numel()
    rows = []
    for t in range(1, config.M + 1):
        mean = {name: (x / sums[t, "n"]).item() for (site, name), x in sums.items() if site == t and name != "n"}
        row = {"site": t, "slots": len(config.slots(t)), "cosine": mean["cosine"]}
        for name in ("contiguous", "interleaved", "matched"):
            if name in mean:
                row |= {name: mean[name], f"{name}_random": mean[f"{name}_random"], f"{name}_excess": mean[name] - mean[f"{name}_random"]}
        rows.append(row)
    means = {name: statistics.mean(row[name] for row in rows if name in row) for name in rows[-1] if name not in ("site", "slots")}
    return {"slices": c.slices, "matched_sources": matched, "tokens": tokens, "sites": rows, "mean": means}


def run_queries(c, name):
    if min(c.slices, c.sources - 1, c.draws) < 1:
        fail("--slices and --draws must be positive, --sources at least 2")
    if name.endswith(".safetensors"):
        result = {"matrices": {"query": query_matrix(*tensors(c, name))}}
    elif c.query or c.gain:
        fail("--query and --gain name the tensors of a .safetensors file; a run's are known")
    else:
        model, run, device = load(c, name)
        config, router = model.config, model.router
        widths = [config.d_model] * config.headwise + [config.r // config.H]
        if any(w % c.slices for w in widths):
            fail(f"--slices={c.slices} must divide the {widths[-1]} coordinates of each query; --slices=1 does, and tells of the rest")
        rows = lambda name: router[name].detach().cpu().flatten(1) if name in router else None  # [sites, coordinates]
        matrices = {f"{kind}query": query_matrix(rows(f"{kind}query"), rows(f"{kind}gain")) for kind in ("", "group_") if f"{kind}query" in router}
        result = {"matrices": matrices} | width(model, run, c, device)
        table([{name: value for name, value in row.items() if not name.endswith("excess")} for row in result["sites"]])
        print(f"{result['tokens']:,} tokens, {c.slices} slices, KL in nats; matched: {result['matched_sources']} slots at each site; means over sites:")
        for kind in ("contiguous", "interleaved", "matched"):
            trained, random, excess = (result["mean"][kind + what] for what in ("", "_random", "_excess"))
            print(f"  {kind:12} trained {trained:.4g}, random {random:.4g}, excess {excess:.4g}")
        print()
    for name, matrix in result["matrices"].items():
        print(f"{name}: " + ", ".join(f"{key} {cell(value)}" for key, value in matrix.items() if not isinstance(value, list)))
        if "singular_values" in matrix:
            print("  singular values", *(f"{v:.3g}" for v in matrix["singular_values"][:16]), *["..."] * (len(matrix["singular_values"]) > 16))
    return result, draw_queries


def tensors(c, file):
    """The queries [sites, coordinates] and gains of a safetensors file: a tensor with several dimensions holds a row for each of its
    first, one with a single dimension is a row."""
    try:
        from safetensors import safe_open
    except ImportError:
        fail("a .safetensors file needs the package: pip install safetensors")
    if not c.query:
        fail("give the names of the file's queries: --query='layers.*.query'")
    natural = lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    try:
        with safe_open(file, "pt") as f:
            def rows(patterns):
                names = sorted((n for n in f.keys() if any(fnmatch(n, p) for p in patterns.split(","))), key=natural)
                if not names:
                    fail(f"{file} has no tensor {patterns}; there are: {', '.join(itertools.islice(f.keys(), 8))}, ...")
                found = [f.get_tensor(n) for n in names]
                return torch.cat([x.flatten(1) if x.dim() > 1 else x[None] for x in found])

            query, gain = rows(c.query), rows(c.gain) if c.gain else None
    except Exception as e:  # the package has an error class of its own
        fail(f"cannot read the queries of {file}: {type(e).__name__}: {' '.join(str(e).split())[:200]}")
    if gain is not None and gain.shape != query.shape:
        fail(f"--gain gives {list(gain.shape)}, --query {list(query.shape)}: they must be the same")
    return query, gain


# ----------------------------------------------------------------------------------------------------------------------
# compare

# What of train.py's settings makes a run's losses what they are, and as often; the others say how fast and where it ran.
RECIPE = ("data", "seq", "batch", "steps", "lr", "min_lr", "schedule", "warmup", "warmdown", "optimizer", "muon_lr", "weight_decay", "decay", "z_loss",
          "ema", "clip", "doc_mask", "eval_every", "eval_tokens", "dtype", "param_dtype", "init_from")
RATES = ("lr", "min_lr", "muon_lr")  # a run's baseline may have other ones
# Not in a run's name where the other one tells them apart (sha256: of data sets that have one name)
FOLLOWS = {name: "d_model" for name in ("n_head", "n_kv_head", "head_dim", "d_mlp")} | {"min_lr": "lr", "sha256": "data"}
MEANS = {"speed_ratio": "speed", "tokens_per_s": "tokens/s", "grad_norm": "|grad|", "grad_norm_variance": "var |grad|", "clipped": "clipped",
         "added_flops_percent": "+FLOPs %", "peak_gib": "GiB"}  # what is averaged over seeds, and its column


def flags_of(config):
    """The route with the routing flags that are not the defaults, as train.py takes them."""
    given = {name: getattr(config, name) for name, default in ROUTING_FLAGS.items() if getattr(config, name) != default}
    if config.N == config.M:
        given.pop("blocks", None)
    return " ".join([config.route, *(f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items())])


def number(value):
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is no number")
    return value


def read_run(folder, tail):
    """What compare needs of a run's folder. Raises ValueError with one line."""
    run, log = read_config(folder), []
    try:
        for line in Path(folder, "log.jsonl").read_text(errors="replace").splitlines():
            with suppress(ValueError):  # the line that a running job is writing
                log += [entry] if isinstance(entry := json.loads(line), dict) else []
        evals = [(number(entry["step"]), number(entry["val_loss"])) for entry in log if "val_loss" in entry]
        if not evals:
            raise ValueError(f"{folder} has no evaluation yet")
        config, norms, settings = GPTConfig(**run["model"]), [number(entry["grad_norm"]) for entry in log], run["train"]
        backbone = {k: v for k, v in vars(config).items() if k not in ROUTING_FLAGS and k not in ("route", "kernel")}
        if config.head_dim * config.n_head == config.d_model:
            backbone["head_dim"] = None
        recipe = {k: settings.get(k) for k in RECIPE} | {"sha256": "+".join(hashed[:8] for hashed in run["data"]["sha256"])}
        if recipe["init_from"]:  # the models that several seeds go on from are one, if their names end in the seeds
            recipe["init_from"] = re.sub(rf"(?<!\d){settings['seed']}$", "SEED", recipe["init_from"])
        for name, value in (recipe | settings | {"device": run.get("device"), "ranks": run.get("ranks")}).items():
            if not isinstance(value, str | int | float | None):
                raise TypeError(f"{name} is {value!r}")
        last = [loss for _, loss in evals[-(tail or min(11, math.ceil(len(evals) / 7))):]]
        return {"run": str(folder), "config": config, "backbone": backbone, "recipe": recipe, "size": str(settings["size"]), "seed": settings["seed"],
                "machine": (run.get("device"), run.get("ranks")),
                "loss": statistics.mean(last), "evaluations": len(last), "final_loss": last[-1],
                "step": number(log[-1]["step"]), "steps": number(settings["steps"]),
                "tokens_per_s": statistics.median(number(entry["tokens_per_s"]) for entry in log),
                "compute": number(run["flops_per_token"]) * number(log[-1]["tokens"]),
                "added_flops_percent": percent(config), "grad_norm": statistics.mean(norms), "grad_norm_variance": statistics.pvariance(norms),
                "clipped": sum(norm > settings["clip"] for norm in norms) / len(norms), "curve": evals,
                "peak_gib": max((number(entry["peak_gib"]) for entry in log if entry.get("peak_gib") is not None), default=None)}
    except OSError as e:
        raise ValueError(f"{folder} has no log.jsonl that can be read ({e.strerror})")
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise ValueError(f"{folder} is damaged: {type(e).__name__}: {e}")


def compare(runs):
    """Adds to each run its label, its baseline's name, delta and speed_ratio; returns one row for each label, over seeds."""
    told, baselines, groups = {}, {}, defaultdict(list)
    for size in {run["size"] for run in runs}:
        peers = [run["backbone"] | run["recipe"] for run in runs if run["size"] == size]
        kinds = lambda *names: len({tuple(peer[name] for name in names) for peer in peers})
        told[size] = [k for k in peers[0] if kinds(k) > 1 and not (k in FOLLOWS and kinds(FOLLOWS[k], k) == kinds(FOLLOWS[k]))]
    alike = lambda run: (run["seed"], *run["backbone"].values(), *(v for k, v in run["recipe"].items() if k not in RATES))
    for run in runs:
        if run["config"].route == "baseline" and run["step"] >= run["steps"]:
            baselines[alike(run)] = min(run, baselines.get(alike(run), run), key=lambda r: r["loss"])
    for run in runs:
        varied = [f"--{k}={v}" for k in told[run["size"]] if (v := (run["backbone"] | run["recipe"])[k]) is not None]
        run["label"] = " ".join([run["size"]] * (len(told) > 1) + [flags_of(run["config"]), *varied])
        groups[run["label"]].append(run)
        base = baselines.get(alike(run))
        run["baseline"] = base and base["run"]
        run["delta"] = run["loss"] - base["loss"] if base else None
        comparable = base and run["machine"] == base["machine"] and base["tokens_per_s"]
        run["speed_ratio"] = run["tokens_per_s"] / base["tokens_per_s"] if comparable else None
    rows = []
    for label, members in groups.items():
        seeds = {m["seed"]: [other for other in members if other["seed"] == m["seed"]] for m in members}

        def values(name):  # one of each seed
            found = [[m[name] for m in same if m[name] is not None] for same in seeds.values()]
            return [statistics.mean(some) for some in found if some]

        mean = lambda name: statistics.mean(values(name)) if values(name) else None
        std = lambda name: statistics.stdev(values(name)) if len(values(name)) > 1 else None
        spread = std("delta")
        rows.append({"runs": label, "seeds": len(seeds), "loss": mean("loss"), "std": std("loss"), "delta": mean("delta"), "delta_std": spread,
                     "delta_over_se": abs(mean("delta")) / (spread / math.sqrt(len(values("delta")))) if spread else None}
                    | {name: mean(name) for name in MEANS})
    return rows


def power_law(compute, loss):
    """The least-squares fit of L = A C^-alpha + E -> (A, alpha, E, rms residual): for each E a line through log(L - E), the E with the least
    residual by ever finer search. Raises ValueError for fewer than three different C or a loss that does not fall."""
    if len(set(compute)) < 3:
        raise ValueError(f"a power law needs baselines of three different amounts of compute, there are {len(set(compute))}")
    if min(*compute, *loss) <= 0:
        raise ValueError("a power law needs positive losses and compute")
    C, L = np.log(compute), np.asarray(loss, dtype=np.float64)

    def fit(u):  # E = (1 - e^u) min L
        E = -math.expm1(u) * L.min()
        slope, level = np.polyfit(C, np.log(L - E), 1)
        return np.sqrt(np.mean((np.exp(level + slope * C) + E - L) ** 2)), level, -slope, E

    low, high = math.log(1e-4), 0.0
    for _ in range(12):
        grid = np.linspace(low, high, 41)
        best = grid[np.argmin([fit(u)[0] for u in grid])]
        low, high = max(low, best - grid[1] + grid[0]), min(high, best + grid[1] - grid[0])
    residual, level, alpha, E = fit(best)
    if alpha < 1e-3:
        raise ValueError("the baselines' loss does not fall with compute: no power law")
    return math.exp(level), float(alpha), float(E), float(residual)


def gains(runs):
    """The power law of the baselines and each other run's compute-equivalent gain: the compute at which the law gives its loss, over its own."""
    losses = defaultdict(list)
    if any(run["recipe"]["sha256"] != runs[0]["recipe"]["sha256"] for run in runs):
        raise ValueError("--gain needs runs on the same data")
    for run in runs:
        if run["config"].route == "baseline":
            losses[run["compute"]].append(run["loss"])
    A, alpha, E, residual = power_law(list(losses), [statistics.mean(found) for found in losses.values()])
    gain = lambda run: ((run["loss"] - E) / A) ** (-1 / alpha) / run["compute"] if run["loss"] > E else None
    return {"A": A, "alpha": alpha, "E": E, "residual": residual, "points": len(losses),
            "gain": {run["run"]: gain(run) for run in runs if run["config"].route != "baseline"}}


def read_items(folder):
    """{task: {id: 0 or 1}} of a run's eval/*.json, of the file with the highest number if several have a task. Tasks whose items are not
    right or wrong are left out."""
    found, number = {}, lambda file: int(re.search(r"(?:-(\d+))?$", file.stem)[1] or 1)
    for file in sorted(Path(folder, "eval").glob("*.json"), key=lambda file: (number(file), file.name)):
        try:
            for task, items in json.loads(file.read_text()).get("items", {}).items():
                if items and all(item["correct"] in (0, 1) for item in items):
                    found[task] = {item["id"]: int(item["correct"]) for item in items}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            print(f"left out: {file} holds no results of eval.py: {type(e).__name__}: {e}", file=sys.stderr)
    return found


def paired_items(ours, theirs, seed=0):
    """{id: correct} of two models on the same items -> discordant counts, exact two-sided McNemar p, difference of the accuracies and its
    95 % bootstrap interval."""
    n = len(ours)
    gained, lost = (sum(ours[i] == won and theirs[i] == 1 - won for i in ours) for won in (1, 0))
    changed = gained + lost
    p = min(1.0, 2 * sum(math.comb(changed, k) for k in range(min(gained, lost) + 1)) / 2 ** changed)
    draws = np.random.default_rng(seed).multinomial(n, [gained / n, lost / n, (n - changed) / n], 10_000)
    low, high = np.percentile((draws[:, 0] - draws[:, 1]) / n, (2.5, 97.5))
    return {"n": n, "gained": gained, "lost": lost, "mcnemar_p": p, "difference": (gained - lost) / n, "low": low.item(), "high": high.item()}


def compare_items(against):
    """{run: the run that it is compared with} -> a row for each task that both have results of."""
    items, rows = {run: read_items(run) for run in against}, []
    for a, b in against.items():
        for task in items[a].keys() & items[b].keys() if a != b else ():
            if items[a][task].keys() != items[b][task].keys() or not items[a][task]:
                print(f"left out: {a} and {b} were not asked the same items of {task}: {len(items[a][task])} and {len(items[b][task])}", file=sys.stderr)
                continue
            rows.append({"run": a, "against": b, "task": task} | paired_items(items[a][task], items[b][task]))
    if not rows:
        raise ValueError("no two runs have results of the same task: python eval.py writes them to RUN/eval/")
    return sorted(rows, key=lambda row: (row["run"], row["task"]))


def run_compare(c, *folders):
    if c.tail is not None and c.tail < 1:
        fail("--tail must be positive")
    if c.figure != "curves" and not c.plot:
        fail(f"--figure={c.figure} is drawn to a file: give --plot=FILE")
    inside = lambda folder: [] if Path(folder, "config.json").exists() else sorted(str(file.parent) for file in Path(folder).glob("*/config.json"))
    runs = []
    for folder in itertools.chain(*(inside(folder) or [folder] for folder in folders)):
        try:
            runs.append(read_run(folder, c.tail))
        except ValueError as e:
            print(f"left out: {e}", file=sys.stderr)
    if not runs:
        fail("no run to compare")
    rows = compare(runs)
    names = MEANS | {"delta_over_se": "|delta|/SE"}
    table([{names.get(name, name): value for name, value in row.items()} for row in rows])
    short = [f"{run['run']} ({run['evaluations']})" for run in runs if run["evaluations"] < (c.tail or 0)]
    unfinished = [f"{run['run']} ({run['step']} of {run['steps']})" for run in runs if run["step"] < run["steps"]]
    for what, some in ((f"fewer evaluations than {c.tail}", short), ("not at their last step", unfinished)):
        if some:
            print(f"{what}: {', '.join(some)}")
    result = {"groups": rows, "runs": [{k: v for k, v in run.items() if k not in ("config", "backbone", "machine")} for run in runs]}
    if c.gain:
        result["power_law"] = law = gains(runs)
        print(f"\nL = {law['A']:.4g} C^-{law['alpha']:.4g} + {law['E']:.4g} through {law['points']} baselines, rms residual {law['residual']:.2g} nats")
        table([{"run": name, "compute-equivalent gain": gain} for name, gain in law["gain"].items()])
    if c.items:
        other = lambda run: run["baseline"] if run["baseline"] not in (None, run["run"]) else runs[0]["run"]
        result["items"] = compare_items({run["run"]: other(run) for run in runs})
        print()
        table(result["items"])
    for run in runs:  # what is drawn
        run["group"] = next(row for row in rows if row["runs"] == run["label"])
    return result, functools.partial(draw_compare, figure=c.figure, runs=runs)


# ----------------------------------------------------------------------------------------------------------------------
# Pictures

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito's, told apart by everybody
STYLE = {"font.size": 7, "axes.titlesize": 7.5, "legend.fontsize": 6.5, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
         "axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 1.1, "lines.markersize": 3.5, "legend.frameon": False,
         "image.cmap": "viridis", "savefig.dpi": 300, "savefig.bbox": "tight", "svg.fonttype": "none", "svg.hashsalt": "probe"}
COLUMN, PAGE = 3.4, 7.0  # inches


def whole(*axes):
    """Ticks at whole numbers."""
    for axis in axes:
        axis.get_major_locator().set_params(integer=True)


def heat(ax, matrix, title="", **options):
    """matrix [rows, columns] with nan where there is nothing."""
    image = ax.imshow(np.ma.masked_invalid(matrix), aspect="auto", interpolation="nearest", **options)
    ax.set_title(title)
    ax.spines[:].set_visible(False)
    return image


def site_by_slot(result, values):
    """A matrix of all sites (from 1) and slots (from 0), nan where a site does not read; values(row): a number for each slot that it reads."""
    matrix = np.full((len(result["sites"]), len(result["sites"]) + 1), np.nan)
    for row in result["sites"]:
        matrix[row["site"] - 1, row["slots"]] = values(row)
    return matrix


def site_map(fig, ax, matrix, title, label=None, colorbar_axes=None, **options):
    image = heat(ax, matrix, title, extent=(-0.5, matrix.shape[1] - 0.5, len(matrix) + 0.5, 0.5), **options)
    whole(ax.xaxis, ax.yaxis)
    ax.set_xlabel("slot")
    if label:
        extend = "max" if options["vmax"] < np.nanmax(matrix) else "neither"
        fig.colorbar(image, ax=colorbar_axes or ax, label=label, extend=extend, fraction=0.05 if colorbar_axes is None else 0.02)


def draw_cost(plt, result):
    fig, ax = plt.subplots(figsize=(COLUMN, 1.4))
    rows, left = result["traffic"], np.zeros(3)
    scale = [row["bytes"] / (row["pair_units"] + row["site_units"]) / 1e9 for row in rows]
    for key, label, color in (("pair_units", "for each (site, slot) pair", COLORS[0]), ("site_units", "once for each site", COLORS[4])):
        width = np.array([row[key] for row in rows]) * scale
        ax.barh([row["kernels"] for row in rows], width, left=left, label=label, color=color)
        left += width
    for i, row in enumerate(rows):
        ax.text(left[i], i, f" {row['ms']:.3g} ms", va="center")
    ax.set(xlabel="memory traffic of the reads of a step (GB)", title=f"{result['size']}, {result['route']}", xlim=(0, left.max() * 1.2))
    ax.invert_yaxis()
    ax.legend(loc="lower right")
    return fig


def draw_sweep(plt, result):
    fig, ax = plt.subplots(figsize=(COLUMN, 2.3))
    for i, name in enumerate(row["blocks"] for row in result["reads"]):
        for keys, line in (("slice", "o-"), ("projected", "s--")):
            rows = [row for row in result["added_flops_percent"] if row["keys"] == keys]
            ax.plot([row["rank"] for row in rows], [row[name] for row in rows], line, color=COLORS[i], label=name if keys == "slice" else None)
    ax.plot([], [], "ks--", label="projected keys")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ticks = [row["rank"] for row in result["added_flops_percent"] if row["keys"] == "slice"]
    ticks = ticks[:-2] + ticks[-1:]  # 3d/4 would touch d
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    ax.set(xlabel="rank r (coordinates)", ylabel="added FLOPs (% of the core)")
    ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    return fig


def draw_routing(plt, result):
    rows, H = result["sites"], max(len(row["effective_by_head"]) for row in result["sites"])
    t = [row["site"] for row in rows]
    fig = plt.figure(figsize=(PAGE, 2.3 + 1.9 * (-(-H // 4) if H > 1 else 0)), layout="constrained")
    top, below = (fig.subfigures(2, 1, height_ratios=[2.3, 1.9 * -(-H // 4)]) if H > 1 else (fig, None))
    axes = top.subplots(1, 3 if H > 1 else 2)
    mean = site_by_slot(result, lambda row: np.mean(row["weights"], 1))
    site_map(top, axes[0], mean, "mean over tokens" + " and heads" * (H > 1), "weight", vmin=0, vmax=np.nanpercentile(mean, 97))
    axes[0].set_ylabel("site")
    mean, spread = (np.array([row[key] for row in rows]) for key in ("effective", "spread"))
    axes[1].fill_between(t, mean - spread, mean + spread, color=COLORS[0], alpha=0.25, linewidth=0, label="± 1 std over tokens")
    axes[1].plot(t, mean, "o-", color=COLORS[0], label="read")
    axes[1].plot(t, [len(row["slots"]) for row in rows], "--", color=COLORS[6], label="there are |S(t)|")
    axes[1].set(xlabel="site", ylabel="effective sources exp(H)", ylim=(0, None))
    whole(axes[1].xaxis)
    axes[1].legend()
    if below is not None:
        axes[2].plot(t, [np.mean(row["deviation"]) for row in rows], "o-", color=COLORS[1], label="trained heads")
        axes[2].plot(t, [np.mean(row["deviation_random"]) for row in rows], "s--", color=COLORS[6], label="random queries")
        axes[2].set(xlabel="site", ylabel="deviation from the heads' mean", ylim=(0, None))
        whole(axes[2].xaxis)
        axes[2].legend()
        heads = list(below.subplots(-(-H // 4), min(H, 4), squeeze=False, sharex=True, sharey=True).flat)
        gap = lambda row, h: [w[h] - np.mean(w) if h < len(w) else np.nan for w in row["weights"]]
        maps = [site_by_slot(result, lambda row: gap(row, h)) for h in range(H)]
        limit = max(np.nanmax(np.abs(m)) for m in maps) or 1
        for h, ax in enumerate(heads):
            ax.set_visible(h < H)
            if h < H:
                label = "weight" if h == H - 1 else None  # one scale for all
                site_map(below, ax, maps[h], f"head {h + 1} minus the mean", label, heads, cmap="PuOr", vmin=-limit, vmax=limit)
        heads[0].set_ylabel("site")
    return fig


def draw_text(plt, result):
    weights, tokens = np.array(result["weights"]), [repr(token)[1:-1].replace(" ", "␣") for token in result["tokens"]]
    H, n, T = weights.shape
    fig, axes = plt.subplots(H, 1, figsize=(max(COLUMN, 0.4 + 0.13 * T), 0.4 + H * (0.35 + 0.07 * n)), sharex=True, squeeze=False, layout="constrained")
    for h, ax in enumerate(axes.flat):
        image = heat(ax, weights[h], f"head {h + 1}" if H > 1 else "", vmin=0, vmax=weights.max())
        shown = range(0, n, -(-n // 7))
        ax.set_yticks(shown, [result["slots"][i] for i in shown])
        ax.set_ylabel("slot")
        ax.tick_params(axis="x", length=0)
    ax.set_xticks(range(T), tokens, family="monospace", rotation=90 if max(map(len, tokens)) > 1 else 0, fontsize=6, parse_math=False)
    fig.suptitle(f"what each token reads at site {result['site']}, before the {result['before']}", fontsize=7.5)
    fig.colorbar(image, ax=list(axes.flat), label="weight", fraction=0.05)
    return fig


def draw_queries(plt, result):
    panels = 3 if "sites" in result else 1
    fig, axes = plt.subplots(1, panels, figsize=(PAGE if panels > 1 else COLUMN, 2.1), layout="constrained", squeeze=False)
    *most, last = axes.flat
    if most:
        t, value = [row["site"] for row in result["sites"]], lambda name: np.array([row[name] for row in result["sites"]])
        for i, name in enumerate(("contiguous", "interleaved")):
            most[0].plot(t, value(name), "os"[i] + "-", color=COLORS[i], label=f"{name} slices")
            most[0].plot(t, value(name + "_random"), "--", color=COLORS[i], label=f"random, {name}")
        top = max(line.get_ydata().max() for line in most[0].lines)
        most[0].set(xlabel="site", ylabel=f"KL of {result['slices']} slices (nats)", ylim=(0, 1.5 * top or 1))  # room for the legend
        most[0].legend()
        most[1].plot(t, value("cosine"), "o-", color=COLORS[2])
        most[1].set(xlabel="site", ylabel="mean cosine of the sources")
        whole(most[0].xaxis, most[1].xaxis)
    for i, (name, matrix) in enumerate(result["matrices"].items()):
        values = np.array(matrix.get("singular_values", []))
        last.plot(range(1, len(values) + 1), values, "o-", color=COLORS[i], label=name)
    whole(last.xaxis)
    last.set(xlabel="number", ylabel="singular value of the queries", ylim=(0, None))
    return fig


def draw_compare(plt, result, figure, runs):
    groups = {run["label"]: run for run in runs}.values()  # one run for each label; run["group"] has the means
    route_of = {"grid": "lr", "norms": "lr", "heads": "mhar"}.get(figure)
    chosen = [run for run in groups if run["config"].route == route_of and run["config"].keys == "slice"]
    if route_of and not chosen:
        fail(f"--figure={figure} needs runs with --route={route_of} and keys that are slices")
    blocks = lambda c: math.inf if c.N == c.M else c.N
    named = lambda N: "full" if N == math.inf else str(N)
    fig, ax = plt.subplots(figsize=(COLUMN, 2.4), layout="constrained")
    if figure == "curves":
        for i, run in enumerate(groups):
            for j, seed in enumerate(r for r in runs if r["label"] == run["label"]):
                ax.plot(*zip(*seed["curve"]), color=COLORS[i % 7], linestyle=("-", "--", ":")[i // 7 % 3],
                        marker="o" if len(seed["curve"]) == 1 else None, label=None if j else run["label"])
        late = [loss for run in runs for _, loss in run["curve"][len(run["curve"]) // 2:]]
        margin = 0.05 * (max(late) - min(late)) or 0.1
        ax.set(xlabel="optimizer step", ylabel="validation loss (nats)", ylim=(min(late) - margin, max(late) + margin))
    elif figure == "width":
        routed = [run for run in groups if run["config"].route != "baseline" and run["group"]["delta"] is not None]
        if not routed:
            fail("--figure=width needs runs with a baseline, and these")
        layers, lines = defaultdict(set), defaultdict(dict)  # of each route and width the best, where several groups differ in something else
        for run in routed:
            layers[run["config"].d_model].add(run["config"].n_layer)
        deep = lambda c: f" --n_layer={c.n_layer}" if max(map(len, layers.values())) > 1 else ""
        for run in sorted(routed, key=lambda run: -run["group"]["loss"]):
            lines[flags_of(run["config"]) + deep(run["config"])][run["config"].d_model] = run["group"]
        for i, (name, points) in enumerate(sorted(lines.items())):
            widths = sorted(points)
            ax.errorbar(widths, [points[d]["delta"] for d in widths], yerr=[points[d]["delta_std"] or 0 for d in widths], fmt="o^sDv"[i % 5] + "-",
                        color=COLORS[i % 7], label=name, capsize=2)
        ax.axhline(0, color=COLORS[6], linewidth=0.6)
        ax.set_xticks(sorted({d for points in lines.values() for d in points}))
        ax.set(xlabel="width d", ylabel="loss minus the baseline's (nats; bars: std)")
    elif figure == "flops":
        for i, run in enumerate(groups):
            ax.errorbar(run["added_flops_percent"], run["group"]["loss"], yerr=run["group"]["std"], fmt="o^sDv"[i % 5], color=COLORS[i % 7],
                        label=run["label"], capsize=2)
        ax.set(xlabel="added FLOPs (% of the core)", ylabel="validation loss (nats)")
    elif figure == "norms":
        for i, N in enumerate(sorted({blocks(run["config"]) for run in chosen})):
            points = sorted((run["config"].r, run["group"]["grad_norm"]) for run in chosen if blocks(run["config"]) == N)
            ax.plot(*zip(*points), "o^sDv"[i % 5] + "-", color=COLORS[i % 7], label=f"N = {named(N)}")
        ax.set_xscale("log", base=2)
        ranks = sorted({run["config"].r for run in chosen})
        ax.set_xticks(ranks, ranks)
        ax.set(xlabel="rank r (coordinates)", ylabel="mean gradient norm")
    else:
        cells = {}  # the best, where several groups differ in something else
        for run in chosen:
            c = run["config"]
            key = (c.r, blocks(c)) if figure == "grid" else (c.H, c.n_kv_head)
            cells[key] = min(cells.get(key, math.inf), run["group"]["loss"])
        ys, xs = (sorted(set(axis)) for axis in zip(*cells))
        matrix = np.array([[cells.get((y, x), np.nan) for x in xs] for y in ys])
        fig.colorbar(heat(ax, matrix, cmap="viridis_r"), label="validation loss (nats)")
        for (i, j), value in np.ndenumerate(matrix):
            dark = value > (np.nanmin(matrix) + np.nanmax(matrix)) / 2
            ax.text(j, i, "" if np.isnan(value) else f"{value:.3f}", ha="center", va="center", color="white" if dark else "black")
        ax.set_xticks(range(len(xs)), map(named, xs))
        ax.set_yticks(range(len(ys)), ys)
        ax.set(xlabel="blocks N", ylabel="rank r") if figure == "grid" else ax.set(xlabel="KV heads", ylabel="routing heads H")
    if figure in ("curves", "width", "flops", "norms"):
        labels = ax.get_legend_handles_labels()[1]
        columns = 2 if max(map(len, labels)) < 28 else 1
        fig.set_figheight(2.2 + 0.14 * -(-len(labels) // columns))  # the axes keep their height
        fig.legend(loc="outside upper center", ncols=columns)
    return fig


# ----------------------------------------------------------------------------------------------------------------------
# Tables, files, flags


def cell(value, spec=".4g"):
    if value is None or isinstance(value, str | bool):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else format(float(value), spec)


def table(rows, spec=".4g"):
    """Rows as dicts, one column for each name that has a value in any of them."""
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) is not None for row in rows)]
    texts = [columns] + [[cell(row.get(name), spec) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts)]
    left = [isinstance(rows[0].get(name), str) for name in columns]
    for line in texts:
        print("  ".join(f"{text:{'<' if l else '>'}{w}}" for text, w, l in zip(line, widths, left)).rstrip())


def load(c, name):
    """A run's model with depth routing, its config.json and the device."""
    if c.tokens < 1 or c.batch < 1 or not 0 <= c.seed < 2**63:
        fail("--tokens and --batch must be positive, --seed not negative")
    device = pick_device(c.device)
    model, run = load_run(name, device, c.checkpoint)
    if model.config.route not in DEPTH_ROUTES:
        fail(f"{name} is a {model.config.route} run: it has no depth routing; there is {', '.join(DEPTH_ROUTES)}")
    return model, run, device


def check_files(c):
    """Before anything is computed: can the results be written?"""
    for flag, file in (("json", c.json), ("plot", c.plot)):
        if file and (not Path(file).parent.is_dir() or Path(file).is_dir()):
            fail(f"--{flag}={file}: there is no folder {Path(file).parent}" if not Path(file).is_dir() else f"--{flag}={file} is a folder")
        if file and (Path(file).parent / "config.json").exists():
            fail(f"--{flag}={file} would be among a run's own files: choose another folder")
    if c.plot:
        if c.plot == c.json:
            fail("--json and --plot are one file")
        if Path(c.plot).suffix not in (".png", ".svg", ".pdf"):
            fail(f"--plot={c.plot} must end in .png, .svg or .pdf")
        if not importlib.util.find_spec("matplotlib"):
            fail("--plot needs the package: pip install matplotlib")


def write_files(c, result, draw):
    result = {"command": shlex.join(["python", "probe.py", *sys.argv[1:]])} | result
    try:
        text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    except ValueError:
        fail("a result is not finite: nothing is written")
    if c.plot:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        with plt.rc_context(STYLE):
            fig = draw(plt, result)
            fig.savefig(c.plot, metadata={"Date": None} if c.plot.endswith(".svg") else None)
            plt.close(fig)
    if c.json:
        Path(c.json).write_text(text)


def report(run, c, *rest):
    check_files(c)
    write_files(c, *run(c, *rest))


def main():
    commands = {"cost": (run_cost, "", Cost, GPTConfig), "routing": (run_routing, "RUN", Routing), "queries": (run_queries, "RUN", Queries),
                "compare": (run_compare, "RUN ...", Compare)}
    run_command({name: (functools.partial(report, run), *rest) for name, (run, *rest) in commands.items()})


if __name__ == "__main__":
    main()
