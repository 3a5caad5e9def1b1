"""Masking of secret values: every form, across every boundary of chunks, at constant size."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from urllib.parse import quote

import pytest

from scheduler.agent.secret_masking import SecretMask, mask_chunk, scrub_file

VALUE = b"s3cr3t/+value\xc3\xa9"


@pytest.mark.parametrize(
    "printed",
    [
        VALUE,
        base64.b64encode(VALUE).rstrip(b"="),
        base64.urlsafe_b64encode(VALUE).rstrip(b"="),
        quote(VALUE, safe="").encode(),
        json.dumps(VALUE.decode())[1:-1].encode(),
    ],
)
def test_each_form_of_a_value_is_masked(printed: bytes) -> None:
    line = b"token=" + printed + b" end\n"
    masked = SecretMask.of([VALUE]).mask(line)
    assert len(masked) == len(line)
    assert printed[:-2] not in masked
    assert masked.startswith(b"token=*****")
    assert masked.endswith(b" end\n")


@pytest.mark.parametrize("user", [b"a:", b"ab:", b"abc:"])
def test_a_value_within_base64_is_masked_at_each_offset(user: bytes) -> None:
    line = base64.b64encode(user + VALUE + b"tail")
    masked = SecretMask.of([VALUE]).mask(line)
    assert masked.count(b"*") >= len(VALUE) * 8 // 6 - 2


def test_lines_of_a_long_value_are_masked_one_by_one() -> None:
    mask = SecretMask.of([b"-----BEGIN KEY-----\nabcdefghijkl\nmnopqrstuvwx\n-----END KEY-----\n"])
    assert mask.mask(b"second: mnopqrstuvwx!") == b"second: ************!"


@pytest.mark.parametrize("seed", range(20))
def test_no_boundary_of_chunks_uncovers_a_value(seed: int) -> None:
    drawn = random.Random(seed)
    values = [b"abcabcabd", b"bcabda", b"zzzzzzzz"]
    mask = SecretMask.of(values)
    log = b"".join(drawn.choice([*values, b"abcabc", b"zzzz", b" ", b"\n", b"abc"]) for _ in range(200))
    sent, size = b"", 0
    while len(sent) < len(log):
        size = min(len(log), size + drawn.randrange(1, 40))  # the log grows
        start, is_last = len(sent), size == len(log)
        size_max = drawn.randrange(1, 30)
        data = log[start : min(size, start + size_max + mask.longest)]
        may_grow = not is_last and start + len(data) >= size
        before = log[max(0, start - mask.longest) : start]
        sent += mask_chunk(mask, before, data, size_max=size_max, may_grow=may_grow)
    assert sent == mask.mask(log)
    assert not any(value in sent for value in values)


def test_an_unknown_value_masks_everything_but_line_ends() -> None:
    assert SecretMask(()).mask(b"ab\ncd\r\n") == b"**\n**\r\n"


def test_a_file_is_masked_in_place_across_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.agent.secret_masking._BLOCK_BYTES", 7)
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"one " + VALUE + b" two " + VALUE + VALUE + b"\n")
    size = path.stat().st_size
    scrub_file(path, SecretMask.of([VALUE]))
    assert path.stat().st_size == size
    assert set(path.read_bytes().replace(b"one ", b"").replace(b" two ", b"").rstrip()) == {ord("*")}


def test_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(VALUE)
    (tmp_path / "link").symlink_to(target)
    scrub_file(tmp_path / "link", SecretMask.of([VALUE]))
    assert target.read_bytes() == VALUE
