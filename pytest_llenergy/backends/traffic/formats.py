# SPDX-License-Identifier: Apache-2.0
"""Read rows in the forms of OpenAI, ShareGPT, Mooncake and Azure as rows of the plugin's own form.

A row of that form is an object with ``prompt`` or ``input_tokens``, and perhaps ``answer``, ``output_tokens``
and ``timestamp`` (milliseconds).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from pytest_llenergy.errors import LLEnergyError

Row = dict[str, Any]

#: Who wrote a message, by the names of OpenAI and of ShareGPT. Others, such as tools, are refused.
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
}

#: Columns of Azure's traces of LLM inference, with the keys of the same meaning.
AZURE = {"ContextTokens": "input_tokens", "GeneratedTokens": "output_tokens"}

#: Tokens of a block in Mooncake's traces.
MOONCAKE_BLOCK_TOKENS = 512


def read_messages(row: Mapping[str, Any]) -> Row:
    """Read ``messages`` of OpenAI: the last one of a user with all before it, and the answer to it.

    Of ``conversations`` of ShareGPT the first prompt and answer are read, as by the benchmarks of vLLM and
    SGLang.
    """
    messages = row.get("messages", row.get("conversations"))
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise LLEnergyError("messages must be a list of objects")
    said: list[tuple[str, str]] = []
    for number, message in enumerate(messages, 1):
        who = message.get("role", message.get("from"))
        role = ROLES.get(who) if isinstance(who, str) else None
        text = _text(message.get("content", message.get("value")))
        if role is None:
            raise LLEnergyError(f"message {number} has the role {who!r}; known: {', '.join(ROLES)}")
        if text is None or (role != "assistant" and not text.strip()):
            raise LLEnergyError(f"message {number} of {who} has no text, or parts that are no text")
        said.append((role, text))
        if role == "assistant" and "messages" not in row:
            break
    answer = said.pop()[1] if said and said[-1][0] == "assistant" else ""
    if not said or said[-1][0] != "user":
        raise LLEnergyError("no message of a user at the end, or before an answer at the end")
    *history, (_, prompt) = said
    kept = {name: value for name, value in row.items() if name not in ("messages", "conversations")}
    return {**kept, "history": history, "prompt": prompt, "answer": answer}


def _text(content: Any) -> str | None:
    """Return the text of a message; None if it has parts that are no text."""
    if isinstance(content, list):
        parts = [_text(part.get("text") if isinstance(part, dict) else part) for part in content]
        texts = [part for part in parts if part is not None]
        return "".join(texts) if len(texts) == len(parts) else None
    return content if isinstance(content, str) else None


def read_mooncake(row: Mapping[str, Any], block_tokens: int) -> Row:
    """Read a row of a trace of Mooncake: lengths, and hash ids of the blocks that prompts share."""
    names = {"input_length": "input_tokens", "output_length": "output_tokens"}
    read = {names.get(name, name): value for name, value in row.items() if name != "hash_ids"}
    tokens, ids = read.get("input_tokens"), row.get("hash_ids") or []
    if not isinstance(ids, list):
        raise LLEnergyError(f"hash_ids must be a list, found {type(ids).__name__}")
    if isinstance(tokens, int):
        if (len(ids) - 1) * block_tokens >= tokens:
            raise LLEnergyError(f"{len(ids)} hash_ids of {block_tokens} tokens exceed the prompt's {tokens}")
        starts = [n * block_tokens for n in range(len(ids))]
        read["blocks"] = [
            [f"hash/{each}", min(block_tokens, tokens - start)]
            for each, start in zip(ids, starts, strict=True)
        ]
    return read


def read_azure(row: Mapping[str, Any]) -> Row:
    """Read a row of a trace of Azure, whose cells are texts."""
    read: Row = {}
    for column, name in AZURE.items():
        value: Any = row.get(column)
        if not str(value).strip().isdecimal():
            raise LLEnergyError(f"{column} is {value!r}, needs a whole number")
        read[name] = int(value)
    # Azure writes seven digits of a second; Python 3.10 reads three or six.
    text = str(row["TIMESTAMP"]).strip()
    fitting = re.sub(r"\.(\d+)", lambda match: "." + match[1][:6].ljust(6, "0"), text)
    try:
        at = datetime.fromisoformat(fitting)
    except ValueError:
        raise LLEnergyError(f"TIMESTAMP is {text!r}, needs a form like 2023-11-16 18:15:46.68") from None
    at = at.replace(tzinfo=at.tzinfo or timezone.utc)
    return {**read, "timestamp": (at - datetime(2000, 1, 1, tzinfo=timezone.utc)).total_seconds() * 1000}


def read_row(row: Any, column: str | None, block_tokens: int) -> Row:
    """Read a row of whatever form as one of the plugin's."""
    if not isinstance(row, dict):
        raise LLEnergyError(f"needs an object, found {type(row).__name__}")
    if column is not None:
        return {**row, "prompt": row.get(column)}
    if "TIMESTAMP" in row:
        return read_azure(row)
    if row.get("prompt") is None and ("messages" in row or "conversations" in row):
        return read_messages(row)
    return read_mooncake(row, block_tokens)
