"""Makes eagle3_expected.safetensors: what EAGLE3 heads of speculators compute.

It runs in an environment with speculators 0.9.0, Transformers 5.19 and PyTorch 2.13, which need not be that of the
tests: `python tests/loading/make_eagle3_expected.py`.

The file holds one set of weights, rounded to fp16, of which each head reads a part, the inputs of a training pass, and
per head its config and the logits of every unrolled step. In such a step row i reads the token after the one of the
step before, and the rows of its own earlier steps: it drafts for the prefix that ends with row i.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

HIDDEN, VOCABULARY, DRAFT_VOCABULARY, TOKENS, STEPS = 32, 64, 24, 7, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
HEADS: dict[str, tuple[type, dict[str, Any]]] = {
    "plain": (LlamaConfig, {}),
    "norm_before_residual": (LlamaConfig, {"norm_before_residual": True}),
    "norm_before_fc": (LlamaConfig, {"norm_before_fc": True, "norm_before_residual": True}),
    "eagle_3_1": (LlamaConfig, {"fc_norm": True, "norm_output": True}),
    "qwen3": (Qwen3Config, {"norm_before_residual": True}),
    "two_layers": (LlamaConfig, {"num_hidden_layers": 2}),
    "window": (
        Qwen3Config,
        {"layer_types": ["sliding_attention"], "sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0},
    ),
    "whole_vocabulary": (LlamaConfig, {"draft_vocab_size": VOCABULARY}),
}


def head(kind: type, options: dict[str, Any]) -> Eagle3DraftModel:
    """A head without values in its weights."""
    layer = kind(**SIZES | {key: value for key, value in options.items() if key in _OF_LAYER})
    layer._attn_implementation = "eager"
    own = {key: value for key, value in options.items() if key not in _OF_LAYER}
    proposals = [GreedyTokenProposalConfig(speculative_tokens=STEPS)]
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        **{"draft_vocab_size": DRAFT_VOCABULARY, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]} | own,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=proposals, default_proposal_method="greedy", verifier=verifier
        ),
    )
    return Eagle3DraftModel(config).eval()


_OF_LAYER = ("num_hidden_layers", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers")


def draw(name: str, shape: torch.Size) -> torch.Tensor:
    """A weight in fp16: no norm is 1, and logits are spread."""
    values = torch.randn(shape)
    values = 1.0 + 0.25 * values if len(shape) == 1 else values * (4.0 if "lm_head" in name else 1.4) / shape[-1] ** 0.5
    return values.half()


@torch.no_grad()
def main() -> None:
    """Write the file beside this one."""
    torch.manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    targets = torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY].sort().values
    weights["d2t"] = targets - torch.arange(DRAFT_VOCABULARY)
    weights["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, targets, True)
    features, ids = torch.randn(TOKENS, 3 * HIDDEN), torch.randint(VOCABULARY, (TOKENS,))
    expected: dict[str, torch.Tensor] = {}
    heads: dict[str, Any] = {}
    for name, (kind, options) in HEADS.items():
        model = head(kind, options)
        with TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            config = json.loads((Path(directory) / "config.json").read_text())
            with safe_open(Path(directory) / "model.safetensors", "pt") as saved:
                names = sorted(saved.keys())
        state = {}
        for key in names:
            tensor = model.state_dict()[key]
            # The head of another vocabulary is another weight.
            stored = f"{key}:{tensor.shape[0]}" if key == "lm_head.weight" else key
            if stored not in weights:
                weights[stored] = draw(key, tensor.shape)
            state[key] = weights[stored]
        model.load_state_dict(state, strict=False)
        model.float()
        logits: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(lambda module, args, out, logits=logits: logits.append(out[0]))
        documents = torch.zeros(1, TOKENS, dtype=torch.long)
        model(features[None], ids[None], documents, ttt_steps=STEPS)
        assert len(logits) == STEPS
        expected[f"logits:{name}"] = torch.stack(logits)
        heads[name] = {"config": config, "names": names}
    tensors = {f"weight:{key}": value for key, value in weights.items()} | expected | {"features": features, "ids": ids}
    path = Path(__file__).with_name("eagle3_expected.safetensors")
    save_file(tensors, path, {"heads": json.dumps(heads)})
    path.chmod(0o644)


if __name__ == "__main__":
    main()
