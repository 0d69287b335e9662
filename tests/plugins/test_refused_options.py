"""What vLLM takes and our models do not do is refused at the start; what vLLM leaves undone is done."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from plugins.hosting import hosted
from plugins.test_fp8_rows import ASKED, COUNT, assert_refused, assert_same, ours, write

from allotrope.architectures.registry import ARCHITECTURES, find_architecture
from allotrope.errors import ModelError

pytestmark = [pytest.mark.usefixtures("in_vllm"), pytest.mark.timeout(900)]

LACKING = "is not supported by Allotrope's models"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enable_prompt_embeds": True}, f"prompts of embeddings {LACKING}"),
        ({"cpu_offload_gb": 1}, f"offloading weights {LACKING}"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            f"transfer of caches (kv_transfer_config) {LACKING}",
        ),
        ({"enable_lora": True}, f"LoRA {LACKING}"),
        ({"load_format": "sharded_state"}, f"load_format=sharded_state {LACKING}"),
        ({"quantization": "fp8", "dtype": "bfloat16"}, f"quantizing a plain checkpoint {LACKING}"),
        ({"additional_config": {"allotrope": {"attention_backends": "mha=reference"}}}, "'attention_backends'"),
        ({"additional_config": {"allotrope": "mha=reference"}}, "allotrope='mha=reference' is not understood"),
    ],
)
def test_refusals(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    if "kv_transfer_config" in options:
        from vllm.config import KVTransferConfig

        options = {"kv_transfer_config": KVTransferConfig(**options["kv_transfer_config"])}
    assert_refused(write("LlamaForCausalLM", tmp_path), options, reason)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("pipeline_parallel_size", 2, "pipeline parallelism"),
        ("decode_context_parallel_size", 2, "context parallelism"),
        ("prefill_context_parallel_size", 2, "context parallelism"),
        ("data_parallel_size", 2, "data parallelism of experts"),
        ("enable_expert_parallel", True, "expert parallelism"),
        ("enable_dbo", True, "dual batch overlap"),
        ("ubatch_size", 2, "dual batch overlap"),
    ],
)
def test_parallelism_is_refused(field: str, value: int, what: str, tmp_path: Path) -> None:
    """vLLM's CPU platform rules these out before a model is made, so its config is changed afterwards."""
    config = _config(write("Qwen3MoeForCausalLM", tmp_path))
    setattr(config.parallel_config, field, value)
    _assert_only_refused(config, what)


@pytest.mark.parametrize(
    ("architecture", "wanted", "reason"),
    [
        ("Qwen3NextForCausalLM", {"method": "ngram"}, "speculative decoding with recurrent states"),
        ("KimiLinearForCausalLM", {"method": "ngram"}, "speculative decoding with recurrent states"),
        ("LlamaForCausalLM", {"method": "ngram_gpu"}, "speculative decoding by ngram_gpu"),
        ("LlamaForCausalLM", {"method": "eagle3", "model": "LlamaForCausalLMEagle3"}, "speculative decoding by eagle3"),
        ("DeepseekV4ForCausalLM", {"method": "mtp"}, "DeepSeekV4MTPModel is not served"),
        ("DeepseekV3ForCausalLM", {"method": "mtp", "model": "DeepseekV3ForCausalLM"}, "the model's own checkpoint"),
        ("GptOssForCausalLM", {"method": "draft_model", "model": "LlamaForCausalLM"}, "one block table"),
        ("LlamaForCausalLM", {"method": "draft_model", "model": "OPTForCausalLM"}, "OPTForCausalLM is not among"),
    ],
)
def test_speculation_is_refused(architecture: str, wanted: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """No engine is made: the reason comes before the model."""
    drafts = {"num_nextn_predict_layers": 1} if wanted["method"] == "mtp" else {}
    path = write(architecture, tmp_path / "target", **drafts)
    if "model" in wanted:
        wanted = wanted | {"model": str(_write_draft(wanted["model"], tmp_path / "draft", **drafts))}
    config = _config(path, speculative_config=wanted | {"num_speculative_tokens": 2})
    from allotrope.plugins.vllm.model import HostedModel

    with pytest.raises(ModelError) as raised:
        HostedModel(vllm_config=config)
    assert str(raised.value).count(reason) == 1


def test_a_draft_head_of_another_model_is_refused(tmp_path: Path) -> None:
    """It reads the embedding of a model of ours, which has to be there."""
    from allotrope.plugins.vllm.draft import HostedDraft

    with pytest.raises(ModelError, match="vLLM runs another one"):
        HostedDraft(vllm_config=_config(write("DeepseekV3ForCausalLM", tmp_path)))


def test_what_the_model_would_not_see_is_refused(tmp_path: Path) -> None:
    """vLLM's CPU platform rules some of these out before a model is made, so its config is changed afterwards."""
    from vllm.config import WeightTransferConfig

    from allotrope.plugins.vllm.model import HostedModel

    config = _config(write("Qwen3MoeForCausalLM", tmp_path))
    config.weight_transfer_config = WeightTransferConfig(backend="ipc")
    config.aux_output_config.enable_return_routed_experts = True
    config.mamba_config.enable_stochastic_rounding = True
    config.model_config.convert = config.model_config.convert_type = "classify"
    with pytest.raises(ModelError) as raised:
        HostedModel(vllm_config=config)
    assert str(raised.value).count(LACKING) == 4
    for what in ("classes of texts", "updates of weights", "returning the experts of tokens", "rounding states at"):
        assert what in str(raised.value)


def _write_draft(architecture: str, directory: Path, **changed: Any) -> Path:
    """A small checkpoint of a model of ours; of others, a config."""
    if architecture in ARCHITECTURES:
        return write(architecture, directory, **changed)
    directory.mkdir()
    tiny = find_architecture({"architectures": ["LlamaForCausalLM"]}, str(directory)).tiny()
    opt = {"model_type": "opt", "vocab_size": tiny["vocab_size"]}
    config = (opt if architecture.startswith("OPT") else tiny) | {"architectures": [architecture]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _config(path: Path, **options: Any) -> Any:
    """What vLLM makes of its options before there is an engine."""
    from vllm.engine.arg_utils import EngineArgs

    plain = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": 256}
    return EngineArgs(str(path), **(plain | options)).create_engine_config()


def _assert_only_refused(config: Any, what: str) -> None:
    from allotrope.plugins.vllm.model import HostedModel

    with pytest.raises(ModelError) as raised:
        HostedModel(vllm_config=config)
    assert f"{what} {LACKING}" in str(raised.value) and str(raised.value).count(LACKING) == 1


def test_a_config_of_another_place(tmp_path: Path) -> None:
    path = write("LlamaForCausalLM", tmp_path / "model")
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(path / "config.json", other)
    assert_refused(path, {"hf_config_path": str(other)}, f"a config of another place (hf_config_path) {LACKING}")


def test_an_attention_backend_of_vllm_is_said_to_be_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import AttentionConfig

    from allotrope.plugins.vllm import model

    said: list[str] = []
    monkeypatch.setattr(model.log, "warning", lambda text, *values: said.append(text % values))
    path = write("LlamaForCausalLM", tmp_path)
    with hosted(path, block_size=16, attention_config=AttentionConfig(backend="CPU_ATTN")):
        pass
    assert sum("attention backend CPU_ATTN is not used" in text for text in said) == 1


def test_weights_come_once(tmp_path: Path) -> None:
    """What products read is made of them when they are whole: nothing is left to fill anew."""
    with hosted(write("LlamaForCausalLM", tmp_path), block_size=16) as running:
        before = running.answers(ASKED, COUNT)
        with pytest.raises(ModelError, match="weights cannot be loaded a second time"):
            running.runner.model.load_weights([])
        assert [one.ids for one in running.answers(ASKED, COUNT)] == [one.ids for one in before]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV4ForCausalLM"])
def test_weights_outlive_a_reload_that_is_refused(architecture: str, tmp_path: Path) -> None:
    """vLLM moves every parameter to the meta device before it hands over weights."""
    with hosted(write(architecture, tmp_path), block_size=16) as running:
        before = running.answers(ASKED, COUNT)
        for _ in range(2):
            with pytest.raises(ModelError, match="weights cannot be loaded a second time"):
                running.llm.collective_rpc("reload_weights")
            assert not any(one.is_meta for one in running.runner.model.state_dict().values())
        assert [one.ids for one in running.answers(ASKED, COUNT)] == [one.ids for one in before]


def test_dummy_weights_are_whole(tmp_path: Path) -> None:
    """Codes and numbers of experts too, which vLLM leaves as it found the memory."""
    path = write("DeepseekV4ForCausalLM", tmp_path)
    with hosted(path, load_format="dummy", block_size=16) as running:
        answers = running.answers(ASKED, COUNT)
    assert all(answer.logprobs.isfinite().all() for answer in answers)


def test_weights_that_come_past_the_model_are_refused(tmp_path: Path) -> None:
    """By a loader that fills parameters under their own names, as vLLM's registry takes them from anyone."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("in_place")
    class InPlace(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            for parameter in model.parameters():
                parameter.data.zero_()

    assert_refused(write("LlamaForCausalLM", tmp_path), {"load_format": "in_place"}, f"load_format=in_place {LACKING}")


def test_states_move_on_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends of torch's operations write in a rehearsal, too: their steps are not rehearsed."""
    path = write("Qwen3NextForCausalLM", tmp_path)
    want = ours(path, dtype="float32")
    monkeypatch.setattr("allotrope.kernels.warmup.triton_reasons", lambda device: [])
    with hosted(path, block_size=16, additional_config={"allotrope": {"attention_backend": "gdn=chunked"}}) as running:
        assert_same(running.answers(ASKED, COUNT), want)
        assert_same(running.answers(ASKED, COUNT), want)
