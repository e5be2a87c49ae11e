from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged import (
    ALL_BACKENDS,
    BACKENDS,
    DEVICE_BACKENDS,
    INDEX_LAYOUTS,
    MAIN_LAYOUTS,
    Cache,
    a_device,
    make_cache,
    runnable,
    skip_float64,
    use_backend,
    use_device_backend,
    without_waiting,
)
from torch import Tensor

from anymla.formats.hadamard import hadamard_transform
from anymla.formats.page_layout import get_layout
from anymla.ops.compressor import compress_norm_rope_insert, config, save_partial_states
from anymla.ops.compressor.shapes import (
    ROPE_DIM,
    V4_INDEX,
    V4_RATIO4,
    V4_RATIO128,
    CompressorShape,
)
from anymla.ops.norm_rope import YarnScaling, cos_sin_table, inv_freq
from anymla.testing.tolerance import accumulation, assert_close, ulps

TABLE = cos_sin_table(inv_freq(ROPE_DIM, 160000.0, YarnScaling(16.0, 65536)), 0, 1024)
EPS = 1e-6
HOSTILE = (-1, -(2**31), 2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A compressor as data."""

    ratio: int
    overlap: bool
    dim: int

    @property
    def parts(self) -> int:
        return 2 if self.overlap else 1

    @property
    def width(self) -> int:
        return self.parts * self.dim

    @property
    def layouts(self) -> tuple[str, ...]:
        return MAIN_LAYOUTS if self.dim == 512 else INDEX_LAYOUTS

    @property
    def plain(self) -> str:
        return f"rows_fp32_{self.dim}"


def kind_of(shape: CompressorShape) -> Kind:
    return Kind(shape.window.ratio, shape.window.overlap, shape.window.channels)


DEEPSEEK = {
    "overlapping": kind_of(V4_RATIO4),
    "overlapping index": kind_of(V4_INDEX),
    "long": kind_of(V4_RATIO128),
}
STATE_PAGES = V4_RATIO4.window.page_size, V4_RATIO128.window.page_size
OTHERS = {
    "every token": Kind(1, False, 128),
    "pairs": Kind(2, False, 512),
    "odd": Kind(3, True, 128),
}


def by_kind(kinds: dict[str, Kind]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", list(kinds.values()), ids=list(kinds))


# Codes are the layouts' matter, so one kind of Triton's is enough but for one test.
KINDS = (*BACKENDS, "triton")


@pytest.fixture(params=KINDS)
def backend(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


class World:
    """Some requests with their tokens' projections, a state cache full of NaN and a target."""

    def __init__(
        self,
        kind: Kind,
        lengths: list[int],
        *,
        layout: str | None = None,
        page: int = 4,
        entries: int = 2,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        gap: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=dtype)

        self.kind, self.page, self.entries, self.dtype = kind, page, entries, dtype
        self.lengths = lengths
        self.kv = [normal(length, kind.width) * 2 for length in lengths]
        self.score = [normal(length, kind.width) * 3 for length in lengths]
        self.ape = normal(kind.ratio, kind.width)
        self.weight = normal(kind.dim)
        longest = max([*lengths, 1])
        columns = -(-longest // page)
        pages = len(lengths) * columns + 1
        self.state_table = (
            torch.randperm(pages, generator=generator)[: len(lengths) * columns]
            .view(len(lengths), columns)
            .int()
        )
        storage = torch.full((pages, page * 2 * kind.width + gap), torch.nan, dtype=dtype)
        self.state = storage[:, : page * 2 * kind.width].unflatten(1, (page, 2 * kind.width))
        self.state_storage = storage
        k_columns = -(-longest // (kind.ratio * entries))
        self.cache: Cache = make_cache(layout or kind.plain, len(lengths) * k_columns, entries)
        self.k_table = torch.randperm(len(lengths) * k_columns, generator=generator)
        self.k_table = self.k_table.view(len(lengths), k_columns)

    def k_slot(self, request: int, entry: int) -> int:
        page = int(self.k_table[request, entry // self.entries])
        return page * self.entries + entry % self.entries

    def expected_slots(self) -> set[int]:
        return {
            self.k_slot(request, entry)
            for request, length in enumerate(self.lengths)
            for entry in range(length // self.kind.ratio)
        }

    def step(
        self,
        spans: list[tuple[int, int, int]],
        *,
        padding: int = 0,
        backend: str,
        hadamard: bool = False,
    ) -> None:
        """Tokens start .. stop - 1 of requests, then padding tokens full of NaN."""
        ratio = self.kind.ratio
        tokens = [(r, p) for r, start, stop in spans for p in range(start, stop)]
        kv = [self.kv[r][start:stop] for r, start, stop in spans]
        score = [self.score[r][start:stop] for r, start, stop in spans]
        nan = torch.full((padding, self.kind.width), torch.nan, dtype=self.dtype)
        fused = torch.cat((torch.cat([*kv, nan]), torch.cat([*score, nan])), dim=1)
        state_slots = [
            int(self.state_table[r, p // self.page]) * self.page + p % self.page for r, p in tokens
        ]
        k_slots = [self.k_slot(r, p // ratio) if (p + 1) % ratio == 0 else -1 for r, p in tokens]
        # Padding tokens stand at a closing position, so that only their slots hold them back.
        positions = torch.tensor([p for _, p in tokens] + [ratio - 1] * padding)
        requests = torch.tensor([r for r, _ in tokens] + [-1] * padding, dtype=torch.int32)
        state_slots_all = torch.tensor(state_slots + [-1] * padding, dtype=torch.int64)
        k_slots_all = torch.tensor(k_slots + [-1] * padding, dtype=torch.int64)
        save_partial_states(
            *fused.split(self.kind.width, dim=1),
            self.ape,
            positions.long(),
            self.state,
            state_slots_all[: len(tokens)] if padding == 1 else state_slots_all,
            compress_ratio=ratio,
            backend=backend,
        )
        compress_norm_rope_insert(
            self.state,
            self.state_table,
            state_slots_all,
            requests,
            positions.long(),
            self.weight,
            EPS,
            TABLE,
            self.cache.tensor,
            k_slots_all,
            compress_ratio=ratio,
            overlap=self.kind.overlap,
            layout=self.cache.layout.layout_id,
            hadamard=hadamard,
            backend=backend,
        )

    def rows(self, request: int) -> Tensor:
        """Decoded entries of a request, by the layout's own codec."""
        count = self.lengths[request] // self.kind.ratio
        slots = [self.k_slot(request, entry) for entry in range(count)]
        return self.cache.layout.read(
            self.cache.tensor, torch.tensor(slots, dtype=torch.int64), torch.float64
        )

    def formula(self, request: int) -> Tensor:
        """Entries of a request by the definition, in float64."""
        kind, kv = self.kind, self.kv[request].double()
        bias = self.ape.double().repeat(-(-len(kv) // kind.ratio), 1)[: len(kv)]
        score = self.score[request].double() + bias
        rows = []
        for entry in range(len(kv) // kind.ratio):
            first, stop = entry * kind.ratio, (entry + 1) * kind.ratio
            own = slice(kind.width - kind.dim, None)
            values, logits = [kv[first:stop, own]], [score[first:stop, own]]
            if kind.overlap and entry:
                values.append(kv[first - kind.ratio : first, : kind.dim])
                logits.append(score[first - kind.ratio : first, : kind.dim])
            e = torch.cat(logits).exp()
            c = (e / e.sum(0) * torch.cat(values)).sum(0)
            c = c / (c.square().mean() + EPS).sqrt() * self.weight.double()
            cos, sin = TABLE[first].double().chunk(2)
            pairs = torch.view_as_complex(c[-64:].view(32, 2)) * torch.complex(cos, sin)
            rows.append(torch.cat((c[:-64], torch.view_as_real(pairs).flatten())))
        return torch.stack(rows) if rows else torch.zeros(0, kind.dim, dtype=torch.float64)


def one_shot(world: World, backend: str, **options: bool) -> World:
    world.step(
        [(r, 0, length) for r, length in enumerate(world.lengths)], backend=backend, **options
    )
    return world


# What an entry is ------------------------------------------------------------------------------


@by_kind(DEEPSEEK | OTHERS)
@pytest.mark.parametrize("page", [1, *STATE_PAGES])
def test_entries_by_the_formula(backend, kind, page):
    skip_float64(backend, torch.float64)
    world = one_shot(World(kind, [3 * kind.ratio + 2, 17], page=page, dtype=torch.float64), backend)
    for request in range(2):
        # float64 all the way; the float32 target rounds once.
        assert_close(
            world.rows(request), world.formula(request), rtol=ulps(torch.float32, 0.5) + 1e-12
        )


def bound_in_float32(world: World, want: Tensor) -> dict[str, float]:
    """How far float32 entries of a world's first request may be from ``want``."""
    kind = world.kind
    # A logit of magnitude s carries s units of relative error into its weight; the pooled sum is
    # then divided by its root mean square, which cancellation makes small.
    logits = float(world.score[0].abs().max() + world.ape.abs().max())
    bound = accumulation(kind.parts * kind.ratio, torch.float32) + ulps(torch.float32, logits + 8)
    unscaled = want / world.weight.double()
    amplification = float(world.kv[0].abs().max()) / float(unscaled.square().mean(1).sqrt().min())
    return {"atol": bound, "scale": amplification * 2 * float(world.weight.abs().max())}


@by_kind(DEEPSEEK | OTHERS)
@pytest.mark.parametrize("page", [1, STATE_PAGES[0]])
def test_entries_in_float32(backend, kind, page):
    world = one_shot(World(kind, [5 * kind.ratio], page=page, seed=3), backend)
    want = world.formula(0)
    assert_close(world.rows(0), want, **bound_in_float32(world, want))


@by_kind(DEEPSEEK)
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("backend", ALL_BACKENDS, indirect=True)
def test_the_layout_rounds_and_nothing_else(backend, kind, hadamard):
    """The bytes are the encoding of the float32 row."""
    length = 2 * kind.ratio + 9
    plain = one_shot(World(kind, [length], seed=5), backend)
    rotated = one_shot(World(kind, [length], seed=5), backend, hadamard=hadamard)
    rows = plain.rows(0).float()
    if hadamard:
        rows = hadamard_transform(rows)
        assert not torch.equal(rows, plain.rows(0).float())
    assert torch.equal(rotated.rows(0).float(), rows)
    for layout in kind.layouts:
        world = one_shot(World(kind, [length], layout=layout, seed=5), backend, hadamard=hadamard)
        data, scales = world.cache.layout.encode(rows)
        want = data if scales is None else torch.cat((data, scales), dim=1)
        for entry, stored in enumerate(want):
            assert torch.equal(world.cache.entry_bytes(world.k_slot(0, entry)), stored)


@pytest.mark.parametrize("wrong", ["end", "next", "zero"])
def test_an_entry_is_rotated_at_its_first_position(backend, wrong):
    kind = DEEPSEEK["overlapping"]
    world = one_shot(World(kind, [16]), backend)
    row, want = world.rows(0)[2], world.formula(0)[2]
    assert (row - want).abs().max() < 1e-4
    by = {"end": 3, "next": 4, "zero": -8}[wrong]
    angle = TABLE[8 + by].double() if by > 0 else TABLE[0].double()
    pairs = torch.view_as_complex(want[-64:].view(32, 2).contiguous())
    first = torch.complex(*TABLE[8].double().chunk(2))
    moved = torch.view_as_real(pairs / first * torch.complex(*angle.chunk(2))).flatten()
    assert (row[-64:] - moved).abs().max() > 0.1


LENGTHS = [*range(1, 10), 127, 128, 129, 255, 256, 257]


@by_kind(DEEPSEEK)
def test_only_complete_windows_become_entries(backend, kind):
    slow = backend == "triton" and kind.ratio < V4_RATIO128.window.ratio
    for length in (1, 3, 4, 5, 8, 9, 31) if slow else LENGTHS:
        world = World(kind, [length], layout=kind.layouts[0])
        before = world.cache.storage.clone()
        world.step([(0, 0, length)], backend=backend)
        assert world.cache.changed(before) == world.expected_slots()
        assert len(world.expected_slots()) == length // kind.ratio
        assert world.rows(0).isfinite().all()


# Chunks, batches, going back -------------------------------------------------------------------


@by_kind(DEEPSEEK)
@pytest.mark.parametrize("layout", [0, 1, 2])
def test_token_by_token_is_one_shot(backend, kind, layout):
    length = 2 * kind.ratio + 3
    whole = one_shot(World(kind, [length], layout=kind.layouts[layout]), backend)
    single = World(kind, [length], layout=kind.layouts[layout])
    for position in range(length):
        single.step([(0, position, position + 1)], backend=backend)
    assert torch.equal(single.cache.storage, whole.cache.storage)


@given(
    kind=st.sampled_from(list((DEEPSEEK | OTHERS).values())),
    cuts=st.lists(st.integers(1, 299), max_size=6),
    page=st.sampled_from([1, 3, 4, 8, 64]),
    entries=st.sampled_from([1, 2, 64]),
    name=st.sampled_from(runnable(KINDS)[1:]),
    seed=st.integers(0, 99),
)
def test_any_chunks_are_one_shot(kind, cuts, page, entries, name, seed):
    options = {"layout": kind.layouts[0], "page": page, "entries": entries, "seed": seed}
    with pytest.MonkeyPatch.context() as patch:
        backend = use_backend(name, patch)
        # The interpreter takes its time; this still closes windows of every kind.
        length = min(300, kind.ratio + 26) if backend == "triton" else 300
        whole = one_shot(World(kind, [length], **options), backend)
        chunked = World(kind, [length], **options)
        bounds = [0, *sorted({cut for cut in cuts if cut < length}), length]
        for start, stop in itertools.pairwise(bounds):
            chunked.step([(0, start, stop)], backend=backend)
    assert torch.equal(chunked.cache.storage, whole.cache.storage)
    assert torch.equal(chunked.state.nan_to_num(7.0), whole.state.nan_to_num(7.0))


@by_kind(DEEPSEEK | OTHERS)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_blocks_do_not_show(backend, kind, monkeypatch):
    """However little is gathered at a time, the entries are the same bits."""
    length = 5 * kind.ratio
    whole = one_shot(World(kind, [length, length], layout=kind.layouts[0]), backend)
    monkeypatch.setattr(config, "HOST_ELEMENTS", 2 * kind.ratio * 2 * kind.width)
    monkeypatch.setattr(config, "DEVICE_ELEMENTS", 1)
    pieces = one_shot(World(kind, [length, length], layout=kind.layouts[0]), backend)
    assert torch.equal(pieces.cache.storage, whole.cache.storage)


@by_kind(DEEPSEEK)
@pytest.mark.parametrize("padding", [0, 1, 5])
def test_a_batch_is_its_requests(backend, kind, padding):
    """Mixed prefill and decode, with padding tokens that nobody may see."""
    lengths = [2 * kind.ratio + 1, kind.ratio, 5, kind.ratio + 7]
    world = World(kind, lengths, layout=kind.layouts[0])
    half = [length // 2 for length in lengths]
    world.step([(r, 0, half[r]) for r in (2, 0, 3)], padding=padding, backend=backend)
    world.step(
        [(1, 0, lengths[1]), *((r, half[r], lengths[r]) for r in (3, 2, 0))],
        padding=padding,
        backend=backend,
    )
    alone = World(kind, lengths, layout=kind.layouts[0])
    for request, length in enumerate(lengths):
        alone.step([(request, 0, length)], backend=backend)
    assert torch.equal(world.cache.storage, alone.cache.storage)
    assert world.expected_slots()


@by_kind(DEEPSEEK)
@pytest.mark.parametrize("drafted", [1, 3, 4, 5, 9])
def test_going_back_needs_no_undoing(backend, kind, drafted):
    """Rejected tokens wrote states and entries; the accepted ones write them again."""
    length = kind.ratio + 6
    world = World(kind, [length + drafted], layout=kind.layouts[0])
    for accepted in range(2, length, max(1, kind.ratio // 3)):
        world.step([(0, 0, accepted)], backend=backend)
        true_kv = world.kv[0].clone()
        world.kv[0][accepted : accepted + drafted] = 99.0
        world.step([(0, accepted, accepted + drafted)], backend=backend)
        world.kv[0] = true_kv
        world.step([(0, accepted, accepted + drafted)], backend=backend)
    world.step([(0, accepted, length + drafted)], backend=backend)
    never = one_shot(World(kind, [length + drafted], layout=kind.layouts[0]), backend)
    assert torch.equal(world.cache.storage, never.cache.storage)


@by_kind(DEEPSEEK)
def test_states_older_than_the_retention_are_never_read(backend, kind):
    """Pages behind the window are freed, poisoned, and handed to whoever comes next."""
    length = 3 * kind.ratio + 2
    kept = World(kind, [length], layout=kind.layouts[0])
    freed = World(kind, [length], layout=kind.layouts[0])
    retention = kind.parts * kind.ratio
    for position in range(length):
        kept.step([(0, position, position + 1)], backend=backend)
        freed.step([(0, position, position + 1)], backend=backend)
        oldest_page = max(0, position + 2 - retention) // freed.page
        for column in range(oldest_page):
            if int(freed.state_table[0, column]) >= 0:
                freed.state[int(freed.state_table[0, column])] = torch.nan
                freed.state_table[0, column] = -1 if column % 2 else -7
    assert torch.equal(freed.cache.storage, kept.cache.storage)
    assert (freed.state_table < 0).any()


def test_a_step_that_closes_no_window_touches_nothing(backend):
    world = World(DEEPSEEK["overlapping"], [8], layout="v4_main_fp8")
    before = world.cache.storage.clone()
    for position in (0, 1, 2):
        world.step([(0, position, position + 1)], backend=backend)
    assert not world.cache.changed(before)


# Hostile input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "hostile"),
    [
        *(("state_slot_mapping", value) for value in (-1, -(2**62), 10**6, 2**62)),
        *(("k_slot_mapping", value) for value in (-1, -(2**62), 10**6, 2**62)),
        *(("token_to_req", value) for value in (-1, -(2**31), 5, 2**31 - 1)),
        *(("positions", value) for value in (-1, -9, -(2**62), 2**62 + 3, 10**9 + 3, 4, 5, 6)),
    ],
)
def test_a_hostile_token_is_skipped_and_the_others_are_not(backend, argument, hostile):
    kind = DEEPSEEK["overlapping"]
    world = one_shot(World(kind, [12], layout="v4_main_fp8"), backend)
    want = world.cache.storage.clone()
    fresh = make_cache("v4_main_fp8", *world.cache.tensor.shape[:2])
    before = fresh.storage.clone()
    (free,) = set(range(fresh.slots)) - world.expected_slots()
    arguments = {
        "state_slot_mapping": torch.tensor([0, 0, 1, 2], dtype=torch.int64),
        "token_to_req": torch.zeros(4, dtype=torch.int32),
        "positions": torch.tensor([7, 3, 3, 11], dtype=torch.int64),
        "k_slot_mapping": torch.tensor(
            [world.k_slot(0, 1), free, *map(world.k_slot, (0, 0), (0, 2))]
        ),
    }
    arguments[argument][1] = hostile
    compress_norm_rope_insert(
        state_cache=world.state,
        state_block_table=world.state_table,
        norm_weight=world.weight,
        eps=EPS,
        cos_sin_cache=TABLE,
        k_cache=fresh.tensor,
        compress_ratio=kind.ratio,
        overlap=True,
        layout="v4_main_fp8",
        backend=backend,
        **arguments,
    )
    assert fresh.changed(before) == world.expected_slots()
    assert torch.equal(fresh.storage, want)


@pytest.mark.parametrize("hostile", [-1, -(2**31), 10**6, 2**31 - 1])
def test_positions_without_a_page_take_no_part(backend, hostile):
    kind = DEEPSEEK["overlapping"]
    dtype = torch.float32 if backend == "triton" else torch.float64
    world = one_shot(World(kind, [12], page=4, dtype=dtype), backend)
    known = world.rows(0)
    world.state_table[0, 1] = hostile  # positions 4..7
    world.cache.storage.fill_(0xFF)
    state = torch.zeros(3, dtype=torch.int64)
    slots = torch.tensor([world.k_slot(0, entry) for entry in range(3)])
    before = world.cache.storage.clone()
    compress_norm_rope_insert(
        world.state,
        world.state_table,
        state,
        torch.zeros(3, dtype=torch.int32),
        torch.tensor([3, 7, 11]),
        world.weight,
        EPS,
        TABLE,
        world.cache.tensor,
        slots,
        compress_ratio=kind.ratio,
        overlap=True,
        layout=kind.plain,
        backend=backend,
    )
    got = world.rows(0)
    assert torch.equal(got[0], known[0])
    # Entry 1 still has the previous window's rows, entry 2 only its own.
    assert got.isfinite().all()
    assert not torch.equal(got[1], known[1])
    lone = World(kind, [12], dtype=dtype)
    lone.score[0][4:8, : kind.dim] = -torch.inf
    want = lone.formula(0)[2:]
    rounding = {"rtol": ulps(torch.float32, 0.5) + 1e-12}
    assert_close(
        got[2:], want, **bound_in_float32(world, want) if backend == "triton" else rounding
    )

    world.state_table[0, :2] = hostile  # nothing left to pool for entry 1
    world.cache.storage.copy_(before)
    compress_norm_rope_insert(
        world.state,
        world.state_table,
        state[:1],
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([7]),
        world.weight,
        EPS,
        TABLE,
        world.cache.tensor,
        slots[1:2],
        compress_ratio=kind.ratio,
        overlap=True,
        layout=kind.plain,
        backend=backend,
    )
    assert torch.equal(world.cache.storage, before)


@by_kind(DEEPSEEK)
def test_nothing_to_do(backend, kind):
    world = World(kind, [4], layout=kind.layouts[0])
    before = world.cache.storage.clone()
    world.step([], backend=backend)
    world.step([], padding=3, backend=backend)
    empty = world.state[:0]
    i64, i32 = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    for state, table in (
        (empty, world.state_table),
        (world.state, world.state_table[:0]),
        (world.state, world.state_table[:, :0]),
    ):
        compress_norm_rope_insert(
            state,
            table,
            i64,
            i32,
            i64 + kind.ratio - 1,
            world.weight,
            EPS,
            TABLE,
            world.cache.tensor,
            i64,
            compress_ratio=kind.ratio,
            overlap=kind.overlap,
            layout=kind.layouts[0],
            backend=backend,
        )
    assert not world.cache.changed(before)


def test_states_beyond_two_gibibytes(backend):
    """Only touched memory becomes real, so a large cache costs little."""
    kind = DEEPSEEK["overlapping"]
    world = World(kind, [8])
    want = one_shot(World(kind, [8]), backend).cache.storage
    pages = 2**31 // (world.state.element_size() * world.state[0].numel()) + 3
    world.state = torch.empty(pages, *world.state.shape[1:])
    world.state_table = torch.tensor([[pages - 1, pages - 3]], dtype=torch.int32)
    world.step([(0, 0, 8)], backend=backend)
    assert torch.equal(world.cache.storage, want)


# Saving states ---------------------------------------------------------------------------------


@given(
    kind=st.sampled_from(list((DEEPSEEK | OTHERS).values())),
    pages=st.integers(0, 4),
    page=st.integers(1, 9),
    gap=st.sampled_from([0, 16, 37]),
    tokens=st.integers(0, 9),
    hostile=st.lists(st.sampled_from([-1, -(2**62), 2**62, 10**6]), max_size=3),
    unmapped=st.integers(0, 2),
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    name=st.sampled_from(runnable(KINDS)),
)
def test_states_are_values_and_biased_scores(
    kind, pages, page, gap, tokens, hostile, unmapped, seed, dtype, name
):
    if name == "triton":
        dtype = torch.float32
    generator = torch.Generator().manual_seed(seed)
    storage = torch.full((pages, page * 2 * kind.width + gap), torch.nan, dtype=dtype)
    state = storage[:, : page * 2 * kind.width].unflatten(1, (page, 2 * kind.width))
    valid = torch.randperm(pages * page, generator=generator)[:tokens].tolist()
    slots = [*valid, *hostile, pages * page]
    order = torch.randperm(len(slots), generator=generator)
    mapping = torch.tensor(slots)[order]
    count = len(slots) + unmapped
    fused = torch.randn(count, 2 * kind.width, generator=generator, dtype=dtype)
    kv, score = fused.split(kind.width, dim=1)
    ape = torch.randn(kind.ratio, kind.width, generator=generator, dtype=dtype)
    positions = torch.randint(0, 10**6, (count,), generator=generator)
    positions[:1] = -5  # a padding token may have any position
    want = storage.clone()
    for token, slot in enumerate(mapping.tolist()):
        if slot in valid:
            row = torch.cat((kv[token], score[token] + ape[int(positions[token]) % kind.ratio]))
            begin = slot % page * 2 * kind.width
            want[slot // page, begin : begin + 2 * kind.width] = row
    with pytest.MonkeyPatch.context() as patch:
        save_partial_states(
            kv,
            score,
            ape,
            positions,
            state,
            mapping,
            compress_ratio=kind.ratio,
            backend=use_backend(name, patch),
        )
    assert torch.equal(storage.nan_to_num(7.0), want.nan_to_num(7.0))


def test_the_masking_branch_never_looks(monkeypatch):
    """What runs on a device: no operation that would wait for a value."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoLooking(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            waits = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select")
            assert not any(wait in str(func) for wait in waits), func
            return func(*args, **(kwargs or {}))

    backend = use_backend("torch without looking at values", monkeypatch)
    world = World(DEEPSEEK["overlapping"], [9], layout="v4_main_fp8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "step", _inside(World.step, NoLooking))
        world.step([(0, 0, 9)], padding=2, backend=backend)
    want = one_shot(World(DEEPSEEK["overlapping"], [9], layout="v4_main_fp8"), "reference")
    assert torch.equal(world.cache.storage, want.cache.storage)


def _inside(function, mode):
    """The function, with the two operations that it calls under ``mode``."""

    def run(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("save_partial_states", "compress_norm_rope_insert"):
                original = globals()[name]

                def guarded(*a, _original=original, **k):
                    with mode():
                        return _original(*a, **k)

                patch.setitem(globals(), name, guarded)
            return function(*args, **kwargs)

    return run


# What bad arguments get ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv": torch.zeros(2, 256).bfloat16()}, TypeError, "kv must be float32 or float64"),
        ({"score": torch.zeros(2, 128)}, ValueError, r"score must be .* \[T=2, W=256\]"),
        ({"ape": torch.zeros(3, 256)}, ValueError, r"ape must be .* \[r=4, W=256\]"),
        ({"state_cache": torch.zeros(1, 4, 256)}, ValueError, r"must be \[P, S, 512\], got \[1"),
        ({"state_cache": torch.zeros(1, 4, 600)[..., :512]}, ValueError, "inner strides"),
        ({"slot_mapping": torch.zeros(3).long()}, ValueError, "at most T=2 long, got 3"),
        ({"slot_mapping": torch.zeros(2).int()}, TypeError, "slot_mapping must be int64"),
        ({"compress_ratio": 0}, ValueError, "compress_ratio must be at least 1, got 0"),
    ],
)
def test_saving_names_what_is_wrong(change, error, message):
    arguments = {
        "kv": torch.zeros(2, 256),
        "score": torch.zeros(2, 256),
        "ape": torch.zeros(4, 256),
        "positions": torch.zeros(2, dtype=torch.int64),
        "state_cache": torch.zeros(1, 4, 512),
        "slot_mapping": torch.zeros(2, dtype=torch.int64),
        "compress_ratio": 4,
    }
    with pytest.raises(error, match=message):
        save_partial_states(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"overlap": False}, ValueError, r"state_cache must be \[P, S, 256\], got \[1, 4, 512\]"),
        ({"state_cache": torch.zeros(1, 4, 512).bfloat16()}, TypeError, "state_cache must be"),
        ({"positions": torch.zeros(3).long()}, ValueError, r"positions must be int64 \[T=2\]"),
        ({"token_to_req": torch.zeros(2).long()}, TypeError, "token_to_req must be int32"),
        ({"cos_sin_cache": TABLE[:0]}, ValueError, r"L >= 1, got \[0, 64\]"),
        ({"cos_sin_cache": TABLE[:, :7]}, ValueError, r"R even .* got \[1024, 7\]"),
        ({"layout": "v4_main_fp8"}, ValueError, r"k_cache must be \[P, B, 584\]"),
        ({"layout": "index"}, ValueError, "unknown cache layout 'index'"),
        ({"compress_ratio": -4}, ValueError, "compress_ratio must be at least 1, got -4"),
        (
            {"norm_weight": torch.zeros(96), "state_cache": torch.zeros(1, 4, 384)},
            ValueError,
            "layout must be one of 96 channels",
        ),
    ],
)
def test_compressing_names_what_is_wrong(change, error, message):
    arguments = {
        "state_cache": torch.zeros(1, 4, 512),
        "state_block_table": torch.zeros(1, 1, dtype=torch.int32),
        "state_slot_mapping": torch.zeros(2, dtype=torch.int64),
        "token_to_req": torch.zeros(2, dtype=torch.int32),
        "positions": torch.zeros(2, dtype=torch.int64),
        "norm_weight": torch.zeros(128),
        "eps": EPS,
        "cos_sin_cache": TABLE,
        "k_cache": torch.zeros(2, 4, 132, dtype=torch.uint8),
        "k_slot_mapping": torch.zeros(2, dtype=torch.int64),
        "compress_ratio": 4,
        "overlap": True,
        "layout": "v4_index_fp8",
    }
    with pytest.raises(error, match=message):
        compress_norm_rope_insert(**(arguments | change))


# What a device does ----------------------------------------------------------------------------


@pytest.mark.gpu
@by_kind(DEEPSEEK | OTHERS)
@pytest.mark.parametrize("name", DEVICE_BACKENDS[:2])
def test_a_device_does_the_same_without_waiting(kind, name, monkeypatch):
    device, backend = a_device(), use_device_backend(name, monkeypatch)
    length = 2 * kind.ratio + 3
    want = one_shot(World(kind, [length, 5]), "torch")
    positions = torch.cat((torch.arange(length), torch.arange(5), torch.tensor([kind.ratio - 1])))
    requests = torch.tensor([0] * length + [1] * 5 + [-1], dtype=torch.int32)
    pages = want.state_table[requests.long().clamp(min=0), positions // want.page]
    state_slots = torch.where(requests < 0, -1, pages * want.page + positions % want.page)
    k_slots = torch.tensor(
        [
            want.k_slot(r, p // kind.ratio) if r >= 0 and (p + 1) % kind.ratio == 0 else -1
            for r, p in zip(requests.tolist(), positions.tolist(), strict=True)
        ]
    )
    padding = torch.full((1, kind.width), torch.nan)
    kv, score = (torch.cat((*x, padding)).to(device) for x in (want.kv, want.score))
    state = torch.full_like(want.state, torch.nan).to(device)
    cache = torch.full_like(want.cache.tensor, torch.nan).to(device)
    ape, weight, table = (x.to(device) for x in (want.ape, want.weight, TABLE))
    tables, requests, positions, state_slots, k_slots = (
        x.to(device) for x in (want.state_table, requests, positions, state_slots, k_slots)
    )
    with without_waiting(device):
        save_partial_states(
            kv,
            score,
            ape,
            positions,
            state,
            state_slots,
            compress_ratio=kind.ratio,
            backend=backend,
        )
        compress_norm_rope_insert(
            state,
            tables,
            state_slots,
            requests,
            positions,
            weight,
            EPS,
            table,
            cache,
            k_slots,
            compress_ratio=kind.ratio,
            overlap=kind.overlap,
            layout=kind.plain,
            backend=backend,
        )
    assert torch.equal(state.cpu().nan_to_num(7.0), want.state.nan_to_num(7.0))
    # The same float32 steps in another order of summation and with another exponential.
    bound = accumulation(kind.parts * kind.ratio, torch.float32) + ulps(torch.float32, 32)
    scale = float(want.rows(0).abs().max()) * 16
    want.cache.tensor.copy_(want.cache.tensor.nan_to_num(7.0))
    assert_close(cache.cpu().nan_to_num(7.0), want.cache.tensor, atol=bound, scale=scale)


@pytest.mark.gpu
@by_kind(DEEPSEEK)
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("name", DEVICE_BACKENDS)
def test_on_a_device_the_layout_rounds_and_nothing_else(kind, hadamard, name, monkeypatch):
    """The bytes are the encoding of what the same backend stores in float32."""
    device, backend = a_device(), use_device_backend(name, monkeypatch)
    length = 2 * kind.ratio + 9
    want = one_shot(World(kind, [length], seed=5), "torch")
    ends = torch.arange(kind.ratio - 1, length, kind.ratio)
    slots = torch.tensor([want.k_slot(0, entry) for entry in range(len(ends))])
    zeros = torch.zeros(len(ends), dtype=torch.int64)
    inputs = (want.state, want.state_table, zeros, zeros.int(), ends, want.weight)
    state, table, state_slots, requests, positions, weight = (x.to(device) for x in inputs)
    rows = None
    for layout in (kind.plain, *kind.layouts):
        row_layout = get_layout(layout)
        cache = row_layout.allocate(*want.cache.tensor.shape[:2], device=device)
        compress_norm_rope_insert(
            state,
            table,
            state_slots,
            requests,
            positions,
            weight,
            EPS,
            TABLE.to(device),
            cache,
            slots.to(device),
            compress_ratio=kind.ratio,
            overlap=kind.overlap,
            layout=layout,
            hadamard=hadamard,
            backend=backend,
        )
        if rows is None:
            rows = row_layout.read(cache.cpu(), slots, torch.float32)
            assert rows.any(dim=1).all()
        expected = row_layout.allocate(*want.cache.tensor.shape[:2])
        row_layout.write(expected, slots, rows)
        assert torch.equal(cache.cpu().view(torch.uint8), expected.view(torch.uint8))
