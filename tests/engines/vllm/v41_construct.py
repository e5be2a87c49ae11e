"""vLLM's DeepSeek-V4.1 with parts of anymla's, built on the meta device of a machine without that
device: ``v41_construct.py ANSWER.json CHECKPOINT DEVICE``, DEVICE as ``Machine.name``.

As ``construct.py``: all but the experts, and with another version's source in front of the path.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

import construct
import torch


def build(checkpoint: str, platform: Any) -> dict[str, Any]:
    """By what was asked for: how many modules of each class, and what the log says of each part."""
    import vllm.model_executor.layers.sparse_attn_indexer as scores
    from vllm.config import set_current_vllm_config
    from vllm.config.engram import EngramConfig
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.models.deepseek_v41.nvidia import model as theirs

    from anymla.engines.vllm import report, v41_model

    text = json.loads((Path(checkpoint) / "config.json").read_text())["text_config"]
    on_device = EngramConfig(cpu_offload=False) if "engram_layer_ids" in text else None
    arguments = EngineArgs(checkpoint, max_model_len=4096, max_num_seqs=4, engram_config=on_device)
    config = arguments.create_engine_config()
    config.kernel_config.enable_jit_warmup = False  # it asks for TileLang and CuTe
    platform.device_type, scores.has_deep_gemm = "meta", lambda: True
    theirs.DeepseekV4MoE = construct.NoExperts
    theirs.DeepseekV4Model.finalize_mega_moe_weights = lambda self: None
    theirs.DeepseekV41LLMForCausalLM.set_moe_parameters = lambda self: None
    found: dict[str, Any] = {}
    with set_current_vllm_config(config):
        store = f"file://{Path(sys.argv[1]).with_suffix('.store')}"
        init_distributed_environment(1, 0, store, 0, "gloo")
        initialize_model_parallel(1, 1)
        for chosen in ("auto", "force"):
            plan = report.v41_plan(report.this_machine(), chosen)
            v41_model._PLAN = plan
            v41_model._REPLACED = frozenset(part.name for part in plan if part.replaced)
            config.compilation_config.static_forward_context.clear()
            with torch.device("meta"):
                built = v41_model.AnymlaDeepseekV41(vllm_config=config)
            built.process_weights_after_loading()
            names = collections.Counter(type(each).__name__ for each in built.modules())
            found[chosen] = {
                "classes": names,
                "replaced": sorted(v41_model._REPLACED),
                "whole first site": built.model.layers[0].hc_attn_fn_broadcast.shape[1],
                "functions": [
                    name
                    for name, ours in v41_model.hyper_connection.V41_FUNCTIONS.items()
                    if vars(theirs)[name] is ours
                ],
            }
    return found


if __name__ == "__main__":
    torch.set_default_dtype(torch.bfloat16)
    found = build(sys.argv[2], construct.pretend(sys.argv[3]))
    Path(sys.argv[1]).write_text(json.dumps(found))
