"""Request fields by which other engines change the answer: each with this API's name for it, or the reason of refusal.

The tables cover vLLM, SGLang, llama.cpp's server, Ollama, Text Generation Inference, LM Studio, text-generation-webui,
KoboldAI, ExLlama's servers, Transformers and APIs of hosted models. A foreign field that cannot change an answer has
no row, and counts as unknown.
"""

from __future__ import annotations

from allotrope.server.rules import Misplaced, Only, Renamed, Rule

_NO_GRAMMAR = "write it in structured_outputs, as json, regex, choice, grammar or structural_tag"
_NO_BEAM = "beam search is not offered"
_NO_ADAPTER = "adapters are not loaded; serve a checkpoint into which it is merged"
_NO_MEDIA = "this server reads text only"
_NO_SPECULATION = "drafts are chosen when the server starts (--speculative-config)"
_NO_DRY = "DRY is not offered; see repetition_penalty"
_NO_XTC = "XTC is not offered; see temperature and min_p"
_NO_MIROSTAT = "Mirostat is not offered; see temperature, top_p and min_p"
_NO_DYNAMIC = "the temperature is the same for every token"
_NO_SMOOTHING = "smoothing is not offered; see temperature"
_NO_TAIL = "this truncation of the distribution is not offered; see top_p, top_k and min_p"
_NO_GUIDANCE = "classifier-free guidance is not offered"
_NO_REPORT = "this server does not report it"
_ALL_TOKENS = "penalties look at all tokens so far"
_FIXED_ORDER = "samplers run in one order: penalties, temperature, top_k, top_p, min_p"
_NO_BANS = "words cannot be banned; give their tokens a logit_bias of -100"
_NO_SEARCH = "this server has no tools of its own"
_APART = "reasoning is set apart where the model's format is known; see include_reasoning"
_ONLY_LIKELIEST = "log-probabilities are those of the most likely tokens"
_KEPT_PROMPT = "a prompt is never shortened unless truncate_prompt_tokens says so"
_TEMPLATE = Misplaced("write it in chat_template_kwargs, if the model's template reads it")
_CONTINUED = "prompts are continued as they are"
_ASK_CHAT = f"{_CONTINUED}; ask /v1/chat/completions"
_IN_THE_BODY = "write its fields in the body itself"

_ANY_ROUTE: dict[str, Rule] = {
    # Lengths and ends.
    **dict.fromkeys(
        ("max_new_tokens", "n_predict", "num_predict", "max_output_tokens", "max_tokens_to_sample", "max_length"),
        Renamed("max_tokens"),
    ),
    **dict.fromkeys(("min_new_tokens", "min_length"), Renamed("min_tokens")),
    **dict.fromkeys(("stop_sequences", "stop_sequence", "stopping_strings", "stop_words"), Renamed("stop")),
    "custom_stopping_strings": Only(([], ""), "write them in stop"),
    "stop_regex": Only(([],), "answers end at texts (stop) and token ids (stop_token_ids)"),
    "no_stop_trim": Renamed("include_stop_str_in_output", (False,)),
    "ban_eos_token": Renamed("ignore_eos", (False,)),
    **dict.fromkeys(("eos_token_id", "end_id"), Misplaced("write it in stop_token_ids, as a list")),
    "t_max_predict_ms": Only((0, -1), "answers are limited in tokens (max_tokens)"),
    "auto_max_new_tokens": Only((False,), "leave max_tokens out of a chat for that"),
    "repetition_detection": Only((), "loops are not looked for; see repetition_penalty"),
    # Sampling.
    **dict.fromkeys(("repeat_penalty", "rep_pen", "repetition_penality"), Renamed("repetition_penalty")),
    "freq_pen": Renamed("frequency_penalty"),
    "pres_pen": Renamed("presence_penalty"),
    "temp": Renamed("temperature"),
    "random_seed": Renamed("seed"),
    "num_return_sequences": Renamed("n"),
    "do_sample": Only((True,), "write temperature=0 for greedy sampling"),
    **dict.fromkeys(("repeat_last_n", "penalty_last_n"), Only((-1,), _ALL_TOKENS)),
    **dict.fromkeys(("repetition_penalty_range", "rep_pen_range"), Only((0,), _ALL_TOKENS)),
    **dict.fromkeys(("penalize_nl", "penalize_newline"), Only((True,), "line ends are penalized as other tokens are")),
    "encoder_repetition_penalty": Only((1.0,), "the prompt's tokens have no penalty of their own"),
    "rep_pen_slope": Only((0, 1.0), _ALL_TOKENS),
    "repetition_decay": Only((0,), _ALL_TOKENS),
    "no_repeat_ngram_size": Only((0,), "n-grams may repeat; see repetition_penalty"),
    "exponential_decay_length_penalty": Only((), "the length does not raise the probability of end tokens"),
    **dict.fromkeys(("typical_p", "typical"), Only((1.0,), _NO_TAIL)),
    **dict.fromkeys(("tfs_z", "tfs"), Only((1.0,), _NO_TAIL)),
    **dict.fromkeys(("top_a", "epsilon_cutoff", "eta_cutoff", "skew", "top_p_min"), Only((0,), _NO_TAIL)),
    "top_n_sigma": Only((0, -1), _NO_TAIL),
    **dict.fromkeys(("adaptive_target", "adaptive_decay"), Only((-1,), _NO_TAIL)),
    "min_keep": Only((0, 1), "one token is always kept"),
    **dict.fromkeys(("mirostat", "mirostat_mode"), Only((0,), _NO_MIROSTAT)),
    "dry_multiplier": Only((0,), _NO_DRY),
    "xtc_probability": Only((0,), _NO_XTC),
    "dynatemp_range": Only((0,), _NO_DYNAMIC),
    "dynamic_temperature": Only((False,), _NO_DYNAMIC),
    "dynatemp_low": Only((1.0,), _NO_DYNAMIC),
    "dynatemp_high": Only((1.0,), _NO_DYNAMIC),
    "smoothing_factor": Only((0,), _NO_SMOOTHING),
    "temperature_last": Only((False,), _FIXED_ORDER),
    **dict.fromkeys(("samplers", "sampler_priority", "sampler_order", "sampler_seq"), Only(([],), _FIXED_ORDER)),
    "penalty_alpha": Only((0,), "contrastive search is not offered"),
    **dict.fromkeys(("guidance_scale", "cfg_scale"), Only((1.0,), _NO_GUIDANCE)),
    "negative_prompt": Only(("",), _NO_GUIDANCE),
    **dict.fromkeys(("num_beams", "beam_width"), Only((1,), _NO_BEAM)),
    **dict.fromkeys(
        ("custom_token_bans", "banned_tokens", "banned_strings", "bad_words_ids", "banned_words"),
        Only(([], ""), _NO_BANS),
    ),
    **dict.fromkeys(("watermark", "watermarking"), Only((False,), "output is not watermarked")),
    "token_healing": Only((False,), "the prompt's last token stays as it is"),
    **dict.fromkeys(
        ("custom_logit_processor", "custom_params", "logits_processor_args"), Only((), "code in requests is not run")
    ),
    # Structured output.
    **dict.fromkeys(
        ("grammar", "grammar_string", "grammar_lazy", "grammar_triggers", "ebnf", "guided_whitespace_pattern"),
        Only(("", False, []), _NO_GRAMMAR),
    ),
    **dict.fromkeys(
        ("regex", "regex_pattern", "json_schema", "structural_tag", "guided_choices"), Only(("",), _NO_GRAMMAR)
    ),
    "format": Only(("",), _NO_GRAMMAR),
    "guideline": Only(("",), "write it into the prompt"),
    # Adapters, drafts, media.
    **dict.fromkeys(
        ("lora_path", "lora_request", "lora_name", "adapter_id", "adapter_ids", "adapters"), Only(("",), _NO_ADAPTER)
    ),
    "lora": Only(([],), _NO_ADAPTER),
    "draft_model": Only(("",), _NO_SPECULATION),
    "prompt_lookup_num_tokens": Only((0,), _NO_SPECULATION),
    **dict.fromkeys(("speculative.n_max", "speculative.n_min", "speculative.p_min"), Only((), _NO_SPECULATION)),
    **dict.fromkeys(("images", "image_data", "audio_data", "video_data", "mm_payload"), Only(([],), _NO_MEDIA)),
    "media_io_kwargs": Only(({},), _NO_MEDIA),
    # Prompts and their lengths.
    "num_ctx": Misplaced("the context is set at the start of the server (--max-model-len)"),
    **dict.fromkeys(
        ("n_ctx", "context_length", "max_context_length"), Misplaced("the context is set with --max-model-len")
    ),
    **dict.fromkeys(("truncate", "truncation_length"), Renamed("truncate_prompt_tokens")),
    "truncation_side": Only(("left",), "truncate_prompt_tokens keeps the last tokens"),
    "truncation": Only(("disabled",), "write truncate_prompt_tokens"),
    "transforms": Only(([],), _KEPT_PROMPT),
    **dict.fromkeys(("n_keep", "num_keep", "n_discard"), Only((0, -1), _KEPT_PROMPT)),
    "input_ids": Misplaced("write token ids as the prompt of /v1/completions"),
    "session_params": Only((), "each request brings its whole prompt"),
    "memory": Only(("",), "write it into the prompt"),
    # Wrapped bodies.
    "extra_body": Misplaced(f"{_IN_THE_BODY}; only the Python client knows extra_body"),
    "options": Misplaced(
        f"{_IN_THE_BODY}: num_predict as max_tokens, repeat_penalty as repetition_penalty, others by their names"
    ),
    "parameters": Misplaced(f"{_IN_THE_BODY}: max_new_tokens as max_tokens, others by their names"),
    "sampling_params": Misplaced(f"{_IN_THE_BODY}: max_new_tokens as max_tokens, others by their names"),
    # Contents of the answer.
    "return_text": Only((True,), "return_token_ids adds ids to the text"),
    "return_tokens": Renamed("return_token_ids", (False,)),
    "return_logprob": Only((False,), "write logprobs"),
    **dict.fromkeys(("logprob_token_ids", "token_ids_logprob"), Only(([],), _ONLY_LIKELIEST)),
    "decoder_input_details": Only((False,), "write prompt_logprobs"),
    **dict.fromkeys(
        (
            "return_hidden_states",
            "return_routed_experts",
            "return_prompt_text",
            "return_token_offsets",
            "return_mm_kwargs",
            "post_sampling_probs",
            "details",
        ),
        Only((False,), _NO_REPORT),
    ),
    "ec_transfer_params": Only((), "encoder outputs are not moved between servers"),
    # Several models behind one address.
    "models": Misplaced("one model is served; write its name in model"),
    "plugins": Only(([],), _NO_SEARCH),
    "enable_search": Only((False,), _NO_SEARCH),
    "preset": Only(("", "None"), "write the values of the preset"),
    "safe_prompt": Only((False,), "write it into the prompt"),
}

_TEMPLATE_FIELDS = (
    "enable_thinking", "thinking", "think", "thinking_budget", "preserve_thinking", "prompt_mode",
    "reasoning_budget", "thinking_mode",
)  # fmt: skip

CHAT: dict[str, Rule] = {
    **_ANY_ROUTE,
    **dict.fromkeys(_TEMPLATE_FIELDS, _TEMPLATE),
    **dict.fromkeys(("separate_reasoning", "stream_reasoning"), Only((True,), _APART)),
    "reasoning_format": Only(("auto", "deepseek", "parsed"), _APART),
    **dict.fromkeys(
        ("n_probs", "top_n_tokens", "top_logprobs_num"), Only((0,), "write logprobs=true and top_logprobs")
    ),
    "continue_": Renamed("continue_final_message", (False,)),
    **dict.fromkeys(("prompt", "input", "inputs", "text"), Misplaced("write messages, or ask /v1/completions")),
    **dict.fromkeys(("system", "instructions", "system_prompt"), Misplaced("write it as a message of the role system")),
    **dict.fromkeys(
        ("template", "chat_template_str", "instruction_template", "instruction_template_str"),
        Only(("",), "templates are run as code, so only the operator sets one (--chat-template)"),
    ),
    **dict.fromkeys(("character", "bot_name", "user_bio", "greeting"), Only(("",), "write it into the messages")),
    "mode": Only(("instruct",), "messages are laid out by the model's chat template"),
    "tool_prompt": Only(("",), _NO_SEARCH),
    "add_bos_token": Only((True,), "the chat template writes the special tokens itself"),
}

COMPLETIONS: dict[str, Rule] = {
    **_ANY_ROUTE,
    **dict.fromkeys(_TEMPLATE_FIELDS, Misplaced(_ASK_CHAT)),
    **dict.fromkeys(("n_probs", "top_n_tokens", "top_logprobs_num"), Renamed("logprobs", (0,))),
    "add_bos_token": Renamed("add_special_tokens", (True,)),
    "return_full_text": Renamed("echo", (False,)),
    **dict.fromkeys(("inputs", "input", "text"), Renamed("prompt")),
    **dict.fromkeys(("system", "system_prompt", "context"), Misplaced("write it at the beginning of the prompt")),
    **dict.fromkeys(("template", "raw"), Only(("", True), _CONTINUED)),
    "tools": Only(([],), _ASK_CHAT),
    "tool_choice": Only(("none", "auto"), _ASK_CHAT),
    "include_reasoning": Only((True,), _ASK_CHAT),
    **dict.fromkeys(("input_prefix", "input_suffix", "input_extra"), Only(("", []), "text cannot be filled in")),
}

TOKENIZE: dict[str, Rule] = {
    **dict.fromkeys(("content", "text", "input"), Renamed("prompt")),
    "add_special": Renamed("add_special_tokens"),
    "with_pieces": Renamed("return_token_strs", (False,)),
    "parse_special": Only((True,), "special tokens in a text are always read as such"),
}

DETOKENIZE: dict[str, Rule] = {"ids": Renamed("tokens"), "token_ids": Renamed("tokens")}

MESSAGE: dict[str, Rule] = {
    "thinking": Renamed("reasoning_content"),
    **dict.fromkeys(("prefix", "partial"), Only((False,), "write continue_final_message=true beside messages")),
    **dict.fromkeys(("images", "videos", "audios"), Only(([],), _NO_MEDIA)),
    "tools": Only(([],), "write them beside messages"),
}
