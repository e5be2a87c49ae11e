"""torch.compile sees blocks and whole layers, and gives the eager gradients."""

import pytest
import torch

from anymla import train
from anymla.layers.caches import CACHE_FORMATS
from anymla.layers.linear import PackedWeight
from anymla.layers.rope_table import RopeTable
from anymla.layers.spec import Candidates, LayerSpec
from anymla.train.layer import Sizes

TOKENS, STREAMS, WIDTH = 12, 4, 16
STARTS = [0, 5, 12]
PLAN = train.Plan(STARTS, 4)
TABLE = RopeTable(64, 10000.0, None, torch.device("cpu")).table_for(TOKENS)
TEACHER = torch.randn(TOKENS, 3, 64), torch.randn(PLAN.num_entries, 64), torch.zeros(TOKENS, 3)
CODES = torch.randint(0, 120, (128, 128), dtype=torch.uint8)
SITE = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iters": 3}
GATES = [(TOKENS, STREAMS, WIDTH), (24, 64), (24,), (3,)]


def index_loss(iq, ik, weights):
    return train.index_loss(iq, ik, weights, PLAN, *TEACHER, None)


def heads(q, kv):
    at = PLAN.positions.long()
    return train.heads_and_rows(q, kv, at, TABLE, eps=1e-6, layout="v4_main_fp8")


def frozen(x):
    packed = PackedWeight("fp8", CODES, torch.full((1, 1), 120, dtype=torch.uint8))
    return train.FrozenLinear(packed, quantize_activations=True)(x)


# A function of tensors that get gradients, and their shapes.
BLOCKS = {
    "hyper_pre": (lambda *x: train.hyper_pre(*x, **SITE), GATES),
    "hyper_pre with a norm": (
        lambda *x: train.hyper_pre(*x[:4], norm_weight=x[4], **SITE), [*GATES, (WIDTH,)]
    ),
    "hyper_gates": (lambda *x: train.hyper_gates(*x, **SITE), GATES),
    "hyper_collapse": (
        lambda *x: train.hyper_collapse(*x, norm_eps=1e-6),
        [GATES[0], (TOKENS, STREAMS), (WIDTH,)],
    ),
    "hyper_post": (
        train.hyper_post,
        [(TOKENS, WIDTH), GATES[0], (TOKENS, STREAMS), (TOKENS, STREAMS, STREAMS)],
    ),
    "hyper_head": (
        lambda *x: train.hyper_head(*x, norm_eps=1e-6, hc_eps=1e-6),
        [GATES[0], (4, 64), (4,), (1,)],
    ),
    "compress": (
        lambda *x: train.compress(*x, PLAN, eps=1e-6, rope=TABLE),
        [(TOKENS, 1024), (TOKENS, 1024), (4, 1024), (512,)],
    ),
    "compress, not rotated": (
        lambda *x: train.compress(*x, PLAN, eps=1e-6, rope=None),
        [(TOKENS, 512), (TOKENS, 512), (4, 512), (512,)],
    ),
    "round_rows": (lambda x: train.round_rows(x, "v4_main_fp8"), [(TOKENS, 512)]),
    "round_rows, transformed": (
        lambda x: train.round_rows(x, "v4_index_mxfp4", dtype=torch.bfloat16, hadamard=True),
        [(TOKENS, 128)],
    ),
    "heads_and_rows": (heads, [(TOKENS, 3, 512), (TOKENS, 512)]),
    "index_loss": (index_loss, [(TOKENS, 4, 128), (PLAN.num_entries, 128), (TOKENS, 4)]),
    "grouped_projection": (
        lambda o, w: train.grouped_projection(o, w, PLAN.positions.long(), TABLE),
        [(TOKENS, 4, 64), (2, 8, 128)],
    ),
    "frozen linear": (frozen, [(TOKENS, 128)]),
    "rms_norm": (lambda *x: train.rms_norm(*x, 1e-6), [(TOKENS, WIDTH), (WIDTH,)]),
    "rope": (lambda x: train.rope(x, PLAN.positions.long(), TABLE), [(TOKENS, 3, 64)]),
}  # fmt: skip


def operators(run, inputs, monkeypatch):
    """Operators of this package, by name, with the arguments of their first call in a run."""
    seen = {}
    call = torch.library.CustomOpDef.__call__

    def noted(self, *args):
        seen.setdefault(self._qualname, (self, args))
        return call(self, *args)

    monkeypatch.setattr(torch.library.CustomOpDef, "__call__", noted)
    loss(run(*inputs)).backward()
    monkeypatch.undo()
    return seen


def loss(made):
    """A sum of results, with weights that differ."""
    made = [made] if isinstance(made, torch.Tensor) else [each for each in made if each is not None]
    weights = [torch.linspace(0.5, 1, each.numel(), device=each.device) for each in made]
    pairs = zip(made, weights, strict=True)
    return sum((each.float().flatten() * weight).sum() for each, weight in pairs)


def drawn(shapes):
    torch.manual_seed(1)
    return [torch.randn(shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("name", BLOCKS)
def test_operators_are_what_they_declare(name, monkeypatch):
    """Schema, fakes and registrations; of gradients there are none further."""
    run, shapes = BLOCKS[name]
    seen = operators(run, drawn(shapes), monkeypatch)
    assert len(seen) == 2
    for operator, args in seen.values():
        forward = not operator._qualname.endswith("_backward")
        more = ("test_autograd_registration", "test_aot_dispatch_static") if forward else ()
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor", *more))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_second_derivative_is_refused(name):
    run, shapes = BLOCKS[name]
    inputs = drawn(shapes)
    grads = torch.autograd.grad(loss(run(*inputs)), inputs, create_graph=True)
    again = [grad for grad in grads if grad.requires_grad]
    assert again
    for grad in again:
        with pytest.raises(RuntimeError, match="no autograd formula"):
            torch.autograd.grad(grad.square().sum(), inputs, allow_unused=True, retain_graph=True)


def compared(run, inputs):
    """Gradients of a compiled function and of the function."""
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    got, want = (
        torch.autograd.grad(loss(f(*inputs)), inputs, allow_unused=True) for f in (compiled, run)
    )
    assert any(each is not None for each in want)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.compiles
@pytest.mark.parametrize("name", BLOCKS)
def test_compiled_gradients_are_the_eager_ones(name):
    run, shapes = BLOCKS[name]
    compared(run, drawn(shapes))


SIZES = Sizes(
    hidden_size=32, num_attention_heads=4, head_dim=512, q_lora_rank=16, o_groups=2,
    o_lora_rank=16, index_n_heads=8, index_head_dim=128, rms_norm_eps=1e-6,
)  # fmt: skip


def spec_of(index, ratio, width=0, **options):
    return LayerSpec(
        index=index, role="backbone", ratio=ratio, overlap=ratio == 4, selects=bool(width),
        window=8, selection_width=width, **options,
    )  # fmt: skip


V41 = {"position_bias": False, "latent_keys": True, "hadamard": False, "norms_heads": False}
WITHIN = Candidates(source=3, blocks=3, block_size=2)
LAYERS = {
    "window": [spec_of(0, 0)],
    "ratio 4": [spec_of(0, 4, 2)],
    "ratio 128": [spec_of(0, 128)],
    "V4.1": [
        spec_of(0, 2, 3, shares_selection=True, **V41),
        spec_of(1, 2, kv_source=0, index_source=0, **V41),
        spec_of(3, 1, 4, candidates=WITHIN, **V41),
        spec_of(4, 1, 4, kv_source=3, candidates=WITHIN, **V41),
    ],
}


def chain(specs, stage, kv_cache, dtype=torch.float32, device="cpu", deterministic=None):
    """A function of a chain of layers' input, their plans made before, and all that it learns."""
    generator = torch.Generator().manual_seed(0)  # draws the same for every dtype and device
    layers = []
    for spec in specs:
        rope = RopeTable(64, 160000.0, None, torch.device(device))
        formats = CACHE_FORMATS[kv_cache]
        layer = train.Attention(spec, SIZES, rope, formats, index_stage=stage, dtype=dtype)
        with torch.no_grad():
            for value in layer.parameters():  # norms near 1, and rows of matrices of length 1
                noise = torch.randn(value.shape, generator=generator)
                small = value.shape[-1] ** -0.5
                value.copy_(1 + 0.2 * noise if value.ndim == 1 else noise * small)
        layers.append((layer.double() if dtype == torch.float64 else layer).to(device))
    plans = {
        spec.ratio: train.Plan([0, 40, 70], spec.ratio, spec.window, device=device)
        for spec in specs
    }

    def run(x, *parameters):
        shared, made = train.Shared(), []
        for layer in layers:
            plan = plans[layer.spec.ratio]
            attended = layer(x, plan, shared=shared, deterministic=deterministic)
            x = x + attended.out
            made += [attended.out, attended.index_loss]
        return made

    x = torch.randn(70, SIZES.hidden_size, generator=generator).to(device, dtype).requires_grad_()
    return run, [x, *(p for layer in layers for p in layer.parameters())]


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("name", "stage"),
    [(name, "frozen") for name in LAYERS]
    + [(name, stage) for name in ("ratio 4", "V4.1") for stage in ("sparse", "dense")],
)
def test_a_whole_layer_compiles_without_having_run(name, stage):
    run, inputs = chain(LAYERS[name], stage, "nvfp4" if name == "V4.1" else "fp8")
    compared(run, inputs)


def test_checkpointed_layers_have_the_same_gradients():
    run, inputs = chain(LAYERS["ratio 4"], "sparse", "fp8")
    want = torch.autograd.grad(loss(run(*inputs)), inputs)
    made = torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(loss(made), inputs), want, strict=True):
        assert torch.equal(a, b)
