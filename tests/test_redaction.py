"""Secrets are hidden in every spelling, other values stay, and JSON stays JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta import redaction
from aorta.redaction import redact, shown_values

SECRET = "hunter2x"
HIDDEN = {
    "s3://me:hunter2x@host/t?sig=hunter2x&rank=3": "s3://me:...@host/t?sig=...&rank=3",
    "simplecache::memory://user:hunter2x@h": "simplecache::memory://user:...@h",
    "ftp://u:hunter2x@x@h/y": "ftp://u:...@h/y",
    "http:/user:hunter2x@h/t.json": "http:/user:...@h/t.json",  # as a path has it
    "https://hunter2x@github.com/x": "https://...@github.com/x",
    "https://h/x?X-Amz-Signature=hunter2x&X-Amz-Credential=hunter2x%2F20&X-Amz-Date=1": (
        "https://h/x?X-Amz-Signature=...&X-Amz-Credential=...&X-Amz-Date=1"
    ),
    "https://h?AWSAccessKeyId=hunter2x&Expires=3": "https://h?AWSAccessKeyId=...&Expires=3",
    "AccountKey=hunter2x==;EndpointSuffix=x": "AccountKey=...",
    "hydra.launcher.command=[env,HF_TOKEN=hunter2x]": "hydra.launcher.command=[env,HF_TOKEN=...]",
    "a=1,token=hunter2x,b=3": "a=1,token=...,b=3",
    "f(token=hunter2x, b=3)": "f(token=..., b=3)",
    "HIP_DB_PASS=hunter2x MYSQL_PWD=hunter2x": "HIP_DB_PASS=... MYSQL_PWD=...",
    'token="hunter2x b" c': 'token="..." c',
    "password: hunter2x": "password: ...",
    "{'db_pass': 'hunter2x', 'step': 3}": "{'db_pass': '...', 'step': 3}",
    '{"HF_TOKEN": "hunter2x y"}': '{"HF_TOKEN": "..."}',
    "Authorization: Bearer hunter2x": "Authorization: Bearer ...",
    "Authorization: Basic hunter2x==": "Authorization: Basic ...",
    "curl -H 'X-Api-Key: hunter2x'": "curl -H 'X-Api-Key: ...'",
    "run --password hunter2x --steps 3": "run --password ... --steps 3",
    "['run', '--hf-token', 'hunter2x y', '-x']": "['run', '--hf-token', '...', '-x']",
    f"hf_{SECRET * 4}": "hf_...",
    "eyJhbGciOiJIUzI1.eyJzdWIiOiIx.hunter2x": "eyJ...",
    "-----BEGIN PRIVATE KEY-----\nhunter2x\n-----END": "-----BEGIN PRIVATE KEY-----...-----END",
}
KEPT = (
    *("KEY=VALUE", "max_tokens=4096", "tokens_per_s=3.0", "TOKENIZERS_PARALLELISM=true", "forward_pass=3"),
    *(
        "PWD=/home/x",
        "author: me",
        "KeyError: 'x'",
        "signature: f(x)",
        "unknown keys: a, b",
        '{"token": 17, "key": "x"}',
    ),
    *("http://h:80/x", "tcp://10.0.0.1:29500", "sftp://me@host/path", "file:///a/b@c", "s3://bucket/x?versionId=3"),
    *("the credentials, or set profiling.remote_root=null", "key: holds a password, and addresses", "--token-ring -x"),
)


@pytest.mark.parametrize(("text", "shown"), HIDDEN.items())
def test_a_secret_is_hidden_in_every_spelling_and_the_rest_stays(text: str, shown: str) -> None:
    assert redact(text) == redact(shown) == shown
    for indent in (None, 2):
        assert SECRET not in redact(json.dumps([{"a": text, "b": [text, 1]}], indent=indent))


@pytest.mark.parametrize("text", KEPT)
def test_other_values_stay(text: str) -> None:
    assert redact(text) == text
    assert redact(json.dumps({"a": text})) == json.dumps({"a": text})


_TEXTS = st.lists(st.sampled_from([*HIDDEN, *KEPT, *redaction.NAMES, *"\"\\'=:,]}@/- \n", "ü"])).map("".join)


@given(st.recursive(_TEXTS | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(_TEXTS, inner)))
def test_json_stays_json(document: object) -> None:
    for text in (json.dumps(document), json.dumps(document, indent=1), json.dumps(json.dumps(document))):
        json.loads(redact(text))


def test_values_of_the_environment_are_hidden_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"GIT_AUTHOR_NAME": "somebody else", "OLDPWD": "/some/where", "SSH_AUTH_SOCK": __file__, "A_TOKEN": "true"}
    for name, value in {**kept, "MY_TOKEN": 'top "secret" 1'}.items():
        monkeypatch.setenv(name, value)
    redaction._values.cache_clear()
    try:
        for text in ('a top "secret" 1 b', 'a top \\"secret\\" 1 b', "a top%20%22secret%22%201 b"):
            assert redact(text) == "a ... b"
        assert all(redact(value) == value for value in kept.values())
    finally:
        redaction._values.cache_clear()


def test_quotes_do_not_reach_into_another_line() -> None:
    text = "no viable input 'A_TOKEN='\n  in: a value with 'x'"
    assert redact(text) == text


def test_values_are_hidden_by_their_names_and_in_themselves() -> None:
    assert shown_values({"HIP_DB_PASS": "x", "NCCL_NET": "tcp://a:b@c", "NCCL_ALGO": "Ring"}) == {
        "HIP_DB_PASS": "...",
        "NCCL_NET": "tcp://a:...@c",
        "NCCL_ALGO": "Ring",
    }
