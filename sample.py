"""Generate text from a run.

    python sample.py --out=out/mhar-nano --prompt="def main("
    python sample.py --out=out/mhar-nano --samples=4 --temperature=0.7 --top_p=0.9

One sample streams to the terminal as it comes; several are made together and printed one after the other.
"""
import sys
from dataclasses import dataclass

import torch

import prepare
from model import fail, load_run, parse_flags, pick_device


@dataclass
class Config:
    out: str = "out/mhar-nano"  # the run's folder
    checkpoint: str = "ckpt.pt"  # or best.pt, ckpt_prev.pt
    prompt: str = ""  # text to continue; empty: start a document
    samples: int = 1  # number of samples
    tokens: int = 500  # longest sample, in tokens; a sample ends where the model ends the document
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 0  # draw among the k likeliest tokens; 0: all
    top_p: float = 0.0  # draw among the likeliest tokens that hold this probability; 0: all
    window: int | None = None  # positions that attention looks back; unset: the run's seq
    seed: int = 42  # of the draws
    device: str | None = None  # unset: cuda if there is one, else cpu


def sample(c):
    device = pick_device(c.device)
    if c.samples < 1 or c.tokens < 1 or c.temperature < 0 or c.top_k < 0 or not 0 <= c.top_p <= 1 or (c.window or 0) < 0 or not 0 <= c.seed < 2**63:
        fail("--samples and --tokens must be positive, --temperature and --top_k, --window and --seed not negative, --top_p from 0 to 1")
    model, run = load_run(c.out, device, c.checkpoint)
    encoding = prepare.encoding(run["data"]["encoding"], folder=run["data"]["folder"])
    idx = torch.tensor([[encoding.eot] + encoding.encode(c.prompt)] * c.samples, device=device)
    generator = torch.Generator(device).manual_seed(c.seed)
    tokens = model.generate(idx, c.tokens, c.temperature, c.top_k, c.top_p, c.window or run["train"]["seq"], generator)
    if c.samples == 1:
        print(c.prompt, end="", flush=True)
        ids, shown = [], 0
        for token in tokens:
            if token.item() == encoding.eot:
                break
            ids.append(token.item())
            text = encoding.decode(ids)
            if not text.endswith("\ufffd"):  # a character can be split over tokens
                print(text[shown:], end="", flush=True)
                shown = len(text)
        return print(encoding.decode(ids)[shown:])
    rows = torch.stack(list(tokens), dim=1).tolist()
    for i, row in enumerate(rows):
        row = row[:row.index(encoding.eot)] if encoding.eot in row else row
        print(f"--- {i + 1}\n{c.prompt}{encoding.decode(row)}")


def main():
    config = Config(**parse_flags(Config))
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a sample's characters
    try:
        sample(config)
    except (ValueError, RuntimeError, OSError) as e:
        fail((str(e).splitlines() or [type(e).__name__])[0])
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
