"""The one registration of ``torch.ops.sparsecomp``; each operator file defines its own operators in it."""

import torch

library = torch.library.Library("sparsecomp", "DEF")
