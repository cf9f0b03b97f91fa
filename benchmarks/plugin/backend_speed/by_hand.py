# SPDX-License-Identifier: Apache-2.0
"""The same backends called from a plain script without the plugin: ``by_hand.py BACKEND MODEL``.

Prints the seconds of each generation and the number of tokens as JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speed_setting import NEW_TOKENS, PROMPT, REPEATS, WARM_UP

SERVER = Path(__file__).parents[2] / "serving" / "llama_server.py"
THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))


def transformers(model: str) -> Callable[[], int]:
    """Generate with ``AutoModelForCausalLM.generate``."""
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
    """Generate with ``LLMPipeline.generate``, with the prefix cache off."""
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
    """Generate with ``onnxruntime_genai.Generator``, token by token; ``min_length`` prevents an early end."""
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
    """Generate with ``xllamacpp.Server`` in this process, without its prompt cache."""
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


def vllm(model: str) -> Callable[[], int]:
    """Generate with ``vllm.LLM.generate``, with the prefix cache off and its default process layout."""
    import vllm

    memory = {"kv_cache_memory_bytes": 1 << 30}
    loaded = vllm.LLM(model=model, enable_prefix_caching=False, disable_log_stats=True, **memory)
    params = vllm.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)

    return lambda: len(loaded.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids)


def server(model: str) -> Callable[[], int]:
    """Stream from llama.cpp's server over HTTP, with one connection per request."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), model, str(port), str(THREADS)])
    atexit.register(process.wait)
    atexit.register(process.terminate)
    address = f"http://127.0.0.1:{port}"
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                break
        except OSError:
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode} before it was ready") from None
            # The server does not report that it is ready.
            time.sleep(0.1)
    asked = {
        **{"model": "default", "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True},
        **{"stream_options": {"include_usage": True}, "ignore_eos": True, "cache_prompt": False},
    }
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )

    def generate() -> int:
        tokens = 0
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    tokens = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", tokens)
        return tokens

    return generate


BACKENDS = {
    "transformers": transformers,
    "openvino": openvino,
    "onnxruntime": onnxruntime,
    "llama-cpp": llama_cpp,
    "server": server,
    "vllm": vllm,
}


def main(backend: str, model: str) -> None:
    """Load, warm up and time each generation."""
    generate = BACKENDS[backend](model)
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
