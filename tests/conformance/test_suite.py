# SPDX-License-Identifier: Apache-2.0
"""The suite itself: the example of the documentation passes, and each wrong backend fails one check."""

from __future__ import annotations

import re
import textwrap

import pytest

from .tiny import BACKEND, DERIVED, HOOK, JOBS, SUITE, SUITE_OF_DERIVED

#: All tests share one rank.
OPTIONS = ("-rsf", "-p", "no:cacheprovider", "--energy-isolation=run")
DEGREE = "test_a_requested_degree_is_used_or_refused"


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project that contains the example."""
    (pytester.path / "tiny_backend.py").write_text(BACKEND)
    pytester.makeconftest(HOOK)
    return pytester


def add(
    project: pytest.Pytester, name: str, code: str, row: str = "", spec: str = "", attributes: str = ""
) -> str:
    """Add a backend that is derived from the example, and its suite. Returns the class of tests."""
    module = name.replace("-", "_")
    (project.path / f"{module}.py").write_text(DERIVED.format(module=module, code=code, row=row, spec=spec))
    suite = SUITE_OF_DERIVED.format(module=module, attributes=textwrap.indent(attributes, "    "))
    (project.path / f"test_{module}.py").write_text(suite)
    return f"test_{module}.py::Test_{module}"


def output_of(result: pytest.RunResult) -> str:
    return " ".join(result.stdout.str().split())


def failures(result: pytest.RunResult) -> dict[str, str]:
    """Return the text of each failure by its test."""
    parts = re.split(r"^_+ (Test_\S+) _+$", result.stdout.str(), flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def test_the_example_of_the_documentation_passes(project: pytest.Pytester) -> None:
    project.makepyfile(SUITE)
    result = project.runpytest("-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=14, skipped=2)
    assert "nobody else has these weights" in output_of(result)
    assert "it is greedy" in output_of(result)


def test_the_example_measures(project: pytest.Pytester) -> None:
    project.makepyfile(
        "import pytest\n@pytest.mark.backend_options(size_mb=4)\ndef test_it(backend):\n"
        "    made = backend.generate(['abc'], max_new_tokens=3)\n    assert made.output_tokens == 3\n"
    )
    result = project.runpytest("--energy-backend=tiny", "--energy-model=random:llama-tiny")
    result.assert_outcomes(passed=1)


COUNTS_PADDING = (
    JOBS
    + """
class Job(TinyJob):
    def result(self, outcome):
        made = super().result(outcome)
        longest = max(len(prompt) for prompt in self.prompts)
        padded = [msgspec.structs.replace(each, input_tokens=longest) for each in made.requests]
        return msgspec.structs.replace(made, requests=padded)
"""
)
CUTS = """
class Derived(TinyBackend):
    def prepare(self, prompts, params):
        return super().prepare([prompt[:1000] for prompt in prompts], params)
"""
ONE_TOKEN_LESS = """
class Derived(TinyBackend):
    def prepare(self, prompts, params):
        fewer = max(params.max_new_tokens - 1, 1)
        return super().prepare(prompts, msgspec.structs.replace(params, max_new_tokens=fewer))
"""
IGNORES_STOP_IDS = """
class Derived(TinyBackend):
    def prepare(self, prompts, params):
        return super().prepare(prompts, msgspec.structs.replace(params, stop_token_ids=()))
"""
LEAVES_STOP_TOKEN_OUT = (
    JOBS
    + """
class Job(TinyJob):
    def complete(self, prompt):
        ids, stamps_ns = super().complete(prompt)
        cut = len(ids) - (ids[-1] in self.params.stop_token_ids)
        return ids[:cut], stamps_ns[:cut]
"""
)
SEES_PADDING = (
    JOBS
    + """
class Job(TinyJob):
    def complete(self, prompt):
        longest = max(map(len, self.prompts))
        return super().complete([0] * (longest - len(prompt)) + prompt)
"""
)
REPORTS_A_PREFIX_CACHE = (
    JOBS
    + """
class Job(TinyJob):
    def result(self, outcome):
        made = super().result(outcome)
        reused = [msgspec.structs.replace(each, cached_tokens=1) for each in made.requests]
        return msgspec.structs.replace(made, requests=reused)
"""
)
STAMPS = (
    JOBS
    + """
class Job(TinyJob):
    def complete(self, prompt):
        ids, stamps_ns = super().complete(prompt)
        return ids, STAMPS
"""
)
LEAKS = """
KEPT = []
class Derived(TinyBackend):
    def close(self):
        KEPT.append(self.weights)
        super().close()
"""
LOADS = """
class Derived(TinyBackend):
    def load(self, model, options, context):
        if model.kind != "random":
            REFUSAL
        return super().load(model, options, context)
"""
ANY_MODEL = "refuses=lambda model: None"
TAKES_ANY_OPTION = """
class Derived(TinyBackend):
    def load(self, model, options, context):
        known = isinstance(options.get("size_mb", 8), int)
        return super().load(model, options if known else {}, context)
"""
SAMPLES = """
class Derived(TinyBackend):
    def prepare(self, prompts, params):
        return Job(self.weights, [list(prompt.encode()) for prompt in prompts], params)
class Job(TinyJob):
    def run(self):
        self.numbers = NUMBERS
        return super().run()
    def step(self, state, token):
        return super().step(state, token) ^ (self.numbers.getrandbits(32) if self.params.do_sample else 0)
"""
OTHER_WEIGHTS = """
class Derived(TinyBackend):
    def load(self, model, options, context):
        info = super().load(model, options, context)
        self.weights = random.Random(1).randbytes(len(self.weights))
        return info
"""
AS_IT_IS = "class Derived(TinyBackend): pass"
STARTS = """
class Derived(TinyBackend):
    def load(self, model, options, context):
        info = super().load(model, options, context)
        self.n = N_OF_THEM
        self.world = context.parallel.tensor if self.n > 1 else 1
        self.started = [subprocess.Popen(["sleep", "600"]) for _ in range(self.n)]
        return info
    def workers(self):
        return [BackendWorker(pid=each.pid, rank=number % self.world, world_size=self.world)
                for number, each in enumerate(self.started)]
    def close(self):
        super().close()
        CLOSE
"""
ENDS = "[(each.kill(), each.wait()) for each in self.started]"
DEGREES_ASKED = "context.parallel.tensor"
BY_BACKEND = "launch='backend', tensor=True"

#: Wrong backends: the code, the check that fails, and a part of its message.
WRONG = {
    "counts-padding": (
        {"code": COUNTS_PADDING},
        "test_prompts_are_counted_without_padding",
        "prompt 'abc' has 3 tokens, and input_tokens is 11; count the tokens",
    ),
    "cuts-long-prompts": (
        {"code": CUTS},
        "test_a_long_prompt_is_processed_whole_or_refused",
        "has input_tokens=1000; refuse in prepare() what the library would cut",
    ),
    "one-token-less": (
        {"code": ONE_TOKEN_LESS},
        "test_outputs_are_counted_as_produced",
        "max_new_tokens=5 with ignore_eos made 4 tokens of prompt 0",
    ),
    "ignores-stop-ids": (
        {"code": IGNORES_STOP_IDS},
        "test_a_stop_token_ends_its_sequence",
        "a sequence ends with the stop token as its last output token",
    ),
    "leaves-the-stop-token-out": (
        {"code": LEAVES_STOP_TOKEN_OUT},
        "test_a_stop_token_ends_its_sequence",
        "a sequence ends with the stop token",
    ),
    "sees-padding": (
        {"code": SEES_PADDING},
        "test_a_padded_batch_gives_what_each_prompt_gives_alone",
        "prompt 'abc': token 0 differs; in a batch: [",
    ),
    "reports-a-prefix-cache": (
        {"code": REPORTS_A_PREFIX_CACHE},
        "test_repeated_prompts_are_computed_anew",
        "a repeated prompt was taken from a prefix cache; switch that off in load()",
    ),
    "one-stamp-for-all": (
        {"code": STAMPS.replace("STAMPS", "[time.monotonic_ns()] * len(ids)")},
        "test_timestamps_are_as_declared",
        "prompt 0: its first and last token have the same stamp, and a step made each",
    ),
    "stamps-backwards": (
        {"code": STAMPS.replace("STAMPS", "stamps_ns[::-1]")},
        "test_timestamps_are_as_declared",
        "prompt 0: its stamps are not time.monotonic_ns() in order",
    ),
    "stamps-not-declared": (
        {"code": AS_IT_IS, "row": "timestamps='none'"},
        "test_timestamps_are_as_declared",
        "the capabilities declare timestamps='none', but some are reported; declare them",
    ),
    "leaks": (
        {"code": LEAKS},
        "test_unloading_frees_the_memory",
        "more stay after each close() (MiB after each: ",
    ),
    "crashes-on-a-broken-model": (
        {"code": LOADS.replace("REFUSAL", "os.kill(os.getpid(), signal.SIGSEGV)"), "spec": ANY_MODEL},
        "test_a_broken_model_is_reported_in_one_line",
        "was killed by SIGSEGV while loading ",
    ),
    "shows-the-librarys-own-error": (
        {"code": LOADS.replace("REFUSAL", "raise KeyError('architectures')"), "spec": ANY_MODEL},
        "test_a_broken_model_is_reported_in_one_line",
        "the broken model broken-model: load() raised KeyError ('architectures'); raise ModelError or ",
    ),
    "does-not-name-the-model": (
        {"code": LOADS.replace("REFUSAL", "raise ModelError('it cannot be read')"), "spec": ANY_MODEL},
        "test_a_broken_model_is_reported_in_one_line",
        "the message does not name 'broken-model': it cannot be read",
    ),
    "takes-a-broken-model": (
        {"code": LOADS.replace("REFUSAL", "model = replace(model, kind='random')"), "spec": ANY_MODEL},
        "test_a_broken_model_is_reported_in_one_line",
        "the broken model broken-model was loaded without an error",
    ),
    "takes-any-option": (
        {"code": TAKES_ANY_OPTION},
        "test_a_bad_option_is_reported_in_one_line",
        "size_mb='no such value' was loaded without an error; raise ModelError or BackendError",
    ),
    "leaves-the-seed-to-chance": (
        {"code": SAMPLES.replace("NUMBERS", "random.Random()"), "attributes": "why_no_sampling = ''"},
        "test_sampling_depends_only_on_the_seed",
        "seed=1 draws other tokens the second time; set the seed before each run",
    ),
    "ignores-the-seed": (
        {"code": SAMPLES.replace("NUMBERS", "random.Random(0)"), "attributes": "why_no_sampling = ''"},
        "test_sampling_depends_only_on_the_seed",
        "the seeds 1 to 4 draw the same tokens; apply do_sample and seed",
    ),
    "other-weights": (
        {"code": OTHER_WEIGHTS, "attributes": "reference = 'tiny'\nreference_options = {}"},
        "test_tokens_equal_those_of_the_reference",
        "prompt 'abc': token 0 differs; other_weights: [",
    ),
    "other-weights-in-each-rank": (
        {"code": OTHER_WEIGHTS.replace("(1)", "(context.rank)"), "row": "data=True"},
        f"{DEGREE}[data]",
        "prompt 'x': token 0 differs; data=2: [",
    ),
    "says-tensor-and-copies": (
        {"code": AS_IT_IS, "row": "tensor=True"},
        f"{DEGREE}[tensor]",
        "tensor=2: rank 0 generates while the others do nothing, so it holds a whole copy of the model",
    ),
    "starts-one-for-two": (
        {"code": STARTS.replace("N_OF_THEM", "1").replace("CLOSE", ENDS), "row": BY_BACKEND},
        f"{DEGREE}[tensor]",
        "planned 2 processes of the backend, tensor 2 by pipeline 1; found 1 processes",
    ),
}


@pytest.mark.parametrize("whole_suite", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_wrong_backend_fails_the_check_for_it(project: pytest.Pytester, whole_suite: bool) -> None:
    """With the whole suite: and no other check."""
    chosen = []
    for name, (backend, test, _) in WRONG.items():
        suite = add(project, name, **backend)
        chosen.append(suite if whole_suite else f"{suite}::{test}")
    found = failures(project.runpytest(*OPTIONS, *chosen))
    expected = {f"Test_{name.replace('-', '_')}.{test}": text for name, (_, test, text) in WRONG.items()}
    assert set(found) == set(expected)
    for test, text in expected.items():
        assert text in found[test], test


RIGHT = {
    "samples": {
        "code": SAMPLES.replace("NUMBERS", "random.Random(self.params.seed)"),
        "attributes": "why_no_sampling = ''",
    },
    "has-a-reference": {"code": AS_IT_IS, "attributes": "reference = 'tiny'\nreference_options = {}"},
    "starts-its-own": {
        "code": STARTS.replace("N_OF_THEM", DEGREES_ASKED).replace("CLOSE", ENDS),
        "row": f"data=True, {BY_BACKEND}",
    },
    "says-why-batches-differ": {"code": SEES_PADDING, "attributes": "why_batches_differ = 'it is a toy'"},
    "has-an-option-that-takes-everything": {
        "code": TAKES_ANY_OPTION,
        "attributes": "bad_options = {'size_mb': 0}",
    },
}


@pytest.mark.parametrize(
    "name",
    [name if name == "starts-its-own" else pytest.param(name, marks=pytest.mark.slow) for name in RIGHT],
)
def test_a_right_backend_passes(project: pytest.Pytester, name: str) -> None:
    result = project.runpytest(*OPTIONS, add(project, name, **RIGHT[name]))
    assert failures(result) == {}
    assert result.parseoutcomes().get("errors", 0) == 0
    assert result.parseoutcomes()["passed"] >= 13


#: Each rank has one half of the weights, and a state is the sum of both halves.
SHARDS = """
class Derived(TinyBackend):
    def prepare(self, prompts, params):
        return Job(self.weights, [list(prompt.encode()) for prompt in prompts], params)
class Job(TinyJob):
    def step(self, state, token):
        import torch, torch.distributed as dist
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if ranks > 1 else 0
        halves = [zlib.crc32(self.weights[token * 4096 + half * 2048:][:2048], state ^ token)
                  for half in (0, 1) if half % ranks == rank]
        total = torch.tensor([sum(halves)])
        if ranks > 1:
            dist.all_reduce(total)
        return int(total) % (1 << 32)
"""


@pytest.mark.slow
def test_ranks_that_need_one_another_are_shards(project: pytest.Pytester) -> None:
    suite = add(project, "shards", "import zlib\n" + SHARDS, row="framework='torch', tensor=True")
    project.runpytest(*OPTIONS, f"{suite}::{DEGREE}[tensor]").assert_outcomes(passed=1)


def test_a_backend_that_cannot_run_is_an_error_or_skipped_with_the_pip_line(project: pytest.Pytester) -> None:
    chosen = [
        add(project, "refuses", AS_IT_IS, spec="refuses=lambda model: 'it reads nothing'"),
        add(project, "absent", AS_IT_IS, spec="requires=('no_such_module',)"),
    ]
    result = project.runpytest(*OPTIONS, *chosen)
    result.assert_outcomes(errors=16, skipped=16)
    assert "model = 'random:llama-tiny': it reads nothing; name another" in output_of(result)
    assert "absent is not available: no module no_such_module; pip install tiny-backend" in output_of(result)
