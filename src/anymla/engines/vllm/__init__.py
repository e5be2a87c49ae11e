"""vLLM serves DeepSeek-V4 with anymla's attention: an out-of-tree plugin, adapters only."""
