"""Result types of the grouped products, by the names that the operations take."""

import torch

OUT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
