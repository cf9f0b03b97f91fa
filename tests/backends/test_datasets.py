# SPDX-License-Identifier: Apache-2.0
"""Files of requests in the forms that people have, and one clear line for each that cannot be used."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.backends.traffic import Request, dataset
from pytest_llenergy.errors import LLEnergyError


def jsonl(path: Path, *rows: Any) -> Path:
    file = path / "data.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


class TestForms:
    def test_prompts_with_output_lengths(self, tmp_path: Path) -> None:
        file = jsonl(tmp_path, {"prompt": "one", "output_tokens": 3}, "", {"prompt": "two\u2028lines"})
        assert list(dataset(file, output_tokens=9)) == [
            Request(prompt="one", output_tokens=3),
            Request(prompt="two\u2028lines", output_tokens=9),
        ]
        assert dataset(file, limit=1).description == "1 requests of data.jsonl"

    def test_the_first_prompt_and_answer_of_sharegpt_are_read(self, tmp_path: Path) -> None:
        file = tmp_path / "sharegpt.json"
        talk = [
            {"from": "human", "value": "hi"},
            {"from": "gpt", "value": "hello there"},
            {"from": "human", "value": "bye"},
        ]
        file.write_text(json.dumps([{"id": "1", "conversations": talk}, {"conversations": talk[:1]}]))
        assert list(dataset(file, output_tokens=7)) == [
            Request(prompt="hi", answer="hello there"),
            Request(prompt="hi", output_tokens=7),
        ]

    def test_messages_of_openai(self, tmp_path: Path) -> None:
        """What comes before the last message of a user is sent with it."""
        messages = [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "bye"},
        ]
        file = jsonl(tmp_path, {"messages": messages, "output_tokens": 5}, {"messages": messages[:3]})
        first, second = dataset(file)
        history = (("system", "Be short."), ("user", "hi"), ("assistant", "hello"))
        assert first == Request(history=history, prompt="bye", output_tokens=5)
        assert second == Request(history=history[:1], prompt="hi", answer="hello")

    def test_parts_of_a_message_are_its_text_and_explicit_lengths_count(self, tmp_path: Path) -> None:
        parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": " there"}]
        talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a long answer"}]
        rows = ({"messages": talk, "output_tokens": 9}, {"messages": talk})
        assert list(dataset(jsonl(tmp_path, *rows), output_tokens=9)) == [
            Request(prompt="hi there", output_tokens=9),
            Request(prompt="hi there", answer="a long answer"),
        ]

    def test_bad_rows_are_skipped_on_request_and_counted(self, tmp_path: Path) -> None:
        file = jsonl(tmp_path, {"prompt": "a"}, "# no row", {"prompt": None}, {"prompt": "\ufeffb"})
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n") + b'{"prompt": "\xff"}')
        made = dataset(file, skip_bad_rows=True)
        assert [each.prompt for each in made] == ["a", "\ufeffb"]
        assert made.description == "2 requests of data.jsonl, 3 rows skipped"

    def test_a_trace_of_mooncake_shares_the_blocks_of_equal_hash_ids(self, tmp_path: Path) -> None:
        """The first rows of the published trace."""
        file = jsonl(
            tmp_path,
            {"timestamp": 27482, "input_length": 6758, "output_length": 500, "hash_ids": list(range(14))},
            {"timestamp": 30535, "input_length": 1500, "output_length": 490, "hash_ids": [0, 14]},
            {"timestamp": 30535, "input_length": 100, "output_length": 1},
        )
        first, second, third = dataset(file, time_scale=0.5)
        assert [each.at_s for each in (first, second, third)] == pytest.approx([0.0, 1.5265, 1.5265])
        assert [each.input_tokens for each in (first, second, third)] == [6758, 1500, 100]
        assert [each.output_tokens for each in (first, second, third)] == [500, 490, 1]
        assert first.blocks[0] == second.blocks[0] == ("hash/0", 512)
        assert first.blocks[-1] == ("hash/13", 6758 - 13 * 512)
        # Two ids for 1500 tokens: the rest belongs to this prompt alone.
        assert [tokens for _, tokens in second.blocks] == [512, 512, 476]

    @pytest.mark.parametrize("zone", ["", "+00:00"])
    def test_a_trace_of_azure(self, tmp_path: Path, zone: str) -> None:
        file = tmp_path / "azure.csv"
        file.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
            f"2023-11-16 18:15:46.6805900{zone},374,44\r\n"
            f"2023-11-16 18:15:50.9951690{zone},396,109\r\n"
            f"2023-11-16 18:16:00{zone},1,1\r\n"
        )
        made = dataset(file, limit=2)
        assert [request.at_s for request in made] == pytest.approx([0.0, 4.314579], abs=2e-6)
        assert [(request.input_tokens, request.output_tokens) for request in made] == [(374, 44), (396, 109)]
        assert len(dataset(file)) == 3

    def test_a_trace_of_azure_in_json_with_times_of_several_zones(self, tmp_path: Path) -> None:
        file = tmp_path / "azure.jsonl"
        times = "2023-11-16 00:00:00+00:00", "2023-11-16 02:00:01+02:00"
        rows = [{"TIMESTAMP": each, "ContextTokens": 374, "GeneratedTokens": 44} for each in times]
        file.write_text("\n".join(map(json.dumps, rows)))
        assert [request.at_s for request in dataset(file)] == [0.0, 1.0]


class TestFaults:
    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (["{broken"], "line 1: not JSON in UTF-8: JSON is malformed: "),
            ([{"prompt": "a"}, [1]], "line 2: needs an object, found list"),
            (
                [{"promt": "a"}],
                "line 1: no prompt, messages, conversations or input_tokens; it has: promt; ",
            ),
            ([{"prompt": ""}], "line 1: Expected `str` matching regex"),
            ([{"prompt": "a", "output_tokens": 0}], "line 1: Expected `int` >= 1 - at `output_tokens`"),
            ([{"prompt": "a", "input_tokens": 9}], "line 1: it has a prompt and input_tokens, which say how"),
            ([{"input_length": 1.5}], "line 1: Expected `int | null`, got `float` - at `input_tokens`"),
            (
                [{"input_length": 10, "hash_ids": [1, 2]}],
                "line 1: 2 hash_ids of 512 tokens exceed the",
            ),
            ([{"prompt": "a", "timestamp": 5}, {"prompt": "a"}], "request 2 has no timestamp, and others"),
            (
                [{"prompt": "a", "timestamp": 5}, {"prompt": "a", "timestamp": 4}],
                "request 2 is earlier than the",
            ),
            ([{"messages": [{"role": "system", "content": "x"}]}], "line 1: no message of a user at the end"),
            ([{"messages": "x"}], "line 1: messages must be a list of objects"),
            (["# a comment", {"prompt": "a"}], "line 1: not JSON in UTF-8: "),
            (['{"prompt": "a"}', '{"prompt": "\\ud800"}'], "line 2: not JSON in UTF-8: "),
            (
                [{"messages": [{"role": "tool", "content": "x"}]}],
                "line 1: message 1 has the role 'tool'; known",
            ),
            (
                [{"messages": [{"role": ["x"], "content": "x"}]}],
                "line 1: message 1 has the role ['x']; known",
            ),
            (
                [{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}],
                "line 1: message 1 of user has no text, or parts that are no text",
            ),
            (
                [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}],
                "line 1: message 2 of assistant has no text",
            ),
            (
                [{"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value": "b"}]}],
                "line 1: no message of a user at the end",
            ),
            ([], "holds no requests"),
        ],
    )
    def test_a_bad_row_is_named_with_its_line(self, tmp_path: Path, rows: list[Any], message: str) -> None:
        file = jsonl(tmp_path, *rows)
        with pytest.raises(LLEnergyError) as caught:
            dataset(file)
        assert re.sub(r"^data set \S*?data\.jsonl: ", "", str(caught.value)).startswith(message)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a,b\n1,2\n", "line 1: no column TIMESTAMP, ContextTokens, GeneratedTokens, as Azure"),
            ("soon,1,1", "line 2: TIMESTAMP is 'soon', needs a form like 2023-11-16 18:15:46.68"),
            ("2023-11-16 18:15:46,x,1", "line 2: ContextTokens is 'x', needs a whole number"),
            ("2023-11-16 18:15:46,5", "line 2: GeneratedTokens is None, needs a whole number"),
            ("2023-11-16 18:15:46,0,5", "line 2: Expected `int` >= 1 - at `input_tokens`"),
        ],
    )
    def test_a_bad_csv_is_named_with_its_line(self, tmp_path: Path, text: str, message: str) -> None:
        head = "" if text.startswith("a") else "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        (tmp_path / "trace.csv").write_text(head + text)
        with pytest.raises(LLEnergyError) as caught:
            dataset(tmp_path / "trace.csv")
        assert message in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "arguments", "message"),
        [
            ("missing.jsonl", {}, "cannot be read: No such file or directory"),
            ("data.txt", {}, "needs a file that ends in .jsonl, .json, .csv"),
            ("missing.jsonl", {"limit": 0}, "limit is 0, needs a whole number, 1 or more"),
            ("missing.jsonl", {"time_scale": 0}, "time_scale is 0, needs a number, more than 0"),
        ],
    )
    def test_bad_arguments_are_refused(
        self, tmp_path: Path, name: str, arguments: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(LLEnergyError, match=re.escape(message)):
            dataset(tmp_path / name, **arguments)
