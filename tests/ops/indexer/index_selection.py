"""Selections by hand, and calls whose scores are exact."""

import dataclasses
import math

import torch
from index_scores import D, i32
from paged import make_cache

from anymla.formats.page_layout import INDEX_FP8
from anymla.ops.indexer import select_topk


def integers(*shape):
    """Values whose scores are exact in any order of summation, with many ties."""
    return torch.randint(-2, 3, shape).float()


def keys_in(layout, table, entries, count, *, gap=0, keys=None):
    """A cache of NaN bytes with ``count`` keys of each request; the cache and the keys."""
    kind = make_cache(layout, int(table.max()) + 2, entries, gap=gap)
    keys = integers(len(table), count, D) if keys is None else keys
    w = torch.arange(count)
    for request, row in enumerate(table):
        slots = row.long()[w // entries] * entries + w % entries
        kind.layout.write(kind.tensor, slots, keys[request])
    return kind.tensor, keys


def by_rule(scores, k):
    """Places of the best k of a list of scores, ascending: higher, NaN highest, then earlier."""
    order = sorted(
        range(len(scores)),
        key=lambda n: (not math.isnan(scores[n]), 0 if math.isnan(scores[n]) else -scores[n], n),
    )
    return sorted(order[:k])


def expected(q, keys, weights, lengths, owners, k):
    """The selection by hand, from keys [R, N, D] that are stored exactly."""
    rows = []
    for token, request in enumerate(owners):
        chosen = []
        if 0 <= request < len(keys):
            last = min(lengths[token], keys.shape[1])
            dots = q[token].double() @ keys[request, : max(0, last)].double().T
            scores = weights[token].double() @ dots.relu()
            chosen = by_rule(scores.tolist(), k)
        rows.append(chosen + [-1] * (k - len(chosen)))
    return i32(rows)


@dataclasses.dataclass
class Call:
    """Arguments of a call and what it must give."""

    arguments: dict
    want: torch.Tensor

    def check(self, run, **options):
        got = select_topk(**self.arguments, **options, backend=run)
        assert got.dtype == torch.int32
        assert torch.equal(got, self.want)


def a_call(tokens, lengths, owners, k, *, entries=16, heads=2, layout=INDEX_FP8, **options):
    """Tokens with their lengths and requests over an integer cache."""
    each, gap = options.pop("each", False), options.pop("gap", 0)
    requests = max(owners) + 1 if each else max(*owners, 1) + 1
    longest = max(1, *lengths)
    pages = -(-longest // entries)
    table = torch.randperm(requests * pages + 2)[: requests * pages].view(requests, pages).int()
    cache, keys = keys_in(layout, table, entries, longest, gap=gap)
    q, weights = integers(tokens, heads, D), integers(tokens, heads)
    want = expected(q, keys, weights, lengths, owners, k)
    arguments = {
        "q": q,
        "index_cache": cache,
        "weights": weights,
        "lengths": i32(lengths),
        "block_table": table,
        "k": k,
        "layout": layout,
        "token_to_req": None if each else i32(owners),
        **options,
    }
    if layout == INDEX_FP8:
        arguments["q"] = q.to(torch.float8_e4m3fn)
    return Call(arguments, want)


def arbitrary_scores(rows):
    """Queries, keys and weights that give exactly the numbers in ``rows`` as scores.

    relu(x) - relu(-x) is x, NaN and infinities included.
    """
    values = torch.tensor(rows)
    keys = torch.zeros(*values.shape, D)
    keys[..., 0] = values
    q = torch.zeros(len(values), 2, D)
    q[:, 0, 0], q[:, 1, 0] = 1.0, -1.0
    return q, keys, torch.tensor([1.0, -1.0]).expand(len(values), 2).contiguous()
