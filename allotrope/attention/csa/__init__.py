"""Compressed sparse attention: one row is key and value; a window, pooled entries, an indexer to choose among them."""

from allotrope.attention.csa.compressor import Compression as Compression
from allotrope.attention.csa.family import CSA as CSA
from allotrope.attention.csa.inputs import CsaInputs as CsaInputs
from allotrope.attention.csa.inputs import IndexInputs as IndexInputs
from allotrope.attention.csa.plan import CsaPlan as CsaPlan
from allotrope.attention.csa.spec import CsaSpec as CsaSpec
from allotrope.attention.csa.spec import IndexerSpec as IndexerSpec
