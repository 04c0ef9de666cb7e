"""Element types: what operands and results may be made of."""

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
