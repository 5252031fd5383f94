"""Train a small GPT on a text, on as many ranks as were started.

    paceline train                                        # 2 ranks of this machine
    paceline train --nproc 4 --steps 500                  # launcher flags and flags of this script
    torchrun --nproc-per-node 2 examples/train_gpt.py     # the same script, unchanged
    python examples/train_gpt.py                          # one rank

It learns the next byte of `data/rides.txt`. Ctrl-C saves a checkpoint. A second run does not replace it unless
--overwrite says so; --resume continues from it with
the losses that an uninterrupted run would have had (to the bit with up to two ranks; with more, the order
in which the ranks' gradients are summed may differ in the first resumed step).
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Until train() takes over, Ctrl-C just ends this process: a traceback out of an import helps nobody.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.run.init import World

BYTES = 256
STOPS = (signal.SIGINT, signal.SIGTERM)


def flag(default: float, text: str) -> Any:
    return field(default=default, metadata={"help": f"{text} (default: {default})"})


@dataclass(frozen=True)
class Config:
    """What decides the losses; each field is a flag, and is kept in the checkpoint."""

    steps: int = flag(480, "optimizer steps in total")
    batch: int = flag(8, "sequences for each rank and step")
    context: int = flag(64, "bytes the model looks back")
    layers: int = flag(3, "transformer blocks")
    heads: int = flag(4, "attention heads in a block; has to divide --width")
    width: int = flag(128, "size of the residual stream")
    dropout: float = flag(0.0, "share of the activations that is dropped")
    lr: float = flag(4e-3, "highest learning rate")
    seed: int = flag(1, "seed of the weights, the batches and dropout")


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(seen.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, BYTES, bias=False)
        for embedding in (self.embed, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.position(places))))


def draw_batch(text: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Random windows of the text and, for each of their bytes, the one that follows."""
    starts = torch.randint(len(text) - config.context, (config.batch,))
    windows = torch.stack([text[start : start + config.context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def learning_rate(step: int, config: Config) -> float:
    """A short warm-up, then half a cosine down to a tenth."""
    warm_up = max(1, config.steps // 20)
    if step < warm_up:
        return config.lr * (step + 1) / warm_up
    done = (step - warm_up) / max(1, config.steps - warm_up)
    return config.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class Checkpoint:
    """One safetensors file: weights, optimizer state and every rank's generator, with step and config.

    It is written under another name and renamed, so that it is complete or absent.
    """

    def __init__(self, path: Path, world: World) -> None:
        self.path, self.world = path, world

    def save(self, step: int, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write the state after ``step`` steps. Every rank calls this; rank 0 writes."""
        mine = torch.get_rng_state()
        generators = [torch.empty_like(mine) for _ in range(self.world.world_size)]
        dist.all_gather(generators, mine)
        if self.world.rank == 0:
            tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in state.items()}
            tensors |= {f"generator.{rank}": state for rank, state in enumerate(generators)}
            about = {"step": step, "world_size": self.world.world_size, "config": asdict(config)}
            partial = self.path.with_suffix(".partial")
            save_file(tensors, partial, metadata={"about": json.dumps(about)})
            partial.replace(self.path)
        dist.barrier()

    def load(self, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Fill model, optimizer and this rank's generator; return the number of steps done."""
        if not self.path.is_file():
            refuse(f"argument --resume: there is no {self.path}; train without --resume first")
        about, tensors = self.read("--resume")
        for name, value in about["config"].items():
            # More steps than planned are welcome; another model or other data would not be a continuation.
            if name != "steps" and value != getattr(config, name):
                refuse(f"argument --resume: {self.path} was made with --{name} {value}; give the same here")
        if about["world_size"] != self.world.world_size:
            refuse(f"argument --resume: {self.path} is of {about['world_size']} ranks; start as many")
        model.load_state_dict(part(tensors, "model"))
        states = {index: part(tensors, f"optimizer.{index}") for index, _ in enumerate(model.parameters())}
        optimizer.load_state_dict(optimizer.state_dict() | {"state": states})
        torch.set_rng_state(tensors[f"generator.{self.world.rank}"])
        return about["step"]

    def read(self, flag: str, *, whole: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What the file says about itself, and its tensors unless only the first is wanted."""
        try:
            with safe_open(self.path, "pt") as file:
                about = json.loads(file.metadata()["about"])
                return about, {name: file.get_tensor(name) for name in file.keys() if whole}  # noqa: SIM118
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            refuse(f"argument {flag}: {self.path} is not a checkpoint of this script ({error})")

    def keep(self) -> None:
        """Refuse to train from scratch where there is a checkpoint: even a run of more steps may be stopped early."""
        if self.path.exists():
            about, _ = self.read("--out", whole=False)
            refuse(
                f"argument --out: {self.path} is of {about['step']} steps, and this run would replace it. Give "
                "--resume to continue from it, --overwrite to replace it, or another --out"
            )


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(f"{prefix}."): t for n, t in tensors.items() if n.startswith(f"{prefix}.")}


class Display:
    """What rank 0 shows: a bar on a terminal, a line now and then elsewhere, a table at the end."""

    def __init__(self, config: Config, flags: argparse.Namespace, world: World) -> None:
        self.config, self.flags, self.world = config, flags, world
        self.console = Console(quiet=world.rank != 0, highlight=False, soft_wrap=True)
        self.entries: list[dict[str, float]] = []
        self.ranks = "1 rank" if world.world_size == 1 else f"{world.world_size} ranks"
        self.tokens_a_step = config.batch * config.context * world.world_size
        note = TextColumn("{task.fields[note]}")
        columns = (BarColumn(20), MofNCompleteColumn(), note, TimeRemainingColumn())
        on_terminal = self.console.is_terminal and world.rank == 0
        self.bar = Progress(*columns, console=self.console, disable=not on_terminal, refresh_per_second=4)
        self.task = self.bar.add_task("", total=config.steps, note="")

    def start(self, first: int) -> None:
        """Begin after step ``first``. Keep only the part of the log that the checkpoint covers."""
        self.bar.update(self.task, completed=first)
        path = self.flags.out / "log.jsonl"
        if self.world.rank == 0:
            kept = path.read_text().splitlines(keepends=True)[:first] if path.exists() else []
            path.write_text("".join(kept))

    def step(self, step: int, *, loss: float, step_s: float, exposed_s: float) -> None:
        self.entries.append({"step": step, "loss": loss, "step_s": step_s, "exposed_s": exposed_s})
        if self.world.rank != 0:
            return
        with (self.flags.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(self.entries[-1]) + "\n")
        tokens_per_s, waiting = self.tokens_a_step / step_s, exposed_s / step_s
        note = f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  comm wait {waiting:.0%}"
        self.bar.update(self.task, completed=step, note=note)
        if self.bar.disable and (step % self.flags.log_every == 0 or step in (1, self.config.steps)):
            self.console.print(f"step {step}/{self.config.steps}  {note}")

    def table(self, stats: paceline.Stats) -> Table:
        steps, first, last = len(self.entries), self.entries[0], self.entries[-1]
        total_s, exposed_s = (sum(entry[key] for entry in self.entries) for key in ("step_s", "exposed_s"))
        table = Table(title=f"{self.ranks}, {self.world.backend}", show_header=False)
        table.add_row("steps", f"{first['step']} to {last['step']}")
        table.add_row("loss", f"{first['loss']:.3f} -> {last['loss']:.3f}")
        table.add_row("tokens/s", f"{steps * self.tokens_a_step / total_s:,.0f}")
        table.add_row("buckets", f"{stats.buckets}")
        table.add_row("bytes a step", f"{stats.bytes_per_step:,}")
        wait = f"{1000 * exposed_s / steps:.1f} ms a step ({exposed_s / total_s:.0%})"
        table.add_row("exposed communication", wait)
        return table


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Note Ctrl-C and SIGTERM in a list instead of dying; a second signal of the same kind acts as usual."""
    received: list[int] = []

    def note(signum: int, _frame: FrameType | None) -> None:
        received.append(signum)
        signal.signal(signum, signal.SIG_DFL)

    before = {signum: signal.signal(signum, note) for signum in STOPS}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def train(config: Config, flags: argparse.Namespace, world: World) -> int:
    """Train, show it, leave a checkpoint; return the exit code."""
    display = Display(config, flags, world)
    say = display.console.print
    text = torch.frombuffer(bytearray(flags.text.read_bytes()), dtype=torch.uint8)
    if len(text) <= config.context:
        refuse(f"argument --text: {flags.text} has {len(text)} bytes; --context {config.context} needs more")

    torch.manual_seed(config.seed)
    model = GPT(config).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=True)
    torch.manual_seed(config.seed * 1_000_003 + world.rank)  # each rank its own batches and dropout
    checkpoint = Checkpoint(flags.out / "checkpoint.safetensors", world)
    if not flags.resume and not flags.overwrite:
        checkpoint.keep()
    first = checkpoint.load(config, model, optimizer) if flags.resume else 0
    last = flags.stop_at or config.steps
    if first >= last:
        say(f"Nothing to do up to step {last}: {checkpoint.path} is at step {first}. Give more --steps to go on.")
        return 0
    display.start(first)
    ddp = paceline.DistributedDataParallel(model)

    size = sum(parameter.numel() for parameter in model.parameters())
    origin = f"continuing after step {first}" if first else "from scratch"
    say(f"GPT of {size:,} parameters, {len(text):,} bytes of text, {display.ranks}, {origin}")
    step, stopped_by = first, None
    with stop_signals() as received:
        with display.bar:
            while step < last and stopped_by is None:
                start_s = time.perf_counter()
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, config)
                tokens, targets = (half.to(world.device) for half in draw_batch(text, config))
                loss = F.cross_entropy(ddp(tokens).flatten(0, 1), targets.flatten())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                step += 1
                # One small all-reduce: for the mean loss, and so that all ranks stop after the same step.
                news = [loss.item() / world.world_size, *(float(signum in received) for signum in STOPS)]
                shared = torch.tensor(news, dtype=torch.float64)
                dist.all_reduce(shared)
                stopped_by = next((s for s, heard in zip(STOPS, shared[1:], strict=True) if heard), None)
                step_s = time.perf_counter() - start_s
                display.step(step, loss=shared[0].item(), step_s=step_s, exposed_s=ddp.stats().exposed_s)
                if flags.save_every and step % flags.save_every == 0:
                    checkpoint.save(step, config, model, optimizer)
        checkpoint.save(step, config, model, optimizer)
    if step == config.steps and world.rank == 0 and flags.sample:
        say(f"\nWhat it writes now:\n{sample(model, config, flags.sample)}\n", markup=False)
    say(display.table(ddp.stats()))
    say(f"Checkpoint after step {step}: {checkpoint.path}")
    if step < config.steps:
        reason = f"Stopped by {signal.Signals(stopped_by).name}. " if stopped_by else ""
        say(f"{reason}The same command with --resume continues it.")
    return 128 + stopped_by if stopped_by else 0


@torch.no_grad()
def sample(model: nn.Module, config: Config, length: int) -> str:
    """Let the model write, one byte after the other."""
    model.eval()
    tokens = torch.tensor([list(b"On a ")], device=next(model.parameters()).device)
    for _ in range(length):
        odds = F.softmax(model(tokens[:, -config.context :])[:, -1] / 0.8, dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(odds, 1)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def refuse(message: str) -> NoReturn:
    """End with one line and exit code 2. All ranks come here alike, so one of them speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(f"train_gpt: {message}", file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(f"{message} (see --help)")


def parse_flags(argv: list[str] | None = None) -> tuple[Config, argparse.Namespace]:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(name: str, kind: type, default: object, text: str) -> None:
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=kind.__name__.upper(), help=text)

    for item in fields(Config):
        add(item.name, type(item.default), item.default, item.metadata["help"])
    rides = Path(__file__).with_name("data") / "rides.txt"
    add("text", Path, rides, "what to learn (default: data/rides.txt)")
    add("out", Path, Path("runs/gpt"), "directory of the checkpoint and the log (default: runs/gpt)")
    add("save-every", int, 0, "steps between checkpoints (default: only one, at the end)")
    add("stop-at", int, 0, "stop after this step, to continue with --resume")
    add("log-every", int, 20, "steps between lines where there is no terminal for a bar (default: 20)")
    add("sample", int, 200, "bytes to let the model write at the end (default: 200)")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint in --out, if there is one")
    flags = parser.parse_args(argv)
    config = Config(**{item.name: getattr(flags, item.name) for item in fields(Config)})

    positive = {"steps", "batch", "context", "layers", "heads", "width", "lr", "log_every"}
    for name, value in vars(flags).items():
        if isinstance(value, int | float) and not (value > 0 if name in positive else value >= 0):
            wanted = "must be above 0" if name in positive else "must not be negative"
            parser.error(f"argument --{name.replace('_', '-')}: {wanted}, got {value}")
    if config.width % config.heads:
        parser.error(f"argument --heads: {config.heads} does not divide --width {config.width}")
    if config.dropout >= 1:
        parser.error(f"argument --dropout: must be below 1, got {config.dropout}")
    if flags.stop_at > config.steps:
        parser.error(f"argument --stop-at: {flags.stop_at} is beyond --steps {config.steps}")
    if flags.resume and flags.overwrite:
        parser.error("argument --overwrite: not with --resume, which continues from the checkpoint")
    if not flags.text.is_file():
        parser.error(f"argument --text: there is no file {str(flags.text)!r}")
    try:
        flags.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: {error}")
    return config, flags


def main() -> int:
    config, flags = parse_flags()
    world = paceline.init()
    try:
        return train(config, flags, world)
    except paceline.errors.PeerError as error:
        print(f"train_gpt: rank {world.rank} stopped: {error}", file=sys.stderr)
        return 1
    finally:
        paceline.shutdown()


if __name__ == "__main__":
    raise SystemExit(main())
