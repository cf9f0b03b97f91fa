# SPDX-License-Identifier: Apache-2.0
"""A backend for CTranslate2, written by docs/extending.md with the helpers that it names."""

BACKEND = """
import time

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.batches import check_lengths, encode_prompts, stamped_result
from pytest_llenergy.backends.convert import build_cached, pretrained_path, source_key
from pytest_llenergy.backends.models import load_tokenizer, translate_load_errors
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import BackendInfo, Precision

SPEC = BackendSpec(
    name="ctranslate2",
    factory="ctranslate2_backend:CTranslate2Backend",
    requires=("ctranslate2", "transformers"),
    install="pip install ctranslate2 'pytest-llenergy[transformers]'",
    capabilities=Capabilities(
        data=True,
        options=("compute_type",),
        passes=True,
        timestamps="token",
    ),
)


class CTranslate2Backend:
    def load(self, model, options, context):
        import ctranslate2
        from transformers import AutoConfig

        given = {"compute_type": "float32", **options}
        path = pretrained_path(model)
        with translate_load_errors("ctranslate2", model, options):
            converter = ctranslate2.converters.TransformersConverter(path)
            name = f"{source_key(model)}-ctranslate2-{ctranslate2.__version__}"
            # Into a directory inside: the converter wants to make it.
            files = str(build_cached(name, lambda made: converter.convert(str(made / "model"))) / "model")
            self.generator = ctranslate2.Generator(files, intra_threads=context.threads, **given)
            self.limit = AutoConfig.from_pretrained(path).max_position_embeddings
        self.tokenizer = load_tokenizer(model, path)
        return BackendInfo(
            name="ctranslate2",
            version=ctranslate2.__version__,
            model=model.label,
            dtype=self.generator.compute_type,
            precision=Precision(weights=self.generator.compute_type, compute=self.generator.compute_type),
            options={**given, "threads": context.threads},
        )

    def prepare(self, prompts, params):
        if params.do_sample:
            raise BackendError("ctranslate2: its threads take a seed when they start, not later")
        rows = encode_prompts("ctranslate2", self.tokenizer.encode, prompts)
        check_lengths("ctranslate2", [len(row) for row in rows], params.max_new_tokens, self.limit)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else {self.tokenizer.eos_token_id})}
        return CTranslate2Job(self.generator, self.tokenizer, rows, params.max_new_tokens, sorted(ends))

    def synchronize(self):
        '''generate_batch returns when the tokens are on the host.'''

    def close(self):
        del self.generator


class CTranslate2Job:
    def __init__(self, generator, tokenizer, rows, max_new_tokens, ends):
        self.generator, self.tokenizer, self.rows = generator, tokenizer, rows
        self.prompts = [tokenizer.convert_ids_to_tokens(row) for row in rows]
        self.settings = {"max_length": max_new_tokens, "end_token": ends, "return_end_token": True}
        self.settings["include_prompt_in_result"] = False

    def run(self):
        return [self.complete(prompt) for prompt in self.prompts]

    def complete(self, prompt):
        '''One prompt a call: the output of a shorter one in a batch would begin with the rest of it.'''
        stamps_ns = []
        result = self.generator.generate_batch(
            [prompt], callback=lambda _: stamps_ns.append(time.monotonic_ns()), **self.settings
        )
        return result[0].sequences_ids[0], stamps_ns

    def result(self, outcome):
        token_ids, stamps_ns = zip(*outcome, strict=True)
        texts = [self.tokenizer.decode(ids) for ids in token_ids]
        return stamped_result(texts, token_ids, [len(row) for row in self.rows], stamps_ns)
"""

SUITE = """
from ctranslate2_backend import SPEC
from pytest_llenergy.conformance import BackendConformance

class TestCTranslate2(BackendConformance):
    spec = SPEC
    model = "random:llama-tiny"
    reference = "transformers"
    why_no_sampling = "its threads take a seed when they start, not later"
"""
