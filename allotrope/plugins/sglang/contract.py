"""Everything of SGLang that the plugin imports, subclasses or calls: the only list of host symbols, and their probes.

Owns which host versions are known. A symbol that another file of this folder uses is in this table.
"""

from __future__ import annotations

from allotrope.plugins.contract import Contract, Symbol

HOST = "sglang"
DISTRIBUTIONS = ("sglang",)
KNOWN = ("0.5.23",)

SYMBOLS = (
    Symbol("sglang.srt.server_args:add_attention_backend_choices"),
)
CONTRACT = Contract("SGLang", DISTRIBUTIONS, KNOWN, SYMBOLS)
installed, probe, refusals = CONTRACT.installed, CONTRACT.probe, CONTRACT.refusals

LIMITS: dict[str, str] = {}
