"""The mail: boxes that no object leaves, lists that grow, and a file that nobody reads once it is closed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from muster.errors import ClosedError, MusterError
from muster.transport import mail
from muster.transport.mail import LocalMail, Mail, SharedMail


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("mail")
    yield fd
    os.close(fd)


def test_what_does_not_fit_leaves_the_next_box_alone(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "_BOX_BYTES", 4096)
    post = SharedMail(fd, 4)
    length = post.put(1, "another env's")
    with pytest.raises(MusterError, match=r"pickled objects are too many for one step of one env.* has 4096;"):
        post.put(0, b"x" * 5000)
    with pytest.raises(MusterError, match="has 4096"):
        post.append(0, b"x" * 3000, post.append(0, b"x" * 3000, 0))
    assert post.get(1, length) == "another env's"


def test_a_closed_mail_reads_no_other_file_that_has_got_its_number(fd: int) -> None:
    post = SharedMail(fd, 4)
    length = post.put(0, "mine")
    post.close()
    other = os.memfd_create("other")
    os.dup2(other, fd)
    for use in (lambda: post.get(0, length), lambda: post.appended(0, 0, length), lambda: post.put(0, "mine")):
        with pytest.raises(ClosedError):
            use()
    assert os.fstat(other).st_size == 0
    os.close(other)


@pytest.mark.parametrize("kind", ["between processes", "within one"])
def test_what_was_appended_stays_while_more_is(fd: int, kind: str) -> None:
    post: Mail = SharedMail(fd, 4) if kind == "between processes" else LocalMail()
    first = post.append(3, ("a", 1), 0)
    second = post.append(3, ("b", 2), first)
    assert post.appended(3, 0, first) == [("a", 1)]
    assert post.appended(3, first, second) == [("b", 2)]
    assert post.appended(3, 0, second) == [("a", 1), ("b", 2)]
