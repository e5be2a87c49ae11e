"""The exchange through inboxes, one rank at a time: what the others send is there beforehand."""

import pytest
import torch

pytest.importorskip("triton")

from anymla.ops._inboxes import TURNS, Inboxes, blank_word, word_dtype
from anymla.ops._triton_rank_sum import SLICE, sum_over_ranks
from anymla.ops.choice import best_logits
from anymla.ops.choice.triton_ranks import WORDS, best_over_ranks


class Ranks:
    """Inboxes of all ranks in one process, of which one rank runs."""

    def __init__(self, size, rank, words, step, dtype):
        self.word, self.step, self.rank = word_dtype(dtype), step, rank
        blank = blank_word(self.word)
        self.boxes = [torch.full((TURNS, size, words), blank, dtype=self.word) for _ in range(size)]
        addresses = torch.tensor([box.data_ptr() for box in self.boxes])
        turns = torch.zeros(words // step, dtype=torch.int32)
        self.inboxes = Inboxes(addresses, turns, words, rank, self.word)

    def send(self, sender, words):
        """What ``sender`` writes into the inbox of the rank that runs."""
        for program in range(-(-len(words) // self.step)):
            part = slice(program * self.step, min((program + 1) * self.step, len(words)))
            turn = int(self.inboxes.turns[program])
            slot = self.boxes[self.rank][turn, sender]
            assert (slot[part] == blank_word(self.word)).all(), (
                "a turn comes again that is not blank"
            )
            slot[part] = words[part]

    def sent(self, receiver, turns, count):
        """What the rank that runs has written into an inbox, with the turns of before."""
        slots = self.boxes[receiver][:, self.rank, :count]
        return torch.cat([slots[turn, i * self.step : (i + 1) * self.step]
                          for i, turn in enumerate(turns) if i * self.step < count])  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (3, 2), (4, 1)])
def test_sums(size, rank, dtype):
    """Tensors of several sizes one after the other; each slice has turns of its own."""
    ranks = Ranks(size, rank, 4 * SLICE, SLICE, dtype)
    generator = torch.Generator().manual_seed(rank)
    for count in (4 * SLICE, 1000, 2 * SLICE, 7, SLICE + 1, 4 * SLICE, 3, 3, 3, 3):
        given = [torch.randn(count, generator=generator).to(dtype) for _ in range(size)]
        given[rank][1] = -0.0  # the blank word
        for sender in range(size):
            if sender != rank:
                ranks.send(sender, given[sender].view(ranks.word))
        turns = ranks.inboxes.turns.tolist()
        total = sum_over_ranks(given[rank], ranks.inboxes)
        wanted = torch.stack(given).double().sum(0)
        assert torch.equal(total, torch.stack(given).float().sum(0).to(dtype))
        assert (total.double() - wanted).abs().max() <= size * torch.finfo(dtype).eps * 8
        for receiver in range(size):
            got = ranks.sent(receiver, turns, count).view(dtype)
            assert torch.equal(got, given[rank])


def test_a_rank_without_a_number_spoils_the_sum():
    ranks = Ranks(2, 0, SLICE, SLICE, torch.bfloat16)
    theirs = torch.ones(5).bfloat16()
    theirs[2] = torch.nan
    ranks.send(1, theirs.view(torch.int16))
    total = sum_over_ranks(torch.ones(5).bfloat16(), ranks.inboxes)
    assert total.isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (3, 2), (4, 1)])
def test_the_best_of_all_ranks(size, rank):
    vocab, rows = 20, 6
    ranks = Ranks(size, rank, 16 * WORDS, WORDS, torch.float32)
    for step in range(7):
        logits = torch.randn(rows, size * vocab)
        logits[1] = torch.nan if step == 1 else 0.0
        logits[2] = -torch.inf
        logits[3, -1] = logits[3, 4] = 7.0
        logits[4, 3] = torch.inf
        parts = logits.split(vocab, 1)
        best = [best_logits(part, backend="reference") for part in parts]
        for sender, (value, token, log_sum) in enumerate(best):
            if sender != rank:
                ids = (token + sender * vocab).int()
                words = [value + 0.0, ids.view(torch.float32), log_sum + 0.0, 0 * value]
                words[3] = torch.zeros(rows)
                ranks.send(sender, torch.stack(words, 1).view(torch.int32).flatten())
        token, logprob = best_over_ranks(
            best[rank], ranks.inboxes, first=rank * vocab, vocab=size * vocab
        )
        wanted = logits.log_softmax(1)
        found = logits.argmax(1)
        found[2] = found[4] = size * vocab
        if step == 1:
            found[1] = size * vocab
        assert torch.equal(token, found)
        known = [0, 1, 3, 5] if step != 1 else [0, 3, 5]
        assert torch.allclose(logprob[known], wanted.amax(1)[known], atol=1e-5)
