"""Latent attention: one cached row per token for all heads, absorbed or expanded, whichever costs less."""

from allotrope.attention.mla.family import MLA as MLA
from allotrope.attention.mla.inputs import MlaInputs as MlaInputs
from allotrope.attention.mla.plan import MlaPlan as MlaPlan
from allotrope.attention.mla.spec import MlaSpec as MlaSpec
