# SPDX-License-Identifier: Apache-2.0
"""The same backends called from a plain script without the plugin: ``by_hand.py BACKEND MODEL WORK``.

Prints JSON. For the work ``speed``: the seconds of each generation and the number of tokens. For ``answers``:
the answer to each prompt as token ids, or as text if the interface has no ids.
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

from speed_setting import NEW_TOKENS, PROMPT, PROMPTS, REPEATS, WARM_UP

SERVER = Path(__file__).parents[2] / "serving" / "llama_server.py"
THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))

#: Token ids of an answer, or its text and the number of its tokens.
Answer = list[int] | tuple[str, int]
Generate = Callable[[str], Answer]


def transformers(model: str) -> Generate:
    """Generate with ``AutoModelForCausalLM.generate``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    torch.set_num_threads(THREADS)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    loaded.generation_config = GenerationConfig()
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, pad_token_id=0, do_sample=False)

    def generate(prompt: str) -> Answer:
        inputs: Any = tokenizer([prompt], return_tensors="pt")
        with torch.inference_mode():
            whole = loaded.generate(**inputs, generation_config=config)[0].tolist()
        return list(whole[inputs["input_ids"].shape[1] :])

    return generate


def openvino(model: str) -> Generate:
    """Generate with ``LLMPipeline.generate``, with the prefix cache off."""
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.LLMPipeline(
        model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=THREADS
    )
    tokenizer = pipeline.get_tokenizer()
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.apply_chat_template = NEW_TOKENS, True, False

    return lambda prompt: list(pipeline.generate(tokenizer.encode([prompt]), config).tokens[0])


def onnxruntime(model: str) -> Generate:
    """Generate with ``onnxruntime_genai.Generator``, token by token.

    ``min_length`` prevents an early end, and with it the token that ends a text. The other backends ignore
    that token and go on, so another one that no text needs is declared the end.
    """
    import onnxruntime_genai

    written = json.loads((Path(model) / "genai_config.json").read_bytes())["model"]
    unused = written["vocab_size"] - 1
    config = onnxruntime_genai.Config(model)
    config.clear_providers()
    session = {"intra_op_num_threads": THREADS}
    config.overlay(json.dumps({"model": {"eos_token_id": unused, "decoder": {"session_options": session}}}))
    loaded = onnxruntime_genai.Model(config)
    tokenizer = onnxruntime_genai.Tokenizer(loaded)

    def generate(prompt: str) -> Answer:
        ids = tokenizer.encode(prompt)
        whole = len(ids) + NEW_TOKENS
        params = onnxruntime_genai.GeneratorParams(loaded)
        params.set_search_options(max_length=whole, min_length=whole, do_sample=False)
        generator, tokens = onnxruntime_genai.Generator(loaded, params), []
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        return tokens

    return generate


def llama_cpp(model: str) -> Generate:
    """Generate with ``xllamacpp.Server`` in this process, without its prompt cache."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 512, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.cache_prompt = False
    server = xllamacpp.Server(params)
    request = {
        **{"max_tokens": NEW_TOKENS, "temperature": 0},
        **{"ignore_eos": True, "cache_prompt": False},
    }

    def generate(prompt: str) -> Answer:
        answer = server.handle_completions({**request, "prompt": prompt})
        return str(answer["choices"][0]["text"]), int(answer["usage"]["completion_tokens"])

    return generate


def vllm(model: str) -> Generate:
    """Generate with ``vllm.LLM.generate``, with the prefix cache off and its default process layout."""
    import vllm

    memory = {"kv_cache_memory_bytes": 1 << 30}
    loaded = vllm.LLM(model=model, enable_prefix_caching=False, disable_log_stats=True, **memory)
    params = vllm.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)

    return lambda prompt: list(loaded.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)


def server(model: str) -> Generate:
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
        **{"model": "default", "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True},
        **{"stream_options": {"include_usage": True}, "ignore_eos": True, "cache_prompt": False},
    }

    def generate(prompt: str) -> Answer:
        text, tokens = "", 0
        body = json.dumps({**asked, "prompt": prompt}).encode()
        request = urllib.request.Request(
            f"{address}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    text += "".join(each["text"] for each in event["choices"])
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return text, tokens

    return generate


BACKENDS = {
    "transformers": transformers,
    "openvino": openvino,
    "onnxruntime": onnxruntime,
    "llama-cpp": llama_cpp,
    "server": server,
    "vllm": vllm,
}


def measure_speed(generate: Generate) -> dict[str, Any]:
    """Warm up and time each generation."""
    for _ in range(WARM_UP):
        generate(PROMPT)
    seconds = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        answer = generate(PROMPT)
        seconds.append(time.perf_counter() - start_s)
    return {"tokens": answer[1] if isinstance(answer, tuple) else len(answer), "seconds": seconds}


def collect_answers(generate: Generate) -> dict[str, Any]:
    """Answer each prompt."""
    answers = [generate(prompt) for prompt in PROMPTS]
    return {"answers": [each[0] if isinstance(each, tuple) else each for each in answers]}


def main(backend: str, model: str, work: str) -> None:
    """Load the model and do the work."""
    do = {"speed": measure_speed, "answers": collect_answers}[work]
    print(f"\n{json.dumps(do(BACKENDS[backend](model)))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
