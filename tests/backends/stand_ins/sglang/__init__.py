# SPDX-License-Identifier: Apache-2.0
"""``sglang.Engine``, as python/sglang/srt/entrypoints/engine.py and server_args.py have it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from typing import Any

from sglang.srt.server_args import ServerArgs
from words import continued

__version__ = "0.5.stand-in"

#: python/sglang/srt/sampling/sampling_params.py
SAMPLING = {
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema"),
    *("regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "logit_bias", "sampling_seed"),
    *("spaces_between_special_tokens", "no_stop_trim", "custom_params", "stream_interval"),
}


class Engine:
    """One scheduler for each shard of each replica, and a detokenizer."""

    def __init__(self, **kwargs: Any) -> None:
        self.server_args = args = ServerArgs(**{"log_level": "error", **kwargs})
        titles = [
            "sglang::scheduler"
            + (f"_DP{data}" if args.dp_size > 1 else "")
            + (f"_PP{pipeline}" if args.pp_size > 1 else "")
            + (f"_TP{tensor}" if args.tp_size > 1 else "")
            for data in range(args.dp_size)
            for pipeline in range(args.pp_size)
            for tensor in range(args.tp_size)
        ]
        if args.nnodes > 1:
            # As _calculate_rank_ranges of engine.py divides them.
            here = len(titles) // args.nnodes
            titles = titles[args.node_rank * here : (args.node_rank + 1) * here]
        if args.node_rank == 0:
            titles.append("sglang::detokenizer")
        else:
            assert os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] == "0", "blocks until its schedulers end"
        self._processes = [subprocess.Popen([title, "300"], executable="/bin/sleep") for title in titles]
        self._caches = not args.disable_radix_cache or "STAND_IN_CACHES" in os.environ
        self._seen: set[tuple[int, ...]] = set()

    def generate(
        self,
        prompt: list[str] | str | None = None,
        sampling_params: list[dict[str, Any]] | dict[str, Any] | None = None,
        input_ids: list[list[int]] | list[int] | None = None,
        return_logprob: list[bool] | bool | None = False,
        stream: bool = False,
        lora_path: list[str | None] | str | None = None,
    ) -> list[dict[str, Any]]:
        assert prompt is None, "with skip_tokenizer_init prompts are token ids"
        assert not stream
        assert lora_path is None or lora_path in (self.server_args.lora_paths or {})
        assert isinstance(sampling_params, list)
        outputs = []
        for ids, params in zip(input_ids or [], sampling_params, strict=True):
            assert isinstance(ids, list)
            if unknown := set(params) - SAMPLING:
                raise TypeError(f"SamplingParams got unexpected arguments {unknown}")
            ends = {*(params.get("stop_token_ids") or ()), *(() if params.get("ignore_eos") else (2,))}
            seed = params.get("sampling_seed", 0) if params.get("temperature") else 0
            made = continued(ids, params["max_new_tokens"], ends, seed)
            cached = len(ids) - 1 if self._caches and tuple(ids) in self._seen else 0
            self._seen.add(tuple(ids))
            reason = {"type": "stop", "matched": made[-1]} if made[-1] in ends else {"type": "length"}
            meta: dict[str, Any] = {
                "id": "0",
                "finish_reason": reason,
                "prompt_tokens": len(ids),
                "completion_tokens": len(made),
                "cached_tokens": cached,
                "e2e_latency": 0.001,
            }
            drafts = self.server_args.speculative_num_draft_tokens
            if drafts is not None:
                # python/sglang/srt/managers/tokenizer_manager.py: all drafts of a step, less its own token.
                steps = -(-len(made) // drafts)
                proposed, correct = steps * (drafts - 1), len(made) - steps
                meta |= {"spec_num_proposed_drafts": proposed, "spec_num_correct_drafts": correct}
            outputs.append({"output_ids": made, "meta_info": meta})
        return outputs

    def get_server_info(self) -> dict[str, Any]:
        assert self.server_args.node_rank == 0, "there is no tokenizer manager"
        return {**dataclasses.asdict(self.server_args), "version": __version__}

    def shutdown(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
