"""Gated delta rule with a short causal convolution: recurrent decode, chunked prefill, one state per sequence."""

from allotrope.attention.gdn.family import GDN as GDN
from allotrope.attention.gdn.inputs import GdnInputs as GdnInputs
from allotrope.attention.gdn.plan import GdnPlan as GdnPlan
from allotrope.attention.gdn.spec import GdnSpec as GdnSpec
