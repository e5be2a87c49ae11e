"""What an engine keeps in memory does not depend on how long it has run."""

import gc
import random

import pytest
import torch

from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request


def _traffic(engine, seed):
    rng = random.Random(seed)
    for number in range(5):
        prompt = tuple(rng.choices(range(3, 250), k=rng.choice([1, 4, 30, 90, 140])))
        engine.submit(Request(f"{seed}.{number}", prompt, rng.choice([1, 4, 9])))
    while engine.busy:
        engine.step()


def _held():
    """Sizes of the storages that live tensors have.

    Those of the turns of the last few positions, which operations on a CPU keep, come and go.
    """
    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.dtype != torch.complex64
    }
    return sorted(storages.values())


@pytest.mark.parametrize("decode", ["plain", "fixed"])
def test_memory_is_constant_after_a_warm_up(tiny_model, decode):
    options = EngineOptions(
        decode=decode, max_requests=2, max_seq_len=160, chunk_size=64, draft_tokens=1
    )
    engine = Engine(tiny_model, options)
    engine.warm_up()
    _traffic(engine, 0)  # makes tables of constants, such as those of the number formats
    held = _held()
    for seed in range(1, 5):
        _traffic(engine, seed)
        assert _held() == held


@pytest.mark.gpu
def test_a_gpus_allocator_stays_where_it_is(tiny_model, tmp_path):
    from anymla.model.load import load_model
    from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

    write_tiny_checkpoint(tmp_path, TinyOptions(ratios=(0, 4, 128), experts=8, index_topk=16))
    model = load_model(tmp_path, device="cuda", progress=False)
    options = EngineOptions(max_requests=2, max_seq_len=160, chunk_size=64, draft_tokens=1)
    engine = Engine(model, options)
    engine.warm_up()
    _traffic(engine, 0)
    held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for seed in range(1, 30):
        _traffic(engine, seed)
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == held
