"""Text to token shards under data/, and the reading of them.

    python prepare.py                                             # this Python's standard library, no network: data/stdlib
    python prepare.py --dataset=text --glob='notes/**/*.md' --encoding=gpt2 --out=data/notes
    python prepare.py --dataset=hf --encoding=gpt2 --tokens=1_000_000_000 --out=data/fineweb-edu

A data folder holds train_000.bin, ..., val_000.bin (little-endian uint16 or uint32) and meta.json. Every document is the
end-of-text id followed by its tokens. Exact duplicates are dropped; a document's hash decides whether it is for training
or for validation. One document is one file (stdlib, text), one row (hf), or one line (hf with local .txt files).
"""
import concurrent.futures
import dataclasses
import glob
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shlex
import shutil
import signal
import sys
import sysconfig
import threading
import time
import urllib.request
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Literal, NamedTuple

import numpy as np
import tiktoken

from model import fail, parse_flags

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

SHARD = 100_000_000  # most tokens in a shard
CHUNK = 1 << 18  # characters (or bytes) of text that a worker gets at a time, if not a single longer document
PIECE = 1 << 19  # most characters that are encoded at once: tiktoken dies of a million spaces in a row


@dataclass
class Config:
    dataset: Literal["stdlib", "text", "hf"] = "stdlib"  # Python's own library, your files, or Hugging Face datasets
    glob: str | None = None  # text: the files, as patterns with * and **, several separated by commas
    hf: str = "HuggingFaceFW/fineweb-edu"  # hf: a name on the hub, or a local file or folder of parquet, json, jsonl or txt
    hf_name: str = "sample-10BT"  # hf: the data set's configuration; with another --hf: that one's default
    hf_split: str = "train"  # hf: the data set's split
    text_field: str = "text"  # hf: the column that holds the text
    encoding: str = "bytes"  # bytes, a tiktoken encoding (gpt2, cl100k_base, ...), or a path to a tokenizer.json
    tokens: int | None = None  # stop after about so many training tokens; unset: take everything
    val_fraction: float = 0.05  # share of the documents that is kept for validation
    out: str | None = None  # the folder to make, which must not exist; unset: data/<name>
    workers: int | None = None  # processes that tokenize; unset: number of cores


# ----------------------------------------------------------------------------------------------------------------------
# Encodings


class Encoding(NamedTuple):
    encode: Callable  # text -> list of ids; the text of special tokens is text like any other
    decode: Callable  # list of ids -> text; what means nothing becomes U+FFFD or is left out
    vocab_size: int
    eot: int  # the end-of-text id


def encoding(name, folder="."):
    """The Encoding called name: "bytes" (257 ids), a tiktoken name, or the path of a tokenizer.json, looked for in folder
    first (a data folder's meta.json names its own copy). Raises ValueError with one line."""
    if name.endswith(".json"):
        return tokenizer_json(Path(folder, name) if Path(folder, name).exists() else Path(name))
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        enc = tiktoken.Encoding("bytes", pat_str="(?s).{1,64}", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256})
    elif name not in tiktoken.list_encoding_names():
        raise ValueError(f"unknown encoding {name!r}; there are: bytes, {', '.join(tiktoken.list_encoding_names())}, or a path to a tokenizer.json")
    else:
        try:
            enc = tiktoken.get_encoding(name)
        except Exception as e:
            raise ValueError(f"cannot fetch tiktoken's encoding {name!r} ({type(e).__name__}); it needs the network once, --encoding=bytes never does")
    if "<|endoftext|>" not in enc.special_tokens_set:
        raise ValueError(f"encoding {name!r} has no end-of-text token")

    def token(i):
        try:
            return enc.decode_single_token_bytes(i)
        except (KeyError, OverflowError):  # a model's vocabulary may be larger
            return "\ufffd".encode()

    return Encoding(enc.encode_ordinary, lambda ids: b"".join(map(token, ids)).decode(errors="replace"), enc.n_vocab, enc.eot_token)


def tokenizer_json(path):
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("a tokenizer.json needs the tokenizers library: pip install tokenizers")
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as e:
        raise ValueError(f"cannot read the tokenizer {path}: {str(e).splitlines()[0]}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text like any other
    ids = tokenizer.get_vocab()
    eot = next((ids[t] for t in ("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>") if t in ids), None)
    if eot is None:
        raise ValueError(f"{path} has no end-of-text token that is known here, such as <|endoftext|>")
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    return Encoding(encode, lambda ids: tokenizer.decode(ids, skip_special_tokens=False), max(ids.values()) + 1, eot)


# ----------------------------------------------------------------------------------------------------------------------
# Documents: bytes (a file's) or str (a row's), always in the same order


def documents(c):
    """An iterator over the documents. Raises ValueError where they cannot be found or read."""
    if c.dataset == "hf":
        return rows(c)
    if c.dataset == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        names = (p.relative_to(root) for p in root.rglob("*.py") if not p.name.startswith("test_"))
        files = [root / name for name in sorted(names, key=Path.as_posix) if not skip & set(name.parts[:-1])]
    else:
        files = set()
        for pattern in c.glob.split(","):
            found = [f for f in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(f)]
            if not found:
                raise ValueError(f"--glob={pattern} matches no file")
            files.update(found)
        files = sorted(files)
    return map(read, files)


def read(file):
    try:
        return Path(file).read_bytes()
    except OSError as e:
        raise ValueError(f"cannot read {file}: {e.strerror}")


def rows(c):
    """The text column of a data set, streamed from local files or from the hub."""
    local = Path(c.hf).expanduser()
    if local.exists():
        files = sorted(p for p in local.rglob("*") if p.is_file()) if local.is_dir() else [local]
        kinds = {"parquet": {".parquet"}, "json": {".json", ".jsonl"}, "text": {".txt"}}  # also compressed: .jsonl.gz
        found = {kind: [str(p) for p in files if suffixes & set(p.suffixes)] for kind, suffixes in kinds.items()}
        kind = next((kind for kind in kinds if found[kind]), None)
        if kind is None:
            raise ValueError(f"{c.hf} holds no parquet, json, jsonl or txt files")
        args = dict(path=kind, data_files=found[kind], split="train")
    else:
        args = dict(path=c.hf, name=c.hf_name or None, split=c.hf_split)
        import huggingface_hub.constants
        try:  # one quick look: the library itself would retry for half a minute
            urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=10).close()
        except OSError as e:
            raise ValueError(f"cannot reach the hub for the data set {c.hf} ({type(e).__name__}), and there is no such local file or folder; "
                             "--dataset=stdlib and --dataset=text need no network")
    try:
        import datasets
        datasets.logging.set_verbosity(50)  # what goes wrong is said once, below
        for row in datasets.load_dataset(**args, streaming=True):
            if not isinstance(row.get(c.text_field, 0), str | None):
                columns = ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items())
                raise ValueError(f"--text_field={c.text_field} is not a column of text; there are: {columns}")
            yield row[c.text_field] or ""
    except Exception as e:  # the libraries below raise nearly everything
        raise ValueError(f"cannot read the data set {c.hf}: {' '.join(str(e).split())[:300] or type(e).__name__}")


def chunks(docs):
    chunk, size = [], 0
    for doc in docs:
        chunk.append(doc)
        size += len(doc) + 1
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    yield chunk


def dtype(enc):
    return np.dtype("<u2" if enc.vocab_size <= 65536 else "<u4")


def start_worker(name):
    global ENCODING
    ENCODING = encoding(name)
    parent = multiprocessing.parent_process()
    if parent:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
        def leave():  # a killed parent cannot stop its workers
            multiprocessing.connection.wait([parent.sentinel])
            os._exit(1)
        threading.Thread(target=leave, daemon=True).start()


def tokenize(chunk):
    """Documents -> for each (16 bytes of hash, its tokens with eot in front), or "empty" or "invalid" instead."""
    result = []
    for doc in chunk:
        try:
            text, data = (doc, doc.encode()) if isinstance(doc, str) else (doc.decode(), doc)
        except UnicodeError:  # bytes that are not UTF-8, or a str with half a surrogate pair
            result.append("invalid")
            continue
        if not data:
            result.append("empty")
            continue
        ids = [ENCODING.eot]
        for i in range(0, len(text), PIECE):
            ids += ENCODING.encode(text[i:i + PIECE])
        result.append((hashlib.blake2b(data, digest_size=16).digest(), np.array(ids, dtype=dtype(ENCODING))))
    return result


def in_order(chunks, name, workers):
    """tokenize(chunk) for each chunk, in order; no more than a few are under way."""
    if workers == 1:
        start_worker(name)
        yield from map(tokenize, chunks)
        return
    # fork: under spawn every worker would import torch, for seconds
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, start_worker, (name,))
    try:
        pending = deque([pool.submit(list)])  # forks now, before a data set's threads run
        for chunk in chunks:
            pending.append(pool.submit(tokenize, chunk))
            if len(pending) >= 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except concurrent.futures.BrokenExecutor:
        raise ValueError("a worker died, perhaps for lack of memory: try fewer --workers")
    finally:
        pool.shutdown(cancel_futures=True)


class Writer:
    """Appends tokens to <split>_000.bin, <split>_001.bin, ... of SHARD tokens; shards is what meta.json says of them."""

    def __init__(self, folder, split):
        self.folder, self.split, self.shards, self.file = folder, split, [], None

    def write(self, ids):
        while len(ids):
            if self.file is None or self.shards[-1]["tokens"] == SHARD:
                self.close()
                name = f"{self.split}_{len(self.shards):03}.bin"
                self.file, self.sha = open(self.folder / name, "wb"), hashlib.sha256()
                self.shards.append({"name": name, "tokens": 0})
            part, ids = np.split(ids, [SHARD - self.shards[-1]["tokens"]])
            data = part.tobytes()
            self.file.write(data)
            self.sha.update(data)
            self.shards[-1]["tokens"] += len(part)

    def close(self):
        if self.file:
            self.shards[-1]["sha256"] = self.sha.hexdigest()
            with self.file:
                self.file.flush()
                os.fsync(self.file.fileno())


def prepare(c):
    """Makes the data folder that c describes, whole or not at all; c.out must not exist. Prints a summary.
    Raises ValueError with one line."""
    for name, dataset in {"glob": "text", "hf": "hf", "hf_name": "hf", "hf_split": "hf", "text_field": "hf"}.items():
        if getattr(c, name) != getattr(Config, name) and c.dataset != dataset:
            raise ValueError(f"--{name} goes with --dataset={dataset}, not with {c.dataset}")
    if c.dataset == "text" and not c.glob:
        raise ValueError("--dataset=text needs --glob='folder/**/*.txt'")
    if not (0 < c.val_fraction < 1 and (c.tokens is None or c.tokens > 0) and (c.workers is None or c.workers > 0)):
        raise ValueError("--val_fraction must be between 0 and 1, --tokens and --workers positive")
    out = Path(c.out or Path("data", Path(c.hf).name if c.dataset == "hf" else c.dataset)).expanduser()
    if out.exists():
        raise ValueError(f"{out} exists; delete it or give --out")
    enc = encoding(c.encoding)
    partial = out.with_name(out.name + ".partial")
    try:
        with claimed(partial, out):
            line = write(c, enc, partial)
    except OSError as e:
        raise ValueError(f"cannot write {out}: {e.strerror or e}; nothing is kept")
    print(f"{out}: {line}", flush=True)


UNFINISHED = ".unfinished"


@contextmanager
def claimed(partial, out):
    """Makes the folder partial, or empties what a killed run has left, which holds UNFINISHED; renames it to out at the end, or removes
    it if there was an error. A lock, which dies with the process, keeps others away: two runs of train.py may start in one minute.
    Raises ValueError for a folder that is not ours to empty."""
    made = [p for p in partial.parents if not p.exists()]
    partial.mkdir(parents=True, exist_ok=True)
    lock = os.open(partial if fcntl else os.devnull, os.O_RDONLY)
    try:
        with suppress(AttributeError):  # no fcntl
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{partial} is being written by another process; wait for it")
    except OSError:  # a file system without locks
        pass
    if any(partial.iterdir()) and not (partial / UNFINISHED).exists():
        os.close(lock)
        raise ValueError(f"{partial} is in the way, and not what a killed run has left: move it elsewhere")
    try:
        (partial / UNFINISHED).touch()
        for file in partial.iterdir():
            if file.name != UNFINISHED:
                file.unlink()
        yield
        (partial / UNFINISHED).unlink()
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in made:
            with suppress(OSError):  # not empty
                folder.rmdir()
        os.close(lock)


def write(c, enc, folder):
    """Writes the shards and then meta.json; returns the summary."""
    splits = {s: Writer(folder, s) for s in ("train", "val")}
    tokens = {"train": 0, "val": 0}
    counts = {"train": 0, "val": 0, "empty": 0, "invalid": 0, "duplicate": 0}
    seen, start, shown = set(), time.time(), 0
    stream = in_order(chunks(documents(c)), c.encoding, c.workers or os.cpu_count())
    try:
        for doc in (doc for chunk in stream for doc in chunk):
            if isinstance(doc, str):
                counts[doc] += 1
                continue
            digest, ids = doc
            if digest in seen:
                counts["duplicate"] += 1
                continue
            seen.add(digest)
            split = "val" if int.from_bytes(digest[:8], "big") / 2**64 < c.val_fraction else "train"
            splits[split].write(ids)
            counts[split] += 1
            tokens[split] += len(ids)
            if sys.stderr.isatty() and time.time() - shown > 0.2:
                shown, done = time.time(), sum(tokens.values())
                print(f"{len(seen):,} documents  {done:,} tokens  {done / (shown - start):,.0f} tokens/s", end="   \r", file=sys.stderr)
            if c.tokens and tokens["train"] >= c.tokens:
                break
    finally:
        if shown:
            print(file=sys.stderr)
        stream.close()
        for writer in splits.values():
            writer.close()
    for split, name in (("train", "training"), ("val", "validation")):
        if not counts[split]:
            raise ValueError(f"no {name} document among {len(seen)} ({counts['empty']} empty, {counts['invalid']} not UTF-8, "
                             f"{counts['duplicate']} duplicate): give more documents or another --val_fraction than {c.val_fraction}")
    name = c.encoding
    if name.endswith(".json"):  # the folder is complete and can be moved
        name = "tokenizer.json"
        shutil.copyfile(c.encoding, folder / name)
    meta = {"encoding": name, "vocab_size": enc.vocab_size, "eot": enc.eot, "dtype": dtype(enc).name, "tokens": tokens, "documents": counts,
            "shards": {s: writer.shards for s, writer in splits.items()}, "command": command(c)}
    with open(folder / "meta.json", "w") as f:
        f.write(json.dumps(meta, indent=1) + "\n")
        f.flush()
        os.fsync(f.fileno())
    return (f"{tokens['train']:,} training and {tokens['val']:,} validation tokens ({c.encoding}), {counts['train']:,} and {counts['val']:,} documents; skipped "
            f"{counts['empty']:,} empty, {counts['invalid']:,} not UTF-8, {counts['duplicate']:,} duplicate; {time.time() - start:.1f} s")


def command(c):
    """What makes the same data again, with relative paths; workers change nothing."""
    flags = {k: v for k, v in dataclasses.asdict(c).items() if v not in (getattr(Config, k), "") and k != "workers"}
    relative = lambda path: os.path.relpath(path) if os.path.isabs(path) else path
    flags = {k: ",".join(map(relative, v.split(","))) if k in ("glob", "hf", "encoding", "out") else v for k, v in flags.items()}
    return shlex.join(["python", "prepare.py", *(f"--{k}={v}" for k, v in flags.items())])


# ----------------------------------------------------------------------------------------------------------------------
# Reading


class Shards:
    """One split ("train" or "val") of a data folder as windows of seq + 1 tokens: window i of a shard starts at i * seq, so
    that every token is a target once, and none crosses shards.

    meta: what meta.json says;  tokens: of the split;  n_windows: over all shards
    Raises ValueError with one line if the folder is not there, not whole or not as it was written. Sizes are always
    checked, hashes if all shards together are under 1 GB or with verify."""

    def __init__(self, folder, split, seq, verify=False):
        folder = Path(folder)
        again = f"delete it and make it with python prepare.py --out={folder}"
        if not folder.is_dir():
            raise ValueError(f"no data at {folder}; python prepare.py --out={folder} makes it (--help: from what)")
        try:
            self.meta = json.loads((folder / "meta.json").read_text())
            width, self.vocab_size = np.dtype(self.meta["dtype"]).itemsize, self.meta["vocab_size"]
            self.shards, self.tokens = self.meta["shards"][split], sum(s["tokens"] for s in self.meta["shards"][split])
            verify = verify or width * sum(self.meta["tokens"].values()) < 1e9
        except OSError:
            if (folder / "config.json").exists():
                raise ValueError(f"{folder} is a run or a graft, which has no data of its own")
            raise ValueError(f"{folder} has no meta.json that can be read: it is no data folder or not complete; {again}")
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{folder / 'meta.json'} is damaged ({type(e).__name__}: {e}); {again}")
        self.seq, self.arrays, self.orders = seq, [], {}
        for shard in self.shards:
            file, size = folder / shard["name"], shard["tokens"] * width
            if not file.is_file():
                raise ValueError(f"{file} is missing; {again}")
            if file.stat().st_size != size:
                raise ValueError(f"{file} has {file.stat().st_size} bytes instead of {size}; {again}")
            self.arrays.append(np.memmap(file, np.dtype(self.meta["dtype"]).newbyteorder("<"), mode="r"))
            if verify and hashlib.sha256(self.arrays[-1]).hexdigest() != shard["sha256"]:
                raise ValueError(f"{file} does not have the sha256 of meta.json: it was altered; {again}")
        self.ends = np.cumsum([(len(array) - 1) // seq for array in self.arrays])  # windows up to each shard's end
        self.n_windows = int(self.ends[-1])
        if not self.n_windows:
            raise ValueError(f"the {split} split of {folder} has {self.tokens} tokens, less than a window of seq + 1 = {seq + 1}")

    def window(self, i):
        """Window i of 0 .. n_windows - 1 -> [seq + 1] int64. Raises ValueError if an id in it is beyond the vocabulary."""
        k = int(np.searchsorted(self.ends, i, side="right"))
        start = (i - (self.ends[k - 1] if k else 0)) * self.seq
        ids = self.arrays[k][start:start + self.seq + 1].astype(np.int64)
        if ids.max() >= self.vocab_size:
            raise ValueError(f"{self.arrays[k].filename} has the id {ids.max()}, beyond the vocabulary of {self.vocab_size}")
        return ids

    def order(self, seed, epoch):
        """That epoch's permutation of the windows, [n_windows]."""
        if (seed, epoch) not in self.orders:
            self.orders = dict(list(self.orders.items())[-1:])  # a batch may straddle two epochs
            self.orders[seed, epoch] = np.random.default_rng((seed, epoch)).permutation(np.arange(self.n_windows, dtype=np.int32))
        return self.orders[seed, epoch]

    def batch(self, step, batch, seed, part=slice(None)):
        """Rows part of the global batch of that step, [len(part), seq + 1] int64: a function of (seed, step) alone. Sample
        n = step * batch + row is number n % n_windows in the permutation of epoch n // n_windows."""
        places = [divmod(step * batch + row, self.n_windows) for row in range(batch)[part]]
        return np.stack([self.window(self.order(seed, epoch)[i]) for epoch, i in places])


def main():
    flags = parse_flags(Config)
    if "hf" in flags:
        flags.setdefault("hf_name", "")  # sample-10BT is FineWeb-Edu's
    try:
        prepare(Config(**flags))
    except ValueError as e:
        fail(e)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
