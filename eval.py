"""Evaluate a run: its exact validation loss, and the tasks of the EleutherAI lm-evaluation-harness.

    python eval.py loss out/mhar-nano                                         # the whole validation split
    torchrun --nproc_per_node=8 eval.py loss out/mhar-1b --ema                # the same number from 8 GPUs
    python eval.py tasks out/lr-1b --tasks=lr                                 # pip install lm-eval
    python eval.py tasks out/mhar-nano --tasks=mine --include_path=my_tasks   # your own task, without a network

loss: the validation split is read in consecutive windows of the run's seq tokens; each shard's last window is as short as it comes
out. So every token is a target once, but for the first of each shard (the end-of-text id before its first document, or one token in 100
million). Documents are kept apart if the run was trained so. Cross-entropies are fp32, their sums exact and the batches always the same, so
the number of ranks changes nothing (on a CPU not a bit). Bits per byte divide the same sum (ends of documents too) by the bytes of the
targets' text, in which an end of text has none.

tasks: names of the harness, its groups, yaml files, or a named group here:
    lr        in the manner of LR appendix G: ARC-Easy, ARC-Challenge, HellaSwag, PIQA, WinoGrande, OpenBookQA, BoolQ, SciQ, without examples
    mhar      MHAR: WikiText-2, LAMBADA, HellaSwag
    mhar-mid  MHAR's mid-training: MMLU, GPQA, GSM8K, MATH, and with --confirm_run_unsafe_code HumanEval and MBPP
The harness makes prompts and metrics; here are the log-probabilities and the greedy decoding that it asks for. Under torchrun the ranks
share the items.

Both print a table and write RUN/eval/<name>.json, the next free name: command, versions, results {task: {metric: value}} and items
{task: [{id, correct}]}, where correct is the item's value of the task's first metric: 0 or 1; for perplexities a log-likelihood a word; for
loss the mean nats of a window.
"""
import difflib
import itertools
import json
import logging
import math
import os
import platform
import shlex
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import prepare
from model import Cache, load_run, pick_device, run_command, wide

CHUNK = 2 ** 26  # most logits that are there at a time

# name: {task of the harness: metric, and the filter of its answers if it has several}
GROUPS = {
    "lr": {"arc_easy": "acc", "arc_challenge": "acc_norm", "hellaswag": "acc_norm", "piqa": "acc", "winogrande": "acc", "openbookqa": "acc_norm",
           "boolq": "acc", "sciq": "acc"},
    "mhar": {"wikitext": "word_perplexity", "lambada_openai": "acc", "hellaswag": "acc_norm"},
    "mhar-mid": {"mmlu": "acc", "gpqa_main_zeroshot": "acc", "gsm8k": "exact_match,strict-match", "minerva_math": "math_verify",
                 "humaneval": "pass@1,create_test", "mbpp": "pass_at_1"},
}
RUN_CODE = {"humaneval", "mbpp"}  # of these


@dataclass
class Loss:
    checkpoint: str = "ckpt.pt"  # or best.pt, ckpt_prev.pt
    ema: bool = False  # the moving average of the weights, for runs that keep one
    tokens: int | None = None  # only the first so many targets of the validation split; unset: all
    batch_tokens: int = 16_384  # most tokens in a forward pass
    device: str | None = None  # unset: cuda if there is one, else cpu
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of activations; auto: bfloat16 on CUDA


@dataclass
class Tasks:
    tasks: str = ""  # names, comma separated: of the harness, of a group here (lr, mhar, mhar-mid), or yaml files
    include_path: str | None = None  # a folder with yaml files of your own tasks
    limit: int | None = None  # only the first so many items of each task
    num_fewshot: int | None = None  # examples in the prompt, where a task does not insist on none; unset: as the task has it
    max_length: int | None = None  # longest input in tokens, cut on the left; unset: the run's seq
    confirm_run_unsafe_code: bool = False  # run the code that the model writes (HumanEval, MBPP) on this machine
    checkpoint: str = "ckpt.pt"  # or best.pt, ckpt_prev.pt
    ema: bool = False  # the moving average of the weights, for runs that keep one
    batch_tokens: int = 16_384  # most tokens in a forward pass, padding too (a longer input goes by itself)
    device: str | None = None  # unset: cuda if there is one, else cpu
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of activations; auto: bfloat16 on CUDA


def load(folder, c):
    """The run's model on this rank's device, its config.json, its encoding, rank and number of ranks."""
    rank, world, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    for name, least in {"tokens": 1, "batch_tokens": 1, "limit": world, "num_fewshot": 0, "max_length": 2}.items():
        if getattr(c, name, None) is not None and getattr(c, name) < least:
            raise ValueError(f"--{name} must be {least} at least, not {getattr(c, name)}")
    device = pick_device(c.device)
    if device.type == "cuda" and "RANK" in os.environ:
        device = torch.device("cuda", local)
    model, run = load_run(folder, device, c.checkpoint, c.ema)
    if c.dtype == "bfloat16" or (c.dtype == "auto" and device.type == "cuda"):
        model.dtype = torch.bfloat16
        model.cast_parameters(model.dtype)  # what every forward pass would do
    encoding = prepare.encoding(run["data"]["encoding"], run["data"]["folder"])
    if encoding.vocab_size > model.config.vocab_size:
        raise ValueError(f"{folder} has a vocabulary of {model.config.vocab_size}, its encoding {encoding.vocab_size}")
    Path(folder, "eval").mkdir(exist_ok=True)  # before hours of work
    if "RANK" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return model, run, encoding, rank, world


def token_losses(model, x, targets):
    """What the head reads, x [n, d], and the ids that follow, [n] -> their cross-entropies in nats, [n] in fp32 (float64 for a float64
    model), and whether each id is the likeliest, [n]."""
    nats, likeliest = [], []
    n = max(1, CHUNK // model.config.vocab_size)
    for xs, ids in zip(x.split(n), targets.split(n)):
        logits = wide(model.head(xs))
        nats.append(F.cross_entropy(logits, ids, reduction="none"))
        likeliest.append(logits.argmax(-1) == ids)
    return torch.cat(nats), torch.cat(likeliest)


def progress(done, n, what, rank):
    if sys.stderr.isatty() and rank == 0:
        print(f"{done:,} of {n:,} {what}", end="   \r", file=sys.stderr)


def save(folder, name, c, run, versions, results, items, **more):
    """Writes folder/eval/name.json, or name-2.json, ...: nothing is overwritten."""
    head = {"command": shlex.join(["python", "eval.py", *sys.argv[1:]]), "checkpoint": c.checkpoint, "ema": c.ema, "step": run["step"],
            "versions": {"python": platform.python_version(), "torch": torch.__version__, **versions}} | more
    try:
        text = json.dumps(head | {"results": results, "items": items}, allow_nan=False) + "\n"
    except ValueError:
        raise ValueError(f"a result is not finite: nothing is written to {folder}")
    partial = Path(folder, "eval", f".{name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        for i in itertools.count(1):
            file = partial.with_name(name + (f"-{i}" if i > 1 else "") + ".json")
            try:
                open(file, "x").close()  # takes the name
                partial.replace(file)
                return print(f"-> {file}")
            except FileExistsError:
                pass
    finally:
        partial.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------------------
# The validation loss


@torch.no_grad()
def loss(c, folder):
    model, run, encoding, rank, world = load(folder, c)
    seq, data = run["train"]["seq"], prepare.Shards(run["data"]["folder"], "val", run["train"]["seq"])
    hashes = [shard["sha256"] for split in data.meta["shards"].values() for shard in split]
    if run["data"].get("sha256", hashes) != hashes:
        raise ValueError(f"{run['data']['folder']} is not the data that {folder} was trained on")
    device, arrays, left = model.embed.weight.device, [], c.tokens or data.tokens
    for array in data.arrays:
        arrays.append(array[:left + 1])
        left -= len(arrays[-1]) - 1
    starts = [(array, start) for array in arrays for start in range(0, len(array) - 1, seq)]
    n = max(1, c.batch_tokens // seq)

    sums = torch.zeros(len(starts) + 1, dtype=torch.float64)  # nats of each window; the last is the number of bytes
    counts = torch.tensor([min(seq, len(array) - 1 - start) for array, start in starts])
    for first in range(rank * n, len(starts), world * n):  # batches do not depend on the number of ranks, so neither do their bits
        batch = starts[first:first + n]
        rows = np.full((len(batch), seq + 1), encoding.eot)  # a short window is padded on the right, where nothing sees it
        for row, (array, start) in zip(rows, batch):
            ids = array[start:start + seq + 1]
            row[:len(ids)] = ids
        if rows.max() >= model.config.vocab_size:
            raise ValueError(f"{run['data']['folder']} has the id {rows.max()}, beyond the vocabulary of {model.config.vocab_size}")
        rows = torch.from_numpy(rows).to(device)
        x, y = rows[:, :-1].contiguous(), rows[:, 1:]
        hidden = model.hidden(x, (x == encoding.eot).cumsum(1) if run["train"].get("doc_mask") else None)
        nats = token_losses(model, hidden.flatten(0, 1), y.flatten())[0].view(y.shape).cpu().double()
        counted = torch.arange(seq) < counts[first:first + n, None]
        sums[first:first + len(batch)] = torch.where(counted, nats, 0).sum(1)
        progress(first + len(batch), len(starts), "windows", rank)
    for array in arrays:  # a character that a shard's end or --tokens cuts counts as U+FFFD, 3 bytes
        documents = np.split(array[1:], np.flatnonzero(array[1:] == encoding.eot))
        sums[-1] += sum(len(encoding.decode(ids[ids != encoding.eot].tolist()).encode()) for ids in documents[rank::world])
    if world > 1:
        shared = sums.to(device)
        dist.all_reduce(shared)  # exact: for each window one rank has its sum, the others zeros
        sums = shared.cpu()
    if rank:
        return
    *nats, size = sums.tolist()
    total, tokens = math.fsum(nats), int(counts.sum())
    results = {"loss": total / tokens, "perplexity": float(np.exp(total / tokens)), "bits_per_byte": total / math.log(2) / size,
               "tokens": tokens, "bytes": int(size), "windows": len(starts)}
    shown = (f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.6f}" for name, value in results.items())
    print(f"{folder}, step {run['step']}: " + "  ".join(shown))
    items = [{"id": i, "correct": value / count} for i, (value, count) in enumerate(zip(nats, counts.tolist()))]
    save(folder, "loss", c, run, {}, {"validation": results}, {"validation": items})


# ----------------------------------------------------------------------------------------------------------------------
# The tasks


class Scorer:
    """What the harness asks of a model (lm_eval.api.model.LM, which tasks() adds as the base class), answered by ours. Requests carry
    args, texts: (prompt, answer), (text,), or (prompt, options).

    max_length: longest input in tokens. batch_tokens: most of them in a forward pass, padding included; logits are formed only where an
    answer is. Inputs go longest first and are padded on the right, where causal attention does not look."""

    def __init__(self, model, encoding, max_length, batch_tokens, rank=0, world=1):
        super().__init__()
        self.model, self.encoding, self.max_length, self.batch_tokens = model, encoding, max_length, batch_tokens
        self._rank, self._world_size, self._device = rank, world, model.embed.weight.device

    def split(self, prompt, answer):
        """The ids of a prompt and of its answer: the tokens of both as one text, parted where the prompt's own end. White space at the
        prompt's end belongs to the answer, and so does a token that reaches over the boundary; an empty prompt becomes an end of text."""
        whole, alone = self.encoding.encode(prompt + answer), self.encoding.encode(prompt.rstrip())
        n = next((i for i, (a, b) in enumerate(zip(whole, alone)) if a != b), min(len(whole), len(alone)))
        return whole[:n] or [self.encoding.eot], whole[n:]

    def loglikelihood(self, requests):
        """(prompt, answer) -> [(log-probability of the answer, whether greedy decoding gives it)]"""
        return self.score([self.split(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests):
        """(text,) -> [log-probability of the text after an end of text]. A text beyond max_length is read in windows, the last with as much
        context as fits."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
        windows = [[make_disjoint_window(window) for window in get_rolling_token_windows(
            self.encoding.encode(text), self.encoding.eot, self.max_length, context_len=1)] for text, in (request.args for request in requests)]
        scores = iter(self.score([window for of_text in windows for window in of_text]))
        return [sum(next(scores)[0] for _ in of_text) for of_text in windows]

    @torch.no_grad()
    def score(self, pairs):
        """[(prompt's ids, answer's ids)] -> [(log-probability of the answer, whether greedy decoding gives it)]. What is too long loses the
        beginning of its prompt, never any of the answer. Answers that differ in their last token alone share one input."""
        inputs, totals, greedy = {}, np.zeros(len(pairs)), np.ones(len(pairs), bool)
        for i, (prompt, answer) in enumerate(pairs):
            prompt = prompt[-max(1, self.max_length + 1 - len(answer)):]
            inputs.setdefault((*prompt, *answer[:-1]), []).append(i)
        queue, done = sorted(inputs, key=len, reverse=True), 0
        while done < len(queue):
            batch = queue[done:done + max(1, self.batch_tokens // len(queue[done]))]
            done += len(batch)
            idx = np.full((len(batch), len(batch[0])), self.encoding.eot)
            rows, columns, targets, owners = [], [], [], []
            for row, ids in enumerate(batch):
                idx[row, :len(ids)] = ids
                for i in inputs[ids]:
                    answer = pairs[i][1]
                    rows += [row] * len(answer)
                    columns += range(len(ids) - len(answer), len(ids))
                    targets += answer
                    owners += [i] * len(answer)
            hidden = self.model.hidden(torch.from_numpy(idx).to(self._device))
            nats, likeliest = token_losses(self.model, hidden[rows, columns], torch.tensor(targets, dtype=torch.long, device=self._device))
            np.add.at(totals, owners, -nats.cpu().double().numpy())
            np.logical_and.at(greedy, owners, likeliest.cpu().numpy())
            progress(done, len(queue), "inputs", self._rank)
        return [(total, bool(g)) for total, g in zip(totals.tolist(), greedy)]

    @torch.no_grad()
    def generate_until(self, requests):
        """(prompt, options) -> [the text that greedy decoding puts after the prompt, up to a stop string, an end of text or the options'
        number of tokens]. A long prompt keeps its end, at least half of max_length; generation ends where max_length is full."""
        from lm_eval.models.utils import normalize_gen_kwargs
        queue, texts, done = [], [""] * len(requests), 0
        for i, (prompt, options) in enumerate(request.args for request in requests):
            options = normalize_gen_kwargs(options)
            if options["do_sample"]:
                raise ValueError(f"{requests[i].task_name} draws its answers at random; only greedy decoding is built in")
            ids = self.encoding.encode(prompt) or [self.encoding.eot]
            ids = ids[-max(self.max_length - options["max_gen_toks"], self.max_length // 2):]
            queue.append((ids, min(options["max_gen_toks"], self.max_length - len(ids)), [stop for stop in options["until"] if stop], i))
        queue.sort(key=lambda job: len(job[0]), reverse=True)
        while done < len(queue):
            batch = queue[done:done + max(1, self.batch_tokens // (len(queue[done][0]) + queue[done][1]))]
            done += len(batch)
            for (*_, stops, i), ids in zip(batch, self.greedy(batch)):
                text = self.encoding.decode(ids)
                texts[i] = text[:min((text.index(stop) for stop in stops if stop in text), default=None)]
            progress(done, len(queue), "prompts", self._rank)
        return texts

    def greedy(self, batch):
        """[(prompt's ids, number of tokens, stop strings, _)] -> [the ids that follow]. With a KV cache and no padding: all rows start with
        as many tokens as the shortest prompt has, and longer prompts go on with their own tokens before the model's."""
        cache, outs, live = Cache(), [[] for _ in batch], [row for row, job in enumerate(batch) if job[1] > 0]
        next_ids = [batch[row][0][:len(batch[-1][0])] for row in live]
        while live:
            hidden = self.model.hidden(torch.tensor(next_ids, device=self._device), cache=cache)
            likeliest, next_ids, kept = self.model.head(hidden[:, -1]).argmax(-1).tolist(), [], []
            for k, (row, token) in enumerate(zip(live, likeliest)):
                prompt, most, stops, _ = batch[row]
                if cache.length < len(prompt):
                    token = prompt[cache.length]
                elif token == self.encoding.eot:
                    continue
                else:
                    outs[row].append(token)
                    longest = max((len(stop.encode()) for stop in stops), default=0)  # a token has a byte at least
                    tail = self.encoding.decode(outs[row][-longest - 4:])
                    if len(outs[row]) == most or any(stop in tail for stop in stops):
                        continue
                next_ids.append([token])
                kept.append(k)
            if len(kept) < len(live):
                live = [live[k] for k in kept]
                cache.kv = {layer: (k[kept], v[kept]) for layer, (k, v) in cache.kv.items()}
        return outs

    # Between ranks; the harness gives each its share of the items

    def all_gather(self, tensor):
        parts = [None] * self._world_size
        dist.all_gather_object(parts, tensor.item())
        return torch.tensor(parts)

    def gather_object(self, obj, dst=0):
        parts = [None] * self._world_size if self._rank == dst else None
        dist.gather_object(obj, parts, dst)
        return parts

    def barrier(self):
        dist.barrier()


def chosen(c, rank):
    """--tasks as {name: metric}; the metric is None for what is not of a group here."""
    wanted = {}
    for name in filter(None, c.tasks.split(",")):
        group = GROUPS.get(name, {name: None})
        if name in GROUPS and not c.confirm_run_unsafe_code and RUN_CODE & set(group):
            group = {task: metric for task, metric in group.items() if task not in RUN_CODE}
            if rank == 0:
                print(f"{name} without {' and '.join(sorted(RUN_CODE))}: they need --confirm_run_unsafe_code", file=sys.stderr)
        wanted |= group
    if not wanted:
        raise ValueError(f"which tasks? --tasks={', '.join(GROUPS)}, or names of the harness")
    return wanted


def find_tasks(wanted, c):
    """{name: metric} -> the harness's TaskManager, and {name: (metric, the object, names of the single tasks in it)}. Raises ValueError
    with one line that says what is missing."""
    import huggingface_hub.constants as hub
    offline = False
    try:  # one quick look: the libraries below would retry for half a minute, for each task
        urllib.request.urlopen(hub.ENDPOINT, timeout=10).close()
    except urllib.error.HTTPError:  # it answers
        pass
    except OSError:
        offline = hub.HF_HUB_OFFLINE = True
        os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    from lm_eval.tasks import TaskManager
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if c.include_path and not Path(c.include_path).is_dir():
        raise ValueError(f"--include_path={c.include_path} is no folder")
    manager = TaskManager(include_path=c.include_path, include_defaults=False)
    known = lambda name: name in manager.all_tasks or Path(name).is_file()
    if not all(map(known, wanted)):  # it takes the harness many seconds to list its own thousands
        manager = TaskManager(include_path=c.include_path)
    tasks, code = {}, "runs code that the model writes: --confirm_run_unsafe_code allows it"
    for name, metric in wanted.items():
        if not known(name):
            close = difflib.get_close_matches(name, [*GROUPS, *manager.all_tasks])
            raise ValueError(f"no task {name!r}; there is {', '.join(close or GROUPS)}")
        try:
            found = manager.load([name])
        except Exception as e:  # the libraries below raise nearly everything
            why = str(e) or type(e).__name__
            if "code_eval" in why and not c.confirm_run_unsafe_code:
                why = code
            elif offline and not isinstance(e, ImportError):
                why += "; there is no network, and no copy on this machine"
            raise ValueError(f"task {name}: {why}")
        if any(getattr(task, "UNSAFE_CODE", False) for task in found["tasks"].values()) and not c.confirm_run_unsafe_code:
            raise ValueError(f"task {name}: {code}")
        tasks[name] = metric, [found["groups"][name]] if name in found["groups"] else list(found["tasks"].values()), list(found["tasks"])
    return manager, tasks


def tasks(c, folder):
    try:
        from lm_eval import __version__
    except ImportError:
        raise ValueError("the tasks need the EleutherAI harness: pip install lm-eval")
    if c.confirm_run_unsafe_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    model, run, encoding, rank, world = load(folder, c)
    manager, wanted = find_tasks(chosen(c, rank), c)
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    scorer = type("Run", (Scorer, LM), {})(model, encoding, c.max_length or run["train"]["seq"], c.batch_tokens, rank, world)
    found = simple_evaluate(scorer, tasks=[task for _, objects, _ in wanted.values() for task in objects], task_manager=manager, limit=c.limit,
                            num_fewshot=c.num_fewshot, bootstrap_iters=1000, confirm_run_unsafe_code=c.confirm_run_unsafe_code)
    if found is None:  # rank 0 has it
        return
    results, items = {}, {}
    for task, values in found["results"].items():  # "acc,none": the metric and the filter of its answers
        results[task] = {name.removesuffix(",none"): value for name, value in values.items() if "," in name and isinstance(value, (int, float))}
    for name, (metric, _, singles) in wanted.items():
        for task in [name] if results.get(name) else singles:
            for what, value in results[task].items():
                error = results[task].get(what.replace(",", "_stderr,") if "," in what else what + "_stderr")
                if not what.split(",")[0].endswith("_stderr") and (metric not in results[task] or what == metric):
                    print(f"{task:30} {what:30} {value:10.4f}" + (f" +- {error:.4f}" if error is not None else ""))
        for task in singles:
            samples = found["samples"][task]
            what, _, answers = (metric or f"{samples[0]['metrics'][0]},{samples[0]['filter']}").partition(",")
            values = [(sample["doc_id"], number(sample.get(what))) for sample in samples if sample["filter"] == (answers or "none")]
            values = [{"id": i, "correct": value} for i, value in sorted(values, key=lambda pair: pair[0]) if value is not None]
            items |= {task: values} if values else {}
    versions = {"lm_eval": __version__, "tasks": found["versions"]}
    save(folder, "-".join(Path(name).stem for name in c.tasks.split(","))[:80], c, run, versions, results, items, num_fewshot=found["n-shot"])


def number(value):
    """An item's metric as a number; a log-likelihood with the number of words or bytes that it is of becomes one for each; of (what is right,
    what was said), as for mcc and f1, whether they are equal. None for anything else."""
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(x, (int, float, np.number)) for x in value):
        value = value[0] / max(1, value[1]) if isinstance(value[0], float) else float(value[0] == value[1])
    return float(value) if isinstance(value, (int, float, np.number, np.bool_)) else None


def main():
    try:
        run_command({"loss": (loss, "RUN", Loss), "tasks": (tasks, "RUN", Tasks)})
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
