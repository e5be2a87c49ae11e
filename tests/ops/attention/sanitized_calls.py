"""Very small calls of Hopper's decode kernels, and a handshake by mbarrier: for a sanitizer.

Arguments: "decode", or "right", "early" (see ``mbarrier_handshake``); and "each" if every thread is
to arrive at barriers.

Triton lets one thread arrive for its warpgroup, after a barrier of it. racecheck takes that for no
order between what the other threads did and those who wait. "each" compiles the same kernels with
arrivals of all threads, which the tool understands.
"""

import os
import re
import sys
import tempfile

import torch

from anymla.formats.page_layout import MAIN_FP8, V32_FP8, get_layout
from anymla.ops.attention import CacheRows
from anymla.ops.attention.decode_config import Cut, Schedule
from anymla.testing.device_bridge import to_device

# Layout, how the work is cut.
CASES = {
    "m64, every": (MAIN_FP8, Schedule(64, 1, 4, 2, Cut.EVERY)),
    "m64, stream-K": (MAIN_FP8, Schedule(64, 1, 3, cut=Cut.STREAM_K)),
    "swap_ab, whole": (MAIN_FP8, Schedule(16, 1, 2)),
    "V3.2, whole": (V32_FP8, Schedule(64, 1, 2)),
}


def every_thread_arrives(ptx):
    """Arrivals without their predicate, at barriers that expect 128 times as many."""
    expects = re.compile(r"(mbarrier\.init\.shared::cta\.b64 \[%r\d+\], )(\d+);")
    ptx = expects.sub(lambda found: f"{found[1]}{int(found[2]) * 128};", ptx)
    # One thread announces bytes, but all arrive.
    announces = re.compile(
        r"(@%p\d+ mbarrier\.)arrive\.(expect_tx)\.shared(?:::cta)?\.b64 _, (\[%r\d+\])(, \d+;)"
    )
    ptx = announces.sub(
        r"\1\2.relaxed.cta.shared::cta.b64 \3\4 mbarrier.arrive.shared::cta.b64 _, \3;", ptx
    )
    return re.sub(r"@%p\d+ (mbarrier\.arrive\.shared::cta\.b64 _, )", r"\1", ptx)


def compile_so():
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # whose keys do not know of it
    from triton.backends.nvidia.compiler import CUDABackend

    real = CUDABackend.make_cubin
    CUDABackend.make_cubin = lambda self, ptx, *arguments: real(
        self, every_thread_arrives(ptx), *arguments
    )


def scope(kind, tokens, columns, pages, page):
    layout = get_layout(kind)
    slots = pages * page
    cache = layout.allocate(pages, page)
    layout.write(cache, torch.arange(slots), torch.randn(slots, layout.channels))
    indices = torch.randint(0, slots, (tokens, columns), dtype=torch.int32)
    indices[:, 3::7], indices[:, 4::9] = -1, slots
    lengths = torch.tensor([columns, columns // 2], dtype=torch.int32)
    return CacheRows(cache, kind, indices, lengths)


def decode(kind, schedule):
    from anymla.ops.attention import gluon_sm90_decode_launch as launcher
    from anymla.ops.attention import sparse_attention

    tokens, heads, channels = 2, schedule.heads, get_layout(kind).channels
    q, sink = torch.randn(tokens, heads, channels).bfloat16(), torch.randn(heads)
    given = [scope(kind, tokens, 70, 3, 64)]
    if kind == MAIN_FP8:
        given.append(scope(kind, tokens, 150, 9, 2))
    want, want_lse = sparse_attention(q, given, value_dim=512, sink=sink, backend="torch")
    out = torch.full((tokens, heads, 512), torch.nan).bfloat16().cuda()
    lse = torch.full((tokens, heads), torch.nan).cuda()
    rows = to_device(given, torch.device("cuda"))
    call = launcher.Call(q.cuda(), rows, sink.cuda(), channels**-0.5, schedule)
    launcher.attend(call, launcher.AttentionOut(out, lse))
    off = (out.cpu().float() - want.float()).norm() / want.float().norm()
    near = torch.allclose(lse.cpu(), want_lse, atol=1e-3)
    return bool(off < 4e-3 and near)


if __name__ == "__main__":
    what = sys.argv[1]
    if "each" in sys.argv:
        compile_so()
    torch.manual_seed(0)
    if what == "decode":
        fine = all(decode(*CASES[each]) for each in CASES)
    else:
        import mbarrier_handshake

        fine = mbarrier_handshake.run(what)
    print("as it should be" if fine else "wrong", flush=True)
