"""Speed and memory on one CUDA GPU: depth routing alone, and whole training steps.

    python bench.py kernel                                # the routing of one forward and backward pass, all sizes
    python bench.py kernel --plain --peers=all            # beside plain PyTorch and the other packages that are installed
    python bench.py train --size=100m,350m,1b             # mhar against the baseline
    python bench.py train --size=lr-1b --routes="baseline; lr --blocks=8; attnres --blocks=8"
    python bench.py loss --size=350m                      # the output head with its loss
    python bench.py error --run=out/attnres-nano          # the reads of a trained model, against float64

kernel: every site of one microbatch in order, forward and backward, gradients into every source and query. The sublayers are
stubs: they hand out a fixed tensor and let the gradient through. "of copy" is the time to read each (site, slot) pair exactly
once forward and once backward, at the copy bandwidth measured in the same run, over the time taken; GiB is what the routing
holds at its peak, sources included; "first s" is the first call, with what it compiles and tunes if its caches are empty; error
is the largest relative l2 difference to model.route() in fp32, over the output and every gradient. must and goal are ours on an
H200, and by how much another package is to be slower. `pip install` any of fla-core, liger-kernel, fast-attnres, flash-attn-res.

train: forward, backward, clipping and fused AdamW, bf16 parameters and activations, random tokens. Every repeat builds each
route's model anew, in rotated order. The mean's ratio to the baseline is paired within a repeat, +- its 95 % Student-t interval;
GiB is the peak of what is allocated during a step and memory its ratio (must 1.08, goal 1.02); "first s" goes from building the model to
the end of its first replayed step, and is short in later runs, which find everything compiled. MFU is of 989 TFLOP/s.

loss: model.LinearCrossEntropy forward and backward, at several numbers of logits in a chunk, beside PyTorch's cross_entropy on fp32
logits; GiB is the peak beyond inputs and gradients, dx and dW are the relative l2 errors of the gradients to plain fp32's.

error: a trained run's own outputs, queries and gradients of the reads, in bf16; each read computed again from them by the Bank, by
kernel.route, by plain PyTorch and (one head) by fla-core; median and largest relative l2 error over the sites, against
float64, of the output and the gradients (LR table 10; the Bank's dV is the sum over the sites that read a slot).
"""
import functools
import gc
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import re
import shlex
import statistics
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import model
import prepare
from model import DEPTH_ROUTES, GPT, GPTConfig, LinearCrossEntropy, capture, clip_gradients, fail, load_run, parse_flags, route, run_command

CHAINS = {  # preset of model.py, its routing, tokens of a microbatch, milliseconds that ours must and should reach
    "100m": ("100m", dict(), 16384, 4.0, 2.7),
    "350m": ("350m", dict(), 4096, 5.0, 2.7),
    "1b": ("1b", dict(), 2048, 6.5, 2.7),
    "100m-h1": ("100m", dict(route="attnres"), 16384, None, None),  # other packages have one head
    "350m-h1": ("350m", dict(route="attnres"), 4096, None, None),
    "lr-1b": ("lr-1b", dict(route="lr", blocks=8, rank=1536), 8192, 6.5, 4.7),
    "lr-1b-r384": ("lr-1b", dict(route="lr", blocks=8), 8192, 6.5, 4.7),
    "lr-4b": ("lr-4b", dict(route="lr", blocks=8, rank=2560), 4096, None, None),
    "lr-4b-r640": ("lr-4b", dict(route="lr", blocks=8), 4096, None, None),
    "8b-delta": ("8b", dict(), 8192, 160, 80),
}
TARGETS = {"100m mhar": (0.88, 0.95), "350m mhar": (0.86, 0.95), "1b mhar": (0.84, 0.95),  # of the baseline's tokens/s
           "lr-1b lr --blocks=8": (0.93, 0.97), "lr-1b attnres --blocks=8": (0.93, 0.97)}
PEAK_FLOPS = 989e12  # H100 and H200, dense bf16


@dataclass
class KernelBench:
    sizes: str = ",".join(CHAINS)  # which chains, comma separated
    plain: bool = False  # also plain PyTorch, model.route: eager, and compiled at --peer_sizes
    peers: str = ""  # also other packages, at --peer_sizes: "all", or some of fla-core, liger-kernel, fast-attnres, flash-attn-res
    peer_sizes: str = "100m-h1"  # chains for them: some tune themselves for minutes at every size
    peer_limit: float = 120.0  # seconds that each of them, or plain PyTorch, gets
    profile: bool = False  # also the time of each of our kernels
    json: str | None = None  # write all numbers to this file


@dataclass
class TrainBench:
    size: str = "100m"  # presets, comma separated
    routes: str = "baseline; mhar"  # routes with train.py's flags, separated by semicolons: "baseline; lr --blocks=8; mhar --kernel=torch"
    repeats: int = 3  # fresh models of each route, at most 10
    steps: int = 10  # timed optimizer steps of each model
    micro: int = 16_384  # tokens in a forward pass, one for each step
    seq: int | None = None  # tokens in a sequence; unset: as in the preset's recipe
    graph: bool = True  # replay forward and backward as a CUDA graph
    whole: bool = False  # also compile routes without fused kernels as one whole model instead of part by part
    json: str | None = None  # write all numbers to this file


@dataclass
class LossBench:
    size: str = "350m"  # the preset that gives width and vocabulary
    tokens: int = 16_384  # rows of the logits
    chunks: str = "28,29,30,31,32"  # base-2 logarithms of the logits in a chunk
    json: str | None = None  # write all numbers to this file


@dataclass
class ErrorBench:
    run: str = "out/attnres-nano"  # a run of train.py
    tokens: int = 2048  # validation tokens
    json: str | None = None  # write all numbers to this file


class Report:
    """A table whose rows are printed, and written to the JSON file if there is one, as soon as they are known."""

    def __init__(self, file, columns):
        """columns: name -> format."""
        self.file, self.columns, self.rows, self.bandwidth = file, columns, [], copy_bandwidth()
        self.head = {"command": shlex.join(["python", "bench.py", *sys.argv[1:]]), "device": torch.cuda.get_device_name(),
                     "torch": torch.__version__, "copy TB/s": self.bandwidth * 1e-12}
        print(self.head["command"])
        print(f"{self.head['device']}, torch {torch.__version__}, copies {self.head['copy TB/s']:.2f} TB/s")
        self.width = {name: int(re.search(r"\d+", spec)[0]) for name, spec in columns.items()}
        print(*(f"{name:{'<' if columns[name][0] == '<' else '>'}{w}}" for name, w in self.width.items()), flush=True)

    def add(self, row):
        cells = [" " * self.width[name] if row.get(name) is None else format(row[name], spec) for name, spec in self.columns.items()]
        print(" ".join(cells).rstrip() if "failed" not in row else " ".join(cells[:2]) + f" {row['failed']}", flush=True)
        self.rows.append(row)
        if self.file:
            try:
                Path(self.file).write_text(json.dumps(self.head | {"rows": self.rows}, indent=1) + "\n")
            except OSError as e:
                fail(f"--json={self.file} cannot be written: {e.strerror}")


def attempt(f, *args):
    """The row f(*args), or one that says why there is none."""
    try:
        return f(*args)
    except ImportError as e:
        return {"failed": f"skipped, it is not installed here: {e}"}
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except Exception as e:
        traceback.print_exc()
        return {"failed": f"{type(e).__name__}: {' '.join(str(e).split())[:150]}"}


def timed(f, repeat=15):
    """Median milliseconds of f()."""
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(), f(), end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth():
    """Bytes read and written in a second."""
    a = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    b.copy_(a)
    return 2 * a.nbytes / timed(lambda: b.copy_(a)) * 1e3


# ----------------------------------------------------------------------------------------------------------------------
# bench.py kernel: the chain of reads


class Stub(torch.autograd.Function):
    """A sublayer that computes nothing: y whatever its input is, and the gradient of y as the input's."""

    @staticmethod
    def forward(ctx, mix, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def chain(reads, c, x, query, null, gate, ys):
    """What the head would read: all M + 1 sites in order. reads(c, x, query) -> read(t), write(y)."""
    read, write = reads(c, null.expand_as(x) if c.delta else x, query)
    for t in range(c.M + 1):
        mix = x + gate[t] * read(t) if c.delta else read(t)
        if t == c.M:
            return mix
        y = Stub.apply(mix, ys[t])
        write(y)
        if c.delta:
            x = x + y


def listed(read):
    """The chain of a stateless read(sources, query), as one would write it: a list of sources."""
    def reads(c, x, query):
        sources, ends, count = [x], {0, *c.ends}, itertools.count()

        def write(y):
            sources.append(y if next(count) in ends else sources.pop() + y)

        return lambda t: read(sources[:], query[t]), write  # a copy: checkpointing looks at it again later
    return functools.partial(chain, reads)


def options(c):
    return dict(norm=c.norm, eps=c.norm_eps)


def ours(c):
    from kernel import Bank

    def reads(c, x, query):
        bank = Bank(x, query, c.ends, **options(c))
        return bank.read, bank.write
    return functools.partial(chain, reads)


def stateless(c):
    from torch.utils.checkpoint import checkpoint
    import kernel
    return listed(lambda sources, query: checkpoint(kernel.route, sources, query, **options(c), use_reentrant=False, preserve_rng_state=False))


def plain(c):
    return listed(lambda sources, query: route(sources, query, **options(c))[0])


def compiled(c):
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000  # one for each number of sources
    read = torch.compile(route, dynamic=False)
    return listed(lambda sources, query: read(sources, query, **options(c))[0])


# The other packages, each called as its own documentation does. One head, keys as wide as the values, the query in bf16.


def fla(c):
    from fla.ops.attnres import fused_attnres
    gain = torch.ones(c.d_model, device="cuda", dtype=torch.bfloat16)
    return listed(lambda sources, query: fused_attnres(query[0].bfloat16(), sources, gain, rms_eps=c.norm_eps))


def liger(c):
    from liger_kernel.transformers.functional import liger_attn_res
    gain = torch.ones(c.d_model, device="cuda", dtype=torch.bfloat16)
    return listed(lambda sources, query: liger_attn_res(torch.stack(sources), query[0].bfloat16(), gain, eps=c.norm_eps))


def fast(c):
    from attnres import attnres
    return listed(lambda sources, query: attnres(sources, query[0].bfloat16(), eps=c.norm_eps))


def flash(c):
    """Its form for training runs the whole stack itself, and computes each sublayer again in backward."""
    from flash_attn_res.experimental.autograd import BlockAttentionResiduals

    class Sublayer(torch.nn.Module):
        def __init__(self, y):
            super().__init__()
            self.y = y

        def forward(self, mix):
            return Stub.apply(mix, self.y)

    def whole(c, x, query, null, gate, ys):
        sublayers = [Sublayer(y[None]) for y in ys]
        return BlockAttentionResiduals.apply(x[None], query[:, 0].bfloat16(), sublayers, c.M // c.N, c.norm_eps)[0]
    return whole


PEERS = {"fla-core": fla, "liger-kernel": liger, "fast-attnres": fast, "flash-attn-res": flash}
IMPLEMENTATIONS = {"ours": ours, "ours, per call": stateless, "plain": plain, "compiled": compiled} | PEERS
CHECKED = 128  # tokens whose results are compared; tokens do not depend on each other


def measure(name, what, bandwidth, profile):
    """One row: an implementation on one chain."""
    size, routing, tokens, must, goal = CHAINS[name]
    c = GPTConfig.from_size(size, **routing)
    forward = IMPLEMENTATIONS[what](c)
    torch.manual_seed(0)
    new = lambda *shape: torch.randn(*shape, device="cuda")
    x, grad, null = new(tokens, c.d_model).bfloat16(), new(tokens, c.d_model).bfloat16(), new(c.d_model).bfloat16()
    query, gate = new(c.M + 1, c.H, c.r // c.H) * (c.H / c.r) ** 0.5, new(c.M + 1)
    ys = [(new(tokens, c.d_model) * (1 + t % 3)).bfloat16() for t in range(c.M)]  # of several sizes: a missing norm would show

    def run(forward, x, query, null, gate, ys, grad):
        inputs = [a.requires_grad_() for a in (x, query, null, gate)]
        out = forward(c, *inputs, ys)
        kept = out.detach()[:CHECKED].clone()  # backward may overwrite it
        return kept, *torch.autograd.grad(out, inputs if c.delta else inputs[:2], grad)

    f = lambda: run(forward, x, query, null, gate, ys, grad)
    grad[CHECKED:] = 0  # so that sums over tokens are those of the checked ones
    start = time.time()
    results = f()
    torch.cuda.synchronize()
    first = time.time() - start
    wide = lambda a: a.detach()[:CHECKED].float()
    truth = run(plain(c), wide(x), query.detach().clone(), null.detach().float(), gate.detach().clone(), [wide(y) for y in ys], wide(grad))
    error = max(((a[:len(b)] - b).norm() / b.norm()).item() for a, b in zip(results, truth))
    row = {"first s": first, "error": error, "version": importlib.metadata.version(what) if what in PEERS else torch.__version__}
    if what.startswith("ours") or what in PEERS and c.N == c.M:
        row["must"], row["goal"] = (must, goal) if what.startswith("ours") else ("4x", "6x")
    if not error < 0.1:
        return row | {"failed": f"not timed, it computes something else: relative error {error:.2g}"}
    del results, truth
    grad.normal_()

    base = torch.cuda.memory_allocated()
    if what not in ("ours", "flash-attn-res"):
        base -= sum(y.nbytes for y in ys)  # a list of sources keeps the outputs themselves; these two have copies
    torch.cuda.reset_peak_memory_stats()
    f()
    row["GiB"] = (torch.cuda.max_memory_allocated() - base) / 2**30
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
            f()
            torch.cuda.synchronize()
        for e in sorted(p.key_averages(), key=lambda e: -e.device_time_total)[:12]:
            print(f"    {e.key[:60]:60} {e.count:5} launches {e.device_time_total / 1e3:8.3f} ms")
    ms, mode = timed(f), "eager"
    try:
        replay, _ = capture(f)
        replay()
        ms, mode = timed(replay), "graph"
    except RuntimeError as e:
        print(f"    no CUDA graph holds {what}: {str(e).splitlines()[0][:100]}")
    return row | {"ms": ms, "mode": mode, "of copy": 2 * c.source_reads() * x.nbytes / bandwidth * 1e3 / ms}


def send(pipe, *args):
    pipe.send(attempt(measure, *args))


def isolated(limit, *args):
    """attempt(measure, *args) in a process of its own, which may crash, hang, or tune itself for an hour."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    process = spawn.Process(target=send, args=(there, *args))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(limit) else {"failed": f"not done after {limit:.0f} s"}
    except EOFError:
        process.join()
        return {"failed": f"crashed with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def names_of(text, separator=","):
    return [name.strip() for name in text.split(separator) if name.strip()]


def bench_kernel(b):
    names, slow = names_of(b.sizes), names_of(b.peer_sizes) if b.peers or b.plain else []
    peers = list(PEERS) if b.peers == "all" else names_of(b.peers)
    for peer in peers:
        if peer not in PEERS:
            fail(f"unknown package {peer!r}; there are: {', '.join(PEERS)}, or all")
    for name in names + slow:
        if name not in CHAINS:
            fail(f"unknown chain {name!r}; there are: {', '.join(CHAINS)}")
    for name in slow if peers else []:
        c = GPTConfig.from_size(CHAINS[name][0], **CHAINS[name][1])
        if c.delta or (c.H, c.r) != (1, c.d_model):
            fail(f"--peer_sizes={name}: the other packages have one head and full-width keys: choose from 100m-h1, 350m-h1, lr-1b, lr-4b")
    report = Report(b.json, {"chain": "<10", "implementation": "<21", "ms": "8.2f", "mode": ">5", "must": ">5", "goal": ">5", "x ours": "6.2f",
                             "of copy": "7.0%", "GiB": "6.2f", "first s": "7.1f", "error": "8.1e"})
    for name in dict.fromkeys(names + slow):
        todo = ["ours"] + ["ours, per call"] * (name == "8b-delta") + ["plain"] * b.plain
        todo += ["compiled"] * (b.plain and name in slow) + peers * (name in slow)
        best = math.nan
        for what in todo:
            args = (name, what, report.bandwidth, b.profile and what.startswith("ours"))
            row = attempt(measure, *args) if what.startswith("ours") else isolated(b.peer_limit, *args)
            gc.collect(), torch.cuda.empty_cache()
            if "ms" in row:
                best = row["ms"] if what == "ours" else best
                row["x ours"] = row["ms"] / best
            label = f"{what} {row['version']}" if what in PEERS and "version" in row else what
            report.add({"chain": name, "implementation": label} | row)
    return any("failed" in row for row in report.rows if row["implementation"].startswith("ours"))


# ----------------------------------------------------------------------------------------------------------------------
# bench.py train: whole steps


def train_once(config, whole, seq, b):
    """A fresh model: one measurement."""
    torch._dynamo.reset()  # what was compiled for another route must not count against this one's recompilations
    gc.collect(), torch.cuda.empty_cache()
    torch.manual_seed(0)
    base, start = torch.cuda.memory_allocated(), time.time()
    with torch.device("cuda"):  # drawing a billion weights on the CPU takes a while
        net = GPT(config, torch.bfloat16).cast_parameters(torch.bfloat16).to("cuda")
    net.compile() if whole else net.compile_parts()
    params = list(net.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rows = torch.randint(config.vocab_size, (b.micro // seq, seq + 1), device="cuda")

    def backward(rows):
        net.zero_grad()  # gradients that do not exist yet belong to the graph, and each replay overwrites them
        loss = net(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        return loss.detach()

    def step(backward):
        loss = backward(rows)
        clip_gradients(params, 1.0)
        optimizer.step()
        return loss

    step(backward)
    torch.cuda.reset_peak_memory_stats()
    step(backward)  # before there is a graph: the allocator does not see the peaks within a replay
    peak = (torch.cuda.max_memory_allocated() - base) / 2**30
    if b.graph:
        backward = capture(backward, rows, free=net.zero_grad)[0]
    step(backward)
    torch.cuda.synchronize()
    first = time.time() - start
    step(backward), step(backward)  # warm-up
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(b.steps):
        loss = step(backward)
    end.record()
    torch.cuda.synchronize()
    if not math.isfinite(loss.item()):
        raise RuntimeError(f"loss {loss.item()}")
    ms = begin.elapsed_time(end) / b.steps
    return {"tokens/s": b.micro / ms * 1e3, "step ms": ms, "GiB": peak, "first s": first}


T95 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]  # Student's t for 1 .. 9 degrees of freedom


def bench_train(b):
    if min(b.steps, b.micro, 1 if b.seq is None else b.seq) < 1 or not 1 <= b.repeats <= 10:
        fail("--steps, --micro and --seq must be positive, --repeats from 1 to 10")
    variants = {}  # (size, route) -> its config, whether to compile it as a whole, tokens in a sequence
    for size in names_of(b.size):
        seq = b.seq or {"nano": 128, "350m": 1024, "1b": 1024, "8b": 4096}.get(size, 2048)
        if b.micro % seq:
            fail(f"--micro={b.micro} counts tokens: a multiple of --seq={seq}")
        for spec in names_of(b.routes, ";"):
            name, *flags = shlex.split(spec)
            try:
                config = GPTConfig.from_size(size, **parse_flags(GPTConfig, argv=[f"--route={name}", *flags]))
            except ValueError as e:
                fail(f"{size} {spec}: {e}")
            variants[size, spec] = config, False, seq
            if b.whole and (config.route not in DEPTH_ROUTES or config.kernel == "torch"):
                variants[size, f"{spec} (whole)"] = config, True, seq
    if not variants:
        fail("--routes names no route")
    report = Report(b.json, {"size": "<6", "route": "<28", "run": ">4", "tokens/s": "9,.0f", "ratio": "6.3f", "+-": "6.3f", "must": "5.2f", "goal": "5.2f",
                             "step ms": "8.2f", "MFU": "6.1%", "GiB": "6.2f", "memory": "6.3f", "first s": "7.1f"})
    for size in dict.fromkeys(size for size, _ in variants):
        labels = [label for s, label in variants if s == size]
        runs = {label: [] for label in labels}  # their measurements; a failed one is the last
        for repeat in range(b.repeats):
            turn = repeat % len(labels)
            for label in labels[turn:] + labels[:turn]:
                if not (runs[label] and "failed" in runs[label][-1]):
                    runs[label].append({"size": size, "route": label, "run": str(repeat + 1)} | attempt(train_once, *variants[size, label], b))
                    report.add(runs[label][-1])
        base = runs["baseline" if "baseline" in labels else labels[0]]
        for label in labels:
            if "failed" in runs[label][-1]:
                continue
            config, _, seq = variants[size, label]
            mean = {k: statistics.mean(run[k] for run in runs[label]) for k in ("tokens/s", "step ms", "GiB")}
            row = {"size": size, "route": label, "run": "mean", **mean, "first s": runs[label][0]["first s"],
                   "MFU": mean["tokens/s"] * config.flops(seq) / PEAK_FLOPS}
            if "failed" not in base[-1]:
                ratios = [run["tokens/s"] / other["tokens/s"] for run, other in zip(runs[label], base)]
                row |= {"ratio": statistics.mean(ratios), "memory": mean["GiB"] / statistics.mean(run["GiB"] for run in base)}
                if len(ratios) > 1 and runs[label] is not base:
                    row["+-"] = T95[len(ratios) - 2] * statistics.stdev(ratios) / len(ratios) ** 0.5
            row["must"], row["goal"] = TARGETS.get(f"{size} {label}", (None, None))
            report.add(row)
    return any(row.get("failed", "out of memory") != "out of memory" for row in report.rows)


# ----------------------------------------------------------------------------------------------------------------------
# bench.py loss: the output head


def bench_loss(b):
    c = GPTConfig.from_size(b.size)
    try:
        chunks = [1 << int(text) for text in names_of(b.chunks)]
    except ValueError:
        fail(f"--chunks={b.chunks}: whole numbers that are not negative, separated by commas")
    if b.tokens < 1:
        fail("--tokens must be positive")
    torch.manual_seed(0)
    x, weight = torch.randn(b.tokens, c.d_model, device="cuda"), 0.02 * torch.randn(c.vocab_size, c.d_model, device="cuda")
    targets = torch.randint(c.vocab_size, (b.tokens,), device="cuda")
    plain = lambda x, w: F.cross_entropy(F.linear(x, w).float(), targets)
    run = lambda loss, dtype: torch.autograd.grad(loss(*(inputs := [a.to(dtype).requires_grad_() for a in (x, weight)])), inputs)
    truth = run(plain, torch.float32)
    methods = {"PyTorch": plain, "PyTorch, compiled": torch.compile(plain)}
    methods |= {f"ours, 2^{chunk.bit_length() - 1} logits": chunk for chunk in chunks}
    report = Report(b.json, {"loss": "<20", "ms": "8.2f", "GiB": "7.2f", "dx": "8.1e", "dW": "8.1e"})

    def measured(loss):
        if isinstance(loss, int):
            LinearCrossEntropy.CHUNK, loss = loss, lambda x, w: LinearCrossEntropy.apply(x, w, targets, 0.0)
        errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(run(loss, torch.bfloat16), truth)]
        inputs = [a.bfloat16().requires_grad_() for a in (x, weight)]
        f = lambda: torch.autograd.grad(loss(*inputs), inputs)
        base = torch.cuda.memory_allocated() + sum(a.nbytes for a in inputs)  # the gradients
        torch.cuda.reset_peak_memory_stats()
        f()
        return {"GiB": (torch.cuda.max_memory_allocated() - base) / 2**30, "ms": timed(f, 10), "dx": errors[0], "dW": errors[1]}

    for name, loss in methods.items():
        gc.collect(), torch.cuda.empty_cache()
        report.add({"loss": name} | attempt(measured, loss))


# ----------------------------------------------------------------------------------------------------------------------
# bench.py error: the reads of a trained model, one by one


def recorded(folder, tokens):
    """One forward and backward pass of a run, in bf16 with plain reads: its config, the embedding and each sublayer's output ys
    [M+1][tokens, d], the queries [M+1, H, R], and the gradients of the reads [M+1][tokens, d]."""
    net, run = load_run(folder, "cuda")
    c = net.config
    if c.route not in DEPTH_ROUTES or c.delta or c.headwise or c.keys == "projected":
        fail("bench.py error takes runs of attnres, lr and mhar, without delta, headwise and projected keys")
    c.kernel, net.dtype = "torch", torch.bfloat16
    seq = run["train"]["seq"]
    data = prepare.Shards(run["data"]["folder"], "val", seq)
    rows = torch.stack([torch.from_numpy(data.window(i)) for i in range(min(data.n_windows, max(1, tokens // seq)))]).to("cuda")
    ys, queries, grads, flat = [], [], [], lambda a: a.detach().flatten(0, -2)

    def recording(sources, query, **options):
        mix, weights = route(sources, query, **options)
        t = len(queries)
        queries.append(query.detach()), grads.append(None)
        mix.register_hook(lambda grad: grads.__setitem__(t, flat(grad)))
        if t == 0:
            ys.append(flat(sources[0]))
        return mix, weights

    for sublayer in net.sublayers:
        sublayer.register_forward_hook(lambda module, args, out: ys.append(flat(out[0])))
    model.route = recording
    try:
        net(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()).backward()
    finally:
        model.route = route
    return c, ys, torch.stack(queries), grads


def one_read(read, sources, query, grad):
    """The output of a read, and the gradients of its sources [n, tokens, d] and of its query."""
    leaves = [a.detach().clone().requires_grad_() for a in (query, *sources)]
    out = read(leaves[1:], leaves[0])
    dquery, *dsources = torch.autograd.grad(out, leaves, grad)
    return out.detach(), torch.stack(dsources), dquery


def bench_error(b):
    from kernel import Bank, route as fused
    c, ys, query, grads = recorded(b.run, b.tokens)
    print(f"{b.run}: {c.route}, sites 1 .. {c.M}, {len(ys[0])} tokens, d = {c.d_model}, H = {c.H}, r = {c.r}, N = {c.N}")
    names = [name for what in ("output", "dV", "dq") for name in (what, f"max {what}")]
    report = Report(b.json, {"implementation": "<14"} | {name: "10.2e" for name in names})

    # all sites through a Bank
    leaves, q = [y.clone().requires_grad_() for y in ys], query.clone().requires_grad_()
    bank, mixes = Bank(leaves[0], q, c.ends, **options(c)), []
    for t in range(c.M + 1):
        mixes.append(bank.read(t))
        if t < c.M:
            bank.write(leaves[t + 1])
    slots, outs = bank.slots.bank, [mix.detach().clone() for mix in mixes]  # backward takes the mixes' memory
    torch.autograd.backward(mixes, grads)

    # each read by itself, from the same slots, against float64
    reads = {"plain PyTorch": lambda s, q: route(s, q, **options(c))[0], "kernel.route": lambda s, q: fused(s, q, **options(c))}
    if (c.H, c.r, c.norm) == (1, c.d_model, "full"):
        try:
            from fla.ops.attnres import fused_attnres
            gain = torch.ones(c.d_model, device="cuda", dtype=torch.bfloat16)
            reads["fla-core"] = lambda s, q: fused_attnres(q[0].bfloat16(), s, gain, rms_eps=c.norm_eps)
        except ImportError as e:
            print(f"fla-core is not installed here ({e}): skipped")
    errors = {what: [] for what in ("Bank", *reads)}
    l2 = lambda a, truth: ((a.double() - truth).norm() / truth.norm().clamp_min(1e-300)).item()
    dslots = torch.zeros(slots.shape, dtype=torch.float64, device="cuda")
    for t in range(1, c.M + 1):
        sources, seen = [slots[i] for i in c.slots(t)], c.slots(t)
        truth = one_read(reads["plain PyTorch"], [v.double() for v in sources], query[t].double(), grads[t].double())
        dslots[seen] += truth[1]
        for what, read in reads.items():
            errors[what].append([l2(a, b) for a, b in zip(one_read(read, sources, query[t], grads[t]), truth)])
        errors["Bank"].append([l2(outs[t], truth[0]), None, l2(q.grad[t], truth[2])])
    dslots[0] += grads[0]  # site 0 reads slot 0 alone
    for t in range(c.M, -1, -1):  # of y_t: a slot within a block is contained in the next
        if t > 0 and t not in c.ends:
            dslots[t] += dslots[t + 1]
        if t > 0:
            errors["Bank"][t - 1][1] = l2(leaves[t].grad, dslots[t])

    for what, rows in errors.items():
        row = {"implementation": what}
        for i, name in enumerate(("output", "dV", "dq")):
            row[name] = statistics.median(sites := [row[i] for row in rows])
            row[f"max {name}"], row[f"{name} by site"] = max(sites), sites
        report.add(row)


def need_cuda():
    if not torch.cuda.is_available():
        fail("bench.py needs a CUDA GPU")


def main():
    benches = {"kernel": (KernelBench, bench_kernel), "train": (TrainBench, bench_train), "loss": (LossBench, bench_loss), "error": (ErrorBench, bench_error)}
    on_gpu = lambda bench: lambda b: (need_cuda(), bench(b))[1]
    sys.exit(run_command({name: (on_gpu(bench), "", config) for name, (config, bench) in benches.items()}))


if __name__ == "__main__":
    main()
