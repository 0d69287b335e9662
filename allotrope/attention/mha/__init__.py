"""Softmax attention over keys and values: GQA/MQA, sliding window, sinks, soft-cap, head sizes per layer."""

from allotrope.attention.mha.family import MHA as MHA
from allotrope.attention.mha.inputs import MhaInputs as MhaInputs
from allotrope.attention.mha.plan import MhaPlan as MhaPlan
from allotrope.attention.mha.spec import MhaSpec as MhaSpec
