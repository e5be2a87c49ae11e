"""Make the tiny checkpoint: ``python examples/tiny/train.py OUT``, three minutes on one H200.

Downloads the text, learns a tokenizer and trains, all of it seeded. First short sequences whose
positions jump (see ``tasks.py``), from the novels and the Bible; then all texts and longer
sequences while the learning rate falls, with the attention restricted to the indexer's choice, and
with weights and cache rows rounded as they will be stored. ``--small`` is a toy of the same kind
that a CPU trains in a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import export
import numpy as np
import shape
import torch
import torch.nn.functional as F
import vocabulary
from corpus import Corpus, read_corpus
from network import Network, Numbers, fixed, initial
from optimizer import Optimizer, clip
from tasks import Writer, phrases
from torch import Tensor, multiprocessing

RATE = 3e-3
WARM_UP = 100
INDEX_WEIGHT = 1.0
DRAFT_WEIGHT = 0.3
# How fast the biases follow the experts' loads.
BALANCE = 0.003
CLIP = 1.0


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of training.

    Attributes:
        length: tokens of a sequence.
        batch: sequences of a step.
        steps: how many.
        sparse: attend to the indexer's choice only.
        quantized: round weights and rows.
        everything: all texts, or the novels and the Bible alone.
        rates: of the learning rate, at the beginning and at the end.
        fresh: begin with a new optimizer.
    """

    length: int
    batch: int
    steps: int
    sparse: bool = False
    quantized: bool = False
    everything: bool = False
    rates: tuple[float, float] = (1.0, 1.0)
    fresh: bool = False


PHASES = (
    Phase(256, 64, 386),
    Phase(512, 32, 1398),
    Phase(1024, 24, 64, sparse=True),
    Phase(2048, 16, 208, True, True, True, rates=(1.0, 0.67), fresh=True),
    Phase(8192, 4, 115, True, True, True, rates=(0.67, 0.02)),
)
SMALL = (
    Phase(256, 4, 12),
    Phase(512, 2, 4, True, True, True, rates=(1.0, 0.5), fresh=True),
)
SMALL_SHAPE = {
    "hidden_size": 128,
    "index_n_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


def loss_of(
    net: Network, tokens: Tensor, positions: Tensor, weights: Tensor, answers: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss, and what is reported: text, answers, answers right, drafts that agree, indexers."""
    out = net(tokens, positions)
    target, weight = tokens[:, 1:], weights[:, 1:]
    logits = net.logits(out.hidden[:, :-1]).float()
    each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(weight)
    loss = (each * weight).sum() / weight.sum()
    later, later_weight = tokens[:, 2:], weights[:, 2:]
    assert out.drafts is not None
    guess = net.logits(out.drafts[:, :-2]).float()
    draft = F.cross_entropy(guess.flatten(0, 1), later.flatten(), reduction="none")
    draft = (draft.view_as(later_weight) * later_weight).sum() / later_weight.sum()
    loss = loss + DRAFT_WEIGHT * draft + INDEX_WEIGHT * out.index_loss
    with torch.no_grad():
        asked, plain = answers[:, 1:], (weight == 1).float()
        right = (logits.argmax(-1) == target).float()
        agree = (guess.argmax(-1) == logits[:, 1:].argmax(-1)).float()
        count = asked.sum().clamp(min=1)
        report = torch.stack(
            [
                (each * plain).sum() / plain.sum(),
                (each * asked).sum() / count,
                (right * asked).sum() / count,
                (agree * later_weight).sum() / later_weight.sum(),
                out.index_loss.detach(),
            ]
        )
        for name, load in out.loads.items():
            net.constants[name] += BALANCE * torch.sign(load.mean() - load)
    return loss, report


class Step:
    """Forward and backward pass of one shape of batch; on a GPU recorded as a CUDA graph."""

    def __init__(self, net: Network, phase: Phase, device: torch.device) -> None:
        size = (phase.batch, phase.length)
        self.net = net
        self.inputs = [
            torch.zeros(size, dtype=torch.long, device=device),
            torch.arange(phase.length, device=device).expand(size).contiguous(),
            torch.ones(size, device=device),
            torch.zeros(size, device=device),
        ]
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Sequence[Tensor]) -> Tensor:
        """Leave gradients; returns the report."""
        for place, value in zip(self.inputs, batch, strict=True):
            place.copy_(value, non_blocking=True)
        if not self.inputs[0].is_cuda:
            self._run()
        elif self.graph is None:
            self.graph = self._recorded()
            self.graph.replay()
        else:
            self.graph.replay()
        return self.report

    def _run(self) -> None:
        grads = [w.grad for w in self.net.weights.values() if w.grad is not None]
        if grads:
            torch._foreach_zero_(grads)
        loss, self.report = loss_of(self.net, *self.inputs)
        loss.backward()

    def _recorded(self) -> torch.cuda.CUDAGraph:
        kept = {name: value.clone() for name, value in self.net.constants.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        for name, value in kept.items():
            self.net.constants[name].copy_(value)
        graph = torch.cuda.CUDAGraph()
        # Another thread pins memory meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._run()
        return graph


def _write_batches(
    directory: str, text_file: str, seed: int, phase: Phase, worker: int, workers: int, out: Any
) -> None:
    """A process that writes every ``workers``-th batch of a phase."""
    torch.set_num_threads(1)
    inner = vocabulary.read(pathlib.Path(directory))
    text = np.load(pathlib.Path(directory) / text_file).astype(np.int64)
    for number in range(worker, phase.steps, workers):
        # A writer of its own, so that a batch does not depend on how many processes there are.
        writer = Writer(inner, text, hash((seed, phase.length, number)) & 0x7FFFFFFF)
        b = writer.batch(phase.batch, phase.length)
        small = (b.tokens.astype(np.int16), b.positions.astype(np.int32))
        out.put((*small, b.weights.astype(np.float16), b.answers.astype(np.float16)))


class Batches:
    """The batches of a phase in order, written by other processes and copied ahead."""

    def __init__(
        self, directory: pathlib.Path, seed: int, phase: Phase, workers: int, *, pinned: bool
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pinned, self._steps = pinned, phase.steps
        self._queues = [context.Queue(maxsize=6) for _ in range(workers)]
        text = "all.npy" if phase.everything else "first.npy"
        for i, each in enumerate(self._queues):
            arguments = (str(directory), text, seed, phase, i, workers, each)
            context.Process(target=_write_batches, args=arguments, daemon=True).start()
        self._ahead: queue.Queue[list[Tensor]] = queue.Queue(maxsize=8)
        threading.Thread(target=self._copy, daemon=True).start()

    def _copy(self) -> None:
        for number in range(self._steps):
            arrays = self._queues[number % len(self._queues)].get()
            kinds = (torch.long, torch.long, torch.float32, torch.float32)
            batch = [torch.from_numpy(a).to(kind) for a, kind in zip(arrays, kinds, strict=True)]
            self._ahead.put([each.pin_memory() for each in batch] if self._pinned else batch)

    def __iter__(self) -> Iterator[list[Tensor]]:
        for _ in range(self._steps):
            yield self._ahead.get()


@torch.no_grad()
def examine(
    net: Network, writer: Writer, length: int, depths: Sequence[float], tries: int
) -> list[float]:
    """Share of passkeys found, every digit, at each depth of texts of ``length`` tokens."""
    device = net.weights["embed.weight"].device
    was, net.sparse = net.sparse, True
    exams = [writer.exam(length, depth, facts=4) for depth in depths for _ in range(tries)]
    digits = np.stack([value for _, value in exams])
    rows = np.stack([np.concatenate(exam) for exam in exams])
    positions = torch.arange(length, device=device)
    found = []
    at_once = max(1, 65536 // length)
    for start in range(0, len(rows), at_once):
        ids = torch.from_numpy(rows[start : start + at_once]).to(device)
        hidden = net(ids, positions.expand(len(ids), -1), drafts=False).hidden
        guess = net.logits(hidden[:, -digits.shape[1] - 1 : -1]).argmax(-1).cpu().numpy()
        found.append((guess == digits[start : start + at_once]).all(1))
    net.sparse = was
    right = np.concatenate(found).reshape(len(depths), tries)
    return [round(float(share), 3) for share in right.mean(1)]


@torch.no_grad()
def held_out(net: Network, text: np.ndarray, count: int = 32) -> tuple[float, float]:
    """Nats a token on the novel that was not trained on, and how often drafts agree."""
    device, length = net.weights["embed.weight"].device, 512
    rows = torch.from_numpy(text[: count * length].reshape(count, length)).to(device)
    out = net(rows, torch.arange(length, device=device).expand(count, -1))
    assert out.drafts is not None
    logits = net.logits(out.hidden).float()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    agree = net.logits(out.drafts)[:, :-2].argmax(-1) == logits[:, 1:-1].argmax(-1)
    return loss.item(), agree.float().mean().item()


def prepare(directory: pathlib.Path, corpus: Corpus) -> None:
    """Write the tokenizer and the texts' token ids."""
    directory.mkdir(parents=True, exist_ok=True)
    inner = vocabulary.train(corpus.first, phrases())
    vocabulary.write(inner, directory, shape.config(0)["max_position_embeddings"])
    texts = {
        "first": corpus.first,
        "all": f"{corpus.first}\n{corpus.second}",
        "held": corpus.held_out,
    }
    for name, text in texts.items():
        ids = inner.encode(text, add_special_tokens=False).ids
        np.save(directory / f"{name}.npy", np.array(ids, dtype=np.uint16))


class Training:
    """All phases, one after the other."""

    def __init__(self, out: pathlib.Path, *, seed: int, small: bool, workers: int) -> None:
        self.began = time.perf_counter()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.out, self.seed, self.workers, self.small = out, seed, workers, small
        self.inner = vocabulary.read(out)
        self.config = shape.config(self.inner.get_vocab_size(), **(SMALL_SHAPE if small else {}))
        numbers = Numbers.of(self.config)
        to = self.device
        weights = {k: v.to(to).requires_grad_() for k, v in initial(numbers, seed).items()}
        constants = {k: v.to(to) for k, v in fixed(numbers, seed).items()}
        self.net = Network(numbers, weights, constants)
        self.net.dtype = torch.bfloat16 if to.type == "cuda" else torch.float32
        self.held = np.load(out / "held.npy").astype(np.int64)

    def run(self) -> None:
        """Train, and write a checkpoint after every phase."""
        phases = SMALL if self.small else PHASES
        pinned = self.device.type == "cuda"
        waiting = [
            Batches(self.out, self.seed, phase, self.workers, pinned=pinned) for phase in phases[:2]
        ]
        for number, phase in enumerate(phases):
            batches = waiting.pop(0)
            if number + 2 < len(phases):
                ahead = phases[number + 2]
                waiting.append(Batches(self.out, self.seed, ahead, self.workers, pinned=pinned))
            if not number or phase.fresh:
                self.optimizer, self.steps = Optimizer(self.net.weights), 0
            self._phase(phase, batches)
            self._examine(last=number + 1 == len(phases))
            export.write(self.out, self.config, self.net.weights, self.net.constants)

    def _phase(self, phase: Phase, batches: Batches) -> None:
        self.net.sparse, self.net.quantized = phase.sparse, phase.quantized
        run, reports = Step(self.net, phase, self.device), []
        for number, batch in enumerate(batches):
            reports.append(run(batch).clone())
            clip(self.net.weights.values(), CLIP)
            first, last = phase.rates
            rate = first + (last - first) * number / phase.steps
            self.optimizer.step(RATE * rate * min(1, (self.steps + 1) / WARM_UP))
            self.steps += 1
            if len(reports) == 100 or number + 1 == phase.steps:
                mean = torch.stack(reports).mean(0).tolist()
                names = ("text", "answers", "right", "drafts", "index")
                values = {k: round(v, 4) for k, v in zip(names, mean, strict=True)}
                self._log(length=phase.length, step=number + 1, **values)
                reports = []

    def _examine(self, *, last: bool) -> None:
        loss, agree = held_out(self.net, self.held, 2 if self.small else 32)
        writer = Writer(self.inner, self.held, 1)
        lengths = (512,) if self.small else (2048, 32768) if last else (2048,)
        found = {
            length: examine(self.net, writer, length, (0.0, 0.25, 0.5, 0.75, 1.0), 2)
            for length in lengths
        }
        self._log(held_out=round(loss, 3), drafts=round(agree, 3), found=found)

    def _log(self, **values: Any) -> None:
        line = json.dumps({"seconds": round(time.perf_counter() - self.began, 1)} | values)
        print(line, flush=True)
        with (self.out / "log.jsonl").open("a") as file:
            file.write(line + "\n")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path, help="where the checkpoint is written")
    parser.add_argument("--packages", type=pathlib.Path, help="where packages are, or downloaded")
    parser.add_argument("--prepared", action="store_true", help="OUT holds tokenizer and texts")
    parser.add_argument("--workers", type=int, default=8, help="processes that write batches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="a toy, for a CPU")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    if not args.prepared:
        prepare(args.out, read_corpus(args.packages or args.out / "packages"))
    Training(args.out, seed=args.seed, small=args.small, workers=args.workers).run()


if __name__ == "__main__":
    main()
