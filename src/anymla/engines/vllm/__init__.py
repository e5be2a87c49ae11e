"""An out-of-tree plugin with which vLLM serves DeepSeek-V4 on anymla's operations."""
