# SPDX-License-Identifier: Apache-2.0
"""Backends in real ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pytest_llenergy.backends import transformers
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.tasks import Generation, GenerationParams, Params, Result
from pytest_llenergy.devices.cpu import usable_cpus
from pytest_llenergy.devices.lease import CPU, Lease
from pytest_llenergy.model.record import Parallel
from pytest_llenergy.model.timeline import RoundTimeline
from pytest_llenergy.workers.plan import plan_processes
from pytest_llenergy.workers.pool import Load, RankPool
from pytest_llenergy.workers.workload import RankWorkload, call_workload, task_workload

if TYPE_CHECKING:
    from typing_extensions import Self

TINY = "random:llama-tiny"
#: Three, eleven and one token of the random models, which have one a byte and add none.
PROMPTS = ["abc", "hello world", "x"]

#: Two tokens of SmolLM2, 28120 and 905, and six, one a word.
SMOLLM_PROMPTS = ["hello world", "The capital of France is a"]
#: Its 21 tokens ask for an answer that is short.
SMOLLM_CHAT = (
    "<|im_start|>user\nWhat is the capital of France? Answer in one word.<|im_end|>\n<|im_start|>assistant\n"
)

TIMEOUT_S = 300.0


class LoadedRanks:
    """Ranks that have loaded a model, each with one thread; they end with the ``with`` block or ``close``.

    They are on the CPU; those of a backend that does not run there are on boards that only the plan knows.
    ``model`` is a name as ``resolve`` takes it.
    """

    def __init__(
        self,
        spec: BackendSpec = transformers.SPEC,
        model: str | None = TINY,
        degrees: Parallel | None = None,
        **options: Any,
    ) -> None:
        self.spec, self.model, self.degrees = spec, model, degrees or Parallel()
        n = self.degrees.data * self.degrees.tensor * self.degrees.pipeline
        devices = (CPU,) * n if spec.capabilities.cpu else tuple(f"GPU-{number}" for number in range(n))
        self.plan = plan_processes(
            spec.capabilities, self.degrees, Lease(devices=devices), usable_cpus(), 1, spec.python
        )
        # The same ranks take another load.
        self.pool = RankPool(TIMEOUT_S, isolation="run")
        try:
            self.load(**options)
        except BaseException:
            # Nobody could close it yet.
            self.close()
            raise

    def load(self, **options: Any) -> None:
        """Load the model with these options, in place of the one that the ranks have."""
        load = Load.from_options(self.spec, resolve_model(self.model), options)
        self.group, self.info = self.pool.get_loaded(self.plan, load)

    def prepare(self, inputs: Sequence[str], params: Params) -> RankWorkload:
        """A batch that can be run as often as it takes."""
        return task_workload(self.group, inputs, params, TIMEOUT_S)

    def generate(self, prompts: Sequence[str], **params: Any) -> tuple[Generation, RoundTimeline]:
        """One round: eight tokens a prompt, whatever ends a sequence, unless told otherwise."""
        told = GenerationParams.parse({"max_new_tokens": 8, "ignore_eos": True, **params})
        workload = self.prepare(prompts, told)
        timeline = workload.run_round()
        return Generation.merge(workload.results()), timeline

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What a function returns in each rank."""
        workload = call_workload(self.group, function, args, {}, TIMEOUT_S)
        workload.run_round()
        return workload.results()

    def close(self) -> None:
        """End the ranks."""
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def counts(made: Result) -> list[tuple[int, int]]:
    """Input and output tokens of each request."""
    return [(request.input_tokens, request.output_tokens) for request in made.requests]
