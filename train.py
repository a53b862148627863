"""Train a GPT with any residual stream of model.py: on a CPU, on one GPU, or on several under torchrun.

    python train.py --route=mhar                                  # the nano model on Python's own sources
    torchrun --nproc_per_node=8 train.py --size=350m --route=mhar --data=fineweb-edu
    python train.py --resume=out/mhar-nano                        # go on where a run was stopped

A preset (--size) brings the sizes and the recipe of its paper; any flag overrides it. The defaults below are nano's.
"""
import dataclasses
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import prepare
from model import GPT, GPTConfig, capture, clip_gradients, fail, kernels, load_run, parse_flags, read_config


@dataclass
class TrainConfig:
    size: str = "nano"  # a preset of model.py: nano, 100m, 124m, 350m, 1b, lr-0.5b, lr-1b, lr-4b, 8b
    data: str = "stdlib"  # a folder under data/, or a path; made by prepare.py
    out: str | None = None  # the run's folder, which must not exist; unset: the next free out/<route>-<size>
    resume: str | None = None  # go on with this run; only steps, cadences, micro, device, compile and kernel may change
    seq: int = 128  # tokens in a sequence
    batch: int = 8  # sequences in an optimizer step, over all ranks
    micro: int | None = None  # sequences in one forward on one rank; unset: batch / ranks, no accumulation
    steps: int = 700  # optimizer steps
    lr: float = 4e-3  # peak learning rate
    min_lr: float | None = None  # learning rate at the end; unset: lr / 10
    schedule: Literal["cosine", "linear"] = "cosine"  # from peak to end: cosine, or constant and then a linear warmdown
    warmup: int = 50  # steps of linear warmup
    warmdown: float = 0.2  # share of the steps in the linear schedule's warmdown
    weight_decay: float = 0.1  # AdamW's, on every parameter
    clip: float = 1.0  # largest norm of the gradient
    doc_mask: bool = False  # keep attention within documents
    seed: int = 42  # of the weights and of the data's order
    eval_every: int = 100  # steps between evaluations; there is one at the last step too
    eval_tokens: int = 32_768  # validation tokens of an evaluation, always the same ones
    save_every: int = 100  # steps between checkpoints
    verify: bool = False  # check the data's hashes at the start, also beyond 1 GB
    device: str | None = None  # cuda, cpu or mps; unset: the best there is
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of activations; auto: bfloat16 on CUDA
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of the backbone's matrices; everything else stays fp32
    compile: bool | None = None  # torch.compile the parts, and on a single GPU record a micro batch as a CUDA graph; unset: on CUDA


_mhar = dict(seq=1024, batch=32, steps=20_000, lr=1e-3, warmup=1000, param_dtype="bfloat16",
             eval_every=500, eval_tokens=1_048_576, save_every=1000)
_lr = dict(_mhar, seq=2048, batch=128, steps=76_294, schedule="linear", warmup=2000, doc_mask=True)
RECIPES = {
    "nano": dict(),
    "100m": dict(_mhar, seq=2048, batch=64),
    "124m": dict(_mhar, seq=2048, batch=64, lr=5e-4),
    "350m": _mhar,
    "1b": _mhar,
    "lr-0.5b": dict(_lr, steps=38_147),
    "lr-1b": _lr,
    "lr-4b": _lr,
    "8b": dict(_mhar, seq=4096, batch=256, steps=9_500, lr=4e-4, min_lr=4e-6, weight_decay=0.05),
}
MAY_CHANGE = {"resume", "steps", "eval_every", "eval_tokens", "save_every", "micro", "verify", "device", "compile", "kernel"}  # on --resume
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # dense bf16, for the MFU


def configure(flags):
    """Flags that were given -> (GPTConfig, TrainConfig), on top of the preset's or of the resumed run's."""
    model_fields = {f.name for f in dataclasses.fields(GPTConfig)}
    mine = {k: v for k, v in flags.items() if k not in model_fields}
    model = {k: v for k, v in flags.items() if k in model_fields}
    if "resume" in flags:
        run = read_config(flags["resume"])
        old = run["model"] | run["train"]
        for name, value in flags.items():
            if name not in MAY_CHANGE and value != old[name]:
                changeable = ", ".join(sorted(MAY_CHANGE - {"resume"}))
                fail(f"--{name}={value} does not fit {flags['resume']} ({old[name]}); only these may change: {changeable}")
        model, c = GPTConfig(**run["model"] | model), TrainConfig(**run["train"] | mine)
    else:
        size = flags.get("size", TrainConfig.size)
        model = GPTConfig.from_size(size, **model)
        c = TrainConfig(**RECIPES[size] | mine)
    if c.min_lr is None:
        c.min_lr = c.lr / 10
    for name in ("seq", "batch", "steps", "lr", "eval_every", "eval_tokens", "save_every", "clip"):
        if not getattr(c, name) > 0:
            fail(f"--{name} must be positive, not {getattr(c, name)}")
    if not 0 <= c.seed < 2**63:
        fail(f"--seed must be from 0 to 2^63 - 1, not {c.seed}")
    if not (0 <= c.warmdown <= 1 and c.warmup >= 0 and c.min_lr >= 0 and c.weight_decay >= 0):
        fail("--warmdown is a share of the steps, from 0 to 1; --warmup, --min_lr and --weight_decay are not negative")
    return model, c


def learning_rate(step, c):
    """Of optimizer step 0, 1, ...: linear warmup, then cosine to min_lr, or constant and a linear warmdown to min_lr."""
    if step < c.warmup:
        return c.lr * (step + 1) / c.warmup
    if c.schedule == "cosine":
        share = 0.5 + 0.5 * math.cos(math.pi * (step - c.warmup) / max(1, c.steps - c.warmup))
    else:
        share = min(1.0, (c.steps - step) / max(1, c.warmdown * c.steps))
    return c.min_lr + (c.lr - c.min_lr) * share


def new_folder(c, model):
    """Creates the run's folder, never an existing one."""
    names = [c.out] if c.out else [f"out/{model.route}-{c.size}" + (f"-{i}" if i > 1 else "") for i in range(1, 10_000)]
    for name in names:
        try:
            Path(name).mkdir(parents=True)
            return name
        except FileExistsError:
            pass
    fail(f"--out={c.out} exists; nothing is overwritten: choose another name, or --resume={c.out}")


def write_whole(file, write, keep=None):
    """write(path) into a temporary file, which takes file's place only when it is complete and on the disk. What was
    there before stays as keep, if that is given."""
    partial = file.with_name(file.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        write(partial)
        with open(partial, "rb") as f:
            os.fsync(f.fileno())
        if keep and file.exists():
            write_whole(keep, lambda path: link(file, path))
        os.replace(partial, file)
    except (OSError, RuntimeError) as e:  # a full disk; torch.save reports it as a RuntimeError
        partial.unlink(missing_ok=True)
        sys.exit(f"cannot write {file}, what was there before is untouched: {(str(e).splitlines() or [type(e).__name__])[0]}")


def link(old, new):
    try:
        os.link(old, new)
    except OSError:  # not every file system has hard links
        shutil.copyfile(old, new)


def main():
    flags = parse_flags(TrainConfig, GPTConfig)
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a sample's characters
    try:
        train(*configure(flags), vocab_given="vocab_size" in flags)
    except (ValueError, OSError) as e:
        fail(e)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def train(model_config, c, vocab_given=False):
    # -- where: torchrun sets RANK; without it this is the only process
    rank, world, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    best_device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(c.device or best_device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        fail(f"--device={c.device} is not to be had here; there is: {best_device}")
    cuda = device.type == "cuda"
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": torch.bfloat16 if cuda else torch.float32}[c.dtype]
    if cuda and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        fail(f"{torch.cuda.get_device_name()} has no bfloat16: use --dtype=float32 --param_dtype=float32")
    kernels(model_config.kernel, device.type)  # refuses before anything is written
    if "RANK" in os.environ:
        if cuda:
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if cuda else "gloo")
    master = rank == 0
    if c.batch % world or (c.micro is not None and (c.micro <= 0 or c.batch // world % c.micro)):
        fail(f"--batch={c.batch} must be a multiple of ranks x --micro = {world} x {1 if c.micro is None else c.micro}")
    micro = c.micro or c.batch // world

    # -- what: the data, the model, the optimizer
    folder = Path("data") / c.data if (Path("data") / c.data).exists() or c.data == "stdlib" else Path(c.data)
    while c.data == "stdlib" and not folder.exists() and master:
        try:
            prepare.prepare(prepare.Config())
        except ValueError:
            if not folder.exists() and not folder.with_name("stdlib.partial").exists():
                raise
            time.sleep(1)  # another run is making it, or just has
    if world > 1:
        dist.barrier()
    train_data, val_data = (prepare.Shards(folder, split, c.seq, c.verify) for split in ("train", "val"))
    meta = train_data.meta
    if model_config.vocab_size < meta["vocab_size"] and (vocab_given or c.resume):
        fail(f"vocab_size={model_config.vocab_size} is less than the data's {meta['vocab_size']}")
    if not vocab_given and not c.resume:
        model_config.vocab_size = meta["vocab_size"]
    data = {"folder": os.path.relpath(folder), **{k: meta[k] for k in ("encoding", "vocab_size", "eot")},
            "sha256": [shard["sha256"] for split in meta["shards"].values() for shard in split]}
    if c.resume and read_config(c.resume)["data"]["sha256"] != data["sha256"]:
        fail(f"{folder} is not the data that {c.resume} was trained on")
    torch.manual_seed(c.seed)
    model = GPT(model_config, dtype).cast_parameters(getattr(torch, c.param_dtype)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=c.weight_decay, fused=True)
    flops, peak_flops = model_config.flops(c.seq), None
    if cuda:
        peak_flops = next((f for name, f in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)

    # -- the run's folder
    step, best = 0, math.inf
    if c.resume:
        out = Path(c.resume)
        state = load_checkpoint(out, device)
        try:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step, best = state["step"], state["best"]
        except (RuntimeError, KeyError, TypeError) as e:
            fail(f"the checkpoint of {out} does not fit its config.json: {' '.join(str(e).split())[:200]}")
        if step >= c.steps:
            fail(f"{out} has all its {step} steps; give --steps to go on")
    else:
        name = [new_folder(c, model_config) if master else None]
        if world > 1:
            dist.broadcast_object_list(name)
        out = Path(name[0])
    log_file = out / "log.jsonl"
    if master:
        if c.resume:
            kept = logged_until(log_file, step)
            write_whole(log_file, lambda file: file.write_text(kept))
        params = model.num_params()
        config = {
            "model": dataclasses.asdict(model_config), "train": dataclasses.asdict(c) | {"out": None, "resume": None, "data": os.path.relpath(c.data) if os.path.isabs(c.data) else c.data},
            "data": data,
            "parameters": params, "flops_per_token": flops, "ranks": world,
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or device.type,
            "versions": {"python": platform.python_version(), "torch": torch.__version__}, "git": git_commit(),
        }
        write_whole(out / "config.json", lambda file: file.write_text(json.dumps(config, indent=1) + "\n"))
        log = open(log_file, "a", buffering=1)
        print(f"{model_config.route} {c.size}: {params['total']:,} parameters ({params['routing']:,} routing), "
              f"vocabulary {model_config.vocab_size:,} ({meta['encoding']}), {train_data.tokens:,} training tokens of {folder}, "
              f"{world} x {device.type} -> {out}", flush=True)

    # -- how: one loop
    compiled = cuda if c.compile is None else c.compile
    if compiled:
        model.compile_parts()
        if master:
            print("compiling; the first step takes a while ...", flush=True)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if world > 1 else model
    stop = []  # signals that asked for an end
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, lambda number, frame: stop.append(number))

    def to_device(rows):
        return torch.from_numpy(rows).pin_memory().to(device, non_blocking=True) if cuda else torch.from_numpy(rows).to(device)

    def loss_of(net, rows):
        x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        return net(x, y, docs=(x == meta["eot"]).cumsum(1) if c.doc_mask else None)

    share = slice(rank * c.batch // world, (rank + 1) * c.batch // world)
    n_micro = c.batch // world // micro

    def backward(rows, i):
        """Micro batch i of a step: adds its gradients (the first replaces them), returns its share of the step's loss."""
        if i == 0:
            model.zero_grad()
        with wrapped.no_sync() if world > 1 and i < n_micro - 1 else nullcontext():  # averaged over the ranks once a step
            loss = loss_of(wrapped, rows) / n_micro
            loss.backward()
        return loss.detach()

    graphs = []  # of the first micro batch and of the others

    def micro_step(rows, i):
        if not (cuda and compiled and world == 1):
            return backward(rows, i)
        if not graphs:
            replay, pool = capture(lambda rows: backward(rows, 0), rows)
            graphs.append(replay)
            if n_micro > 1:
                graphs.append(capture(lambda rows: backward(rows, 1), rows, pool=pool)[0])
        return graphs[i > 0](rows)

    @torch.no_grad()
    def evaluate():
        """Mean cross-entropy over the same windows every time, spread over the whole validation split."""
        n = max(1, min(val_data.n_windows, c.eval_tokens // c.seq))
        picks = [i * val_data.n_windows // n for i in range(n)][rank::world]
        total = torch.zeros(2, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
        for i in range(0, len(picks), micro):
            rows = to_device(prepare.np.stack([val_data.window(p) for p in picks[i:i + micro]]))
            total += torch.stack([loss_of(model, rows).to(total.dtype) * len(rows), total.new_tensor(len(rows))])
        if world > 1:
            dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def save():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "best": best}
        write_whole(out / "ckpt.pt", lambda file: torch.save(state, file), keep=out / "ckpt_prev.pt")

    started, first = time.time(), step
    rows = to_device(train_data.batch(step, c.batch, c.seed, share))
    while step < c.steps:
        t0 = time.time()
        lr = learning_rate(step, c)
        for group in optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros(2, device=device)  # mean loss, signals
        for i, part in enumerate(rows.split(micro)):
            total[0] += micro_step(part, i)
        grad_norm = clip_gradients(model.parameters(), c.clip)
        if world > 1:
            total[1] = len(stop)
            dist.all_reduce(total)
            total[0] /= world
        optimizer.step()
        if step + 1 < c.steps:
            rows = to_device(train_data.batch(step + 1, c.batch, c.seed, share))
        loss, signals, grad_norm = torch.cat([total, grad_norm.view(1)]).tolist()  # the step's one synchronization
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            sys.exit(f"step {step + 1}: loss {loss}, gradient norm {grad_norm}; the run stops, what {out} has saved stays as it was")
        step += 1
        seconds = time.time() - t0
        signals = signals if world > 1 else len(stop)

        speed = c.batch * c.seq / seconds
        entry = {"step": step, "tokens": step * c.batch * c.seq, "loss": loss, "lr": lr, "grad_norm": grad_norm,
                 "tokens_per_s": round(speed),
                 "mfu": round(speed * flops / peak_flops / world, 4) if peak_flops else None,
                 "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if cuda else None}
        if step % c.eval_every == 0 or step == c.steps:
            entry["val_loss"] = evaluate()
            if not math.isfinite(entry["val_loss"]):
                sys.exit(f"step {step}: validation loss {entry['val_loss']}; the run stops, what {out} has saved stays as it was")
        if master:
            log.write(json.dumps(entry) + "\n")
            pace = (time.time() - started) / (step - first)  # seconds a step so far, evaluations and all
            left = pace * (c.steps - step)
            line = f"step {step}/{c.steps}  loss {loss:.3f}  {c.batch * c.seq / pace:,.0f} tokens/s  {left // 60:.0f}:{left % 60:02.0f} left"
            if "val_loss" in entry:
                print(f"{line}  val_loss {entry['val_loss']:.4f}", flush=True)
            elif sys.stdout.isatty():
                print(line, end="   \r", flush=True)
            if entry.get("val_loss", math.inf) < best:
                best = entry["val_loss"]
                write_whole(out / "best.pt", lambda file: torch.save({"model": model.state_dict(), "step": step}, file))
            if step % c.save_every == 0 or step == c.steps or signals:
                save()
        if signals and step < c.steps:
            if master:
                print(f"\nstopped at step {step}; to go on: python train.py --resume={out}", flush=True)
            return

    if master:
        for s in (signal.SIGTERM, signal.SIGINT):  # all is saved
            signal.signal(s, signal.SIG_DFL)
        model, _ = load_run(out, device)  # not compiled: the cache changes its shape with every token
        encoding = prepare.encoding(meta["encoding"], folder)
        start = torch.full((1, 1), meta["eot"], device=device)
        generator = torch.Generator(device).manual_seed(c.seed)
        tokens = model.generate(start, 200, temperature=0.8, top_k=50, window=c.seq, generator=generator)
        ids = [token.item() for token in tokens]
        print(f"{time.time() - started:.0f} s; a sample:\n{encoding.decode(ids)}\n\nmore: python sample.py --out={out}", flush=True)


def load_checkpoint(out, device):
    """The newest whole checkpoint of a run."""
    for file in (out / "ckpt.pt", out / "ckpt_prev.pt"):
        try:
            return torch.load(file, map_location=device, weights_only=True)
        except FileNotFoundError:
            pass
        except Exception as e:  # torch.load raises nearly everything
            print(f"{file} cannot be read ({type(e).__name__}), so the one before is tried", file=sys.stderr)
    raise ValueError(f"{out} has no whole checkpoint; start it anew")


def logged_until(log_file, step):
    """The whole lines of a log up to that step: what was logged after the checkpoint will be logged again."""
    kept = []
    for line in log_file.read_text(errors="replace").splitlines() if log_file.exists() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):  # half a line
            pass
    return "".join(kept)


def git_commit():
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    main()
