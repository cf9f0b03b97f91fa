# SPDX-License-Identifier: Apache-2.0
"""The same engines called by hand, as in a script that anybody would write. ``by_hand.py ENGINE MODEL``.

Knows nothing of the plugin. Prints the seconds of each generation and the number of tokens it gave, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from speed_setting import NEW_TOKENS, PROMPT, REPEATS, WARM_UP

THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))


def transformers(model: str) -> Callable[[], int]:
    """``AutoModelForCausalLM.generate``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    torch.set_num_threads(THREADS)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    loaded.generation_config = GenerationConfig()
    inputs: Any = tokenizer([PROMPT], return_tensors="pt")
    length = int(inputs["input_ids"].shape[1])
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, pad_token_id=0, do_sample=False)

    def generate() -> int:
        with torch.inference_mode():
            return int(loaded.generate(**inputs, generation_config=config).shape[1]) - length

    return generate


def openvino(model: str) -> Callable[[], int]:
    """``LLMPipeline.generate``, with the prefix cache off."""
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.LLMPipeline(
        model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=THREADS
    )
    inputs = pipeline.get_tokenizer().encode([PROMPT])
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.apply_chat_template = NEW_TOKENS, True, False

    return lambda: len(pipeline.generate(inputs, config).tokens[0])


def onnxruntime(model: str) -> Callable[[], int]:
    """``onnxruntime_genai.Generator``, token by token; ``min_length`` bars the end."""
    import onnxruntime_genai

    config = onnxruntime_genai.Config(model)
    config.clear_providers()
    session = {"intra_op_num_threads": THREADS}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    loaded = onnxruntime_genai.Model(config)
    ids = onnxruntime_genai.Tokenizer(loaded).encode(PROMPT)
    whole = len(ids) + NEW_TOKENS

    def generate() -> int:
        params = onnxruntime_genai.GeneratorParams(loaded)
        params.set_search_options(max_length=whole, min_length=whole, do_sample=False)
        generator, tokens = onnxruntime_genai.Generator(loaded, params), 0
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
            tokens += 1
        return tokens

    return generate


def llama_cpp(model: str) -> Callable[[], int]:
    """``xllamacpp.Server``, called in the process, without its prompt cache."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 512, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.cache_prompt = False
    server = xllamacpp.Server(params)
    request = {
        **{"prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0},
        **{"ignore_eos": True, "cache_prompt": False},
    }

    return lambda: int(server.handle_completions(request)["usage"]["completion_tokens"])


ENGINES = {
    "transformers": transformers,
    "openvino": openvino,
    "onnxruntime": onnxruntime,
    "llama-cpp": llama_cpp,
}


def main(engine: str, model: str) -> None:
    """Load, warm up, time each generation."""
    generate = ENGINES[engine](model)
    for _ in range(WARM_UP):
        generate()
    seconds = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        tokens = generate()
        seconds.append(time.perf_counter() - start_s)
    print(f"\n{json.dumps({'tokens': tokens, 'seconds': seconds})}")


if __name__ == "__main__":
    main(*sys.argv[1:])
