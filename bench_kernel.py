"""Speed and memory of the routing alone: every site of one forward pass, forward and backward, sublayers stubbed.

A stub gives a fixed tensor and hands its gradient through, so the chain keeps its order but computes nothing else. Times are
medians of CUDA graph replays (eager for the peers that a graph cannot capture). `floor` is the time to read every (site,
slot) pair once forward and once backward at the copy bandwidth measured here.

    python bench_kernel.py [--sizes=100m,350m,...] [--plain] [--peers] [--profile]
"""

import argparse
import time

import torch

import kernel

SIZES = {  # M, tokens, d, H, rank, blocks, must ms, goal ms
    "100m": (24, 16384, 512, 4, 512, 24, 4.0, 2.7),
    "350m": (48, 4096, 1024, 8, 1024, 48, 5.0, 2.7),
    "1b": (72, 2048, 1280, 8, 1280, 72, 6.5, 2.7),
    "100m H=1": (24, 16384, 512, 1, 512, 24, 18.6 / 4, 18.6 / 6),
    "350m H=1": (48, 4096, 1024, 1, 1024, 48, 22.3 / 4, 22.3 / 6),
    "lr-1b N=8 r=d": (48, 8192, 1536, 1, 1536, 8, 6.5, 4.7),
    "lr-1b N=8 r=d/4": (48, 8192, 1536, 1, 384, 8, 6.5, 4.7),
    "lr-4b N=8 r=d": (88, 4096, 2560, 1, 2560, 8, None, None),
    "lr-4b N=8 r=d/4": (88, 4096, 2560, 1, 640, 8, None, None),
    "8b delta N=8": (64, 8192, 4096, 8, 4096, 8, 160, 80),
}


class Stub(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mix, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def bank_reads(x, query, ends):
    bank = kernel.Bank(x, query, ends)
    return bank.read, bank.write


def source_reads(read):
    """A chain from a stateless read(sources, query)."""
    def reads(x, query, ends):
        sources, state = [x], [0]

        def write(y):
            t = state[0] = state[0] + 1
            sources.append(y if t == 1 or t - 1 in ends else sources.pop() + y)

        return lambda t: read(sources, query[t]), write
    return reads


def plain(sources, query):
    H, R = query.shape
    v = torch.stack(sources)
    n = torch.nn.functional.rms_norm(v, v.shape[-1:]).unflatten(-1, (H, -1))[..., -R:]
    w = torch.einsum("nthr,hr->nth", n, query.to(v.dtype)).float().softmax(0).to(v.dtype)
    return torch.einsum("nth,nthk->thk", w, v.unflatten(-1, (H, -1))).flatten(-2)


def chain(reads, x, query, ends, ys, grad):
    read, write = reads(x, query, ends)
    M = len(query) - 1
    for t in range(M):
        write(Stub.apply(read(t), ys[t]))
    out = read(M)
    return torch.autograd.grad(out, (x, query), grad)


def delta_chain(reads, null, query, ends, ys, grad, gate):
    read, write = reads(null.expand_as(grad), query, ends)
    x, M = grad.detach().requires_grad_(), len(query) - 1
    for t in range(M):
        h = x + gate[t] * read(t)
        y = Stub.apply(h, ys[t % len(ys)])
        write(y)
        x = x + y
    return torch.autograd.grad(x + gate[M] * read(M), (null, query, gate), grad)


def timed(f, repeat=15):
    times = []
    for _ in range(repeat):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(), f(), b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return sorted(times)[repeat // 2]


def graphed(f):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        f()
    return graph.replay


def copy_bandwidth():
    a = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    return 2 * a.nbytes / timed(lambda: b.copy_(a)) * 1e-9  # TB/s, bytes read and written


def pairs(M, ends):
    return sum(1 + sum(e <= t for e in ends) + (t > 0 and t not in ends) for t in range(1, M + 1))


def measure(name, reads, bandwidth, graph=True, profile=False):
    M, tokens, d, H, r, N, must, goal = SIZES[name]
    ends = {-(-M * j // N) for j in range(1, N + 1)}
    torch.manual_seed(0)
    new = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    x, grad, query = new(tokens, d).requires_grad_(), new(tokens, d), (torch.randn(M + 1, H, r // H, device="cuda") * (H / r) ** 0.5).requires_grad_()
    if "delta" in name:
        ys, null, gate = [new(tokens, d) for _ in range(4)], new(d).requires_grad_(), new(M + 1).requires_grad_()
        f = lambda: delta_chain(reads, null, query, ends, ys, grad, gate)
    else:
        ys = [new(tokens, d) for _ in range(M)]
        f = lambda: chain(reads, x, query, ends, ys, grad)
    start = time.time()
    f()
    torch.cuda.synchronize()
    first = time.time() - start
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    f()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - base) / 2**30
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
            f()
            torch.cuda.synchronize()
        for e in sorted(p.key_averages(), key=lambda e: -e.device_time_total)[:9]:
            print(f"    {e.key[:60]:60} {e.count:5} {e.device_time_total / 1e3:8.3f} ms")
    run = graphed(f) if graph else f
    run()
    ms = timed(run)
    del run
    floor = 2 * pairs(M, ends) * tokens * d * 2 / bandwidth * 1e-9
    return ms, floor, peak, first


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--sizes", default=",".join(SIZES))
    p.add_argument("--plain", action="store_true", help="also plain PyTorch, eager")
    p.add_argument("--peers", action="store_true", help="also fla-core's fused_attnres (H = 1; it tunes itself for minutes)")
    p.add_argument("--profile", action="store_true", help="time by kernel")
    args = p.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth:.2f} TB/s, torch {torch.__version__}")
    print(f"{'chain':18} {'what':16} {'ms':>8} {'must':>6} {'goal':>6} {'floor':>6} {'of copy':>7} {'GiB':>6} {'first s':>7}")
    for name in args.sizes.split(","):
        whats = [("bank", bank_reads, True)]
        if "delta" in name:
            whats += [("route", source_reads(kernel.route), True)]
        if args.plain and "delta" not in name:
            whats += [("plain", source_reads(plain), False)]
        if args.peers and "H=1" in name:
            try:
                from fla.ops.attnres import fused_attnres
                whats += [("fla", source_reads(lambda s, q: fused_attnres(s, q[0].to(s[0].dtype))), False)]
            except ImportError as e:
                print(f"fla-core is not here: {e}")
        for what, reads, graph in whats:
            try:
                ms, floor, peak, first = measure(name, reads, bandwidth, graph, args.profile and what == "bank")
            except torch.OutOfMemoryError:
                print(f"{name:18} {what:16} out of memory")
                continue
            show = lambda x: f"{x:6.1f}" if x else "      "
            print(f"{name:18} {what:16} {ms:8.2f} {show(SIZES[name][6])} {show(SIZES[name][7])} {floor:6.2f} {floor / ms:7.0%} {peak:6.2f} {first:7.1f}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
