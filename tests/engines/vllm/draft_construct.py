"""vLLM's DSpark drafter with parts of anymla's, built where a CPU pretends to be another device:
``draft_construct.py ANSWER.json CHECKPOINT DEVICE``. The answer counts modules by class."""

from __future__ import annotations

import collections
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import construct
import torch

DRAFTS = {"method": "dspark", "num_speculative_tokens": 5}


def build(checkpoint: str, platform: Any) -> dict[str, Any]:
    """By what is asked for; each with whether anymla stores the context."""
    import vllm.model_executor.layers.sparse_attn_indexer as scores
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    import anymla.engines.vllm.experts  # noqa: F401  while vLLM's class has its name
    from anymla.engines.vllm import model, report
    from anymla.engines.vllm.pinned import DSPARK_MODULES, PLATFORMS

    registry._run_in_subprocess = lambda inspect: inspect()  # which would not pretend
    config = EngineArgs(
        checkpoint, max_model_len=4096, max_num_seqs=4, speculative_config=DRAFTS
    ).create_engine_config()
    config.kernel_config.enable_jit_warmup = False
    platform.device_type, scores.has_deep_gemm = "meta", lambda: True
    machine = report.this_machine().platform
    importlib.import_module(PLATFORMS[machine].module).DeepseekV4MoE = construct.NoExperts
    drafter: Any = importlib.import_module(DSPARK_MODULES[machine])
    drafter.DSparkDeepseekV4ForCausalLM.set_moe_parameters = lambda self: None
    found = {}
    with set_current_vllm_config(config):
        store = f"file://{Path(sys.argv[1]).with_suffix('.store')}"
        init_distributed_environment(1, 0, store, 0, "gloo")
        initialize_model_parallel(1, 1)
        for chosen in ("off", "auto", "force"):
            model._PLAN = report.plan(report.this_machine(), chosen)
            config.compilation_config.static_forward_context.clear()
            with torch.device("meta"):
                built = model.AnymlaDeepseekV4DSpark(vllm_config=config)
            found[chosen] = collections.Counter(type(each).__name__ for each in built.modules())
    stores = drafter._insert_context_kv.__module__
    return {"classes": found, "stores": stores}


if __name__ == "__main__":
    torch.set_default_dtype(torch.bfloat16)
    Path(sys.argv[1]).write_text(json.dumps(build(sys.argv[2], construct.pretend(sys.argv[3]))))
