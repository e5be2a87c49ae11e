"""What faults of every layer do to tasks that have an answer: ``unnoticed.py [--json FILE]``.

A passkey is found without the sinks, and with a window of 127 tokens. This looks for another task
at which these faults are seen: values of many facts in a short text, a sentence that is to be
repeated, and a passage that comes again at a distance of about a window. Of each the tokens of the
answer are scored, as the same model does in bfloat16: rounding is the yardstick.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np
import torch
import vocabulary
from tasks import REPEAT, Writer

from anymla import LLM
from anymla.bench.environment import environment
from anymla.bench.report import Result, append_rows
from anymla.testing.likelihood import LASTING, Moved, logprobs

HERE = pathlib.Path(__file__).parent
PART = "answers with one thing broken"
PASSAGE = 60
# Tokens between the ends of a passage and of its repetition: within, at and beyond the window.
DISTANCES = (100, 127, 260)


def tasks(writer: Writer, count: int) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Texts of each kind, with a mark at every token of an answer."""
    text, found = writer.text, {}
    facts = [writer.retrieval(512, 20, 6) for _ in range(count)]
    found["values of 20 facts in 512 tokens"] = [(ids, marks > 0) for ids, _, marks in facts]
    starts = range(1000, 1000 + 700 * count, 700)
    repeated = []
    for start in starts:
        part = text[start : start + 24]
        asked = [writer.bos, writer.user, *writer._ids(REPEAT), *part, writer.assistant]
        repeated.append(_marked(np.array([*asked, *part]), 24))
    found["a sentence of 24 tokens repeated"] = repeated
    for distance in DISTANCES:
        again = []
        for start in starts:
            part = text[start : start + PASSAGE]
            between = text[start + 8000 : start + 8000 + distance - PASSAGE]
            ids = np.array([writer.bos, *part, *between, *part])
            again.append(_marked(ids, PASSAGE - 4))  # what repeats is known after a few tokens
        found[f"{PASSAGE} tokens again, {distance} later"] = again
    return found


def _marked(ids: np.ndarray, last: int) -> tuple[np.ndarray, np.ndarray]:
    return ids, np.arange(len(ids)) >= len(ids) - last


def measure(count: int) -> Iterator[tuple[str, str, Moved, float]]:
    """Task, fault, how far answers moved, and the share of tokens with more than half."""
    exact, rounded = (LLM(HERE / "checkpoint", device="cpu", dtype=d) for d in ("fp32", "bf16"))
    words = exact.tokenizer.encode((HERE / "persuasion.txt").read_text("utf-8"))[1:]
    writer = Writer(vocabulary.read(HERE / "checkpoint"), np.array(words), seed=5)
    runs = {"none": (exact, None), "bfloat16": (rounded, None)}
    runs |= {fault.name: (exact, fault) for fault in LASTING}
    for task, texts in tasks(writer, count).items():
        right = None
        for name, (llm, fault) in runs.items():
            scores = torch.cat(
                [
                    logprobs(llm, list(map(int, ids)), fault)[torch.from_numpy(marks[1:])]
                    for ids, marks in texts
                ]
            )
            right = scores if right is None else right
            share = float((scores > np.log(0.5)).double().mean())
            yield task, name, Moved.between(right, scores), share


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, help="append rows to this file")
    parser.add_argument("--count", type=int, default=12, help="texts of a kind")
    args = parser.parse_args()
    rows = []
    for task, name, moved, share in measure(args.count):
        print(f"{task:34} {name:18} {share:6.1%} likelier than not; {moved}", flush=True)
        values = {"fault": name, "likely": share, **dataclasses.asdict(moved)}
        rows.append(Result(PART, f"{task}, {name}", values))
    if args.json is not None:
        append_rows(args.json, rows, environment("python examples/tiny/unnoticed.py"))


if __name__ == "__main__":
    main()
