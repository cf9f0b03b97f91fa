# SPDX-License-Identifier: Apache-2.0
"""Tests that every backend must pass, as a class to derive from. ``checks`` has the checks themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pytest_llenergy.backends.base import DEGREES, BackendSpec
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.registry import Requirements, explain_unmet
from pytest_llenergy.conformance import checks, ranks
from pytest_llenergy.conformance.checks import require
from pytest_llenergy.conformance.ranks import LoadedBackend, Refusal, model_fields
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import BackendError, PlanError, WorkerError
from pytest_llenergy.plugin.session import RunState, state_of
from pytest_llenergy.ranks.workload import split_prompts
from pytest_llenergy.record.record import Parallel

#: Prompts of unequal lengths with their token counts in models of random weights, which have one per byte.
BYTES = {text: len(text) for text in ("abc", "hello world", "x")}

SHORT, LONG = 5, 12

#: How often the prompts are repeated to make one that exceeds the context of most models.
LONG_PROMPT = 1024


class BackendConformance:
    """Derive a class ``TestMine`` from this one. A class with the mark ``gpus(n)`` runs on GPUs.

    Attributes:
        spec: The backend.
        model: The model that it loads.
        options: Load options.
        reference: Name of a backend that loads the same weights, or ``None``.
        reference_options: Its load options; by default the dtype that this backend has loaded.
        prompts: Two or more texts of unequal lengths, each with its number of tokens, counted by hand. Not
            needed for models of random weights, which have one token per byte.
        bad_options: Invalid values of load options that accept ``"no such value"``.
        any_value: Load options that accept any value, each with the reason.
        threads: Threads of a rank.
        degrees_of_gpus: Degrees that are declared, but refused on the CPU.
        why_no_reference: Why ``reference`` is ``None``. This and the following reasons skip the test that
            they concern, and it shows them.
        why_batches_differ: Why a padded batch gives other tokens than each prompt alone.
        why_shards_differ: Why a sharded model gives other tokens than an unsharded one.
        why_no_sampling: Why the backend cannot sample.
        why_no_stop_tokens: Why the backend refuses stop tokens.
    """

    spec: ClassVar[BackendSpec]
    model: ClassVar[str]
    reference: ClassVar[str | None] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    reference_options: ClassVar[Mapping[str, Any] | None] = None
    prompts: ClassVar[Mapping[str, int]] = {}
    bad_options: ClassVar[Mapping[str, Any]] = {}
    any_value: ClassVar[Mapping[str, str]] = {}
    threads: ClassVar[int] = 1
    why_no_reference: ClassVar[str] = ""
    why_batches_differ: ClassVar[str] = ""
    why_shards_differ: ClassVar[str] = ""
    why_no_sampling: ClassVar[str] = ""
    why_no_stop_tokens: ClassVar[str] = ""

    degrees_of_gpus: ClassVar[Sequence[str]] = ()

    #: Results that several tests of a class share.
    _found: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._found = {}

    @pytest.fixture
    def loaded(self, request: pytest.FixtureRequest, _llenergy_lease: Lease) -> LoadedBackend:
        """The backend, loaded in ranks on the devices of the test."""
        for name in ("spec", "model"):
            if not hasattr(self, name):
                pytest.fail(f"{type(self).__name__} has no {name}; see docs/extending.md", pytrace=False)
        # Here ``options`` configure what a run would have to, and load() names the one that is missing.
        spec = replace(self.spec, needs=None)
        return self._make_loaded(spec, self.options, state_of(request.config), _llenergy_lease)

    def test_prompts_are_counted_without_padding(self, loaded: LoadedBackend) -> None:
        batch_result = loaded.generate(list(self._prompts), max_new_tokens=2)
        checks.check_prompt_counts(batch_result, self._prompts)

    def test_a_long_prompt_is_processed_whole_or_refused(self, loaded: LoadedBackend) -> None:
        text = " ".join(self._prompts) + " "
        (request,) = loaded.generate([text * 4], max_new_tokens=1).timeline.requests
        wanted = request.input_tokens * LONG_PROMPT // 4
        try:
            (request,) = loaded.generate([text * LONG_PROMPT], max_new_tokens=1).timeline.requests
        except BackendError as error:
            require("\n" not in str(error), f"a long prompt is not refused in one line: {error}")
            return
        found = request.input_tokens
        what = f"a prompt of about {wanted} tokens has input_tokens={found}"
        require(found > 0.9 * wanted, f"{what}; refuse in prepare() what the library would cut")

    def test_outputs_are_counted_as_produced(self, loaded: LoadedBackend) -> None:
        batch_result = loaded.generate(list(self._prompts), max_new_tokens=SHORT)
        checks.check_output_counts(batch_result, SHORT)

    def test_a_stop_token_ends_its_sequence(self, loaded: LoadedBackend) -> None:
        texts = list(self._prompts)
        if self.why_no_stop_tokens:
            self._refuses_stop_tokens(loaded, texts)
            pytest.skip(self.why_no_stop_tokens)
        free = self._batch(loaded, texts)
        stop = checks.choose_stop_token(free)
        if stop is None:
            pytest.fail("no token ends one of these prompts early and others later; give others", False)
        batch_result = loaded.generate(texts, max_new_tokens=LONG, stop_token_ids=[stop])
        checks.check_stop_token(batch_result, free, stop)

    def test_a_padded_batch_gives_what_each_prompt_gives_alone(self, loaded: LoadedBackend) -> None:
        if self.why_batches_differ:
            pytest.skip(self.why_batches_differ)
        texts = list(self._prompts)
        batch = self._batch(loaded, texts)
        checks.check_distinct_outputs(batch)
        checks.check_equal_tokens(batch, self._alone(loaded), texts, ("in a batch", "alone"))

    def test_timestamps_are_as_declared(self, loaded: LoadedBackend) -> None:
        for texts in (list(self._prompts)[:1], list(self._prompts)):
            batch_result = loaded.generate(texts, max_new_tokens=SHORT)
            checks.check_timestamps(batch_result, self.spec.capabilities)

    def test_repeated_prompts_are_computed_anew(self, loaded: LoadedBackend) -> None:
        for _ in range(2):
            batch = loaded.generate(list(self._prompts), max_new_tokens=2)
            reused = any(request.cached_tokens for request in batch.generation.requests)
            require(not reused, "a repeated prompt was taken from a prefix cache; switch that off in load()")

    def test_sampling_depends_only_on_the_seed(self, loaded: LoadedBackend) -> None:
        if self.why_no_sampling:
            pytest.skip(self.why_no_sampling)

        def draw(seed: int) -> list[list[int]]:
            texts = [next(iter(self._prompts))]
            return loaded.generate(texts, max_new_tokens=LONG, do_sample=True, seed=seed).token_ids

        first = draw(1)
        same, drawn = draw(1) == first, any(draw(seed) != first for seed in (2, 3, 4))
        require(same, "seed=1 draws other tokens the second time; set the seed before each run")
        require(drawn, "the seeds 1 to 4 draw the same tokens; apply do_sample and seed")

    def test_tokens_equal_those_of_the_reference(
        self, loaded: LoadedBackend, request: pytest.FixtureRequest
    ) -> None:
        state = state_of(request.config)
        if self.reference is None and self.why_no_reference:
            pytest.skip(self.why_no_reference)
        require(
            self.reference in state.backends,
            f"reference is {self.reference!r}; name one of {', '.join(state.backends)}, or None with the "
            "reason in why_no_reference",
        )
        spec = state.backends[str(self.reference)]
        if (missing := spec.explain_unavailable()) is not None:
            pytest.skip(f"the reference is not available: {missing}")
        own, (_, info) = self._alone(loaded), loaded.load()
        options = {"dtype": info.dtype} if self.reference_options is None else self.reference_options
        others = self._alone(self._make_loaded(spec, options, state, loaded.lease))
        checks.check_distinct_outputs(own)
        checks.check_equal_tokens(own, others, list(self._prompts), (self.spec.name, spec.name))

    def test_unloading_frees_the_memory(self, loaded: LoadedBackend) -> None:
        found = loaded.call(ranks.load_repeatedly, prompt=next(iter(self._prompts)))
        if found is None:
            pytest.skip("this system does not report the memory of a process")
        checks.check_memory_freed(found)

    def test_a_broken_model_is_reported_in_one_line(self, loaded: LoadedBackend, tmp_path: Path) -> None:
        bad = checks.bad_models(tmp_path)
        read = [model for model in bad if self.spec.refuses(model) is None]
        for model in bad:
            refusal = self.spec.refuses(model)
            is_line = refusal is None or (refusal.strip() and "\n" not in refusal)
            require(is_line, f"spec.refuses({model.label}) does not return a single line: {refusal!r}")
        tries = [model_fields(model) for model in read]
        refusals = self._try_loading(loaded, tries) if read else []
        for model, refused in zip(read, refusals, strict=True):
            checks.check_refusal(refused, f"the broken model {model.label}", model.label)

    def test_a_bad_option_is_reported_in_one_line(self, loaded: LoadedBackend) -> None:
        names = [name for name in self.spec.capabilities.options if name not in self.any_value]
        if not names:
            pytest.skip("the capabilities declare no load option")
        values = {name: self.bad_options.get(name, "no such value") for name in names}
        tries = [{"options": {**self.options, name: value}} for name, value in values.items()]
        for (name, value), refusal in zip(values.items(), self._try_loading(loaded, tries), strict=True):
            checks.check_refusal(refusal, f"{name}={value!r}", name)

    @pytest.mark.parametrize("kind", DEGREES)
    def test_a_requested_degree_is_used_or_refused(self, loaded: LoadedBackend, kind: str) -> None:
        degrees = Parallel(**{kind: 2})
        if not getattr(self.spec.capabilities, kind):
            assert explain_unmet(self.spec, Requirements(parallel=degrees)) is not None
            with pytest.raises(PlanError, match=f"no {kind} parallelism is offered"):
                loaded.plan(degrees)
            return
        if loaded.devices(2) is None:
            pytest.skip(f"{kind}=2 needs two GPUs; mark the class gpus(2)")
        if kind == "placement" and not loaded.lease.uuids:
            pytest.skip("layers are spread over GPUs; mark the class gpus(2)")
        if kind in self.degrees_of_gpus and not loaded.lease.uuids:
            # The library's own refusal.
            with pytest.raises(BackendError):
                loaded.load(degrees)
            pytest.skip(f"{kind} is offered on GPUs only; mark the class gpus(2)")
        texts = list(self._prompts)
        parts = split_prompts(texts, 2) if kind == "data" else [texts]
        single = [ids for part in parts for ids in self._batch(loaded, list(map(str, part)))]
        group, _ = loaded.load(degrees)
        batch_result = loaded.generate(texts, degrees=degrees, max_new_tokens=LONG)
        checks.check_parts(loaded, group.ranks, batch_result, degrees)
        if kind == "data" or not self.why_shards_differ:
            names = (f"{kind}=2", "on one device")
            checks.check_equal_tokens(batch_result.token_ids, single, texts, names)
        if kind in ("tensor", "pipeline") and self.spec.capabilities.launch == "ranks":
            checks.check_shards_depend(loaded, degrees, texts[0])

    @property
    def _prompts(self) -> Mapping[str, int]:
        if self.prompts:
            return self.prompts
        require(
            self.model.startswith("random:"),
            'give prompts = {"text": tokens, ...}: of unequal lengths, with their tokens counted by hand',
        )
        return BYTES

    def _refuses_stop_tokens(self, loaded: LoadedBackend, texts: Sequence[str]) -> None:
        try:
            loaded.generate(texts, max_new_tokens=2, stop_token_ids=[1])
        except BackendError:
            return
        pytest.fail(
            "stop_token_ids are accepted although why_no_stop_tokens is set; refuse them in prepare()"
        )

    def _batch(self, loaded: LoadedBackend, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of these prompts in one batch on one device."""
        kept: dict[tuple[str, ...], list[list[int]]] = self._found.setdefault(loaded.spec.name, {})
        if tuple(texts) not in kept:
            kept[tuple(texts)] = loaded.generate(texts, max_new_tokens=LONG).token_ids
        return kept[tuple(texts)]

    def _alone(self, loaded: LoadedBackend) -> list[list[int]]:
        """Return the tokens of each prompt in a separate batch."""
        return [self._batch(loaded, [text])[0] for text in self._prompts]

    def _try_loading(self, loaded: LoadedBackend, tries: list[dict[str, Any]]) -> list[Refusal | None]:
        """Load with each of ``tries`` in turn; the rank must survive."""
        try:
            refusals: list[Refusal | None] = loaded.call(ranks.try_loading, tries=tries)
        except WorkerError as error:
            what = " or ".join(str(value) for each in tries for value in each.values())
            pytest.fail(
                f"{str(error).splitlines()[0]} while loading {what}; check it in load() before the "
                "library does, and raise ModelError or BackendError",
                pytrace=False,
            )
        return refusals

    def _make_loaded(
        self, spec: BackendSpec, options: Mapping[str, Any], state: RunState, lease: Lease
    ) -> LoadedBackend:
        model = resolve_model(self.model)
        if (missing := spec.explain_unavailable()) is not None:
            pytest.skip(missing)
        refused = spec.refuses(model)
        require(refused is None, f"model = {self.model!r}: {refused}; name another")
        on_gpus, row = bool(lease.uuids), spec.capabilities
        if not (row.gpu if on_gpus else row.cpu):
            where = "GPUs here" if on_gpus else "the CPU here; mark the class gpus(1)"
            pytest.skip(f"{spec.name} does not run on {where}")
        threads, timeout_s = state.threads or self.threads, state.settings.timeout
        return LoadedBackend(spec, model, options, lease, state.pool, threads, timeout_s)
