"""The table of audited methods: a class states what is recorded, what is gathered, what is judged.

``anymla.audit.checks.CHECKS`` recomputes and judges the cases, by the names in ``judged_by``.
Beside the methods of a layer, ``StreamCalls`` plans what follows the last layer, and
``RowsAtRest`` what no method may change.
"""

from __future__ import annotations

from anymla.engines.vllm.audit.attention import Attention, Insert, Projection, QkvNorm
from anymla.engines.vllm.audit.compressors import Compressor
from anymla.engines.vllm.audit.experts import Experts, Router
from anymla.engines.vllm.audit.indexer import IndexQuery, Selection
from anymla.engines.vllm.audit.linears import Linears
from anymla.engines.vllm.audit.method import Method
from anymla.engines.vllm.audit.streams import Streams

# Methods of a layer in the order in which their caches are read and their cases planned.
METHODS: tuple[type[Method], ...] = (
    QkvNorm,
    Insert,
    Attention,
    Projection,
    Compressor,
    IndexQuery,
    Selection,
    Streams,
    Linears,
    Router,
    Experts,
)
