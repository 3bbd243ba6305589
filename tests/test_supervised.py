"""Supervised examples: exactly the answers are targets, and no template or message can do more than write text."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamui_dist.errors import UserError
from kamui_dist.prepare.chat import DEFAULT_TEMPLATE, Chat, Part, Template, find_template
from kamui_dist.prepare.records import BadRecord
from kamui_dist.tokenizer import load, train_bpe
from tests.corpora import AUSTEN, ends, fails, header, jsonl, run, stream

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
)
SPECIAL = {"<|endoftext|>": 500, "<|im_start|>": 501, "<|im_end|>": 502}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <|im_end|> there"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long<|im_start|>\n"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A directory as published models have it, with special tokens for chats."""
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp("model")
    path = folder / "tokenizer.json"
    train_bpe(iter([(AUSTEN / "persuasion.txt").read_text()[:100_000]]), 500).save(path)
    inner = Tokenizer.from_file(str(path))
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    inner.save(str(path))
    config = {"chat_template": CHATML, "eos_token": {"content": "<|im_end|>"}, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def written(out: Path, tokenizer: Path | str) -> list[list[tuple[str, bool]]]:
    """Of each document: runs of tokens that are targets or not, as text with the special tokens' names."""
    part = out / "train"
    mask = np.concatenate(
        [np.fromfile(part / f["file"].replace("bin", "mask"), np.uint8) for f in header(part)["shards"]]
    )
    ids, loaded = stream(part), load(tokenizer)
    assert len(mask) == len(ids)
    assert set(mask) <= {0, 1}
    names = {i: name for name, i in loaded.special_tokens.items()}
    documents = []
    for doc_ids, doc_mask in zip(np.split(ids, ends(part))[:-1], np.split(mask, ends(part))[:-1], strict=True):
        runs: list[tuple[str, bool]] = []
        plain: list[int]
        cuts = np.flatnonzero(np.diff(doc_mask)) + 1
        for run_ids, run_mask in zip(np.split(doc_ids, cuts), np.split(doc_mask, cuts), strict=True):
            text, plain = "", []
            for i in [*run_ids.tolist(), None]:
                if i is None or i in names:
                    text, plain = text + loaded.decode(plain) + ("" if i is None else names[i]), []
                else:
                    plain.append(i)
            runs.append((text, bool(run_mask[0])))
        documents.append(runs)
    return documents


def test_prompt_and_completion(tmp_path, tokenizer, capsys):
    examples = [
        {"prompt": "Two and two? <|endoftext|>", "completion": " Four."},
        {"prompt": "", "completion": "Only this"},
        {"prompt": "é", "completion": ""},
    ]
    path = jsonl(tmp_path / "a.jsonl", examples)
    command = ["prepare", path, "--supervised", "--val-fraction", 0, "--shard-tokens", 7]
    for name in (tokenizer, "bytes"):
        out = tmp_path / str(name).replace("/", "-")
        assert run(*command, "--tokenizer", name, "--out", out) == 0
        assert written(out, name) == [
            [("Two and two? <|endoftext|>", False), (" Four.<|endoftext|>", True)],
            [("Only this<|endoftext|>", True)],
            [("é", False), ("<|endoftext|>", True)],
        ]
        # The tokens are those of prompt and completion on their own: what sampling from the prompt would go on from.
        first = [*load(name).encode(examples[0]["prompt"]), *load(name).encode(" Four."), load(name).separator]
        assert stream(out / "train")[: len(first)].tolist() == first
        found = header(out / "train")
        assert found["loss_mask"] is True
        assert found["documents"] == 3
        assert all(len(shard["mask_sha256"]) == 64 for shard in found["shards"])
        assert found["target_text_bytes"] == len(" Four.Only this")
        assert run(*command, "--tokenizer", name, "--out", out) == 0
    out = tmp_path / "plain"
    assert run(*command, "--tokenizer", "bytes", "--no-separator", "--out", out) == 0
    assert written(out, "bytes") == [[("Two and two? <|endoftext|>", False), (" Four.", True)], [("Only this", True)]]
    assert header(out / "train")["skipped"]["no_target"] == 1
    assert "left out: 1 example without a target" in capsys.readouterr().out
    jsonl(path, [{"prompt": "x", "completion": ""}])
    told = fails(capsys, *command, "--tokenizer", "bytes", "--no-separator", "--out", tmp_path / "none")
    assert "no example has a target: all 1 are prompt only" in told
    assert not (tmp_path / "none").exists()


def test_chat_with_the_tokenizers_template(tmp_path, tokenizer):
    hi = "<|im_start|>user\nHi <|im_end|> there"
    expected = [
        ("<|im_start|>system\nBe brief.<|im_end|>\n" + hi + "<|im_end|>\n<|im_start|>assistant\n", False),
        ("Hello!<|im_end|>", True),
        ("\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n", False),
        ("So long<|im_start|><|im_end|>", True),
        ("\n<|endoftext|>", False),
    ]  # fmt: skip
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": CHAT[:2]}, {"prompt": "p", "completion": "c"}])
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        words = ["--supervised", "--tokenizer", tokenizer, "--val-fraction", 0, "--workers", workers]
        assert run("prepare", path, *words, "--out", out) == 0
        assert written(out, tokenizer) == [expected, [("p", False), ("c<|endoftext|>", True)]]
        found = header(out / "train")
        assert (found["chat_template"], found["skipped"]["no_target"]) == (CHATML, 1)
    # What a message says in a special token's name is text: the two real ids are the template's.
    ids = stream(tmp_path / "out1" / "train").tolist()
    special = load(tokenizer).special_tokens
    assert (ids.count(special["<|im_start|>"]), ids.count(special["<|im_end|>"])) == (5, 5)


def test_parquet_examples(tmp_path, tokenizer):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    examples = [{"messages": CHAT, "n": 1}, {"messages": CHAT[3:], "n": 2}]
    parquet.write_table(pyarrow.Table.from_pylist(examples), tmp_path / "a.parquet")
    path = jsonl(tmp_path / "a.jsonl", examples)
    words = ["--supervised", "--tokenizer", tokenizer, "--val-fraction", 0, "--out"]
    assert run("prepare", path, *words, tmp_path / "j") == 0
    assert run("prepare", tmp_path / "a.parquet", *words, tmp_path / "p") == 0
    assert written(tmp_path / "j", tokenizer) == written(tmp_path / "p", tokenizer)


def cut(template: str, messages: object = CHAT, special: dict[str, int] = SPECIAL, **more: object) -> list[Part]:
    return Chat(Template(template, "the template", "", "<|endoftext|>"), special).parts(messages, "here", more)


def test_both_ways_agree_and_default():
    targets = [part for part in cut(CHATML) if part.target]
    assert targets == [Part("Hello!", True), Part(502, True), Part("So long<|im_start|>", True), Part(502, True)]
    stripped = [{**m, "content": m["content"].strip()} for m in CHAT]
    assert cut(MARKED, stripped) == cut(CHATML, stripped)
    text = "".join(
        str(p.content) if isinstance(p.content, str) else f"[{p.content}]" for p in cut(DEFAULT_TEMPLATE, CHAT[1:3])
    )
    assert text == "<|user|>\nHi <|im_end|> there\n<|assistant|>\nHello![500]\n"
    assert [p for p in cut(DEFAULT_TEMPLATE, CHAT[1:3]) if p.target] == [Part("Hello!", True), Part(500, True)]


@settings(deadline=None, max_examples=150)
@given(
    chat=st.lists(
        st.tuples(
            st.sampled_from(["system", "user", "assistant"]),
            st.lists(st.sampled_from(["a", " ", "\n", "<|im_end|>", "<|im_start|>assistant\n", "é", "\ufdd0", "<|"])).map("".join),
        ),
        min_size=1,
        max_size=5,
    )
)  # fmt: skip
@pytest.mark.slow
def test_spans_against_an_obvious_reference(chat):
    messages = [{"role": role, "content": content} for role, content in chat]
    found = cut(MARKED, messages)
    # One flag a character, a special token being one.
    flags = [(c, p.target) for p in found for c in (p.content if isinstance(p.content, str) else [p.content])]
    expected: list[tuple[object, bool]] = []
    for role, content in chat:
        answer = role == "assistant"
        expected += [(501, False), *((c, False) for c in role + "\n"), *((c, answer) for c in content)]
        expected += [(502, answer), ("\n", False)]
    assert flags == expected
    assert "".join(map(str, (c for c, _ in flags))) == "".join(
        str(p.content) for p in cut(CHATML.replace(" | trim", ""), messages)
    )
    assert found == cut(CHATML.replace(" | trim", ""), messages)


def test_transformers_renders_the_same(tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"))
    # Loops, namespaces, controls, tojson, white space control: what published templates use.
    source = """{%- set ns = namespace(n=0) -%}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% set ns.n = ns.n + 1 %}
    {{- '[' ~ ns.n ~ ' ' ~ message.role ~ '] ' ~ message.content | tojson }}
    {{- dict(a=1) | tojson(indent=2) }}
{% endfor %}"""
    chat = [{"role": "system", "content": "x"}, {"role": "user", "content": 'a "b" <é>'}]
    expected = theirs.apply_chat_template(chat, chat_template=source, tokenize=False)
    assert "".join(str(part.content) for part in cut(source, chat, {})) == expected


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for m in messages %}{{ m.content if loop.last else '' }}{% endfor %}", "writes message 3 in another way"),
        ("{{ raise_exception('roles must alternate') }}", "fails on the chat: roles must alternate"),
        ("{{ messages[0].nothing.more }}", "fails on the chat"),
        ("{{ ''.__class__.__mro__ }}", "fails on the chat: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "fails on the chat"),
        ("{% set n = namespace(__class__=1) %}", "fails on the chat"),
        ("{% for i in range(10**9) %}{% endfor %}", "fails on the chat"),
        ("{{ cycler.__init__.__globals__ }}", "fails on the chat"),
        ("{% include '/etc/passwd' %}", "fails on the chat"),
        (
            "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
            "a generation block inside another",
        ),
    ],
)
def test_templates_that_do_not_do(template, says):
    with pytest.raises(BadRecord, match=r"^here") as caught:
        cut(template)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_examples(tmp_path, tokenizer, capsys):
    path = tmp_path / "a.jsonl"
    command = ["prepare", path, "--supervised", "--tokenizer", tokenizer, "--val-fraction", 0, "--out", tmp_path / "o"]
    for value, says in (
        ({"text": "x"}, "line 2 has neither messages nor prompt and completion; it has text"),
        ({"prompt": "x"}, "line 2 has no field 'completion'; it has prompt"),
        ({"prompt": "x", "completion": 1}, "line 2: the field 'completion' is not text but int"),
        ({"messages": []}, "line 2: messages is not a list with at least one message"),
        ({"messages": "x"}, "line 2: messages is not a list"),
        ({"messages": [{"content": "x"}]}, "line 2: a message is not an object with role and content"),
        (
            {"messages": [{"role": "endoftext", "content": "x"}]},
            "line 2: the role 'endoftext' is the name of a special",
        ),
    ):
        jsonl(path, [{"prompt": "a", "completion": "b"}, value])
        assert f"{path}: {says}" in fails(capsys, *command)
        assert run(*command, "--skip-bad") == 0
        assert "left out: 1 bad record" in capsys.readouterr().out
        assert run(*command, "--skip-bad", "--force") == 0
        (tmp_path / "o").rename(tmp_path / f"o{says[-9:]}{len(says)}".replace("/", ""))
    (tmp_path / "a.txt").write_text("x")
    assert "a.txt is plain text" in fails(capsys, "prepare", tmp_path / "a.txt", *command[2:])
    (tmp_path / "t.jinja").write_text("{% for %}")
    assert "t.jinja is not a Jinja template" in fails(capsys, *command, "--chat-template", tmp_path / "t.jinja")
    assert "cannot read the chat template" in fails(capsys, *command, "--chat-template", tmp_path / "none")
    words = [word for word in command if word != "--supervised"]
    assert "it needs --supervised" in fails(capsys, *words, "--chat-template", tmp_path / "t.jinja")


def test_where_a_template_is_found(tmp_path):
    def found(name: object = tmp_path, given: Path | None = None) -> tuple[str, str]:
        template = find_template(str(name), given, "<|endoftext|>")
        return template.source, template.eos_token

    (tmp_path / "tokenizer.json").write_text("{}")
    assert found() == found("bytes") == (DEFAULT_TEMPLATE, "<|endoftext|>")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]})
    )
    assert found() == ("D", "<|endoftext|>")
    config.write_text(json.dumps({"chat_template": "C", "eos_token": "</s>"}))
    assert found(tmp_path / "tokenizer.json") == ("C", "</s>")
    (tmp_path / "chat_template.jinja").write_text("J")
    assert found() == ("J", "</s>")
    (tmp_path / "own").write_text("O")
    assert found(given=tmp_path / "own") == ("O", "</s>")
    config.write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config.json is not JSON"):
        found()
