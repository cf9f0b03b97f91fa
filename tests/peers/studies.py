# SPDX-License-Identifier: Apache-2.0
"""Files as users of LLenergyMeasure have them, with how many experiments each is, counted by hand."""

from __future__ import annotations

TASK = """
serving_mode: offline
task:
  model: random:llama-tiny
  dataset: {n_prompts: 2}
  max_output_tokens: 3
"""

#: By name: the file, and how many experiments it is.
STUDIES: dict[str, tuple[str, int]] = {
    "one experiment": (TASK + "engine: transformers\n", 1),
    "an experiment with everything": (
        """
version: "2.0"
serving_mode: offline
engine: transformers
sampling_preset: standard
task:
  model: Qwen/Qwen2.5-0.5B
  random_seed: 7
  dataset: {source: aienergyscore, n_prompts: 100, order: shuffled}
  max_input_tokens: 128
  max_output_tokens: 64
measurement:
  energy_sampler: nvml
  baseline: {enabled: true, duration_seconds: 10.0}
  latency_profiling: false
offline: {warmup: {enabled: true, n_prompts: 4, thermal_floor_seconds: 30}}
transformers:
  engine_params: {dtype: bfloat16, attn_implementation: eager, use_cache: true, device_map: auto}
  sampling_params: {do_sample: true, min_p: 0.05}
  llem_execution: {batch_size: 8, allow_tf32: true}
passthrough_kwargs: {use_safetensors: true}
""",
        1,
    ),
    # 2 dtypes by 3 batch sizes.
    "two axes": (
        TASK
        + """
sweep:
  transformers.engine_params.dtype: [float32, bfloat16]
  transformers.llem_execution.batch_size: {pow2: {min: 1, max: 4}}
study_execution: {n_cycles: 3, experiment_order: shuffle}
""",
        6,
    ),
    # 2 dtypes by 1 + 2 + 1 alternatives.
    "groups with lists in them": (
        TASK
        + """
sweep:
  transformers.engine_params.dtype: [float16, bfloat16]
  transformers.quant:
    - {}
    - transformers.engine_params.load_in_4bit: true
      transformers.engine_params.bnb_4bit_quant_type: [nf4, fp4]
    - transformers.engine_params.load_in_8bit: true
""",
        8,
    ),
    # 2 lengths for each engine: by 2 dtypes of transformers, by 3 degrees of vllm.
    "axes of engines": (
        TASK
        + """
sweep:
  task.max_output_tokens: [2, 3]
  transformers.engine_params.dtype: [float32, bfloat16]
  vllm.engine_params.tensor_parallel_size: [1, 2, 4]
""",
        10,
    ),
    # 2 engines by 2 prompts, and the section of one is left out for the other.
    "a list of engines": (
        TASK
        + """
engine: [transformers, vllm]
transformers: {engine_params: {attn_implementation: eager}}
sweep:
  task.dataset.n_prompts: [1, 2]
""",
        4,
    ),
    # 3 from 1 to 9, 4 from 1 to 1000: 3 by 4.
    "ranges": (
        TASK
        + """
sweep:
  task.random_seed: {min: 1, max: 9, num: 3}
  task.max_output_tokens: {log: {min: 1, max: 1000, num: 4}}
""",
        12,
    ),
    "a list of experiments": (
        """
serving_mode: offline
task: {dataset: {n_prompts: 2}}
experiments:
  - task: {model: random:llama-tiny, max_output_tokens: 2}
    engine: transformers
  - task: {model: openai-community/gpt2}
    engine: vllm
    vllm: {engine_params: {dtype: float16}}
""",
        2,
    ),
    # 2 of the sweep, then 1.
    "a sweep and a list": (
        TASK
        + """
sweep:
  transformers.engine_params.dtype: [float16, bfloat16]
experiments:
  - transformers: {engine_params: {dtype: float32}}
""",
        3,
    ),
}
