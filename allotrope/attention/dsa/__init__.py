"""Sparse latent attention: a lightning indexer selects the top-k tokens that each query attends to."""

from allotrope.attention.dsa.family import DSA as DSA
from allotrope.attention.dsa.inputs import DsaInputs as DsaInputs
from allotrope.attention.dsa.inputs import IndexInputs as IndexInputs
from allotrope.attention.dsa.plan import DsaPlan as DsaPlan
from allotrope.attention.dsa.spec import DsaSpec as DsaSpec
from allotrope.attention.dsa.spec import IndexerSpec as IndexerSpec
