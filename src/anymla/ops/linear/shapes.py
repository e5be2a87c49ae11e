"""Named shapes of V4's and V4.1's linear layers, on one and on several GPUs, and token numbers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ProductShape:
    """Weight of one linear layer or grouped projection: each product is [tokens, k] by [n, k]^T.

    Attributes:
        name: name of the weight in the model.
        n: number of rows of a group's weight.
        k: number of channels.
        groups: number of groups of heads, each with a product; 0 for a linear layer.
    """

    name: str
    n: int
    k: int
    groups: int = 0

    @property
    def rows(self) -> int:
        """Number of rows of all groups' weights together."""
        return max(1, self.groups) * self.n

    @property
    def elements(self) -> int:
        """Number of elements of all groups' weights together."""
        return self.rows * self.k

    def __str__(self) -> str:
        return f"{self.name} {self.rows} x {self.k}"


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Sizes of one model's layers, from which its products follow.

    Attributes:
        hidden: channels of the hidden state.
        q_rank: channels of the query latent.
        heads: number of query heads.
        groups: number of groups of heads in the output projection.
        inner: inner size of the shared expert.
        head_dim: number of channels of a head.
        o_rank: rows of a group's weight in the output projection.
        index_heads: number of heads of the indexer.
        index_dim: number of channels of an index head.
        quant_block: rows and channels of an FP8 weight that share a scale.
    """

    hidden: int
    q_rank: int
    heads: int
    groups: int
    inner: int
    head_dim: int = 512
    o_rank: int = 1024
    index_heads: int = 64
    index_dim: int = 128
    quant_block: int = 128

    def products(self, ranks: int = 1) -> tuple[ProductShape, ...]:
        """List the FP8 products of a layer on one of ``ranks`` GPUs, in execution order."""
        inner, output = self.inner // ranks, self.output_projection(ranks)
        return (
            ProductShape("wq_a, wkv", self.q_rank + self.head_dim, self.hidden),
            ProductShape("wq_b", self.heads // ranks * self.head_dim, self.q_rank),
            output,
            ProductShape("wo_b", self.hidden, output.rows),
            ProductShape("shared w1, w3", 2 * inner, self.hidden),
            ProductShape("shared w2", self.hidden, inner),
        )

    def output_projection(self, ranks: int = 1) -> ProductShape:
        """Return the grouped output projection of one of ``ranks`` GPUs."""
        channels = self.heads // self.groups * self.head_dim
        return ProductShape("wo_a", self.o_rank, channels, self.groups // ranks)

    @property
    def index_query(self) -> ProductShape:
        """Return the FP8 product that makes an indexer's queries."""
        return ProductShape("indexer wq_b", self.index_heads * self.index_dim, self.q_rank)

    @property
    def draft(self) -> ProductShape:
        """Return the FP8 product of an MTP layer's two inputs."""
        return ProductShape("e_proj, h_proj", self.hidden, self.hidden)

    @property
    def compressors(self) -> tuple[ProductShape, ProductShape]:
        """Return the bfloat16 products of compressors: ratio 4 with the indexer's, ratio 128."""
        with_indexer = 4 * self.head_dim + 4 * self.index_dim + self.index_heads
        return (
            ProductShape("compressors", with_indexer, self.hidden),
            ProductShape("compressor of ratio 128", 2 * self.head_dim, self.hidden),
        )


V4_FLASH = LayerShape(hidden=4096, q_rank=1024, heads=64, groups=8, inner=2048)
V4_PRO = LayerShape(hidden=7168, q_rank=1536, heads=128, groups=16, inner=3072)
V41_FLASH = LayerShape(
    hidden=5120, q_rank=1280, heads=64, groups=8, inner=2304, index_heads=32, quant_block=32
)
# Projection to V4.1's n-gram keys and values, from 24 rows of 256 channels.
V41_NGRAMS = ProductShape("engram wkv", 5 * V41_FLASH.hidden, 24 * 256)
MODELS = {"flash": V4_FLASH, "pro": V4_PRO}
V41_MODELS = {"flash-41": V41_FLASH}
# A shape without whole blocks of rows or channels.
ODD = ProductShape("odd", 1000, 1120)
# Numbers of GPUs that share a model.
RANKS = (1, 2, 4, 8)
# Token numbers on both sides of every threshold of ``config``; the last are a long prefill.
TOKENS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 512, 513, 4096, 32_768)
