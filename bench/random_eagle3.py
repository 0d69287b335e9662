"""A random EAGLE3 head for a real config.json, in the flat format, so that engines draft with the same file.

    python bench/random_eagle3.py bench/configs/gpt_oss_120b_eagle3 /tmp/head --target /tmp/gpt_oss

Names are those of the EAGLE repository (`midlayer.*`), values are drawn as `random_weights.py` draws them. The head has
no embedding: engines share the target's. Its vocabulary is the target's, or the first `draft_vocab_size` ids of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from allotrope.architectures.eagle3 import read_eagle3  # noqa: E402
from allotrope.architectures.registry import read_spec  # noqa: E402
from allotrope.errors import AllotropeError, ConfigError  # noqa: E402
from allotrope.layers.eagle3 import Eagle3Spec  # noqa: E402
from allotrope.layers.mixers.mha import MhaMixerSpec  # noqa: E402
from allotrope.layers.mlp import MlpSpec  # noqa: E402
from bench.random_weights import Maker, Shards  # noqa: E402


def head_shapes(spec: Eagle3Spec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight of a head of one layer. Raises ConfigError for another head."""
    layer = spec.layers[0]
    mixer, ffn = layer.mixer, layer.ffn
    plain = not (spec.norm_before_fc or spec.fc_norm) and len(spec.layers) == 1 and bool(spec.aux_layers)
    if not plain or not isinstance(mixer, MhaMixerSpec) or not isinstance(ffn, MlpSpec) or mixer.bias:
        raise ConfigError(
            "a head of one Llama layer without biases, with auxiliary hidden states and no norm is written."
        )
    hidden, heads, kv_heads = spec.model.hidden, mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    projections = {
        "self_attn.q_proj": (heads, 2 * hidden),
        "self_attn.k_proj": (kv_heads, 2 * hidden),
        "self_attn.v_proj": (kv_heads, 2 * hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (ffn.width, hidden),
        "mlp.up_proj": (ffn.width, hidden),
        "mlp.down_proj": (hidden, ffn.width),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    found: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(spec.aux_layers) * spec.target_hidden)}
    found |= {f"midlayer.{name}.weight": (hidden,) for name in norms}
    found |= {f"midlayer.{name}.weight": shape for name, shape in projections.items()}
    return found | {"norm.weight": (hidden,), "lm_head.weight": (spec.draft_vocab_size, hidden)}


def write_head(config: Mapping[str, Any], target: Mapping[str, Any], into: Path, *, seed: int, device: str) -> int:
    """Write config.json and the weights of a head for the model of config `target`. Returns the bytes.

    Raises ConfigError or ModelError if the head does not fit it.
    """
    if any(into.glob("*.safetensors")):
        raise ConfigError(f"{into} has weights already; give an empty directory.")
    _, model = read_spec(dict(target), "config of the target")
    spec = read_eagle3(dict(config), "config", model)
    maker = Maker(config, spec.model, seed, torch.device(device))
    into.mkdir(parents=True, exist_ok=True)
    shards = Shards(into)
    for name, shape in head_shapes(spec).items():
        for stored, tensor in maker.make(name, torch.empty(shape, device="meta")):
            shards.add(stored, tensor)
    if spec.draft_vocab_size != spec.model.vocab_size:
        # What is added to an id of the draft vocabulary: the first ids are the same.
        shards.add("d2t", torch.zeros(spec.draft_vocab_size, dtype=torch.int64))
    (into / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return shards.finish()[1]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", type=Path, help="directory with the head's config.json")
    parser.add_argument("out", type=Path, help="directory to write, without weights so far")
    parser.add_argument("--target", type=Path, required=True, help="directory with the model's config.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to draw")
    options = parser.parse_args(arguments)
    config, target = (json.loads((one / "config.json").read_text()) for one in (options.config, options.target))
    try:
        size = write_head(config, target, options.out, seed=options.seed, device=options.device)
    except AllotropeError as error:
        sys.exit(str(error))
    print(f"{options.out}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
