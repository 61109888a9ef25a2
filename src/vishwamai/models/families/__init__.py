"""The families of decoders by their `model_type`: data that reading, writing and loading follow."""

from __future__ import annotations

from collections.abc import Mapping

from vishwamai.models.families.baichuan import BAICHUAN
from vishwamai.models.families.cohere import COHERE
from vishwamai.models.families.conv import CONV
from vishwamai.models.families.corrected_experts import CORRECTED_MIXTURES
from vishwamai.models.families.delta import DELTA
from vishwamai.models.families.dense import DENSE
from vishwamai.models.families.dense_tensors import DENSE_TENSORS
from vishwamai.models.families.experts import MIXTURES
from vishwamai.models.families.falcon_h1 import FALCON_H1
from vishwamai.models.families.family import IDLE, IGNORED, Family
from vishwamai.models.families.gemma import GEMMA
from vishwamai.models.families.kimi import KIMI
from vishwamai.models.families.latent import LATENT
from vishwamai.models.families.llama4 import LLAMA4
from vishwamai.models.families.mamba import MAMBA
from vishwamai.models.families.minimax import MINIMAX
from vishwamai.models.families.position import POSITION
from vishwamai.models.families.selective import SELECTIVE
from vishwamai.models.families.sparse import SPARSE
from vishwamai.models.families.step import STEP
from vishwamai.models.families.ungated import UNGATED
from vishwamai.models.families.zamba2 import ZAMBA2

FAMILIES: Mapping[str, Family] = {
    **DENSE,
    **DENSE_TENSORS,
    **UNGATED,
    **COHERE,
    **GEMMA,
    **POSITION,
    **MIXTURES,
    **CORRECTED_MIXTURES,
    **SPARSE,
    **LLAMA4,
    **LATENT,
    **KIMI,
    **DELTA,
    **CONV,
    **MAMBA,
    **SELECTIVE,
    **FALCON_H1,
    **MINIMAX,
    **ZAMBA2,
    **BAICHUAN,
    **STEP,
}

__all__ = ["FAMILIES", "IDLE", "IGNORED", "Family"]
