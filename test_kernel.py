"""The fused kernels against plain PyTorch: on the CPU in Triton's interpreter (fp32, small), on a GPU compiled (and more)."""

import os
import sys

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import kernel  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


def reference(sources, query, norm="full", eps=1e-6):
    H, R = query.shape
    v = torch.stack(list(sources)).to(query.dtype).unflatten(-1, (H, -1))
    key = v[..., -R:]
    rho = (v.square().mean((-2, -1))[..., None] if norm == "full" else key.square().mean(-1)) + eps
    w = ((key * query).sum(-1) * rho.rsqrt()).softmax(0)
    return (w[..., None] * v).sum(0).flatten(-2)


def ends_of(M, N):
    return sorted({-(-M * j // N) for j in range(1, N + 1)})


def reference_chain(x, query, ends, sublayer, norm, gains=None, dtype=None):
    """The sum that the tests differentiate: every site's read, weighted. dtype rounds sources and reads as the storage does."""
    cast = (lambda a: a.to(dtype).to(a.dtype)) if dtype else (lambda a: a)
    sources, outs = [x], []
    for t in range(len(query)):
        mix = cast(reference(sources, query[t], norm))
        if gains is not None:
            mix = cast(torch.nn.functional.rms_norm(mix, mix.shape[-1:], gains[t], 1e-6))
        outs.append(mix)
        if t + 1 < len(query):
            y = sublayer(t, mix)
            sources.append(cast(sources.pop() + y) if t > 0 and t not in ends else y)
    return outs


def bank_chain(x, query, ends, sublayer, norm, gains=None):
    bank, outs = kernel.Bank(x, query, ends, norm=norm), []
    for t in range(len(query)):
        outs.append(bank.read(t) if gains is None else bank.read(t, gains[t]))
        if t + 1 < len(query):
            bank.write(sublayer(t, outs[-1]))
    return outs


def error(a, b):
    return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(0.1)).item()


def draw(*shape, seed=0, scale=1.0):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(DEVICE)


def run_chain(chain, M, tokens, d, H, R, N, norm, gain, dtype, used=None, **kw):
    """Every output and gradient of a chain with linear sublayers, in dtype."""
    ends = ends_of(M, N)
    x = draw(2, tokens, d, seed=1).to(dtype).requires_grad_()
    qtype = torch.float64 if dtype == torch.float64 else torch.float32
    query = draw(M + 1, H, R, seed=2, scale=1 / R**0.5).to(qtype).requires_grad_()
    mats = [(0.6 * draw(1, d, seed=3 + t) + 0.3 * draw(2, tokens, d, seed=100 + t)).to(dtype).requires_grad_() for t in range(M)]
    gains = [(1 + 0.3 * draw(d, seed=200 + t)).to(dtype).requires_grad_() for t in range(M + 1)] if gain else None
    outs = chain(x, query, ends, lambda t, mix: mix * mats[t], norm, gains, **kw)
    reads = [o.detach().clone() for o in outs]  # backward takes the memory of a Bank's mixes
    weights = [draw(2, tokens, d, seed=300 + t).to(dtype) for t in range(M + 1)]
    used = range(M + 1) if used is None else used
    torch.autograd.backward([outs[t] for t in used], [weights[t] for t in used])
    return reads + [x.grad, query.grad] + [m.grad for m in mats if m.grad is not None] + \
        [g.grad for g in gains or [] if g.grad is not None]


SINGLE = [  # n, tokens, d, H, R, norm
    (1, 3, 80, 1, 80, "full"), (3, 1, 96, 3, 32, "full"), (5, 5, 96, 8, 12, "slice"), (4, 3, 513, 1, 513, "full"),
    (4, 2, 513, 3, 7, "slice"), (40, 2, 80, 1, 20, "slice"), (3, 2, 96, 3, 7, "full")]


@pytest.mark.parametrize("n,tokens,d,H,R,norm", SINGLE + ([(100, 700, 1280, 8, 160, "full")] if GPU else []))
def test_route(n, tokens, d, H, R, norm):
    base = draw(n, tokens, 2 * d).float()
    q = draw(R, H, seed=1, scale=2 / R**0.5).float().T
    for form in ("list", "tensor", "repeated"):
        truth, fused = [], []
        for result, dtype, f in ((truth, torch.float64, reference), (fused, torch.float32, kernel.route)):
            big = base.to(dtype, copy=True).requires_grad_()
            query = q.to(dtype, copy=True).requires_grad_()
            strided = big[..., ::2]
            sources = {"list": list(strided), "tensor": strided, "repeated": [strided[0]] + list(strided)}[form]
            out = f(sources, query, norm=norm)
            out.backward(draw(tokens, d, seed=5).to(dtype))
            result += [out, big.grad, query.grad]
        assert max(error(a, b) for a, b in zip(fused, truth)) < 2.5e-6


CHAINS = [  # M, tokens, d, H, R, N, norm, gain
    (8, 2, 80, 1, 80, 8, "full", False), (4, 1, 96, 3, 32, 4, "slice", False), (7, 1, 96, 8, 7, 3, "full", True),
    (8, 1, 96, 3, 7, 3, "slice", True)] + ([
    (24, 33, 513, 1, 513, 24, "full", False), (40, 17, 1280, 8, 160, 40, "full", True), (40, 17, 96, 3, 7, 40, "slice", False),
    (48, 33, 1536, 1, 384, 8, "slice", True), (48, 33, 512, 4, 128, 4, "full", False), (26, 9, 4096, 8, 512, 8, "full", False),
    (24, 9, 1024, 1, 1024, 24, "full", False), (24, 65, 512, 4, 128, 24, "full", True)] if GPU else [])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    if not GPU:
        monkeypatch.setattr(kernel, "CHUNK", 3)  # so that a short chain has several groups


@pytest.mark.parametrize("M,tokens,d,H,R,N,norm,gain", CHAINS)
def test_chain(M, tokens, d, H, R, N, norm, gain):
    args = (M, tokens, d, H, R, N, norm, gain)
    truth = run_chain(reference_chain, *args, torch.float64)
    fused = run_chain(bank_chain, *args, torch.float32)
    assert len(truth) == len(fused)
    errors = [error(a, b) for a, b in zip(fused, truth)]
    plain = [error(a, b) for a, b in zip(run_chain(reference_chain, *args, torch.float32), truth)]
    print(f"{args}: fused {max(errors):.1e} plain {max(plain):.1e}")
    assert max(errors) < max(2.5e-6, 2 * max(plain))  # long chains: as good as plain fp32


@pytest.mark.parametrize("used", [[2, 5], [0], [6]])
def test_partial_graph(used):
    args = (6, 1, 48, 3, 16, 6, "full", False)
    truth, fused = run_chain(reference_chain, *args, torch.float64, used=used), run_chain(bank_chain, *args, torch.float32, used=used)
    zero = lambda a: torch.zeros((), dtype=torch.float64) if a is None else a
    assert max(error(zero(a), zero(b)) for a, b in zip(fused, truth) if zero(b).abs().max() > 0) < 2.5e-6


def test_backward_once_and_first_order_only():
    x, query = draw(2, 32).float().requires_grad_(), draw(3, 2, 16).float().requires_grad_()
    out = bank_chain(x, query, [1, 2], lambda t, mix: mix, "full")[-1].sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        out.backward()
    grad = torch.autograd.grad(kernel.route([x, 2 * x], query[0]).square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
    with pytest.raises(ValueError):
        kernel.route([x], draw(3, 11).float())


def test_two_forwards_checkpoint_and_no_grad():
    from torch.utils.checkpoint import checkpoint
    x, query = draw(2, 32).float(), draw(5, 2, 16).float().requires_grad_()
    w = draw(32, 32, seed=4, scale=0.2).float().requires_grad_()
    plain = lambda t, mix: torch.tanh(mix @ w)
    kept = lambda t, mix: checkpoint(lambda m: torch.tanh(m @ w), mix, use_reentrant=False)
    grads = []
    for chain, sublayer in ((reference_chain, plain), (bank_chain, plain), (bank_chain, kept)):
        w.grad = query.grad = None
        a = chain(x, query, [2, 4], sublayer, "full")[-1].square().sum()
        b = chain(2 * x, query, [2, 4], sublayer, "full")[-1].sum()
        with torch.no_grad():
            c = chain(x, query, [2, 4], sublayer, "full")[-1].square().sum()
        (a + b).backward()
        assert torch.allclose(a, c, rtol=1e-5)
        grads.append((w.grad, query.grad))
    for other in grads[1:]:
        assert max(error(p, q) for p, q in zip(other, grads[0])) < 5e-6


@gpu
@pytest.mark.parametrize("M,d,H,R,N,norm", [(24, 512, 4, 128, 24, "full"), (40, 1280, 8, 160, 40, "full"), (24, 512, 4, 32, 24, "slice"),
                                            (24, 1536, 1, 384, 8, "slice"), (24, 1024, 1, 1024, 24, "full")])
def test_bf16(M, d, H, R, N, norm):
    args = (M, 64, d, H, R, N, norm, False)
    truth = run_chain(reference_chain, *args, torch.float64)
    fused = run_chain(bank_chain, *args, torch.bfloat16)
    plain = run_chain(plain_bf16_chain, *args, torch.bfloat16)
    l2 = lambda a, b: ((a.double() - b).norm() / b.norm()).item()
    ratios = torch.tensor([l2(a, c) / max(l2(b, c), 1e-9) for a, b, c in zip(fused, plain, truth)])
    print(f"{args}: bf16 error over plain's: geometric mean {ratios.log().mean().exp():.3f}, reads {ratios[:M + 1][1:].log().mean().exp():.3f}, "
          f"largest {ratios.max():.2f}; query {ratios[M + 2]:.2f}")
    again = run_chain(bank_chain, *args, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(fused, again))
    assert ratios.log().mean().exp() <= 1.0


def plain_bf16_chain(x, query, ends, sublayer, norm, gains):
    sources, outs = [x], []
    for t in range(len(query)):
        outs.append(reference(sources, query[t], norm).to(x.dtype))
        if t + 1 < len(query):
            y = sublayer(t, outs[-1])
            sources.append(sources.pop() + y if t > 0 and t not in ends else y)
    return outs


@gpu
def test_cuda_graph_and_accumulation():
    M, d = 16, 512
    x, query = draw(64, d).bfloat16().requires_grad_(), draw(M + 1, 4, 128, scale=0.1).float().requires_grad_()

    def step():
        out = bank_chain(x, query, range(1, M + 1), lambda t, mix: mix * 0.5, "full")[-1]
        out.float().square().sum().backward()

    step()
    single = query.grad.clone()
    step()  # a second microbatch
    assert torch.allclose(query.grad, 2 * single)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    x.grad = query.grad = None
    with torch.cuda.graph(graph):
        step()
    for scale in (1, 3):
        with torch.no_grad():
            x.copy_(scale * draw(64, d, seed=scale).bfloat16())
        graph.replay()
        replayed = x.grad.clone(), query.grad.clone()
        y = x.detach().clone().requires_grad_()
        q = query.detach().clone().requires_grad_()
        out = bank_chain(y, q, range(1, M + 1), lambda t, mix: mix * 0.5, "full")[-1]
        out.float().square().sum().backward()
        assert torch.equal(replayed[0], y.grad) and torch.equal(replayed[1], q.grad)
