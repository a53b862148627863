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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import prepare
from model import (DEPTH_ROUTES, GPT, GPTConfig, capture, clip_gradients, fail, kernels, load_run, memory, on_capture_stream, parse_flags,
                   pick_device, read_config, watch_routing)


@dataclass
class TrainConfig:
    size: str = "nano"  # a preset of model.py: nano, 100m, 124m, 350m, 1b, lr-0.5b, lr-1b, lr-4b, 8b
    data: str = "stdlib"  # a folder under data/, or a path; made by prepare.py
    out: str | None = None  # the run's folder, which must not exist; unset: the next free out/<route>-<size>
    resume: str | None = None  # go on with this run; only steps, cadences, what is logged, micro, device, compile, kernel and recompute may change
    init_from: str | None = None  # begin with this run's weights and a new schedule; the model is its model, but for flags
    eval_only: bool = False  # print the validation loss of the run given as --resume, change nothing
    dry_run: bool = False  # print parameters, memory and time by arithmetic, with the preset's vocabulary; WORLD_SIZE=8 before the command: for 8 GPUs
    seq: int = 128  # tokens in a sequence
    batch: int = 8  # sequences in an optimizer step, over all ranks
    micro: int | None = None  # sequences in one forward on one rank; unset: batch / ranks, no accumulation
    steps: int = 700  # optimizer steps
    lr: float = 4e-3  # peak learning rate
    min_lr: float | None = None  # learning rate at the end; unset: lr / 10
    schedule: Literal["cosine", "linear"] = "cosine"  # from peak to end: cosine, or constant and then a linear warmdown
    warmup: int = 50  # steps of linear warmup
    warmdown: float = 0.2  # share of the steps in the linear schedule's warmdown
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: torch.optim.Muon for the sublayers' matrices, Adam without decay for the rest
    muon_lr: float = 1e-3  # peak learning rate of Muon, on the same schedule
    weight_decay: float = 0.1  # AdamW's or Muon's
    decay: Literal["all", "matrices"] = "all"  # AdamW's decay: for all parameters, or for matrices but the embedding and the router's
    z_loss: float = 0.0  # adds z_loss * mean squared logsumexp of the logits to what is minimized, not to what is logged
    ema: float = 0.0  # moving average of the weights, this much of it kept each step; evaluated and saved. 0: none
    clip: float = 1.0  # largest norm of the gradient
    doc_mask: bool = False  # keep attention within documents
    seed: int = 42  # of the weights and of the data's order
    eval_every: int = 100  # steps between evaluations; there is one at the last step too
    eval_tokens: int = 32_768  # validation tokens of an evaluation, always the same ones
    save_every: int = 100  # steps between checkpoints
    log_routing: bool = False  # on evaluations, log the mean entropy of every site's weights, in nats
    wandb: str | None = None  # also log to this Weights & Biases project
    verify: bool = False  # check the data's hashes at the start, also beyond 1 GB
    device: str | None = None  # cuda, cpu or mps; unset: the best there is
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of activations; auto: bfloat16 on CUDA
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of the backbone's matrices; everything else stays fp32
    fsdp: bool = False  # under torchrun: shard parameters (stored in fp32), gradients, optimizer and average over the ranks (FSDP2)
    recompute: bool = False  # compute the sublayers' activations again in backward instead of keeping them
    compile: bool | None = None  # torch.compile the sublayers and, without --fsdp, record micro batches as CUDA graphs; unset: on CUDA


_mhar = dict(seq=1024, batch=32, steps=20_000, lr=1e-3, warmup=1000, param_dtype="bfloat16",
             eval_every=500, eval_tokens=262_144, save_every=1000)  # an evaluation takes half a percent of the time
_mhar_2048 = dict(_mhar, seq=2048, batch=64)
_lr = dict(_mhar_2048, param_dtype="float32", batch=128, steps=76_294, optimizer="muon", lr=3e-4, z_loss=1e-5, schedule="linear", warmup=2000, doc_mask=True)
RECIPES = {
    "nano": dict(),
    "100m": _mhar_2048,
    "124m": dict(_mhar_2048, lr=5e-4),
    "350m": _mhar,
    "1b": _mhar,
    "lr-0.5b": dict(_lr, steps=38_147),
    "lr-1b": _lr,
    "lr-4b": _lr,
    "8b": dict(_mhar_2048, seq=4096, batch=256, steps=9_500, lr=4e-4, min_lr=4e-6, weight_decay=0.05, decay="matrices", z_loss=1e-4, ema=0.999),
}
PAPERS = {"nano": "ours", "8b": "MHAR mid-training, arXiv 2607.27230"} | {size: "LR, arXiv 2607.09694" for size in RECIPES if size[:3] == "lr-"}
MAY_CHANGE = {"resume", "eval_only", "dry_run", "log_routing", "wandb", "steps", "eval_every", "eval_tokens", "save_every", "micro", "verify", "device", "compile", "kernel", "recompute"}  # on --resume
DDP_WARMUP = 11  # steps before DistributedDataParallel may be recorded in a CUDA graph: it times its first ten
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # dense bf16, for the MFU


def configure(flags):
    """Flags that were given -> (GPTConfig, TrainConfig), on top of the preset's or of the resumed run's."""
    model_fields = {f.name for f in dataclasses.fields(GPTConfig)}
    mine = {k: v for k, v in flags.items() if k not in model_fields}
    model = {k: v for k, v in flags.items() if k in model_fields}
    if "resume" in flags:
        run = read_config(flags["resume"])
        old = {f.name: f.default for f in dataclasses.fields(TrainConfig)} | run["model"] | run["train"]
        for name, value in flags.items():
            if name in ("data", "init_from"):
                value = relative(value)
            if name not in MAY_CHANGE and value != old[name]:
                changeable = ", ".join(sorted(MAY_CHANGE - {"resume"}))
                fail(f"--{name}={value} does not fit {flags['resume']} ({old[name]}); only these may change: {changeable}")
        model, c = GPTConfig(**run["model"] | model), TrainConfig(**run["train"] | mine)
    elif "init_from" in flags:
        run = read_config(flags["init_from"])
        if flags.setdefault("size", run["train"]["size"]) not in RECIPES:
            fail(f"unknown size {flags['size']!r}; there are: {', '.join(RECIPES)}")
        model, c = GPTConfig(**run["model"] | model), TrainConfig(**RECIPES[flags["size"]] | mine | {"size": flags["size"]})
    else:
        size = flags.get("size", TrainConfig.size)
        model = GPTConfig.from_size(size, **model)
        c = TrainConfig(**RECIPES[size] | mine)
    if c.fsdp:  # FSDP2 shards parameters of one dtype together
        if flags.get("param_dtype") == "bfloat16":
            fail("--fsdp stores parameters in fp32 and gathers them in --dtype: leave --param_dtype out")
        c.param_dtype = "float32"
    if c.eval_only and not c.resume:
        fail("--eval_only evaluates a run: give --resume=RUN")
    if c.eval_only and Path(c.resume, "ckpt.pt").exists():  # gathered at the end
        c.fsdp = False
    if c.min_lr is None:
        c.min_lr = c.lr / 10
    for name in ("seq", "batch", "steps", "lr", "muon_lr", "eval_every", "eval_tokens", "save_every", "clip"):
        if not getattr(c, name) > 0:
            fail(f"--{name} must be positive, not {getattr(c, name)}")
    if c.size not in RECIPES:
        fail(f"unknown size {c.size!r}; there are: {', '.join(RECIPES)}")
    if c.min_lr > c.lr:
        fail(f"--min_lr={c.min_lr:g} must be at most --lr={c.lr:g}")
    if not 0 <= c.seed < 2**63:
        fail(f"--seed must be from 0 to 2^63 - 1, not {c.seed}")
    if not (0 <= c.warmdown <= 1 and 0 <= c.ema < 1 and min(c.warmup, c.min_lr, c.weight_decay, c.z_loss) >= 0):
        fail("--warmdown and --ema are shares, from 0 to 1; --warmup, --min_lr, --weight_decay and --z_loss are not negative")
    return model, c


def changed_from_recipe(c):
    """What of a run's recipe is not its preset's, as {name: value}: for config.json."""
    preset, where = TrainConfig(**RECIPES[c.size]), {"size", "data", "out", "init_from", "wandb", *MAY_CHANGE} - {"steps", "eval_tokens"}
    preset.min_lr = preset.lr / 10 if preset.min_lr is None else preset.min_lr
    return {name: value for name, value in dataclasses.asdict(c).items() if name not in where and value != getattr(preset, name)}


def optimizers(model, c):
    """[AdamW], or [Muon, Adam] as LR has it: Muon for the matrices inside sublayers (Q, K, V, O, gate, up, down, each its own), Adam
    without decay for embeddings, head, gains and router. torch's Muon orthogonalizes Nesterov's momentum by five Newton-Schulz steps in
    bf16, scales by sqrt(max(1, rows / columns)) and decays before the update, as Jordan's does; Jordan's also joins Q, K and V."""
    inside = [p for sublayer in model.sublayers for p in sublayer.parameters() if p.ndim == 2]
    adam = dict(lr=c.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    without = lambda chosen: [p for p in model.parameters() if all(p is not q for q in chosen)]
    if c.optimizer == "muon":
        return [torch.optim.Muon(inside, lr=c.muon_lr, momentum=0.95, weight_decay=c.weight_decay),
                torch.optim.AdamW(without(inside), weight_decay=0.0, **adam)]
    if c.decay == "all":
        return [torch.optim.AdamW(model.parameters(), weight_decay=c.weight_decay, **adam)]
    decayed = inside + ([] if model.config.tied else [model.head.weight])
    return [torch.optim.AdamW([{"params": decayed}, {"params": without(decayed), "weight_decay": 0.0}], weight_decay=c.weight_decay, **adam)]


def learning_rate(step, c):
    """Of optimizer step 0, 1, ...: linear warmup, then cosine to min_lr, or constant and a linear warmdown to min_lr."""
    if step < c.warmup:
        return c.lr * (step + 1) / c.warmup
    if c.schedule == "cosine":
        share = 0.5 + 0.5 * math.cos(math.pi * (step - c.warmup) / max(1, c.steps - c.warmup))
    else:
        share = min(1.0, (c.steps - step) / max(1, c.warmdown * c.steps))
    return c.min_lr + (c.lr - c.min_lr) * share


def relative(path):
    return os.path.relpath(path) if path and os.path.isabs(path) else path


def may_restart():
    """Whether torchrun has --max_restarts: then all ranks start again if one dies, and go on with --out. (Each node has its own count of
    restarts, so that is not asked.)"""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def new_folder(c, model):
    """Creates the run's folder, never an existing one (but see may_restart, for one that died before its first save)."""
    names = [c.out] if c.out else [f"out/{model.route}-{c.size}" + (f"-{i}" if i > 1 else "") for i in range(1, 10_000)]
    for name in names:
        try:
            Path(name).mkdir(parents=True, exist_ok=bool(c.out) and may_restart() and Path(name, "config.json").exists())
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
    if may_restart() and "out" in flags and any(Path(flags["out"], name).exists() for name in ("ckpt.pt", "ckpt_prev.pt", "ckpt", "ckpt_prev")):
        flags["resume"] = flags.pop("out")
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a sample's characters
    try:
        try:
            settings = configure(flags)
        except (KeyError, TypeError) as e:
            if not (source := flags.get("resume") or flags.get("init_from")):
                raise
            fail(f"{source}/config.json is damaged: {type(e).__name__}: {e}")
        train(*settings, vocab_given="vocab_size" in flags)
    except (ValueError, OSError) as e:
        fail(e)
    except RuntimeError as e:
        if not isinstance(e, torch.OutOfMemoryError) and "can't allocate memory" not in str(e):  # the CPU's
            raise
        fail(f"out of memory: fewer sequences at a time (--micro), --recompute or --fsdp need less; {str(e).splitlines()[0]}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def train(model_config, c, vocab_given=False):
    # -- where: torchrun sets RANK; without it this is the only process
    rank, world, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    master = rank == 0
    if c.batch % world or (c.micro is not None and (c.micro <= 0 or c.batch // world % c.micro)):
        fail(f"--batch={c.batch} must be a multiple of ranks x --micro = {world} x {1 if c.micro is None else c.micro}")
    micro = c.micro or c.batch // world
    if world > 1 and "RANK" not in os.environ and not c.dry_run:
        fail("WORLD_SIZE is set: only --dry_run takes it without torchrun")
    if c.dry_run:
        if master:
            print(plan(model_config, c, micro, world))
        return
    device = pick_device(c.device, best=("cuda", "mps", "cpu"))
    cuda = device.type == "cuda"
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": torch.bfloat16 if cuda else torch.float32}[c.dtype]
    if cuda and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        fail(f"{torch.cuda.get_device_name()} has no bfloat16: use --dtype=float32 --param_dtype=float32")
    if kernels(model_config.kernel, device.type) and not cuda and dtype != torch.float32:  # refuses before anything is written
        fail("--kernel=triton runs in Triton's interpreter here, which multiplies bfloat16 wrongly: use --dtype=float32")
    if "RANK" in os.environ:
        if cuda:
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if cuda else "gloo")
    elif c.fsdp:
        fail("--fsdp shards over ranks: start it with torchrun")
    if c.wandb and master:
        try:
            import wandb
        except ImportError:
            fail("--wandb needs the package: pip install wandb")

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
    if model_config.vocab_size < meta["vocab_size"] and (vocab_given or c.resume or c.init_from):
        fail(f"vocab_size={model_config.vocab_size} is less than the data's {meta['vocab_size']}")
    if c.init_from and not c.resume and (old := read_config(c.init_from)["data"]["encoding"]) != meta["encoding"]:
        fail(f"{c.init_from} knows the tokens of {old}, {folder} has those of {meta['encoding']}: make the data with its encoding")
    if not vocab_given and not c.resume and not c.init_from:
        model_config.vocab_size = meta["vocab_size"]
    data = {"folder": os.path.relpath(folder), **{k: meta[k] for k in ("encoding", "vocab_size", "eot")},
            "sha256": [shard["sha256"] for split in meta["shards"].values() for shard in split]}
    if c.resume and read_config(c.resume)["data"].get("sha256") not in (None, data["sha256"]):  # None: a graft, which has had no data
        fail(f"{folder} is not the data that {c.resume} was trained on")
    torch.manual_seed(c.seed)
    model = GPT(model_config, dtype, c.z_loss)
    if c.init_from and not c.resume:
        take_weights(model, c.init_from)
    model = model.cast_parameters(getattr(torch, c.param_dtype)).to(device)
    model.recompute = c.recompute
    if c.fsdp:  # the root group, embedding, head and router, stays in fp32 until it is used
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        mesh = dist.init_device_mesh(device.type, (world,))
        for sublayer in model.sublayers:
            fully_shard(sublayer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)
    steppers, params = optimizers(model, c), dict(model.named_parameters())
    ema = {name: p.detach().float().clone() for name, p in params.items()} if c.ema else None
    flops, peak_flops = model_config.flops(c.seq), None
    if cuda:
        peak_flops = next((f for name, f in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)

    # -- the run's folder
    step, best = 0, math.inf
    if c.resume:
        out = Path(c.resume)
        try:
            if c.fsdp:
                step, best = load_sharded(out, model, steppers, ema)
            else:
                state = load_checkpoint(out, device)
                model.load_state_dict(state["model"])
                step, ema = state["step"], state["ema"]
                if not c.eval_only:
                    if "optimizer" not in state:
                        fail(f"{out} has weights but no optimizer state: begin a run with --init_from={out}")
                    for optimizer, old in zip(steppers, state["optimizer"], strict=True):
                        optimizer.load_state_dict(old)
                    best = state["best"]
        except (RuntimeError, KeyError, TypeError, ValueError) as e:
            fail(f"the checkpoint of {out} does not fit its config.json: {' '.join(str(e).split())[:200]}")
        if step >= c.steps and not c.eval_only:
            fail(f"{out} is at step {step} of {c.steps}: give more --steps to go on")
    else:
        name = [new_folder(c, model_config) if master else None]
        if world > 1:
            dist.broadcast_object_list(name)
        out = Path(name[0])
    log_file = out / "log.jsonl"
    log = None
    if master and not c.eval_only:
        if c.resume:
            kept = logged_until(log_file, step)
            write_whole(log_file, lambda file: file.write_text(kept))
        count = model.num_params()
        config = {
            "recipe": {"of": PAPERS.get(c.size, "MHAR, arXiv 2607.27230"), "changed": changed_from_recipe(c)},
            "model": dataclasses.asdict(model_config), "train": dataclasses.asdict(c) | {
                "out": None, "resume": None, "eval_only": False, "dry_run": False, "data": relative(c.data), "init_from": relative(c.init_from)},
            "data": data,
            "parameters": count, "flops_per_token": flops, "ranks": world,
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or device.type,
            "versions": {"python": platform.python_version(), "torch": torch.__version__}, "git": git_commit(),
        }
        write_whole(out / "config.json", lambda file: file.write_text(json.dumps(config, indent=1) + "\n"))
        log = open(log_file, "a" if c.resume else "w", buffering=1)
        print(f"{model_config.route} {c.size}: {count['total']:,} parameters ({count['routing']:,} routing), "
              f"vocabulary {model_config.vocab_size:,} ({meta['encoding']}), {train_data.tokens:,} training tokens of {folder}, "
              f"{world} x {device.type} -> {out}", flush=True)
        if c.wandb:
            wandb.init(project=c.wandb, name=out.name, dir=out, config=config)

    # -- how: one loop
    compiled = (cuda if c.compile is None else c.compile) and not c.eval_only
    if compiled:
        model.compile_parts()
        if master:
            print("compiling; the first step takes a while ...", flush=True)
    recorded = cuda and compiled and not c.fsdp  # as CUDA graphs, those of DDP with their communication
    wrap = lambda: DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped = model if world == 1 or c.fsdp else on_capture_stream(wrap) if recorded else wrap()
    stop = []  # signals that asked for an end
    for s in (signal.SIGTERM, signal.SIGINT) if not c.eval_only else ():
        signal.signal(s, lambda number, frame: stop.append(number))

    def to_device(rows):
        return torch.from_numpy(rows).pin_memory().to(device, non_blocking=True) if cuda else torch.from_numpy(rows).to(device)

    def loss_of(net, rows):
        x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        return net(x, y, docs=(x == meta["eot"]).cumsum(1) if c.doc_mask else None)

    share = slice(rank * c.batch // world, (rank + 1) * c.batch // world)
    n_micro = c.batch // world // micro

    def backward(rows, first, last):
        """One micro batch: adds its gradients and returns its share of the step's loss. The step's first replaces the gradients, its
        last averages them over the ranks. (FSDP averages in every micro batch: else each rank would hold whole gradients.)"""
        if first:
            model.zero_grad()
        with nullcontext() if last or world == 1 or c.fsdp else wrapped.no_sync():
            loss = loss_of(wrapped, rows) / n_micro
            loss.backward()
        return loss.detach()

    graphs, pool = {}, None  # {(first, last) or "evaluation": replay}

    def micro_step(rows, i):
        nonlocal pool
        kind = i == 0, world > 1 and i == n_micro - 1  # first, last; one rank has nothing to average
        if not recorded:
            return backward(rows, *kind)
        if world > 1 and step - begun < DDP_WARMUP:
            return on_capture_stream(backward, rows, *kind)
        if kind not in graphs:
            graphs[kind], pool = capture(lambda rows: backward(rows, *kind), rows, pool=pool, free=model.zero_grad)
        return graphs[kind](rows)

    def mean_loss(rows):
        """Without gradients. A whole micro batch's is a graph too, in the memory that the others leave free between two steps."""
        loss = lambda rows: loss_of(model, rows)
        if pool is None or len(rows) < micro:
            return loss(rows)
        if "evaluation" not in graphs:
            on_capture_stream(loss, rows, pool=pool)  # compiles
            graphs["evaluation"], _ = capture(loss, rows, pool=pool)
        return graphs["evaluation"](rows)

    @torch.no_grad()
    def evaluate():
        """Mean cross-entropy over the same windows every time, spread over the whole validation split."""
        n = max(1, min(val_data.n_windows, c.eval_tokens // c.seq))
        picks = [i * val_data.n_windows // n for i in range(n)][rank::world]
        total = torch.zeros(2, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
        for i in range(0, len(picks), micro):
            rows = to_device(prepare.np.stack([val_data.window(p) for p in picks[i:i + micro]]))
            total += torch.stack([mean_loss(rows).to(total.dtype) * len(rows), total.new_tensor(len(rows))])
        if world > 1:
            dist.all_reduce(total)
        return (total[0] / total[1]).item()

    @contextmanager
    def averaged():
        """With the moving average as the model's weights."""
        def put(values):
            with torch.no_grad():
                for p, value in zip(params.values(), values):
                    p.copy_(value)
            if c.fsdp:
                model.reshard()  # what was gathered before is not used again

        kept = [p.detach().clone() for p in params.values()]
        put(ema.values())
        yield
        put(kept)

    def evaluations():
        results = {"val_loss": evaluate()}
        if ema:
            with averaged():
                results["val_loss_ema"] = evaluate()
        if c.log_routing and model_config.route in DEPTH_ROUTES:
            results["routing_entropy"] = routing_entropy(lambda: loss_of(model, to_device(val_data.window(0)[None])))
        if not math.isfinite(results["val_loss"]):
            sys.exit(f"step {step}: validation loss {results['val_loss']}; the run stops, what {out} has saved stays as it was")
        return results

    if c.eval_only:
        results = evaluations()
        if master:
            print(f"{out}, step {step}: " + ", ".join(f"{name} {value}" for name, value in results.items()))
        return

    def save_weights(name, keep=None, **more):
        """Called on every rank: sharded tensors are gathered."""
        whole = lambda tensors: {k: v.full_tensor().cpu() if c.fsdp else v for k, v in tensors.items()}
        state = {"model": whole(model.state_dict()), "ema": whole(ema) if ema else None, "step": step} | more
        if master:
            write_whole(out / name, lambda file: torch.save(state, file), keep=keep)

    def save():
        if c.fsdp:
            save_sharded(out, model, steppers, ema, step, best)
        else:
            save_weights("ckpt.pt", out / "ckpt_prev.pt", optimizer=[o.state_dict() for o in steppers], best=best)

    started, begun = time.time(), step
    rows = to_device(train_data.batch(step, c.batch, c.seed, share))
    while step < c.steps:
        t0 = time.time()
        lr = learning_rate(step, c)
        for optimizer in steppers:
            for group in optimizer.param_groups:
                group["lr"] = lr * (c.muon_lr / c.lr if isinstance(optimizer, torch.optim.Muon) else 1)
        total = torch.zeros(2, device=device)  # mean loss, signals
        for i, part in enumerate(rows.split(micro)):
            total[0] += micro_step(part, i)
        grad_norm = clip_gradients(model.parameters(), c.clip)
        if world > 1:
            total[1] = len(stop)
            dist.all_reduce(total)
            total[0] /= world
        for optimizer in steppers:
            optimizer.step()
        if ema:
            update_average(list(ema.values()), [p.detach() for p in params.values()], c.ema)
        if step + 1 < c.steps:
            rows = to_device(train_data.batch(step + 1, c.batch, c.seed, share))
        peak = torch.cuda.max_memory_reserved() if cuda else None  # reserved: a graph's replay allocates nothing
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
                 "peak_gib": round(peak / 2**30, 3) if cuda else None}
        if step % c.eval_every == 0 or step == c.steps:
            entry |= evaluations()
        if master:
            log.write(json.dumps(entry) + "\n")
            if c.wandb:
                wandb.log(entry, step=step)
            pace = (time.time() - started) / (step - begun)  # seconds a step so far, evaluations and all
            left = pace * (c.steps - step)
            line = f"step {step}/{c.steps}  loss {loss:.3f}  {c.batch * c.seq / pace:,.0f} tokens/s  {left // 60:.0f}:{left % 60:02.0f} left"
            if "val_loss" in entry:
                print(f"{line}  val_loss {entry['val_loss']:.4f}", flush=True)
            elif sys.stdout.isatty():
                print(line, end="   \r", flush=True)
        if entry.get("val_loss", math.inf) < best:
            best = entry["val_loss"]
            save_weights("best.pt")
        if step % c.save_every == 0 or step == c.steps or signals:
            save()
        if signals and step < c.steps:
            if master:
                print(f"\nstopped at step {step}; to go on: python train.py --resume={out}", flush=True)
            return

    if c.fsdp:
        save_weights("ckpt.pt")
    if master:
        for s in (signal.SIGTERM, signal.SIGINT):  # all is saved
            signal.signal(s, signal.SIG_DFL)
        norms = [json.loads(line)["grad_norm"] for line in log_file.read_text().splitlines()]
        mean = sum(norms) / len(norms)
        print(f"gradient norm: mean {mean:.3f}, variance {sum((norm - mean) ** 2 for norm in norms) / len(norms):.4f}, "
              f"{sum(norm > c.clip for norm in norms) / len(norms):.0%} of the steps above {c.clip:g}")
        model, _ = load_run(out, device)  # not compiled: the cache changes its shape with every token
        encoding = prepare.encoding(meta["encoding"], folder)
        start = torch.full((1, 1), meta["eot"], device=device)
        generator = torch.Generator(device).manual_seed(c.seed)
        tokens = model.generate(start, 200, temperature=0.8, top_k=50, window=c.seq, generator=generator)
        ids = [token.item() for token in tokens]
        print(f"{time.time() - started:.0f} s; a sample:\n{encoding.decode(ids)}\n\nmore: python sample.py --out={out}", flush=True)


def update_average(averages, params, kept):
    """average = kept average + (1 - kept) parameter, for fp32 averages and parameters of any dtype, without a copy of these."""
    kept = torch.tensor(kept, dtype=torch.float32).item()  # as it will be rounded anyway: the two shares must add up to one
    torch._foreach_mul_(averages, kept)
    torch._foreach_add_(averages, params, alpha=1 - kept)


def plan(model, c, micro, world):
    """What --dry_run prints: model.memory's arithmetic, and the time that all steps would take at an MFU of 40 %."""
    bytes_ = memory(model, c.seq, micro, ranks=world, fsdp=c.fsdp, recompute=c.recompute, optimizer=c.optimizer, ema=c.ema > 0,
                    accumulate=c.batch > micro * world, param_dtype=getattr(torch, c.param_dtype),
                    dtype=torch.float32 if c.dtype == "float32" else torch.bfloat16)
    with torch.device("meta"):
        count = GPT(model).num_params()
    tokens, flops = c.steps * c.batch * c.seq, model.flops(c.seq)
    hours = tokens * flops / (0.4 * PEAK_FLOPS["H100"] * world) / 3600
    duration = f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:.2g} minutes"
    return "\n".join([
        f"{model.route} {c.size}: {count['total']:,} parameters ({count['routing']:,} routing), vocabulary {model.vocab_size:,}",
        f"{world} GPUs, {micro} x {c.seq} tokens a micro batch, {c.batch // world // micro} of them a step; GiB on each:",
        *(f"  {name:11} {value / 2**30:8.2f}" for name, value in bytes_.items()),
        "  (peak: at the output head, or at the optimizer's step; most of the gradients take the activations' place)",
        *["  more in truth: this route has no fused kernels, and plain PyTorch keeps more for backward than is counted"]
        * (model.headwise or model.keys == "projected"),
        f"{tokens:,} tokens, {tokens * flops:.3g} FLOPs: {duration} at 40 % of an H100's {PEAK_FLOPS['H100'] / 1e12:.0f} TFLOP/s"])


def take_weights(model, folder):
    """The weights of another run's newest checkpoint; parameters of the router that one of the two lacks stay as they are."""
    source, _ = load_run(folder)
    if model.config.tied and not source.config.tied:
        raise ValueError(f"{folder} has a head of its own: leave out --tied")
    try:
        missing, unexpected = model.load_state_dict(source.state_dict(), strict=False)
    except RuntimeError as e:
        raise ValueError(f"the weights of {folder} do not fit: {' '.join(str(e).split())[:200]}")
    wrong = [name for name in missing + unexpected if not name.startswith("router.")]
    if wrong:
        raise ValueError(f"the weights of {folder} do not fit this model: {', '.join(wrong)[:200]}")


@torch.no_grad()
def routing_entropy(run):
    """Mean entropy of each read's weights over tokens and heads, in nats, sites 1 .. M, of the model that run() runs."""
    entropy = {}
    with watch_routing() as reads:
        run()
    for t, weights in reads:
        entropy.setdefault(t, []).append(-torch.xlogy(weights, weights).sum(0).mean().item())
    return [round(sum(values) / len(values), 4) for t, values in sorted(entropy.items()) if t > 0]


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


def sharded_state(model, steppers, ema):
    params, moments = get_state_dict(model, steppers)
    return {"model": params, "optimizer": moments, "ema": ema or {}}


def save_sharded(out, model, steppers, ema, step, best):
    """Each rank writes its part of a torch.distributed.checkpoint folder, which takes ckpt's place when it is complete; that one
    becomes ckpt_prev."""
    partial, newest, before = out / "ckpt.partial", out / "ckpt", out / "ckpt_prev"
    master = dist.get_rank() == 0
    if master:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    try:
        dcp.save(sharded_state(model, steppers, ema) | {"step": step, "best": best}, checkpoint_id=partial)
    except (OSError, RuntimeError, dcp.CheckpointException) as e:
        sys.exit(f"cannot write {partial}, what was there before is untouched: {(str(e).splitlines() or [type(e).__name__])[-1][:200]}")
    if master:
        if newest.exists():
            shutil.rmtree(before, ignore_errors=True)
            newest.rename(before)
        partial.rename(newest)
    dist.barrier()


def load_sharded(out, model, steppers, ema):
    """The newest whole folder, for any number of ranks. Returns its step and best."""
    state = sharded_state(model, steppers, ema) | {"step": 0, "best": 0.0}
    for folder in (out / "ckpt", out / "ckpt_prev"):
        if (folder / ".metadata").is_file():  # written last
            try:
                dcp.load(state, checkpoint_id=folder)
            except (Exception, dcp.CheckpointException) as e:  # the second is none of the first
                if dist.get_rank() == 0:
                    print(f"{folder} cannot be read ({type(e).__name__}), so the one before is tried", file=sys.stderr)
                continue
            set_state_dict(model, steppers, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            return state["step"], state["best"]
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
        command = "git describe --always --dirty --abbrev=40 --exclude=*"  # -dirty: not what was committed
        return subprocess.run(command.split(), cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    main()
