"""The embedded demo pair is the one that was trained; its template rebuilds the prompts it was trained on."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from specprefill_jax.chat import Chat, ask_about

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "artifacts" / "demo"
EXAMPLES = [json.loads(line) for line in (DEMO / "examples.jsonl").read_text().splitlines()]
TURN = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
PINS = {
    path: digest
    for line in (ROOT / "tests" / "data" / "demo.sha256").read_text().splitlines()
    for digest, path in [line.split("  ")]
}


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat.load(DEMO / "tokenizer.json", DEMO / "chat_template.jinja", stop_ids=[2])


def taken_apart(prompt: str) -> tuple[str, str, str]:
    """Text, question and beginning of the answer of an example."""
    user, prefix = prompt.removeprefix(TURN[0]).split(TURN[1])
    text, question = user.rsplit("\n\n", 1)
    return text, question, prefix


@pytest.mark.parametrize("path", PINS)
def test_a_file_of_the_demo_pair_has_its_pinned_hash(path: str) -> None:
    assert hashlib.sha256((ROOT / path).read_bytes()).hexdigest() == PINS[path]


def test_every_file_of_the_demo_pair_is_pinned() -> None:
    files = {str(path.relative_to(ROOT)) for path in DEMO.rglob("*") if path.is_file()}
    assert files - {"artifacts/demo/README.md"} == set(PINS)


def test_there_are_40_examples_of_five_depths_four_lengths_and_two_kinds() -> None:
    assert len(EXAMPLES) == 40
    assert {example["kind"] for example in EXAMPLES} == {"prose", "code"}
    assert min(example["tokens"] for example in EXAMPLES) == 470
    assert max(example["tokens"] for example in EXAMPLES) == 4091


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example['kind']}-{example['tokens']}")
def test_templating_an_examples_parts_gives_its_prompt_ids(chat: Chat, example: dict[str, Any]) -> None:
    text, question, prefix = taken_apart(example["prompt"])
    message = {"role": "user", "content": ask_about(text, question)}
    rendered = chat.render([message], prefix=prefix)
    assert rendered == example["prompt"]
    ids = chat.encode(rendered)
    assert len(ids) == example["tokens"]
    assert chat.decode(ids) == example["prompt"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example['kind']}-{example['tokens']}")
def test_an_examples_fact_span_holds_the_answer(chat: Chat, example: dict[str, Any]) -> None:
    first, end = example["fact_span"]
    fact = chat.encode(example["prompt"])[first:end].tolist()
    (answer,) = example["answer_ids"]
    assert answer in fact
    assert chat.decode([answer]) == example["answer"]


def test_the_demo_document_is_the_23rd_example_with_its_fact_in_the_middle(chat: Chat) -> None:
    parts = {path.stem: path.read_text() for path in (DEMO / "example").iterdir()}
    # The files end in a newline each; the shell's "$(cat FILE)" and `ask_about` drop it.
    message = {"role": "user", "content": ask_about(parts["document"], parts["question"].rstrip("\n"))}
    assert chat.render([message], prefix=parts["prefix"].rstrip("\n")) == EXAMPLES[22]["prompt"]
    assert " " + parts["answer"].rstrip("\n") == EXAMPLES[22]["answer"]
    length = len(chat.encode(parts["document"]))
    assert length >= 2000
    first, end = EXAMPLES[22]["fact_span"]
    assert 0.4 * length < first < end < 0.6 * length
