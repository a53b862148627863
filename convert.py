"""Convert runs exactly: attention residuals to low rank, a Llama or Qwen3 checkpoint to a run and back, and compare two runs.

    python convert.py lowrank out/attnres-nano --out=out/lowrank                       # same outputs, keys of a few coordinates
    python convert.py graft path/to/Llama-3.1-8B --out=out/graft --route=mhar --delta --blocks=8
    python train.py --init_from=out/graft --data=fineweb-edu --fsdp --recompute        # goes on with it
    python convert.py export out/baseline-nano --out=path/to/folder                    # for transformers
    python convert.py check out/attnres-nano out/lowrank --dtype=float64               # how far their logits are apart

lowrank (LR 4.8 and appendix B.1): a site's query q reads <q, v_i> / rho(v_i), rho over all of v_i. An orthogonal R with v' = v R leaves rho
and <q R, v R> as they are; one that turns all queries into the last r coordinates makes these the only ones that keys need. Every weight that
the residual width faces is turned with it, the norms' gains, which would not commute with R, are first folded into the weights behind them,
and the queries' gains into the queries. With H heads each turns its own slice of d/H coordinates, r/H of which become its keys (ours).

graft: config.json and safetensors become a run with the same logits: a baseline, hyper-connections at their start, or delta routing with
closed gates. export: the reverse, for a baseline or closed gates.

Folders are written whole or not at all, and nothing is overwritten. Files are mapped and tensors changed in place, so that memory holds the
weights about once. A converted run has no optimizer state: train.py goes on with --init_from, not with --resume.
"""
import dataclasses
import functools
import json
import os
import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

import prepare
from model import DEPTH_ROUTES, GPT, GPTConfig, load_run, pick_device, read_weights, run_command

PIECE = 1 << 19  # most numbers of a matrix that are in float64 at a time


@dataclass
class LowRank:
    out: str = ""  # the run to make, a folder that must not exist
    rank: int = 0  # r, over all heads; 0: the smallest that is enough, rounded up to a multiple of 16 a head
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # what the weights are stored in
    checkpoint: str = "ckpt.pt"  # or best.pt, ckpt_prev.pt
    ema: bool = False  # convert the moving average of the weights


@dataclass
class Graft:
    out: str = ""  # the run to make, a folder that must not exist
    route: Literal["mhar", "baseline", "attnres", "lr", "hc"] = "mhar"  # as in train.py, and so are the next six
    delta: bool = False  # needed for mhar, attnres and lr: only closed gates leave the model as it is
    blocks: int | None = None  # N; unset or 0: every sublayer's output is a source
    heads: int | None = None  # H of mhar; unset: the number of key-value heads
    rank: int | None = None  # r; unset: d (lr: d/4)
    key_norm: Literal["auto", "full", "slice"] = "auto"  # rho over all d coordinates or over the key's
    key_gain: Literal["auto", "on", "off"] = "auto"  # learned gain on the keys


@dataclass
class Export:
    out: str = ""  # the folder to make, which must not exist
    checkpoint: str = "ckpt.pt"  # or best.pt, ckpt_prev.pt
    ema: bool = False  # export the moving average of the weights


@dataclass
class Check:
    data: str | None = None  # a folder under data/, or a path; unset: the first run's. Its validation split is used
    tokens: int = 2048  # how many of its tokens, spread over the split, in windows of the first run's seq
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of activations; float64: of the weights too
    checkpoint: str = "ckpt.pt"  # the first run's; of the second it is ckpt.pt
    ema: bool = False  # take the first run's moving average
    device: str | None = None  # unset: cuda if there is one, else cpu


def read_run(folder, c):
    """A run's config.json, GPTConfig and weights, which are sure to be that model's."""
    run, weights = read_weights(folder, c.checkpoint, c.ema)
    del run["step"]  # a converted run begins at 0
    config = GPTConfig(**run["model"])
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in GPT(config).state_dict().items()}
    wrong = [name for name in shapes | weights if name not in weights or weights[name].shape != shapes.get(name)]
    if wrong:
        raise ValueError(f"{Path(folder, c.checkpoint)} does not hold this run's model: missing, unknown or of another shape: {', '.join(wrong)[:200]}")
    return run, config, weights


# ----------------------------------------------------------------------------------------------------------------------
# AttnRes to LR


def lowrank(c, run_folder):
    run, old, weights = read_run(run_folder, c)
    matrices = getattr(torch, c.dtype)
    others = torch.promote_types(matrices, torch.float32)  # as in training
    weights = {name: p.to(others if p.ndim < 2 or name.startswith("router.") else matrices) for name, p in weights.items()}
    with new_folder(c.out) as folder:
        config, weights, needed = low_rank(old, weights, c.rank)
        write_run(folder, run | {"converted": {"from": os.path.relpath(run_folder), "rank": needed}}, config, weights)
    print(f"{c.out}: its queries span {needed} of {old.d_model} coordinates, keys take {config.r}"
          + (f" ({config.H} heads of {config.r // config.H})" if config.H > 1 else "")
          + ("; the head is no longer tied to the embedding, for the last norm's gain is now in it" if old.tied > config.tied else ""))


@torch.no_grad()
def low_rank(c, weights, rank=0):
    """The same function with keys of r coordinates. GPTConfig and weights {name: tensor} -> (GPTConfig, weights, the smallest r); the given
    tensors are overwritten. With the gains g of the norms, per head R = [any basis of the rest | basis of the queries' span]:

        embedding, null:             W R          Q, K, V, gate, up, head:  (W g) R, and g = 1
        O, down:                     R^T W        query:  the last r of (query gain) R

    Gains of token attention's Q and K norms are not along the residual width: they stay. R comes from an SVD of the queries in float64, and
    each matrix is multiplied in float64. Raises ValueError for a routing that has no exact low-rank form, or a rank that is too small."""
    if c.route not in DEPTH_ROUTES:
        raise ValueError(f"route={c.route} has no queries over depth: there is nothing to convert")
    if c.headwise or c.keys == "projected":
        raise ValueError(f"{'headwise reads' if c.headwise else 'keys=projected'} do not take their keys from the slice that a head mixes: they have no low-rank form")
    if c.norm == "slice" and (c.H > 1 or c.r < c.d_model):
        raise ValueError("key_norm=slice normalizes by the key's coordinates alone, so that fewer of them give other weights; key_norm=full can be converted")
    H, width = c.H, c.d_model // c.H
    query = weights["router.query"].double()
    if c.gain:
        query = query * weights.pop("router.gain").double()
    query = F.pad(query, (width - c.r // H, 0))  # [M + 1, H, d/H], whatever the rank was
    _, spectrum, basis = torch.linalg.svd(query[1:].transpose(0, 1))  # [H, min(M, d/H)], rows of [H, d/H, d/H]
    needed = max(1, int((spectrum > spectrum.max() * max(query.shape) * torch.finfo(torch.float64).eps).sum(-1).max()))
    if rank == 0:
        rank = H * min(-(-needed // 16) * 16, width)
    if rank < H * needed:
        raise ValueError(f"rank={rank} is too small: these queries span {needed} coordinates{' in a head' if H > 1 else ''}, so it takes {H * needed}")
    new = dict(route="lr", heads=None) if H == 1 else dict(route="mhar")
    new |= dict(rank=rank, key_norm="full", key_gain="off")
    R = basis.mT.flip(-1)  # [H, d/H, d/H]; the queries' span is in the last columns

    def turn(matrix, gain=None):
        """matrix [n, d] = (matrix gain) R, in place."""
        for rows in matrix.split(max(1, PIECE // c.d_model)):
            x = rows.double() if gain is None else rows.double() * gain
            rows.copy_((x.unflatten(1, (H, width)).transpose(0, 1) @ R).transpose(0, 1).flatten(1))

    def taken(norm):
        """A norm's gain, which is one from now on."""
        if norm in weights:
            gain = weights[norm].to(torch.float64, copy=True)
            weights[norm].fill_(1)
            return gain

    gain = taken("norm.weight")
    if c.tied and gain is not None and not (gain == 1).all():
        weights["head.weight"] = weights["embed.weight"].clone()
        new["tied"] = False
    turn(weights["embed.weight"])
    if new.get("tied", c.tied):
        weights["head.weight"] = weights["embed.weight"]
    else:
        turn(weights["head.weight"], gain)
    for t in range(c.M):
        gain = taken(f"sublayers.{t}.norm.weight")
        for name in ("gate", "up") if t % 2 else ("q", "k", "v"):
            turn(weights[f"sublayers.{t}.{name}.weight"], gain)
        turn(weights[f"sublayers.{t}.{'down' if t % 2 else 'o'}.weight"].T)
    if c.delta:
        turn(weights["router.null"][None])
    weights["router.query"] = (query.transpose(0, 1) @ R).transpose(0, 1)[..., width - rank // H:].to(weights["router.query"].dtype).contiguous()
    return dataclasses.replace(c, **new), weights, H * needed


# ----------------------------------------------------------------------------------------------------------------------
# Hugging Face folders

ARCHITECTURES = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}  # whether it has our qk_norm
FIELDS = {"n_layer": "num_hidden_layers", "d_model": "hidden_size", "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads", "head_dim": "head_dim",
          "d_mlp": "intermediate_size", "vocab_size": "vocab_size", "tied": "tie_word_embeddings", "norm_eps": "rms_norm_eps"}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # of rope_type llama3
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")


def names(config):
    """{a backbone weight's name here: its name there}."""
    parts = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "norm": "input_layernorm"}
    parts |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"} if config.qk_norm else {}
    parts = parts, {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "norm": "post_attention_layernorm"}
    inside = {f"sublayers.{t}.{ours}.weight": f"model.layers.{t // 2}.{theirs}.weight" for t in range(config.M) for ours, theirs in parts[t % 2].items()}
    head = {} if config.tied else {"head.weight": "lm_head.weight"}
    return {"embed.weight": "model.embed_tokens.weight"} | inside | {"norm.weight": "model.norm.weight"} | head


def backbone(hf):
    """A config.json -> GPTConfig's fields of the backbone. Raises ValueError for what model.py does not compute."""
    kind = (hf.get("architectures") or [None])[0]
    if kind not in ARCHITECTURES:
        raise ValueError(f"it is a {kind}; there are: {', '.join(ARCHITECTURES)}")
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}  # the first: transformers 5
    rope = {"rope_theta": hf.get("rope_theta", 1e4), "rope_type": rope.get("type", "default")} | rope
    for name, value, fits in [("hidden_act", hf.get("hidden_act", "silu"), ("silu", "swish")), ("rope_type", rope["rope_type"], ("default", "llama3")),
                              ("layer_types", set(hf.get("layer_types") or ()) - {"full_attention"}, (set(),)),
                              ("rope_parameters by layer type", any(isinstance(value, dict) for value in rope.values()), (False,)),
                              ("partial_rotary_factor", rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1)), (1,)),
                              *((flag, hf.get(flag), (None, False)) for flag in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"))]:
        if value not in fits:
            raise ValueError(f"{name} = {value} is not what model.py computes")
    head_dim = 128 if ARCHITECTURES[kind] else hf["hidden_size"] // hf["num_attention_heads"]
    defaults = {"tie_word_embeddings": False, "num_key_value_heads": hf["num_attention_heads"], "head_dim": head_dim}
    hf = hf | {name: value for name, value in defaults.items() if hf.get(name) is None}
    scaling = ",".join(str(rope[name]) for name in SCALING) if rope["rope_type"] == "llama3" else ""
    return {ours: {"tied": bool, "norm_eps": float}.get(ours, int)(hf[theirs]) for ours, theirs in FIELDS.items()} | {
        "qk_norm": ARCHITECTURES[kind], "rope_theta": float(rope["rope_theta"]), "rope_scaling": scaling}


def graft(c, hf_folder):
    source = Path(hf_folder)
    routing = {name: value for name, value in dataclasses.asdict(c).items() if name != "out"}
    if c.route in DEPTH_ROUTES and not c.delta:
        raise ValueError(f"route={c.route} takes the residual stream's place, and the model would have to learn anew: give --delta")
    try:
        hf = json.loads((source / "config.json").read_text())
        fields, seq = backbone(hf), min(4096, hf.get("max_position_embeddings", 4096))
        GPTConfig(**fields)
    except OSError as e:
        raise ValueError(f"cannot read {source / 'config.json'}: {e.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{source / 'config.json'}: {f'it has no {e}' if isinstance(e, KeyError) else e}")
    config, where = GPTConfig(**fields | routing), shards(source)
    with torch.device("meta"):
        model = GPT(config)
    shapes, wanted = model.state_dict(), names(config)
    extra = [name for name in where.keys() - set(wanted.values()) if not name.endswith("rotary_emb.inv_freq") and (name, config.tied) != ("lm_head.weight", True)]
    missing = wanted.values() - where.keys()
    if extra or missing:
        raise ValueError(f"{source} " + (f"lacks {min(missing)}" if missing else f"has {min(extra)}, which model.py has no place for"))
    with ExitStack() as stack:
        files = {file: stack.enter_context(opened(source / file)) for file in sorted(set(where.values()))}
        weights = {ours: files[where[theirs]].get_tensor(theirs) for ours, theirs in wanted.items()}  # mapped, not read
        for name, p in weights.items():
            if p.shape != shapes[name].shape:
                raise ValueError(f"{wanted[name]} is {list(p.shape)}, by config.json it should be {list(shapes[name].shape)}")
            if not p.is_floating_point() or p.itemsize < 2:
                raise ValueError(f"{wanted[name]} is {p.dtype}: quantized weights cannot be trained")
        if config.tied:
            weights["head.weight"] = weights["embed.weight"]
            if "lm_head.weight" in where and not torch.equal(files[where["lm_head.weight"]].get_tensor("lm_head.weight"), weights["head.weight"]):
                raise ValueError("lm_head.weight is not the embedding, though tie_word_embeddings says so")
        encoding = prepare.encoding("tokenizer.json", source) if (source / "tokenizer.json").exists() else None
        if encoding and encoding.vocab_size > config.vocab_size:
            raise ValueError(f"{source} has a vocabulary of {config.vocab_size}, its tokenizer.json one of {encoding.vocab_size}")
        eot = encoding and encoding.eot
        weights |= {f"router.{name}": p for name, p in model.stream.init(config).items()}
        with new_folder(c.out) as folder:
            copy_tokenizer(source, folder)
            data = {"folder": os.path.relpath(c.out), "encoding": "tokenizer.json", "vocab_size": config.vocab_size, "eot": eot}
            run = {"converted": {"from": os.path.relpath(source)}, "train": {"size": "8b", "seq": seq}, "data": data}  # MHAR's mid-training
            write_run(folder, run, config, weights)
    print(f"{c.out}: {hf['architectures'][0]} as {config.route}{' with closed gates' if c.delta else ''}"
          + ("" if eot is not None else f"; {source} has no tokenizer.json, without which sample.py cannot read or write text"))


def shards(folder):
    """{a tensor's name: its file in the folder}. Raises ValueError if there are no safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            where = json.loads(index.read_text())["weight_map"]
            return {name: Path(file).name for name, file in where.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"{index} is damaged: {type(e).__name__}: {e}")
    if not (folder / "model.safetensors").exists():
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        raise ValueError(f"{folder} has no model.safetensors" + (f"; {pickles[0]} is a pickle, which can run code and is not opened" if pickles else ""))
    with opened(folder / "model.safetensors") as file:
        return dict.fromkeys(file.keys(), "model.safetensors")


def opened(file):
    safetensors = need_safetensors()
    try:
        return safetensors.safe_open(file, framework="pt")
    except (OSError, safetensors.SafetensorError) as e:
        raise ValueError(f"{file} is no whole safetensors file: {e}")


def need_safetensors():
    try:
        import safetensors.torch
        return safetensors
    except ImportError:
        raise ValueError("Hugging Face folders need the package: pip install safetensors")


def copy_tokenizer(source, folder):
    for name in TOKENIZER:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def export(c, run_folder):
    run, config, weights = read_run(run_folder, c)
    if config.route != "baseline" and not config.delta:
        raise ValueError(f"{run_folder} is route={config.route}, which transformers does not have; a baseline or a delta route with closed gates can be exported")
    if config.delta and weights["router.gate"].any():
        raise ValueError(f"{weights['router.gate'].count_nonzero()} of the {config.M + 1} gates of {run_folder} are open: what they add has no place in a Llama or Qwen3 model")
    kind = next(name for name, qk_norm in ARCHITECTURES.items() if qk_norm == config.qk_norm)
    widths = {"q_norm": config.head_dim, "k_norm": config.head_dim}
    tensors = {}
    for ours, theirs in names(config).items():  # norms without a gain have a gain of one there
        tensors[theirs] = weights[ours] if ours in weights else torch.ones(widths.get(ours.split(".")[-2], config.d_model))
    scaling, longest = None, run["train"]["seq"]
    if config.rope_scaling:
        *factors, original = map(float, config.rope_scaling.split(","))
        scaling = dict(zip(SCALING, (*factors, int(original)))) | {"rope_type": "llama3"}
        longest = max(longest, int(factors[0] * original))
    hf = {theirs: getattr(config, ours) for ours, theirs in FIELDS.items()} | {
        "architectures": [kind], "model_type": kind.removesuffix("ForCausalLM").lower(), "hidden_act": "silu", "attention_bias": False,
        "rope_theta": config.rope_theta, "rope_scaling": scaling, "max_position_embeddings": longest,
        "torch_dtype": str(functools.reduce(torch.promote_types, {p.dtype for p in tensors.values()})).removeprefix("torch."),
        "bos_token_id": run["data"].get("eot"), "eos_token_id": run["data"].get("eot")}
    with new_folder(c.out) as folder:
        if str(run["data"].get("encoding")).endswith(".json"):
            copy_tokenizer(Path(run["data"]["folder"]), folder)
        (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n")
        need_safetensors().torch.save_file({name: p.contiguous() for name, p in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    print(f"{c.out}: {kind}, {sum(p.numel() for p in tensors.values()):,} parameters in {hf['torch_dtype']}")


# ----------------------------------------------------------------------------------------------------------------------
# Two runs compared


@torch.no_grad()
def check(c, a, b):
    device = pick_device(c.device)
    dtype = getattr(torch, c.dtype)
    first, run = load_run(a, device, c.checkpoint, c.ema, dtype)
    second, _ = load_run(b, device, dtype=dtype)
    folder, seq = Path(c.data or run["data"]["folder"]), run["train"]["seq"]
    folder = Path("data") / folder if (Path("data") / folder).exists() else folder
    data = prepare.Shards(folder, "val", seq)
    sizes = [model.config.vocab_size for model in (first, second)]
    if sizes[0] != sizes[1] or data.vocab_size > sizes[0]:
        raise ValueError(f"vocabularies do not fit: {a} has {sizes[0]}, {b} {sizes[1]}, {folder} {data.vocab_size}")
    n = min(data.n_windows, -(-c.tokens // seq))
    if n < 1:
        raise ValueError(f"--tokens must be positive, not {c.tokens}")
    largest, size, total, same, losses = 0.0, 0.0, 0.0, 0, [0.0, 0.0]
    for i in range(n):
        ids = torch.from_numpy(data.window(i * data.n_windows // n)).to(device)
        x, y = ids[None, :-1], ids[1:]
        docs = (x == data.meta["eot"]).cumsum(1) if run["train"].get("doc_mask") else None
        logits = [model(x, docs=docs)[0].cpu().double() for model in (first, second)]
        difference = (logits[0] - logits[1]).abs()
        largest, size = max(largest, difference.max().item()), max(size, logits[0].abs().max().item())
        total += difference.mean().item() / n
        same += (logits[0].argmax(-1) == logits[1].argmax(-1)).sum().item()
        losses = [loss + F.cross_entropy(l, y.cpu()).item() / n for loss, l in zip(losses, logits)]
    print(f"{n * seq:,} tokens of {folder} in {c.dtype}\nlogits: largest difference {largest:.3g}, mean {total:.3g}, of logits up to {size:.3g}; "
          f"the likeliest token is the same at {same:,} of {n * seq:,}\ncross-entropy: {losses[0]:.8f}, {losses[1]:.8f}, difference {losses[1] - losses[0]:.3g}")


# ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def new_folder(out):
    """A folder to write into, which becomes out when all is written and on the disk. Raises ValueError if out exists."""
    if not out:
        raise ValueError("--out=FOLDER is missing")
    out = Path(out)
    if out.exists():
        raise ValueError(f"--out={out} exists; nothing is overwritten: choose another name")
    partial = out.with_name(out.name + ".partial")
    with prepare.claimed(partial, out):
        yield partial
        for file in partial.iterdir():
            with open(file, "rb") as f:
                os.fsync(f.fileno())


def write_run(folder, run, config, weights):
    """config.json and ckpt.pt, without an optimizer's state."""
    with torch.device("meta"):
        count = GPT(config).num_params()
    run = run | {"model": dataclasses.asdict(config), "parameters": count, "flops_per_token": config.flops(run["train"]["seq"])}
    (folder / "config.json").write_text(json.dumps(run, indent=1) + "\n")
    torch.save({"model": weights, "ema": None, "step": 0}, folder / "ckpt.pt")


def main():
    run_command({"lowrank": (lowrank, "RUN", LowRank), "graft": (graft, "HF_FOLDER", Graft), "export": (export, "RUN", Export),
                 "check": (check, "RUN OTHER_RUN", Check)})


if __name__ == "__main__":
    main()
