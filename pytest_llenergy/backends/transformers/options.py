# SPDX-License-Identifier: Apache-2.0
"""Load options of transformers: those that the backend sets, and compilation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pytest_llenergy.backends.models import first_error_line
from pytest_llenergy.backends.options import DEVICES, SOURCE
from pytest_llenergy.errors import BackendError

_DRAFTING = "it is part of the load option speculative"
_COUNTED = "outputs are counted as one sequence of tokens per prompt"

#: Options of transformers that this backend sets, with the reason.
RESERVED: Mapping[str, str] = {
    "attn_implementation": "use the load option attention",
    "torch_dtype": "use the load option dtype",
    **dict.fromkeys(("device_map", "max_memory", "device_mesh", "tp_plan", "tp_size"), DEVICES),
    **dict.fromkeys(("distributed_config", "offload_folder"), DEVICES),
    **dict.fromkeys(("pretrained_model_name_or_path", "config", "state_dict", "output_loading_info"), SOURCE),
    "eos_token_id": "use ignore_eos and stop_token_ids of generate",
    "max_length": "use max_new_tokens of generate",
    "cache_implementation": "use cache of generate",
    **dict.fromkeys(("compile_config", "disable_compile"), "use the load option compile"),
    "prefill_chunk_size": "use the load option chunked_prefill",
    **dict.fromkeys(("prompt_lookup_num_tokens", "max_matching_ngram_size"), _DRAFTING),
    **dict.fromkeys(("num_assistant_tokens", "is_assistant"), _DRAFTING),
    **dict.fromkeys(("num_return_sequences", "return_dict_in_generate", "stop_strings"), _COUNTED),
    **dict.fromkeys(("pad_token_id", "use_cache", "max_time"), _COUNTED),
}


def refuse_together(what: str, options: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise ``BackendError`` for load options that would be ignored, or do not work, with something else."""
    given = [name for name in names if options.get(name) not in (None, False)]
    if given:
        raise BackendError(f"transformers: {what} does not work with {', '.join(given)}; leave one out")


def compile_config(mode: str) -> Any:
    """Return the compile config of ``GenerationConfig``. By default transformers compiles on GPUs only."""
    import torch._inductor.config as inductor
    from transformers import CompileConfig

    # Otherwise torch starts a process per core, which would run during the measurement.
    inductor.compile_threads = 1
    config = CompileConfig(mode=mode)
    config._compile_all_devices = True
    return config


def count_compiled_graphs() -> int:
    """Return how many graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compile_job(job: Any) -> None:
    """Run a job once so that nothing is left to compile.

    Code compiled for earlier batches is dropped first: with it, torch would compile this batch for any shape,
    or after a few more not at all, and results would depend on earlier runs.
    """
    import torch

    torch.compiler.reset()
    before = count_compiled_graphs()
    try:
        job.run()
    except RuntimeError as error:
        raise BackendError(f"transformers: compile: {first_error_line(error)}") from error
    if count_compiled_graphs() == before:
        raise BackendError(
            "transformers: compile: generate compiled nothing; it does with cache='static', one beam and "
            "most architectures"
        )
