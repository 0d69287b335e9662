"""DeepSeek V4 against Transformers: every kind of layer, over the borders of windows, entries and the indexer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from architectures.execution_modes import assert_matches
from engine.watching import assert_idle, engine, request, run
from tiny_checkpoints import prompts, write_tiny

from allotrope.architectures.deepseek_v4 import tiny_deepseek_v4
from allotrope.architectures.registry import read_spec
from allotrope.errors import ModelError

LENGTHS = (1, 3, 4, 5, 16, 17, 36, 127, 128, 129, 200)

RELEASED = [
    (r"^model\.embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.", ""),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"compressor\.kv_proj\.", "compressor.wkv."),
    (r"compressor\.gate_proj\.", "compressor.wgate."),
    (r"compressor\.position_bias$", "compressor.ape"),
    (r"compressor\.kv_norm\.", "compressor.norm."),
    (r"\.self_attn\.sinks$", ".attn.attn_sink"),
    (r"\.self_attn\.(q|kv|o)((?:_[ab])?)_proj\.", r".attn.w\1\2."),
    (r"\.self_attn\.q_a_norm\.", ".attn.q_norm."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".ffn.gate.bias"),
    (r"\.mlp\.", ".ffn."),
    (r"shared_experts\.gate_proj\.", "shared_experts.w1."),
    (r"shared_experts\.down_proj\.", "shared_experts.w2."),
    (r"shared_experts\.up_proj\.", "shared_experts.w3."),
]


def released(name: str) -> str:
    for pattern, replacement in RELEASED:
        name = re.sub(pattern, replacement, name)
    return name


@pytest.mark.parametrize("page_size", [4, 16])
def test_deepseek_v4(tmp_path: Path, page_size: int) -> None:
    tiny = write_tiny(tiny_deepseek_v4(), tmp_path, rename=released)
    assert_matches(tiny, LENGTHS, page_size=page_size)


def test_warm_equals_cold_at_every_cut(tmp_path: Path) -> None:
    """A shared beginning is taken up at the last entry of 128 tokens that both have, windows and states with it."""
    tiny = write_tiny(tiny_deepseek_v4(), tmp_path, rename=released)
    prompt, other_request = prompts((270, 30))
    want = tiny.greedy(prompt, 8)
    for cut in (1, 127, 128, 129, 200, 255, 256, 257, 270):
        running = engine(tmp_path, page_size=8, max_num_seqs=4, max_model_len=512)
        run(running, [request("warm", [*prompt[:cut], *other_request])])
        before = running.stats().prefix_hits
        assert run(running, [request("p", prompt), request("other", other_request)])["p"] == want
        assert running.stats().prefix_hits - before == cut // 128 * 128
        assert_idle(running)


def test_layer_types_come_from_the_config() -> None:
    with pytest.raises(ModelError, match="neither 'compress_ratios' nor usable 'layer_types'"):
        read_spec(tiny_deepseek_v4() | {"compress_ratios": None}, "tiny")
    with pytest.raises(ModelError, match=r"compress_ratios has 4 entries .* unknown ones \['8'\] .*allowed: 0, 4, 128"):
        read_spec(tiny_deepseek_v4() | {"compress_ratios": [0, 8, 128, 4]}, "tiny")
    _, spec = read_spec(tiny_deepseek_v4() | {"compress_ratios": [4, 0, 4, 128]}, "tiny")
    assert [getattr(layer.mixer, "ratio", None) for layer in spec.layers] == [4, 0, 4, 128]


def test_yarn_leaves_the_attention_factor_at_one() -> None:
    _, spec = read_spec(tiny_deepseek_v4(), "tiny")
    ropes = [getattr(layer.mixer, "rope", None) for layer in spec.layers]
    assert [(rope.theta, rope.scaling.kind, rope.scaling.attention_factor) for rope in ropes] == [
        (10000.0, "none", 1.0),
        *[(160000.0, "yarn", 1.0)] * 3,
    ]
