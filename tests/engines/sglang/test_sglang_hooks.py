"""SGLang's own methods on a CPU, with anymla's hooks applied by SGLang."""

from __future__ import annotations

import importlib.util
import logging
import types
from typing import Any

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang: make test-sglang", allow_module_level=True)

import backends
from sglang.srt.plugins.hook_registry import HookRegistry

from anymla.audit.auditor import Auditor
from anymla.audit.process import judge_here
from anymla.audit.settings import Settings
from anymla.engines.sglang import attention, audit, indexer, pinned, plugin, report
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout
from anymla.testing.oracle.row_formats import ROW_FORMATS

LENGTHS = [700, 130, 3, 260]


@pytest.fixture(scope="module", autouse=True)
def hooks() -> None:
    """Register all hooks as the plugin does, once: SGLang applies them for good."""
    attention.register()
    indexer.register()
    audit.register()
    HookRegistry.apply_hooks()
    attention.backend_built(None, types.SimpleNamespace())


def decoded(scene: backends.Scene, ratio: int, slots: torch.Tensor) -> torch.Tensor:
    """Rows of a pool at slots, in float64."""
    size = backends.PAGE // max(1, ratio)
    pool = scene.backend.token_to_kv_pool
    layer = scene.layers[ratio].layer_id
    buffer = pool.get_extra_key_buffer(layer) if ratio else pool.get_swa_key_buffer_radix(layer)
    view = buffer[:, : size * 584].view(len(buffer), size, 584)
    planes = get_layout(MAIN_FP8).planes(view)
    picked = [each[slots // size, slots % size] for each in planes if each is not None]
    return ROW_FORMATS[MAIN_FP8].decode(*picked).double()


def expected(scene: backends.Scene, ratio: int) -> torch.Tensor:
    """Attention to the listed rows and the sink in float64."""
    core = scene.backend.forward_metadata.core_attn_metadata
    out = []
    for token in range(len(scene.q)):
        window = core.swa_page_indices[token, : core.swa_topk_lengths[token]].long()
        rows = [decoded(scene, 0, window)]
        if ratio:
            listed = core.sparse_page_indices(ratio)[token].long()
            listed = listed[: core.sparse_topk_lengths(ratio)[token]]
            rows.append(decoded(scene, ratio, listed[listed >= 0]))
        keys = torch.cat(rows)
        scores = scene.q[token].double() @ keys.T * 512**-0.5
        weights = torch.cat((scores, scene.sink.double().unsqueeze(1)), 1).softmax(1)
        out.append(weights[:, :-1] @ keys)
    return torch.stack(out)


def choose(scene: backends.Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Run SGLang's selection method with a random index query; return query and weights."""
    generator = torch.Generator().manual_seed(9)
    tokens = len(scene.q)
    q = torch.randn(tokens, 64, 128, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(tokens, 64, 1, generator=generator)
    of_layer = types.SimpleNamespace(
        layer_id=1,
        use_fp4_indexer=False,
        compute_weights=lambda x, skip_scale: weights,
        compute_q=lambda *args: (q, weights),
    )
    x = torch.zeros(tokens, 8)
    scene.backend.forward_c4_indexer(x, x, of_layer, scene.batch, skip_compressor=True)
    return q, weights


@pytest.mark.parametrize("heads", [1, 8, 20, 64])
@pytest.mark.parametrize("ratio", backends.RATIOS)
def test_sglangs_attention_is_computed_by_anymla(ratio: int, heads: int) -> None:
    scene = backends.scene(LENGTHS, heads)
    if ratio == 4:
        choose(scene)
    got, want = scene.attend(ratio), expected(scene, ratio)
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2 * float(want.std()))


def test_a_call_that_is_not_v4s_reaches_sglangs_function() -> None:
    from sglang.kernels.ops.attention import flash_mla_interface

    rows = torch.zeros(1, 64, 1, 656, dtype=torch.uint8)
    meta = flash_mla_interface.get_mla_metadata()[0]
    with pytest.raises(NotImplementedError, match="FlashMLA is not installed"):
        flash_mla_interface.flash_mla_with_kvcache(
            q=torch.zeros(1, 1, 64, 576),
            k_cache=rows,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=512,
            tile_scheduler_metadata=meta,
            indices=torch.zeros(1, 1, 64, dtype=torch.int32),
        )


@pytest.mark.parametrize("legacy", [True, False])
def test_prefill_over_decoded_rows(*, legacy: bool) -> None:
    from sglang.kernels.ops.attention import flash_mla_interface

    generator = torch.Generator().manual_seed(3)
    q = torch.randn(5, 8, 512, generator=generator).bfloat16()
    kv = torch.randn(90, 1, 512, generator=generator).bfloat16()
    indices = torch.randint(0, 90, (5, 1, 64), generator=generator, dtype=torch.int32)
    lengths = torch.tensor([64, 1, 30, 0, 64], dtype=torch.int32)
    sink = torch.randn(8, generator=generator)
    out, largest, lse = flash_mla_interface.flash_mla_sparse_fwd(
        q, kv, indices, 512**-0.5, 512, sink, lengths, use_legacy=legacy
    )
    for token, count in enumerate(lengths.tolist()):
        keys = kv[indices[token, 0, :count].long(), 0].double()
        scores = q[token].double() @ keys.T * 512**-0.5
        weights = torch.cat((scores, sink.double().unsqueeze(1)), 1).softmax(1)
        want = weights[:, :-1] @ keys
        torch.testing.assert_close(out[token].double(), want, rtol=2e-2, atol=2e-2)
        if count:
            unit = torch.log(torch.tensor(2.0)).item() if legacy else 1.0
            got = lse[token].double() * unit
            torch.testing.assert_close(got, scores.logsumexp(1), rtol=1e-4, atol=1e-4)
            got = largest[token].double() * unit
            torch.testing.assert_close(got, scores.amax(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [256, 64, 2])
def test_sglangs_writer_and_anymlas_write_the_same_bytes(size: int) -> None:
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
    from sglang.kernels.ops.kvcache import dsv4_main_kv_store as store

    generator = torch.Generator().manual_seed(size)
    count = 3 * size - 1
    rows = torch.randn(count, 512, generator=generator).bfloat16() * 3
    slots = torch.randperm(3 * size, generator=generator)[:count]
    ours = torch.zeros(3, KVLayout.V4.page_bytes(size), dtype=torch.uint8)
    theirs = torch.zeros_like(ours)
    get_layout(MAIN_FP8).write(ours[:, : size * 584].view(3, size, 584), slots, rows)
    tiles = rows[:, :448].float().view(count, 7, 64)
    exponent = (tiles.abs().amax(-1).clamp(min=1e-4) / 448).log2().ceil()
    codes = (tiles * torch.exp2(-exponent).unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(1)
    scales = (exponent + 127).to(torch.uint8)
    pack = store.NopeFp8RopeBf16Pack(codes, rows[:, 448:].contiguous(), scales)
    store._set_k_and_s_triton(theirs, slots, pack, size)
    assert torch.equal(ours, theirs)
    assert int((ours != 0).sum()) > count * 400


def test_selection_takes_what_sglangs_formula_takes() -> None:
    scene = backends.scene(LENGTHS)
    q, weights = choose(scene)
    core = scene.backend.forward_metadata.core_metadata
    pages = scene.backend.forward_metadata.indexer_metadata
    keys = scene.backend.token_to_kv_pool.get_index_k_with_scale_buffer(1)
    planes = get_layout(INDEX_FP8).planes(keys.view(len(keys), 64, 132))
    for token, length in enumerate(LENGTHS):
        count = length // 4
        entry = torch.arange(count)
        slots = pages.page_table[token].long()[entry // 64] * 64 + entry % 64
        row = ROW_FORMATS[INDEX_FP8].decode(*(p[slots // 64, slots % 64] for p in planes)).double()
        scores = weights[token].double().T @ (q[token].double() @ row.T).relu()
        best = scores[0].topk(min(count, backends.TOPK)).indices.sort().values
        listed = core.c4_sparse_page_indices[token]
        assert sorted(listed[listed >= 0].tolist()) == sorted(slots[best].tolist())
        raw = core.c4_sparse_raw_indices[token]
        assert raw[raw >= 0].tolist() == best.tolist()


def test_heads_are_not_padded_where_anymla_attends() -> None:
    from sglang.srt.models.deepseek_v4 import MqaAttentionBase

    layer: Any = types.SimpleNamespace(n_local_heads=8, n_heads=64, attn_tp_size=8)
    assert MqaAttentionBase._kernel_num_heads(layer, 5) == 8


def test_a_backend_of_another_kind_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="sglang.plugins.anymla"):
        attention.backend_built(None, types.SimpleNamespace(trtllm_attn=True, mega_attn=False))
    assert "not called: SGLang chose trtllm_attn" in caplog.text


def audited(scene: backends.Scene, spoil: Any = None) -> Auditor:
    """Run a step of all layers under an audit of every token; return the auditor when done."""
    auditor = Auditor(Settings(every=1, requests=4, layers=3), audit.LOG, {}, [judge_here])
    audit._watches[id(scene.backend)] = watch = audit.Watch(scene.backend, auditor)

    def step(runner: Any, batch: Any) -> None:
        choose(scene)
        if spoil is _window_one_early:
            spoil(scene)
        for ratio in backends.RATIOS:
            scene.attend(ratio)

    if spoil is not None and spoil is not _window_one_early:
        spoil(scene)
    try:
        for _ in range(2):  # the first step tells the watch which layers there are
            audit.forward(step, scene.backend.model_runner, scene.batch)
    finally:
        del audit._watches[id(scene.backend)]
    auditor.drain()
    assert watch.auditor.audited == 1
    return auditor


def test_an_audit_of_right_layers_raises_no_alarm() -> None:
    auditor = audited(backends.scene(LENGTHS))
    assert list(auditor.alarms) == []
    assert auditor.tallies["attention"].judged == 12
    assert auditor.tallies["selection"].judged == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "audit: Settings(every=200"),
        ({"trtllm_attn": True}, "nothing is audited, its window or its attention takes another"),
        ({"token_to_kv_pool": None}, "AttributeError"),
    ],
)
def test_an_audit_that_cannot_start_leaves_the_server_alone(
    change: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = backends.scene(LENGTHS).backend
    backend.__dict__.update(change)
    try:
        with caplog.at_level(logging.INFO, logger=audit.LOG.name):
            audit.backend_built(None, backend, backend.model_runner)
        assert said in caplog.text
        assert (id(backend) in audit._watches) == (not change)
    finally:
        audit._watches.pop(id(backend), None)


def _window_one_early(scene: backends.Scene) -> None:
    core = scene.backend.forward_metadata.core_attn_metadata
    core.swa_page_indices[0] = core.swa_page_indices[0].roll(-1)
    core.swa_topk_lengths[0] -= 1


def _weights_of_no_head(scene: backends.Scene) -> None:
    """Select by other weights than the indexer's."""
    select = indexer.select_topk

    def spoiled(q: Any, keys: Any, weights: Any, *args: Any, **given: Any) -> Any:
        return select(q, keys, -weights, *args, **given)

    scene.patch.setattr(indexer, "select_topk", spoiled)


def _no_sink(scene: backends.Scene) -> None:
    backend = scene.backend
    attend = backend._flash_mla_with_kvcache

    def without(**given: Any) -> Any:
        return attend(**(given | {"attn_sink": torch.full_like(given["attn_sink"], -torch.inf)}))

    backend._flash_mla_with_kvcache = without


@pytest.mark.parametrize(
    ("spoil", "method"),
    [
        (_window_one_early, "attention"),
        (_weights_of_no_head, "selection"),
        (_no_sink, "attention"),
    ],
)
def test_an_audit_names_a_planted_fault(
    spoil: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = backends.scene(LENGTHS)
    scene.patch = monkeypatch
    auditor = audited(scene, spoil)
    assert {case.method for case, _ in auditor.alarms} == {method}


def test_every_seam_is_there_and_each_is_looked_up() -> None:
    for name in (*report.PARTS, report.AUDIT):
        assert report.refusal_by_source([name]) is None
    assert pinned.installed_version() in pinned.VERSIONS


@pytest.mark.parametrize("value", ["auto", "force", "off", "attention,audit", "what"])
def test_register_says_what_it_does(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(report.VARIABLE, value)
    monkeypatch.setattr(HookRegistry, "register", lambda *args: None)
    with caplog.at_level(logging.INFO, logger="sglang.plugins.anymla"):
        plugin.register()
    said = caplog.text
    expect = {
        "auto": "anymla replaces nothing on cpu",
        "force": "attention replaced (ANYMLA_SGLANG=force)",
        "off": "",
        "attention,audit": "indexer kept (ANYMLA_SGLANG does not ask for it)",
        "what": "anymla replaces nothing: ANYMLA_SGLANG must be one of auto",
    }[value]
    assert expect in said
    assert bool(said) == bool(expect)
