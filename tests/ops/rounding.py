"""Values whose rounding to e4m3 is in doubt, and comparison of results that may have NaNs."""

import torch


def every_tie():
    """65,536 values over all binades of e4m3, with every tie and its neighbours."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60000, generator=generator) * torch.exp2(
        torch.randint(-14, 10, (60000,), generator=generator).float()
    )
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[~values.isnan()].sort().values
    ties = (values[1:] + values[:-1]) / 2
    nudged = torch.cat([torch.nextafter(ties, torch.tensor(side)) for side in (-1e9, 1e9)])
    special = torch.tensor([0.0, -0.0, 448, 449, 464, 465, 1e30, -1e30, torch.inf, -torch.inf])
    x = torch.cat((x, ties, nudged, special, torch.tensor([torch.nan])))
    return torch.nn.functional.pad(x, (0, 65536 - len(x)))


def same(got, want):
    """Values are the same, and NaN where NaN is wanted."""
    got, want = got.double(), want.double()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.25), want.nan_to_num(0.25))
