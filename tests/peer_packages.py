"""Packages with the names and arguments of the peers that the bench uses."""

from __future__ import annotations

VLLM = """
import json, os, pathlib, sys, torch, types
__version__ = "0.0"
SamplingParams = lambda **params: types.SimpleNamespace(**params)
# The mean number of accepted drafts stands for all rates.
rates_of = types.SimpleNamespace(_acceptance_length_to_rates=lambda length, drafts: [length - 1] + [0] * (drafts - 1))
sys.modules["vllm.config"] = types.SimpleNamespace(SpeculativeConfig=rates_of)
sys.modules["vllm.v1.spec_decode.utils"] = types.SimpleNamespace(unconditional_to_conditional_rates=list)


class LLM:
    def __init__(self, directory, **options):
        log = pathlib.Path(__file__).with_name("vllm.json")
        log.write_text(json.dumps([options, os.environ["ALLOTROPE_VLLM"]]))
        drafts = options.get("speculative_config", {"num_speculative_tokens": 1})
        self.rates = torch.zeros(drafts["num_speculative_tokens"])
        self.rates[0] = drafts.get("synthetic_acceptance_length", 1) - 1
        cache = types.SimpleNamespace(num_gpu_blocks=4, block_size=16)
        self.drafted = self.accepted = 0
        self.llm_engine = types.SimpleNamespace(vllm_config=types.SimpleNamespace(cache_config=cache))

    def generate(self, prompts, params, use_tqdm):
        self.drafted += 2
        self.accepted += 2 * self.rates.sum().item()
        step = {id: types.SimpleNamespace(logprob=-id) for id in range(8)}
        made = lambda one: types.SimpleNamespace(token_ids=range(one.max_tokens), logprobs=[step] * one.max_tokens)
        return [types.SimpleNamespace(outputs=[made(one)]) for one in params]

    def get_metrics(self):
        # As its counters: of two engines, and others beside them.
        counts = {"drafts": self.drafted, "draft_tokens": 3 * self.drafted, "accepted_tokens": self.accepted}
        counter = lambda name, value: types.SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=value)
        found = [counter(*count) for count in counts.items()]
        return [*found, *found, types.SimpleNamespace(name="vllm:kv_cache_usage_perc", value=0.5)]

    def collective_rpc(self, what):
        sampler = types.SimpleNamespace(synthetic_conditional_rates=self.rates)
        model = type("Model", (), {"__module__": "allotrope.plugins.vllm.model"})()
        worker = types.SimpleNamespace(
            model_runner=types.SimpleNamespace(rejection_sampler=sampler), get_model=lambda: model
        )
        return [what(worker)] * 2
"""
SGLANG = """
import importlib.metadata, json, os, pathlib
__version__ = "0.1"


class Engine:
    def __init__(self, model_path, **options):
        pathlib.Path(__file__).with_name("sglang.json").write_text(json.dumps(options))

    def get_server_info(self):
        points = {point.value for point in importlib.metadata.entry_points(group="sglang.srt.plugins")}
        ours = os.environ["ALLOTROPE_SGLANG"] == "1" and "allotrope.plugins.sglang:register" in points
        return {"max_total_num_tokens": 77, "attention_backend": "allotrope" if ours else "fa3"}

    def generate(self, input_ids, sampling_params, return_logprob=False, logprob_start_len=None, top_logprobs_num=None):
        runs = os.environ.get("RUNS")
        if runs:
            with open(runs, "a") as file:
                file.write(f"{os.environ['ALLOTROPE_SGLANG']} {len(input_ids)}/{sampling_params['max_new_tokens']}\\n")
            if os.environ["ALLOTROPE_SGLANG"] == "1" and len(input_ids) == 3:
                raise MemoryError("too many")
        # The logprobs of a token say which one it is: after the first, which has none.
        outputs = []
        for i, ids in enumerate(input_ids):
            output = {"output_ids": list(range(sampling_params["max_new_tokens"])), "meta_info": {}}
            if return_logprob:
                later = range(logprob_start_len[i] + 1, len(ids))
                tops = [[(-float(at), id, None) for id in range(top_logprobs_num)] for at in later]
                output["meta_info"]["input_top_logprobs"] = [None, *tops]
            outputs.append(output)
        return outputs
"""
