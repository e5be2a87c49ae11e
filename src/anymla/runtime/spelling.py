"""Names of options in llama.cpp, vLLM and transformers, and the names that they have here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Other names of the same option: the command line accepts them, Python's errors name ours.
SYNONYMS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "num_predict": "max_new_tokens",
    "predict": "max_new_tokens",
    "temp": "temperature",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "random_seed": "seed",
    "torch_dtype": "dtype",
    "device_map": "device",
    "kv_cache_dtype": "kv_cache",
    "max_num_seqs": "max_requests",
    "max_batch_size": "max_requests",
    "max_num_batched_tokens": "chunk_size",
    "ubatch_size": "chunk_size",
    "num_speculative_tokens": "draft_tokens",
    "num_threads": "threads",
    "n_threads": "threads",
    "system_prompt": "system",
    "prompts_file": "batch",
    "file": "prompt_file",
    "ckpt": "checkpoint",
    "ckpt_path": "checkpoint",
    "model_path": "checkpoint",
    "model": "checkpoint",
    "enforce_eager": "no_graphs",
}
_LENGTHS = "caches are as long as the requests need, so there is nothing to set"
_KEYWORDS = "each is a keyword by itself: max_new_tokens, temperature, top_p, top_k, min_p, stop"
_RANKS = "several GPUs: torchrun --nproc-per-node N -m anymla generate"
_AS_STORED = "weights are used as the files hold them, so there is nothing to set"
# Names without an equivalent here, and what to do instead.
_REMARKS = {
    "max_length": "it counts the prompt as well; max_new_tokens does not",
    "do_sample": "temperature 0 takes the best token, any other samples",
    "sampling_params": _KEYWORDS,
    "generation_config": _KEYWORDS,
    "max_model_len": _LENGTHS,
    "max_seq_len": _LENGTHS,
    "ctx_size": _LENGTHS,
    "n_ctx": _LENGTHS,
    "c": _LENGTHS,
    "gpu_memory_utilization": _LENGTHS,
    "tensor_parallel_size": _RANKS,
    "tp": _RANKS,
    "n_gpu_layers": "a model is on one device as a whole: device",
    "gpu_layers": "a model is on one device as a whole: device",
    "trust_remote_code": "a checkpoint's code is never run, so there is nothing to trust",
    "quantization": _AS_STORED,
    "load_format": _AS_STORED,
    "tokenizer": "the tokenizer is the one in the checkpoint's directory",
    "speculative_config": "drafts and draft_tokens say how tokens are drafted",
    "interactive": "a dialogue is anymla chat",
    "i": "a dialogue is anymla chat",
    "conversation": "a dialogue is anymla chat",
    "streamer": "LLM.stream yields the text as it comes",
    "messages": "LLM.chat answers messages",
    "attention_mask": "prompts are not padded: leave it out",
    "input_ids": "the first argument takes a text or token ids",
    "inputs": "the first argument takes a text or token ids",
    "prompt": "the first argument takes a text or token ids",
    "prompt_token_ids": "the first argument takes a text or token ids",
}


def right_name(name: str, known: Iterable[str]) -> str:
    """Return our name of an unknown option, or what to do instead; "" if there is no suggestion.

    Args:
        name: the option's name in Python's spelling, with underscores.
        known: names of the existing options, in the same spelling.
    """
    known = tuple(known)
    close = difflib.get_close_matches(
        name.lower(), {*known, *SYNONYMS, *_REMARKS}, n=1, cutoff=0.75
    )
    nearest = close[0] if close else ""
    for meant in (name, nearest):
        ours = meant if meant in known else SYNONYMS.get(meant)
        if ours in known:
            return f"did you mean {ours}?"
        if meant in _REMARKS:
            return _REMARKS[meant]
    return ""
