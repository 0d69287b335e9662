"""The attention families, by name. Everything that enumerates families reads this table."""

from __future__ import annotations

from allotrope.attention.csa.family import CSA
from allotrope.attention.dsa.family import DSA
from allotrope.attention.family import Family
from allotrope.attention.gdn.family import GDN
from allotrope.attention.mha.family import MHA
from allotrope.attention.mla.family import MLA

FAMILIES: dict[str, Family] = {family.name: family for family in (MHA, MLA, DSA, GDN, CSA)}
